"""What shards count, how counts add up, and that the dashboard asks for nothing that does not exist."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from gym_capture.capture.operations import Commit, Complete, Drop, Operation, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Continues, Root
from gym_capture.errors import RetiredRolloutError, StoreOverloadedError
from gym_capture.serving.metrics import COUNTERS, GAUGES, LABELLED, field_of
from gym_capture.serving.state import ShardStats
from gym_capture.serving.stats import total
from gym_capture.stores.memory import MemoryStore
from tests.calls import call
from tests.docs.pages import PAGES
from tests.reference.metrics_page import document
from tests.serving.exported import every_name
from tests.serving.shards import client
from tests.serving.test_state import intent, play

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "gym-capture.json"


async def test_a_shard_counts_what_happens(tmp_path: Path) -> None:
    state = client(tmp_path, shards=2)
    for name in ("r1", "r2", "r3"):
        await play(state, name, calls=3)
    begun = await state.begin(intent("lost", "r1"), ["edited"])
    await begun.sink.mark_incomplete("capture_failed:lost")
    await begun.sink.mark_delivery("c2", delivered=False)
    supplied = call("x", [1, 2, 1, 0], [9], parent=Continues("c0", 4), prefix_requested=True, prefix_supplied=True)
    supplied = with_values(supplied, normalized=("billing_header", "tool_left_out:mcp"))
    refused = call("y", [1], [9], parent=Root(), prefix_requested=True)
    for entry in (supplied, refused):
        await begun.sink.put(entry)
    with pytest.raises(RetiredRolloutError):
        await state.write(Commit(call("late", [1], [2], parent=Root()), epoch=begun.sink.epoch + 99))
    await state.write(Register("r3", Registration(group_id="g")))
    for _ in range(2):
        await state.write(Complete("r3", Outcome(reward=1.0)))
    snapshot = await state.freeze("r2")
    await state.write(Drop("r2", snapshot.snapshot_id, snapshot.version))

    stats = await state.stats()
    assert stats.shards == 2
    assert (stats.begins, stats.begins_refused) == (10, 0)
    assert stats.resolutions == {"root": 3, "resolved": 6, "unresolved:no_match": 1}
    assert (stats.puts, stats.put_failures) == (11, 1)
    assert stats.put_bytes > 11 * 300
    assert stats.put_seconds > 0
    assert (stats.prefix_requested, stats.prefix_supplied) == (2, 1)
    assert stats.generated_tokens == 9 * 2 + 2
    assert (stats.registrations, stats.completions) == (1, 2)
    assert stats.rules == {"billing_header": 1, "tool_left_out:mcp": 1}
    assert stats.incomplete == {"capture_failed": 1}
    assert (stats.undelivered_marks, stats.delivered_marks) == (1, 0)
    assert (stats.freezes, stats.drops) == (1, 1)
    assert (stats.live_rollouts, stats.lineage_rollouts) == (2, 2)
    assert 0 < stats.longest_idle_s < 60
    assert stats.lineage_bytes > 0
    assert stats.commit_records == 10 + 11 + 1 + 1 + 1 + 2
    assert 0 < stats.commit_batches <= stats.commit_records
    assert stats.log_bytes > stats.log_live_bytes > 0
    assert (stats.waiting_puts, stats.waiting_bytes, stats.queued_writes) == (0, 0, 0)
    json.dumps(asdict(stats))


async def test_a_store_without_a_log_has_no_levels_of_one(tmp_path: Path) -> None:
    state = client(tmp_path, store="gym_capture.stores.memory:MemoryStore.open")
    await play(state, "r1", calls=2)
    stats = await state.stats()
    assert (stats.puts, stats.log_bytes, stats.lineage_rollouts) == (2, 0, 1)


def test_totals_are_sums() -> None:
    one = ShardStats(
        begins=1, put_seconds=0.5, resolutions={"root": 1, "resolved": 2}, lineage_bytes=10, longest_idle_s=2.0
    )
    other = ShardStats(
        begins=2, longest_idle_s=3.0, put_seconds=0.25, resolutions={"root": 3}, incomplete={"engine": 1}
    )
    assert total([one, other]) == ShardStats(
        shards=2,
        begins=3,
        put_seconds=0.75,
        resolutions={"root": 4, "resolved": 2},
        incomplete={"engine": 1},
        lineage_bytes=10,
        longest_idle_s=3.0,
    )
    assert total([]) == ShardStats(shards=0)


# --- back-pressure ---------------------------------------------------------------------------------------------------


class Slow(MemoryStore):
    """A store whose disk takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.arrivals = asyncio.Semaphore(0)

    async def write(self, operation: Operation) -> int:
        if isinstance(operation, Commit):
            self.arrivals.release()
            await self.gate.wait()
        return await super().write(operation)


