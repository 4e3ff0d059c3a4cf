"""The data job, from what is on disk to Parquet, against a builder that reads token files one after another.

Claims: at 50 turns, the job makes trajectories of a graph's log in a twentieth of the processor time in which NeMo
Gym's builder reads the same rollouts from token files; what a rollout costs does not depend on how many there are, from
a thousand to a hundred thousand; and those, of 20 turns, take no more than 1.5 GB of memory, in all processes of the
job together.

Processor time is that of all processes of the job: driver, workers, owners of logs. A job has costs that it pays
once - its workers begin, its logs are opened by actors. A build of a few rollouts shows them (`once_cpu_s`); what a
rollout costs is counted without. The cluster runs before, as a user's does. Reported beside the claims: the same job
over token files, and the throughput by the clock. Memory is the proportional share (PSS): what processes have in common
is counted once. Ray's own processes, which a cluster has without a job and which take time whether or not there is one,
are reported beside the job's.

NeMo Gym's package (`nemo_gym.token_id_capture`) is measured where it imports. Elsewhere a builder in its manner stands
for it: `json.loads` of each line, digests of whole prompts, prefixes compared as lists.

    python -m benchmarks.data_job [--rollouts 100000] [--long 400] [--folder DIRECTORY]

DIRECTORY needs 110 KB a rollout. With fewer than 50,000 rollouts, evenness is reported and not judged: the smallest job
is then too small to be measured.

Prints one JSON object a line; exits non-zero if a claim does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.files import gym_builder
from benchmarks.made_logs import GROUP, Shape, group_name, rollout_name, write_log, write_token_files
from gym_capture.data.job import JobOptions, write_trajectories
from gym_capture.data.log_source import opened_logs
from gym_capture.data.sources import SourceSpec
from gym_capture.demo.graph import private_ray

MIN_RATIO: Final = 20.0
MAX_UNEVEN: Final = 1.25
"""What a rollout costs where it costs the most, by what it costs where it costs the least."""
MAX_PEAK_MB: Final = 1_500
WORKERS: Final = 2
LONG: Final = Shape(turns=50, root=2_000, new=300, generated=200)
MANY: Final = Shape(turns=20, root=1_000, new=200, generated=100)
FEW: Final = WORKERS * GROUP
JUDGED_FROM: Final = 50_000
PEER_ROLLOUTS: Final = 24
_POLL_S: Final = 0.25
_IDLE: Final = "ray::IDLE"
_OF_THE_JOB: Final = ("python", "ray::MapBatches(_write_part)", _IDLE, "ray::Watch", "ray::_LogOwner")
"""Processes by their names: the driver, workers, workers that have nothing to do yet or any more, the job's actors."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000, help="of the largest job")
    parser.add_argument("--long", type=int, default=400, help="rollouts of the job that is compared")
    parser.add_argument("--folder", type=Path, help="where files are made; default: the system's")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gym-capture-data-job-", dir=asked.folder) as folder, _Job() as job:
        held = [_against_peer(job, Path(folder), asked.long), _many(job, Path(folder), asked.rollouts)]
    return 0 if all(held) else 1


# --- claims ----------------------------------------------------------------------------------------------------------


