"""A process that is killed without warning loses nothing that it acknowledged."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gym_capture.capture.codec import encode_entry
from gym_capture.conformance import sample_entry
from gym_capture.stores.log import LogStore


@dataclass
class Acknowledged:
    """What the killed processes said."""

    puts: set[tuple[str, str]] = field(default_factory=set)
    begun: set[tuple[str, str]] = field(default_factory=set)
    maybe_dropped: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)

    def read(self, line: str) -> None:
        kind, rollout_id, call_id = line.split()
        match kind:
            case "begun":
                self.begun.add((rollout_id, call_id))
            case "put":
                self.puts.add((rollout_id, call_id))
            case "dropping":
                self.maybe_dropped.add(rollout_id)
            case "dropped":
                self.dropped.add(rollout_id)


def write_until_killed(directory: Path, generation: int, *, after_lines: int, heard: Acknowledged) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.crash_writer", str(directory), str(generation)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(after_lines):
        heard.read(process.stdout.readline())
    process.kill()
    for line in process.stdout.read().splitlines(keepends=True):
        if line.endswith("\n"):
            heard.read(line)
    process.wait()


@pytest.mark.parametrize("seed", range(2))
def test_killed_writer_loses_nothing_that_it_acknowledged(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    heard = Acknowledged()

    async def check() -> None:
        store = await LogStore.open(tmp_path)
        assert store.recovery.damaged == ()
        live = set(await store.rollout_ids())
        assert not live & heard.dropped
        expected: dict[str, set[str]] = {}
        for rollout_id, call_id in heard.puts:
            expected.setdefault(rollout_id, set()).add(call_id)
        for rollout_id in expected.keys() - live:
            assert rollout_id in heard.maybe_dropped
        for rollout_id in live:
            snapshot = await store.freeze(rollout_id)
            counts = Counter(entry.model_call_id for entry in snapshot.entries)
            assert set(counts.values()) <= {1}
            assert counts.keys() >= expected.get(rollout_id, set())
            assert snapshot.problems == ()
            for entry in snapshot.entries:
                size = entry.generation_token_ids.size
                assert encode_entry(entry) == encode_entry(
                    sample_entry(rollout_id, entry.model_call_id, generation=range(size))
                )
            missing = {call_id for r, call_id in heard.begun if r == rollout_id} - counts.keys()
            assert {f"dangling_intent:{call_id}" for call_id in missing} <= set(snapshot.incomplete)
        await store.close()

    for generation in range(3):
        write_until_killed(tmp_path, generation, after_lines=rng.randint(1, 1500), heard=heard)
        asyncio.run(check())
    assert heard.puts