SLOW: list[Slow] = []


async def open_slow(**_: object) -> Slow:
    SLOW.append(Slow())
    return SLOW[-1]


async def test_calls_are_turned_away_while_too_much_waits_for_the_disk(tmp_path: Path) -> None:
    """Before they generate, retryably; the records of those that have generated are still taken."""

    state = client(tmp_path, store=f"{__name__}:open_slow", waiting_bytes=3_000)
    begun = await state.begin(intent("c0"), [])
    entries = [call(f"c{number}", [1] * 500, [2], parent=Root()) for number in range(4)]
    putting = [asyncio.ensure_future(begun.sink.put(entry)) for entry in entries[:3]]
    for _ in putting:
        await SLOW[-1].arrivals.acquire()
    assert (await state.stats()).waiting_puts == 3
    with pytest.raises(StoreOverloadedError, match="3 records wait for the disk"):
        await state.begin(intent("late"), [])
    putting.append(asyncio.ensure_future(begun.sink.put(entries[3])))
    SLOW[-1].gate.set()
    await asyncio.gather(*putting)
    await state.begin(intent("later"), [])
    stats = await state.stats()
    assert (stats.begins, stats.begins_refused, stats.puts, stats.waiting_bytes) == (2, 1, 4, 0)


# --- the dashboard, and the page --------------------------------------------------------------------------------------


def test_every_count_is_exported() -> None:
    exported = {*COUNTERS, *map(field_of, GAUGES), *LABELLED}
    assert exported | {"shards", "put_seconds"} == {item.name for item in fields(ShardStats)}


def test_the_dashboard_asks_only_for_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"(?:ray_)?gym_capture_\w+", query)}
    assert all(re.search(r"\bgym_capture_|\bray_gym_capture_", query) for query in queries)
    assert asked - every_name() == set()
    unseen = every_name() - asked
    assert unseen == {"ray_gym_capture_put_latency_seconds_sum", "ray_gym_capture_put_latency_seconds_count"}


@pytest.mark.parametrize("name", sorted(every_name()))
def test_names_are_as_prometheus_wants_them(name: str) -> None:
    """https://prometheus.io/docs/practices/naming: one unit, spelled out, behind the name; `_total` behind counters."""
    assert re.fullmatch(r"(ray_)?gym_capture(_[a-z0-9]+)+", name)
    words = name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count").split("_")
    assert not {"s", "ms", "sec", "secs", "millis", "kb", "mb", "gb", "percent", "fraction", "gauge", "counter"} & set(
        words
    )
    for unit in ("seconds", "bytes", "ratio", "nats"):
        assert unit not in words[:-1], f"{unit} stands behind the name"


def test_the_page_lists_them() -> None:
    page = (DASHBOARD.parents[1] / "metrics.md").read_text(encoding="utf-8")
    assert page == document(), "run `make reference`"
    listed = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    parts = {name for name in every_name() if "put_latency" in name}
    assert listed == {*(every_name() - parts), "ray_gym_capture_put_latency_seconds"}


def test_the_pages_name_only_what_is_exported() -> None:
    """Whole names anywhere, and in the table of what to watch names without their prefix."""
    bare = {re.sub(r"^(ray_)?gym_capture_(trainer_)?", "", name) for name in every_name()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"\bray_gym_capture_\w+|\bgym_capture_trainer_\w+", text))
        assert named - every_name() - {"ray_gym_capture_put_latency_seconds"} == set(), page
        _, _, watched = text.partition("## What to watch")
        names = set(re.findall(r"`([a-z_]+)(?:\{[^`]*)?` (?:is|rises?|grows|stays|leaves|falls|above)", watched))
        assert names <= bare | {name.removesuffix("_total") for name in bare}, page
        assert page.name != "operations.md" or "begins_refused_total" in names
