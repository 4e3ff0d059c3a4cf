"""A group becomes rows one rollout at a time, and every rollout asked for is accounted for."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from gym_capture.build.builder import BuildOptions
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Snapshot
from gym_capture.data import groups
from gym_capture.data.groups import RolloutSummary
from gym_capture.data.report import report
from gym_capture.data.requests import Request
from gym_capture.data.schema import SCHEMA

from .made_rollouts import snapshot
from .sync_groups import build_groups


def request(rollout_id: str, reward: float | None = 1.0, failure: str | None = None) -> Request:
    return Request(rollout_id=rollout_id, group_id="g", reward=reward, reward_components=None, failure=failure)


def built(requests: list[Request]) -> tuple[list[RolloutSummary], pa.Table]:
    def freeze(rollout_id: str) -> Snapshot:
        turns = {"r4": 0, "r3": 1}.get(rollout_id, 2)
        return snapshot(rollout_id, turns=turns)

    return gathered(build_groups([requests], freeze, options=BuildOptions(), scale="none"))


def gathered(
    batches: Iterable[tuple[tuple[RolloutSummary, ...], pa.Table]],
) -> tuple[list[RolloutSummary], pa.Table]:
    found = list(batches)
    return [summary for some, _ in found for summary in some], pa.concat_tables([table for _, table in found])


def test_BD_16_rollouts_that_crashed_or_left_nothing_are_reported() -> None:
    requests = [request("r1"), request("r2", 0.0), request("r3", failure="agent_crashed"), request("r4", 0.0)]
    summaries, table = built(requests)
    found = report(["r1", "r2", "r3", "r4"], summaries)
    assert (found.requested, found.complete, found.incomplete, found.missing) == (4, 2, ("r3",), ("r4",))
    assert found.mask_reasons == {"incomplete": 1, "no_calls": 1}
    rows = {row["rollout_id"]: row for row in table.to_pylist()}
    assert [rows[name]["masked"] for name in ("r1", "r2", "r3", "r4")] == [False, False, True, True]
    assert rows["r3"]["mask_reasons"] == ["incomplete:agent_crashed"]
    assert rows["r4"]["token_ids"] == []
    assert [rows[name]["advantage"] for name in ("r1", "r2", "r3", "r4")] == [0.5, -0.5, 0.0, 0.0]


def test_a_rollout_that_failed_without_a_reward_is_masked_for_its_failure_alone_and_out_of_the_baseline() -> None:
    _, table = built([request("r1"), request("r2", 0.0), request("r5", None, failure="refused"), request("r6", None)])
    rows = {row["rollout_id"]: row for row in table.to_pylist()}
    assert (rows["r5"]["masked"], rows["r5"]["reward"]) == (True, None)
    assert rows["r5"]["mask_reasons"] == ["incomplete:refused"]
    assert rows["r6"]["mask_reasons"] == ["missing_reward"]
    assert [rows[name]["advantage"] for name in ("r1", "r2", "r5", "r6")] == [0.5, -0.5, 0.0, 0.0]


def test_a_rollout_that_outgrew_the_context_is_counted_and_says_so_in_its_rows_and_is_not_masked() -> None:
    summaries, table = built([replace(request("r1"), truncated=True), request("r2", 0.0)])
    found = report(["r1", "r2"], summaries)
    assert (found.truncated, found.complete, found.mask_reasons) == (1, 2, {})
    assert table.column("truncated").to_pylist() == [True, False]
    assert table.column("advantage").to_pylist() == [0.5, -0.5]


def test_what_is_not_delivered_is_counted_by_reason() -> None:
    summaries, table = built([request("r1"), request("r2")])
    assert report(["r1", "r2"], summaries).excluded_tokens == {}
    reasons = [{"retry_orphan": 4, "side_call": 1}, {"side_call": 7}]
    odd = [replace(summary, excluded_tokens=found) for summary, found in zip(summaries, reasons, strict=True)]
    assert list(report(["r1", "r2"], odd).excluded_tokens.items()) == [("side_call", 8), ("retry_orphan", 4)]
    assert table.column("excluded_tokens").to_pylist() == [[], []]


def test_a_side_call_of_a_rollout_is_in_its_summary() -> None:
    def freeze(rollout_id: str) -> Snapshot:
        whole = snapshot(rollout_id, turns=2)
        return replace(whole, entries=(*whole.entries[:-1], with_values(whole.entries[-1], finish_reason="abort")))

    (((summary,), _),) = build_groups([[request("r1")]], freeze, options=BuildOptions(), scale="none")
    assert summary.excluded_tokens == {"aborted": 4}
    assert summary.generated_tokens_captured - summary.generated_tokens_delivered == 4


def test_a_rollout_that_never_came_back_is_missing() -> None:
    summaries, _ = built([request("r1")])
    assert report(["r1", "r9"], summaries).missing == ("r9",)


@pytest.mark.parametrize(
    ("reward", "reason"), [(None, "missing_reward"), (float("nan"), "non_finite_reward"), (1e400, "non_finite_reward")]
)
def test_a_reward_that_cannot_be_compared_masks_its_rollout_alone(reward: float | None, reason: str) -> None:
    _, table = built([request("r1", 1.0), request("r2", 0.0), request("r5", reward)])
    assert table.column("mask_reasons").to_pylist() == [[], [], [reason]]
    assert table.column("advantage").to_pylist() == [0.5, -0.5, 0.0]


def test_groups_that_start_from_different_prompts_are_named() -> None:
    summaries, _ = built([request("r1"), request("r2")])
    assert report(["r1", "r2"], summaries).mixed_prompt_groups == ()
    dated = [summaries[0], replace(summaries[1], first_prompt="another digest")]
    assert report(["r1", "r2"], dated).mixed_prompt_groups == ("g",)


@pytest.mark.parametrize("spool_bytes", [1, 2**20])
@pytest.mark.parametrize(("batch_bytes", "n_batches"), [(1, 5), (2**20, 1)])
def test_one_rollout_in_memory_at_a_time(
    monkeypatch: pytest.MonkeyPatch, spool_bytes: int, batch_bytes: int, n_batches: int
) -> None:
    monkeypatch.setattr(groups, "_SPOOL_BYTES", spool_bytes)
    monkeypatch.setattr(groups, "_BATCH_BYTES", batch_bytes)
    made: list[weakref.ref[np.ndarray]] = []
    most = 0

    def freeze(rollout_id: str) -> Snapshot:
        nonlocal most
        gc.collect()
        frozen = snapshot(rollout_id, turns=3)
        made.extend(weakref.ref(entry.generation_token_ids) for entry in frozen.entries)
        most = max(most, sum(1 for array in made if array() is not None))
        return frozen

    requests = [request(f"r{i}", float(i)) for i in range(5)]
    batches = list(build_groups([requests], freeze, options=BuildOptions(), scale="none"))
    summaries, table = gathered(batches)
    assert most == 3
    assert len(batches) == n_batches
    assert [summary.rollout_id for summary in summaries] == [f"r{i}" for i in range(5)]
    assert table.column("advantage").to_pylist() == [-2.0, -1.0, 0.0, 1.0, 2.0]
    assert all(table.schema.equals(SCHEMA, check_metadata=True) for _, table in batches)


def test_a_large_rollout_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"r1": 1, "r2": 1, "r3": 9, "r4": 1, "r5": 1}
    monkeypatch.setattr(groups, "_BATCH_BYTES", 500)
    batches = build_groups(
        [[request(name) for name in turns]],
        lambda rollout_id: snapshot(rollout_id, turns=turns[rollout_id]),
        options=BuildOptions(),
        scale="none",
    )
    assert [[summary.rollout_id for summary in some] for some, _ in batches] == [["r1", "r2"], ["r3"], ["r4", "r5"]]


def test_a_large_rollout_does_not_wait_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_BATCH_BYTES", 500)
    with pa.ipc.new_stream(io.BytesIO(), SCHEMA) as writer:
        spool = groups._Spool(writer, BuildOptions())
        for name, turns, n_written in (("r1", 1, 0), ("r2", 9, 2), ("r3", 1, 2)):
            spool.add(groups._rows_of(request(name), BuildOptions(), snapshot(name, turns=turns)))
            assert len(spool.batches) == n_written


def test_rows_that_make_no_table_take_no_other_rollout_with_them() -> None:
    def freeze(rollout_id: str) -> Snapshot:
        whole = snapshot(rollout_id, turns=2)
        if rollout_id != "r2":
            return whole
        odd = with_values(whole.entries[0], finish_reason=7)  # type: ignore[arg-type]  # a defective source
        return replace(whole, entries=(odd, *whole.entries[1:]))

    requests = [request("r1", 1.0), request("r2", 5.0), request("r3", 0.0)]
    summaries, table = gathered(build_groups([requests], freeze, options=BuildOptions(), scale="none"))
    assert [summary.rollout_id for summary in summaries] == ["r1", "r2", "r3"]
    assert [summary.masked for summary in summaries] == [False, True, False]
    assert summaries[1].details[0].startswith("ArrowTypeError: ")
    assert table.column("mask_reasons").to_pylist() == [[], ["build_failed", "no_calls"], []]
    assert table.column("advantage").to_pylist() == [0.5, 0.0, -0.5]


def test_the_collector_rests_while_a_rollout_is_made_and_no_longer() -> None:
    on: list[bool] = []

    def freeze(rollout_id: str) -> Snapshot:
        on.append(gc.isenabled())
        if rollout_id == "r2":
            raise KeyError(rollout_id)
        return snapshot(rollout_id, turns=1)

    built_ones = build_groups([[request("r1"), request("r2")]], freeze, options=BuildOptions(), scale="none")
    on += [gc.isenabled() for _ in built_ones]
    assert on == [False, False, True]
    gc.disable()
    try:
        built([request("r1")])
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()
