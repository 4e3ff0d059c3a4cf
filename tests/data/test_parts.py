"""A part, as any worker runs it: what it notes of itself, and how it asks for its rollouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gym_capture.data import log_source
from gym_capture.data.log_source import LogClient
from gym_capture.data.logs import Logs
from gym_capture.data.parts import Part, RowOptions, WorkerSource, built_part
from gym_capture.data.requests import each_alone
from gym_capture.data.sources import SourceSpec

from . import made_rollouts
from .test_log_source import record

PART = Part(number=7, groups=tuple(each_alone({"a-1": 0, "a-2": 0})))


class Noted:
    """A post that writes down what it is told."""

    def __init__(self, **deaths: int) -> None:
        self.deaths = deaths
        self.said: list[str] = []

    def enter(self, what: str) -> int:
        self.said.append(what)
        return self.deaths.get(what.split()[0], 0)

    def leave(self) -> None:
        self.said.append("over")


def run(post: Noted) -> None:
    with WorkerSource(SourceSpec(import_path=made_rollouts.IMPORT_PATH)) as source:
        assert sum(table.num_rows for _, table in built_part(PART, source=source, options=RowOptions(), post=post)) == 2


def test_a_part_says_once_that_it_begins() -> None:
    post = Noted()
    run(post)
    assert post.said == ["part 7", "over"]


def test_a_part_of_which_a_worker_died_says_which_rollout_it_is_at() -> None:
    post = Noted(part=1)
    run(post)
    assert post.said == ["part 7", "rollout a-1", "rollout a-2", "part 7", "over"]


class Remote:
    """A method as Ray's handles of actors have it."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.method = method
        self.asked: list[Any] = []

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        self.asked.append(*arguments)
        return self.method(*arguments)


class Handle:
    """An owner of a log, here."""

    def __init__(self, owner: log_source._LogOwner) -> None:
        self.some = Remote(owner.some)


@pytest.mark.parametrize("answer_bytes", [1, 2**20])
async def test_rollouts_come_in_whatever_order_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer_bytes: int
) -> None:
    monkeypatch.setattr(log_source, "_ANSWER_BYTES", answer_bytes)
    await record(tmp_path / "shard-0", "a", "b", "c")
    await record(tmp_path / "shard-1", "d")
    logs = await Logs.open(directory=str(tmp_path))
    names = ("a", "unknown", "b", "c", "d")
    expected = {name: await logs.freeze(name) for name in names}
    await logs.close()
    owners = [log_source._LogOwner(str(tmp_path / f"shard-{shard}")) for shard in range(2)]
    for owner in owners:
        await owner.ready()
    handles = [Handle(owner) for owner in owners]
    client = await LogClient.open(owners=handles)
    client.ahead(names)
    for name in names:
        found = await client.freeze(name)
        assert (found.snapshot_id, found.version) == (expected[name].snapshot_id, expected[name].version)
        assert len(found.entries) == (0 if name == "unknown" else 2)
    one_by_one = [list(names), ["unknown", "b", "c", "d"], ["c", "d"], ["d"]]
    assert handles[0].some.asked == (one_by_one if answer_bytes == 1 else [list(names)])
    for name in ("a", "d", "b"):  # once more, out of order
        assert (await client.freeze(name)).snapshot_id == expected[name].snapshot_id
