"""The inspector over 10,000 rollouts, and over one trajectory of 100,000 tokens.

Claims: over a log, the whole table is there in at most twice the time in which a build opens the same log
(`LogReader`, in turns with it), and its first rows in at most half of that; over Parquet, all of it is there in at most
4 times the time that reading the same columns takes. A page of 4,096 tokens takes at most 4 times as long at the end of
100,000 tokens as at the beginning, and at most a tenth of what all tokens take. The table takes at most 2 KiB of memory
for each rollout.

Reported beside them: seconds, bytes of the answer, how many rollouts a second are read for the columns that only that
shows, and what a poll costs in which nothing is new.

Run: python -m benchmarks.inspector [--rollouts N] [--tokens N]    (two logs of N rollouts in a temporary directory)

Prints one JSON object a line; exits non-zero if a claim does not hold.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pyarrow.parquet as pq

from benchmarks.made_logs import Shape, write_log
from gym_capture.build.builder import BuildOptions
from gym_capture.data.directory import build_directory
from gym_capture.inspector import views
from gym_capture.inspector.library import Library
from gym_capture.inspector.log_source import LogSource
from gym_capture.inspector.parquet_source import ParquetSource
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.source import Source
from gym_capture.stores.log_reader import LogReader

SHAPE: Final = Shape(turns=4, root=300, new=60, generated=60)
ROUNDS: Final = 3
READ: Final = 300
"""Rollouts that are read whole."""
PAGE: Final = 4_096
MOST_TIMES_OPENING: Final = 2.0
MOST_FIRST: Final = 0.5
MOST_TIMES_COLUMNS: Final = 4.0
MOST_TIMES_PAGE: Final = 4.0
MOST_OF_ALL: Final = 0.1
MOST_BYTES: Final = 2_048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-inspector-") as directory:
        log, built = Path(directory, "log"), Path(directory, "built")
        size = write_log(log, SHAPE, rollouts=options.rollouts)
        build_directory(log, out=built, options=BuildOptions())
        holds = [
            _over_a_log(log, options.rollouts, size),
            _over_parquet(built, options.rollouts),
            _long(Path(directory, "long"), options.tokens),
        ]
    return 0 if all(holds) else 1


def _report(benchmark: str, *, holds: bool, **figures: object) -> bool:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"benchmark": benchmark, "holds": holds, **rounded}), flush=True)
    return holds


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _looked(source: Source) -> tuple[float, float, Library]:
    """Seconds to the first rows, and to all of them."""
    library = Library(source)
    begun = time.perf_counter()
    is_more = library.look()
    first = time.perf_counter() - begun
    while is_more:
        is_more = library.look()
    return first, time.perf_counter() - begun, library


def _over_a_log(log: Path, rollouts: int, size: int) -> bool:
    (shard,) = log.iterdir()
    opening, first, whole = [], [], []
    for _ in range(ROUNDS):
        opening.append(_seconds(lambda: LogReader(shard).close()))
        gc.collect()
        to_first, to_all, library = _looked(LogSource(log))
        first.append(to_first)
        whole.append(to_all)
    answer: dict[str, object] = {}
    table_s = _seconds(lambda: answer.update(library.table()))
    encoded = views.as_json(answer)
    names = [row.rollout for row in library.rows()[:READ]]
    reading_s = _seconds(lambda: [library.source.read(name) for name in names])
    poll_s = _seconds(library.look)
    tracemalloc.start()
    _, _, kept = _looked(LogSource(log))
    per_rollout = tracemalloc.get_traced_memory()[0] / rollouts
    tracemalloc.stop()
    assert len(kept.rows()) == rollouts
    times, part = median(whole) / median(opening), median(first) / median(opening)
    return _report(
        "inspector.log",
        holds=(
            (times <= MOST_TIMES_OPENING and part <= MOST_FIRST and per_rollout <= MOST_BYTES)
            if rollouts >= 10_000
            else True
        ),
        rollouts=rollouts,
        log_mib=size / 2**20,
        opening_s=median(opening),
        first_rows_s=median(first),
        all_rows_s=median(whole),
        times_opening=times,
        first_of_opening=part,
        table_s=table_s,
        answer_bytes=len(encoded),
        gzipped_bytes=len(gzip.compress(encoded, 3)),
        read_per_s=READ / reading_s,
        idle_poll_ms=poll_s * 1e3,
        bytes_per_rollout=per_rollout,
    )


def _over_parquet(built: Path, rollouts: int) -> bool:
    columns = [
        "rollout_id",
        "group_id",
        "is_main",
        "call_ids",
        "spans",
        "reward",
        "masked",
        "mask_reasons",
        "loss_mask",
    ]
    reading, first, whole = [], [], []
    for _ in range(ROUNDS):
        reading.append(_seconds(lambda: pq.read_table(built, columns=columns).to_pylist()))
        gc.collect()
        to_first, to_all, library = _looked(ParquetSource(built))
        first.append(to_first)
        whole.append(to_all)
    names = [row.rollout for row in library.rows()[:READ]]
    reading_s = _seconds(lambda: [library.source.read(name) for name in names])
    assert len(library.rows()) == rollouts
    times = median(whole) / median(reading)
    return _report(
        "inspector.parquet",
        holds=times <= MOST_TIMES_COLUMNS,
        rollouts=rollouts,
        columns_s=median(reading),
        first_rows_s=median(first),
        all_rows_s=median(whole),
        times_columns=times,
        read_per_s=READ / reading_s,
    )


def _long(directory: Path, tokens: int) -> bool:
    turns = 100
    part = max(tokens // (2 * turns), 1)
    write_log(directory, Shape(turns=turns, root=part, new=part, generated=part), rollouts=1)
    _, _, library = _looked(LogSource(directory))
    (name,) = (row.rollout for row in library.rows())
    opened_s = _seconds(lambda: library.source.read(name))
    seen = library.source.read(name)
    assert seen is not None
    (trajectory,) = seen.trajectories
    vocabulary = Vocabulary({n: f" word{n}".encode() for n in range(150_000)}, frozenset())
    size = trajectory.token_ids.size

    def page(begin: int, end: int) -> object:
        return views.as_json(views.tokens_view(trajectory, begin, end, vocabulary))

    first, last, whole = [], [], []
    for _ in range(ROUNDS * 3):
        first.append(_seconds(lambda: page(0, PAGE)))
        last.append(_seconds(lambda: page(size - PAGE, size)))
        whole.append(_seconds(lambda: [page(begin, begin + PAGE) for begin in range(0, size, PAGE)]))
    times, of_all = median(last) / median(first), median(first) / median(whole)
    return _report(
        "inspector.long",
        holds=(times <= MOST_TIMES_PAGE and of_all <= MOST_OF_ALL) if tokens >= 100_000 else True,
        tokens=int(size),
        open_s=opened_s,
        first_page_ms=median(first) * 1e3,
        last_page_ms=median(last) * 1e3,
        all_pages_ms=median(whole) * 1e3,
        times_first=times,
        of_all=of_all,
        kept_bytes=int(np.sum([seen.nbytes])),
    )


if __name__ == "__main__":
    sys.exit(main())