def _against_peer(job: _Job, folder: Path, rollouts: int) -> bool:
    logs, files = folder / "long", folder / "files"
    write_log(logs / "few", LONG, rollouts=FEW)
    log_bytes = write_log(logs / "all", LONG, rollouts=rollouts)
    write_token_files(files / "few", LONG, rollouts=FEW)
    file_bytes = write_token_files(files / "all", LONG, rollouts=PEER_ROLLOUTS)
    peer, name = gym_builder(), "nemo_gym.token_id_capture"
    if peer is None:
        peer, name = _plain_builder, "a builder in NeMo Gym's manner"
    job.run(logs / "few", FEW)  # the first one loads code into workers that stay
    ours_ms, peer_ms = [], []
    for _ in range(3):  # in turns, so that whatever else the machine does falls on both
        once = job.run(logs / "few", FEW)
        took = job.run(logs / "all", rollouts)
        ours_ms.append(1e3 * (took.cpu_s - once.cpu_s) / (rollouts - FEW))
        copy = folder / "copy"
        shutil.copytree(files / "all", copy)  # it leaves an index, and is faster the second time
        began = time.process_time()
        for number in range(PEER_ROLLOUTS):
            peer(rollout_name(number), [copy])
        peer_ms.append(1e3 * (time.process_time() - began) / PEER_ROLLOUTS)
        shutil.rmtree(copy)
    over_files = job.run(files / "all", PEER_ROLLOUTS).cpu_s - job.run(files / "few", FEW).cpu_s
    ratio = min(peer_ms) / min(ours_ms)
    _report(
        "data_job.long",
        turns=LONG.turns,
        ids=LONG.ids,
        cpu_ms=round(min(ours_ms), 2),
        once_cpu_s=round(once.cpu_s, 1),
        cpu_s_by_process={name: round(cpu_s, 1) for name, cpu_s in took.cpu_by_process.items()},
        log_kb=round(log_bytes / rollouts / 1e3),
        token_file_kb=round(file_bytes / PEER_ROLLOUTS / 1e3),
        from_token_files_cpu_ms=round(1e3 * over_files / (PEER_ROLLOUTS - FEW), 1),
        against=name,
        against_ms=round(min(peer_ms), 1),
        ratio=round(ratio, 1),
        target=MIN_RATIO,
        ok=ratio >= MIN_RATIO,
    )
    return ratio >= MIN_RATIO


def _many(job: _Job, folder: Path, most: int) -> bool:
    logs = folder / "many"
    write_log(logs / "few", MANY, rollouts=FEW)
    job.run(logs / "few", FEW)  # the first one loads code into workers that stay
    once = job.run(logs / "few", FEW)
    cpu_ms: list[float] = []
    for rollouts in (most // 100, most // 10, most):
        log_bytes = write_log(logs / "all", MANY, rollouts=rollouts, shards=2)
        took = job.run(logs / "all", rollouts)
        shutil.rmtree(logs / "all")
        cpu_ms.append(1e3 * (took.cpu_s - once.cpu_s) / (rollouts - FEW))
        _report(
            "data_job.many",
            rollouts=rollouts,
            turns=MANY.turns,
            ids=MANY.ids,
            log_mb=round(log_bytes / 1e6),
            cpu_ms=round(cpu_ms[-1], 2),
            once_cpu_s=round(once.cpu_s, 1),
            per_cpu_s=round(1e3 / cpu_ms[-1]),
            per_s=round(rollouts / took.took_s),
            peak_mb=round(took.peak_mb),
            ray_mb=took.ray_mb,
            peak_mb_by_process=took.by_process,
            cpu_s_by_process={name: round(cpu_s, 1) for name, cpu_s in took.cpu_by_process.items()},
            ok=True,
        )
    uneven = max(cpu_ms) / min(cpu_ms)
    ok = (uneven <= MAX_UNEVEN or most < JUDGED_FROM) and took.peak_mb <= MAX_PEAK_MB
    _report(
        "data_job.growth",
        uneven=round(uneven, 2),
        target_uneven=MAX_UNEVEN,
        peak_mb=round(took.peak_mb),
        target_peak_mb=MAX_PEAK_MB,
        ok=ok,
    )
    return ok


# --- the job, in processes of its own --------------------------------------------------------------------------------


class _Took(NamedTuple):
    cpu_by_process: dict[str, float]
    """Seconds, of each kind of process."""
    took_s: float
    peak_mb: float
    """Of the job's processes together."""
    by_process: dict[str, int]
    """MB of each kind of process at that time, Ray's own included."""

    @property
    def cpu_s(self) -> float:
        return sum(cpu_s for name, cpu_s in self.cpu_by_process.items() if name in _OF_THE_JOB)

    @property
    def ray_mb(self) -> int:
        return sum(mb for name, mb in self.by_process.items() if name not in _OF_THE_JOB)


class _Job:
    """A cluster that runs, and what all its processes take while a job runs on it. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> _Job:
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        self._stack.callback(self._process.join)
        self._stack.callback(self._ours.send, None)
        self._ours.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, source: Path, rollouts: int) -> _Took:
        """Builds all rollouts of a directory. Raises if some are not complete."""
        before = _Processes(psutil.Process(self._process.pid))
        before.look()
        used = _Processes(psutil.Process(self._process.pid))
        began = time.monotonic()
        self._ours.send((source, rollouts))
        while not self._ours.poll(_POLL_S):
            used.look()
        took_s = time.monotonic() - began
        used.look()
        complete, ids = self._ours.recv()
        if complete != rollouts or ids == 0:
            raise RuntimeError(f"{complete} of {rollouts} rollouts are complete, with {ids} ids")
        return _Took(used.cpu_since(before), took_s, used.peak_mb, used.peak_by_process)


class _Processes:
    """A process and all below it, those that ended meanwhile included."""

    def __init__(self, first: psutil.Process) -> None:
        self._first = first
        self._cpu_s: dict[psutil.Process, float] = {}
        self._names: dict[psutil.Process, str] = {}
        self.peak_mb = 0.0
        self.peak_by_process: dict[str, int] = {}

    def cpu_since(self, before: _Processes) -> dict[str, float]:
        """Processor seconds since an earlier look, by the names of processes."""
        cpu_s: dict[str, float] = {}
        for process, until_now in self._cpu_s.items():
            name = self._names[process]
            cpu_s[name] = cpu_s.get(name, 0.0) + until_now - before._cpu_s.get(process, 0.0)
        return cpu_s

    def look(self) -> None:
        by_process: dict[str, float] = {}
        for process in (self._first, *self._first.children(recursive=True)):
            try:
                times, name = process.cpu_times(), process.name().split(".")[0]
                self._cpu_s[process] = times.user + times.system
                if name != _IDLE:  # what it was when it worked
                    self._names[process] = name
                self._names.setdefault(process, name)
                by_process[name] = by_process.get(name, 0.0) + _pss_mb(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
                continue  # it has just ended
        total = sum(mb for name, mb in by_process.items() if name in _OF_THE_JOB)
        if total > self.peak_mb:
            self.peak_mb = total
            self.peak_by_process = {name: round(mb) for name, mb in sorted(by_process.items())}


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _serve(connection: Connection) -> None:
    with private_ray(cpus=WORKERS, namespace="bench-data-job"):
        connection.send("ready")
        while (asked := connection.recv()) is not None:
            connection.send(_build(*asked))


def _build(source: Path, rollouts: int) -> tuple[int, int]:
    """Complete rollouts, and the ids in their files."""
    numbers = range(rollouts)
    table = pa.table(
        {
            "rollout_id": [rollout_name(number) for number in numbers],
            "group_id": [group_name(number) for number in numbers],
            "reward": [float(number % 2) for number in numbers],
        }
    )
    out = source.parent / "out"
    with ExitStack() as stack:
        if any(source.glob("*.tokens.jsonl")):
            spec = SourceSpec(
                import_path="gym_capture.data.directory:NemoGymDirectory", kwargs={"directory": str(source)}
            )
        else:
            spec = stack.enter_context(opened_logs(source))
        report = write_trajectories(table, source=spec, out=out, options=JobOptions(workers=WORKERS))
    rows = sum(pq.read_metadata(path).num_rows for path in out.glob("*.parquet"))
    shutil.rmtree(out)
    return report.complete if rows == rollouts else rows, report.token_ids


# --- a peer ----------------------------------------------------------------------------------------------------------


def _plain_builder(rollout_id: str, directories: Sequence[Path]) -> Any:
    """One call after another, on lists, each prefix proven by its digest."""
    token_ids: list[int] = []
    log_probs: list[float] = []
    digest = ""
    for line in (directories[0] / f"{rollout_id}.tokens.jsonl").read_bytes().splitlines():
        call = json.loads(line)
        prompt, generation = call["prompt_token_ids"], call["generation_token_ids"]
        if prompt[: len(token_ids)] != token_ids or (token_ids and _digest(prompt[: len(token_ids)]) != digest):
            raise AssertionError("the rollouts are one chain each")
        log_probs += [0.0] * (len(prompt) - len(token_ids)) + call["generation_log_probs"]
        token_ids = prompt + generation
        digest = _digest(token_ids)
    return token_ids, log_probs


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(struct.pack(f">{len(ids)}Q", *ids)).hexdigest()


def _report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
