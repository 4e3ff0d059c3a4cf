"""Reading captures that NeMo Gym wrote: every schema version, any order of lines, and every way a file can be wrong."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions, build
from gym_capture.capture.records import Continues, Root, Snapshot, TokenEntry, Unresolved
from gym_capture.data import nemo_gym
from gym_capture.data.nemo_gym import gym_digest, read_directory, read_rollout, shown_id
from gym_capture.errors import StoreError
from gym_capture.reasons import reason_name
from tests.rollout_strategies import Rollout, honest_rollouts, snapshot_of

ALL_CHAINS = BuildOptions(delivery="all_chains")


def digest(ids: Sequence[int]) -> str:
    """As the format defines it, one id at a time."""
    state = hashlib.sha256(b"nemo-gym-tokens")
    if ids:
        state.update(bytes([1]) + struct.pack(">Q", len(ids)))
        for token_id in ids:
            state.update(struct.pack(">Q", token_id))
    return state.hexdigest()


def record(call_id: str, prompt: Sequence[int], generation: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A line of version 3; `None` takes a field out."""
    line: dict[str, Any] = {
        "schema_version": 3,
        "rollout_id": "r1",
        "model_call_id": call_id,
        "model": "served",
        "prompt_token_ids": list(prompt),
        "generation_token_ids": list(generation),
        "generation_log_probs": [-0.5] * len(generation),
        "output_items": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}],
        "token_item_index": 0,
        "created_at": 1.5,
        "parent_resolution": "root",
        "parent_call_id": None,
        "cum_len": len(prompt) + len(generation),
        "digest": digest([*prompt, *generation]),
        **fields,
    }
    return {key: value for key, value in line.items() if key not in fields or value is not None or key == "digest"}


A = record("a", [1, 2], [3, 9])
B = record("b", [1, 2, 3, 9, 4], [5], parent_resolution="resolved", parent_call_id="a")
B_DELTA = B | {"schema_version": 5, "prompt_token_ids": [4], "prompt_is_delta": True}


def write(directory: Path, *lines: Mapping[str, Any] | bytes, rollout_id: str = "r1") -> None:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
    (directory / f"{rollout_id}.tokens.jsonl").write_bytes(b"".join(encoded))


def names(snapshot: Snapshot) -> list[tuple[str, str | None, str | None]]:
    return [(problem.reason, problem.call_id, problem.field) for problem in snapshot.problems]


# --- what is read ------------------------------------------------------------------------------------------------


def test_a_record_becomes_an_entry(tmp_path: Path) -> None:
    fields = {
        "requested_model": "policy",
        "has_tools": True,
        "prefix_requested": True,
        "prefix_supplied": True,
        "finish_reason": "tool_calls",
        "stop_reason": 7,
        "max_tokens": 64,
        "sampling": {"temperature": 1.0},
        "weight_versions": [{"start": 0, "end": 1, "version": 3}],
        "routed_experts": [[[0], [1]]] * 5,
    }
    write(tmp_path, A, B | fields)
    snapshot = read_rollout(tmp_path, "r1")
    assert names(snapshot) == []
    assert snapshot.incomplete == ()
    a, b = snapshot.entries
    assert a.parent == Root()
    assert b.parent == Continues("a", 4)
    assert b.prompt_token_ids.tolist() == [1, 2, 3, 9, 4]
    assert b.generation_token_ids.tolist() == [5]
    assert b.generation_log_probs.tolist() == [-0.5]
    assert (b.policy.model, b.request.requested_model, b.request.has_tools) == ("served", "policy", True)
    assert (b.reply.finish_reason, b.reply.stop_reason, b.request.max_tokens) == ("tool_calls", "7", 64)
    assert (b.prefix.requested, b.prefix.supplied, b.reply.token_item_index) == (True, True, 0)
    assert b.reply.output_items[0]["content"][0]["text"] == "hi"
    assert [(span.start, span.end, span.version) for span in b.policy.weight_versions] == [(0, 1, "3")]
    assert b.policy.routed_experts is not None
    assert b.policy.routed_experts.shape == (5, 2, 1)
    assert a.request.requested_model == "", "nobody noted what was asked for"


def test_version_1_has_no_parents(tmp_path: Path) -> None:
    lines = [
        {"rollout_id": "r1", "model_call_id": c, "prompt_token_ids": p, "generation_token_ids": [g]}
        for c, p, g in (("b", [1, 2, 3, 4], 5), ("a", [1, 2], 3))
    ]
    write(tmp_path, *[line | {"generation_log_probs": [-0.5]} for line in lines])
    snapshot = read_rollout(tmp_path, "r1")
    assert [entry.parent for entry in snapshot.entries] == [None, None]
    built = build(snapshot)
    assert [trajectory.call_ids for trajectory in built.trajectories] == [("a", "b")]
    assert not built.masked


def test_version_1_left_token_arrays_on_the_items(tmp_path: Path) -> None:
    arrays = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 9], "generation_log_probs": [-0.5, -0.5]}
    items = [{"type": "reasoning"}, {"type": "message", "text": "hi", **arrays}]
    write(tmp_path, record("a", [1, 2], [3, 9], output_items=items, token_item_index=None, parent_resolution=None))
    (entry,) = read_rollout(tmp_path, "r1").entries
    assert entry.reply.output_items == ({"type": "reasoning"}, {"type": "message", "text": "hi"})
    assert entry.reply.token_item_index == 1


def test_version_2_has_parents_but_no_decisions(tmp_path: Path) -> None:
    line = record("b", [1, 2, 3, 9, 4], [5], schema_version=2, parent_resolution=None, parent_call_id="a")
    write(tmp_path, line, record("a", [1, 2], [3, 9], schema_version=2, parent_resolution=None))
    b, a = read_rollout(tmp_path, "r1").entries
    assert (a.parent, b.parent) == (None, Continues("a", 4))


def test_an_unresolved_parent_keeps_its_reason(tmp_path: Path) -> None:
    write(tmp_path, A | {"parent_resolution": "unresolved", "parent_resolution_reason": "ambiguous"})
    (entry,) = read_rollout(tmp_path, "r1").entries
    assert entry.parent == Unresolved("ambiguous")


@pytest.mark.parametrize("cum_len", [6, None])
def test_a_delta_before_its_parent(tmp_path: Path, cum_len: int | None) -> None:
    c_ids = [1, 2, 3, 9, 4, 5, 7]
    c = record("c", [7], [8], schema_version=5, parent_resolution="resolved", parent_call_id="b", prompt_is_delta=True)
    write(tmp_path, c | {"cum_len": None, "digest": digest([*c_ids, 8])}, B_DELTA | {"cum_len": cum_len}, A)
    snapshot = read_rollout(tmp_path, "r1")
    assert names(snapshot) == []
    assert [entry.prompt_token_ids.tolist() for entry in snapshot.entries] == [c_ids, [1, 2, 3, 9, 4], [1, 2]]
    built = build(snapshot)
    assert not built.masked
    (trajectory,) = built.trajectories
    assert trajectory.token_ids.tolist() == [*c_ids, 8]


def test_DJ_07_rows_with_other_fields_are_all_read(tmp_path: Path) -> None:
    """A missing field is as good as null, an unknown one is left aside, and a cut last line is reported."""
    cut = json.dumps(record("d", [1], [2])).encode()[:60]
    lacking = record("b", [5, 6], [7])
    del lacking["digest"]
    write(tmp_path, A, lacking, record("c", [7, 8], [9], digest=None, extra=1), cut)
    snapshot = read_rollout(tmp_path, "r1")
    assert [entry.model_call_id for entry in snapshot.entries] == ["a", "b", "c"]
    assert names(snapshot) == [("truncated_record", None, None)]
    assert build(snapshot).mask_reasons == ("truncated_record",)


def test_a_last_line_without_its_newline_is_a_line(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(A).encode())
    assert names(read_rollout(tmp_path, "r1")) == []


# --- what is wrong with it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        pytest.param(A | {"schema_version": 6}, ("newer_schema_version", "a", "schema_version"), id="newer"),
        pytest.param(A | {"schema_version": 0}, ("malformed_record", "a", "schema_version"), id="no version"),
        pytest.param(
            A | {"generation_log_probs": [-0.5]}, ("malformed_record", "a", "generation_log_probs"), id="misaligned"
        ),
        pytest.param(
            A | {"generation_log_probs": [-0.5, None]}, ("malformed_record", "a", "generation_log_probs"), id="null"
        ),
        pytest.param(
            A | {"generation_log_probs": [-0.5, float("nan")]},
            ("malformed_record", "a", "generation_log_probs"),
            id="NaN",
        ),
        pytest.param(
            A | {"generation_log_probs": [-0.5, -1e300]}, ("malformed_record", "a", "generation_log_probs"), id="huge"
        ),
        pytest.param(
            A | {"generation_log_probs": [-0.5, "x"]}, ("malformed_record", "a", "generation_log_probs"), id="text"
        ),
        pytest.param(A | {"prompt_token_ids": [1, -2]}, ("malformed_record", "a", "prompt_token_ids"), id="negative"),
        pytest.param(A | {"prompt_token_ids": [1, 2.0]}, ("malformed_record", "a", "prompt_token_ids"), id="floats"),
        pytest.param(A | {"prompt_token_ids": [1, 2**31]}, ("malformed_record", "a", "prompt_token_ids"), id="large"),
        pytest.param(A | {"prompt_token_ids": [[1], 2]}, ("malformed_record", "a", "prompt_token_ids"), id="ragged"),
        pytest.param(A | {"prompt_token_ids": None}, ("malformed_record", "a", "prompt_token_ids"), id="no prompt"),
        pytest.param(A | {"token_item_index": 1}, ("malformed_record", "a", "token_item_index"), id="no such item"),
        pytest.param(A | {"parent_call_id": "z"}, ("malformed_record", "a", "parent_call_id"), id="root with parent"),
        pytest.param(
            A | {"parent_resolution": "resolved"}, ("malformed_record", "a", "parent_call_id"), id="resolved without"
        ),
        pytest.param(
            A | {"parent_resolution": "maybe"}, ("malformed_record", "a", "parent_resolution"), id="unknown decision"
        ),
        pytest.param(
            A | {"prompt_is_delta": True}, ("malformed_record", "a", "prompt_is_delta"), id="delta of nothing"
        ),
        pytest.param(A | {"cum_len": 5}, ("malformed_record", "a", "cum_len"), id="length"),
        pytest.param(A | {"digest": digest([1, 2, 3])}, ("digest_mismatch", "a", "digest"), id="digest"),
        pytest.param(A | {"model_call_id": ""}, ("malformed_record", None, "model_call_id"), id="no call id"),
        pytest.param(A | {"rollout_id": "../r"}, ("malformed_record", "a", "rollout_id"), id="impossible rollout"),
        pytest.param(A | {"weight_versions": ["7"]}, ("malformed_record", "a", "weight_versions"), id="weights"),
        pytest.param(A | {"routed_experts": [[1], [1, 2]]}, ("malformed_record", "a", "routed_experts"), id="experts"),
        pytest.param(A | {"routed_experts": ["x"]}, ("malformed_record", "a", "routed_experts"), id="no numbers"),
        pytest.param(
            A | {"routed_experts": [[[0]], [[True]]]}, ("malformed_record", "a", "routed_experts"), id="true expert"
        ),
        pytest.param(A | {"sampling_mask": [1, True]}, ("malformed_record", "a", "sampling_mask"), id="mixed mask"),
        pytest.param(
            A | {"weight_versions": [{"start": False, "end": 2, "version": "7"}]},
            ("malformed_record", "a", "weight_versions"),
            id="false start",
        ),
        pytest.param(A | {"prompt_token_ids": [1, True]}, ("malformed_record", "a", "prompt_token_ids"), id="true id"),
        pytest.param(
            A | {"generation_log_probs": [-0.5, "-0.5"]}, ("malformed_record", "a", "generation_log_probs"), id="quoted"
        ),
        pytest.param(
            json.dumps(A).encode()[:-1] + b', "prompt_token_ids": [7, 8]}\n',
            ("malformed_record", "a", "prompt_token_ids"),
            id="said twice",
        ),
        pytest.param(b"[1]\n", ("malformed_record", None, None), id="no object"),
        pytest.param(b"{\n", ("malformed_record", None, None), id="no JSON"),
        pytest.param(
            b'{"model_call_id": "a", "sampling": {"top_p": NaN}}\n', ("malformed_record", "a", "sampling"), id="NaN"
        ),
        pytest.param(b"\xff\xfe\n", ("malformed_record", None, None), id="no UTF-8"),
        pytest.param(b'{"model_call_id": "\\ud800"}\n', ("malformed_record", None, None), id="half a character"),
    ],
)
def test_a_record_that_cannot_be_trusted_masks_its_rollout_only(
    tmp_path: Path, line: Mapping[str, Any] | bytes, problem: tuple[str, str | None, str | None]
) -> None:
    write(tmp_path, record("other", [7, 7], [8]), line)
    write(tmp_path, record("a", [1, 2], [3, 9], rollout_id="r2"), rollout_id="r2")
    bad, good = read_directory(tmp_path)
    assert names(bad) == [problem]
    assert build(bad).masked
    assert "other" in [entry.model_call_id for entry in bad.entries]
    assert good.rollout_id == "r2"
    assert not build(good).masked


def test_a_wrong_digest_of_a_delta_masks(tmp_path: Path) -> None:
    write(tmp_path, B_DELTA | {"digest": digest([4, 5])}, A)
    assert names(read_rollout(tmp_path, "r1")) == [("digest_mismatch", "b", "digest")]


def test_every_digest_of_deltas_is_checked_whatever_branches_off(tmp_path: Path) -> None:
    """Two branches of a chain, a retry, and a whole prompt between them, in any order: one wrong digest at a time."""
    ids = {"a": [1, 2, 3, 9]}
    lines = {"a": A}
    for call_id, parent, new, generation in (
        ("b", "a", [4], [5]),
        ("b2", "a", [4], [6]),
        ("c", "b", [7], [8, 8]),
        ("d", "b2", [], [8]),
        ("e", "c", [7, 7], [1]),
    ):
        ids[call_id] = [*ids[parent], *new, *generation]
        lines[call_id] = record(
            call_id,
            new,
            generation,
            schema_version=5,
            parent_resolution="resolved",
            parent_call_id=parent,
            prompt_is_delta=True,
            cum_len=len(ids[call_id]),
            digest=digest(ids[call_id]),
        )
    whole = ids["c"]
    lines["w"] = record("w", whole, [5], parent_resolution="resolved", parent_call_id="c")
    for order in (list(lines), list(lines)[::-1], ["e", "b2", "w", "a", "c", "d", "b"]):
        write(tmp_path, *(lines[call_id] for call_id in order))
        assert names(read_rollout(tmp_path, "r1")) == []
        for wrong in lines:
            write(tmp_path, *(lines[each] | ({"digest": digest([7])} if each == wrong else {}) for each in order))
            assert names(read_rollout(tmp_path, "r1")) == [("digest_mismatch", wrong, "digest")]


def test_reading_deltas_touches_every_id_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest covers all ids of its call, so hashing is what grows; writing out, parsing and looking up must not."""
    ids, parent, lines = [1, 2, 3, 9], "a", [A]
    for number in range(2_000):
        call_id = f"c{number}"
        ids += [number, 5]
        fields = {"prompt_is_delta": True, "cum_len": len(ids), "digest": None, "parent_call_id": parent}
        lines.append(record(call_id, [number], [5], schema_version=5, parent_resolution="resolved", **fields))
        parent = call_id
    lines[-1] |= {"digest": digest(ids)}
    hashed: list[int] = []
    digest_of = nemo_gym._digest_of
    monkeypatch.setattr(nemo_gym, "_digest_of", lambda path: hashed.append(path.size) or digest_of(path))
    monkeypatch.setattr(np, "concatenate", lambda *_: pytest.fail("ids were put together anew"))
    write(tmp_path, *lines)
    assert names(read_rollout(tmp_path, "r1")) == []
    assert hashed == [4, len(ids)]


def test_a_delta_that_begins_elsewhere_masks(tmp_path: Path) -> None:
    write(tmp_path, A, B_DELTA | {"cum_len": 7})
    assert build(read_rollout(tmp_path, "r1")).mask_reasons == ("parent_mismatch:b:parent.cum_len",)


@pytest.mark.parametrize("cum_len", [10**12, 2**63 - 1])
def test_a_delta_that_claims_a_path_beyond_all_memory_masks(tmp_path: Path, cum_len: int) -> None:
    write(tmp_path, A, B_DELTA | {"cum_len": cum_len})
    assert build(read_rollout(tmp_path, "r1")).mask_reasons == ("parent_mismatch:b:parent.cum_len",)


def test_parents_that_are_absent_or_go_in_circles_mask(tmp_path: Path) -> None:
    write(tmp_path, B)
    assert "absent_parent:b:parent.call_id" in build(read_rollout(tmp_path, "r1")).mask_reasons
    write(tmp_path, B_DELTA | {"parent_call_id": "c", "cum_len": None}, B_DELTA | {"model_call_id": "c"})
    assert build(read_rollout(tmp_path, "r1")).masked
    loop = B_DELTA | {"model_call_id": "c", "parent_call_id": "b", "prompt_token_ids": [], "generation_token_ids": []}
    loop |= {"generation_log_probs": [], "cum_len": 6}
    write(tmp_path, B_DELTA | {"parent_call_id": "c", "cum_len": 8}, loop)
    assert "parent_cycle:b:parent.call_id" in build(read_rollout(tmp_path, "r1")).mask_reasons


def test_a_record_of_another_rollout_masks(tmp_path: Path) -> None:
    write(tmp_path, A, B | {"rollout_id": "r2"})
    built = build(read_rollout(tmp_path, "r1"))
    assert built.mask_reasons == ("foreign_record:b:rollout_id",)
    assert [trajectory.call_ids for trajectory in built.trajectories] == [("a",)]


def test_one_call_recorded_twice(tmp_path: Path) -> None:
    write(tmp_path, A, A)
    assert not build(read_rollout(tmp_path, "r1")).masked
    write(tmp_path, A, record("a", [1, 2], [3, 8]))
    assert "conflicting_call_id:a" in build(read_rollout(tmp_path, "r1")).mask_reasons


# --- what the files beside it say ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "content", "incomplete"),
    [
        ("incomplete", "", ("capture_failed",)),
        ("incomplete", "\n", ("capture_failed",)),
        ("incomplete", "x\ny\nx\n", ("capture_failed:x", "capture_failed:y")),
        ("intents", "a\n", ()),
        ("intents", "a\nx\n", ("dangling_intent:x",)),
        ("intents", "a\nx\n-x\n", ()),
        ("intents", "x\n-x\nx\n\ny", ("dangling_intent:x", "dangling_intent:y")),
        ("state.json", '{"incomplete": true, "snapshot_id": "s7", "version": 4}', ("capture_failed",)),
        ("lock", "", ()),
    ],
)
def test_lost_calls_make_the_snapshot_incomplete(
    tmp_path: Path, suffix: str, content: str, incomplete: tuple[str, ...]
) -> None:
    write(tmp_path, A)
    (tmp_path / f"r1.tokens.{suffix}").write_text(content)
    snapshot = read_rollout(tmp_path, "r1")
    assert snapshot.incomplete == incomplete
    assert names(snapshot) == []
    assert build(snapshot).mask_reasons == tuple(sorted(incomplete))


def test_a_rollout_whose_every_call_was_lost_is_there(tmp_path: Path) -> None:
    (tmp_path / "r1.tokens.intents").write_text("a\n")
    (tmp_path / "r2.tokens.lock").touch()
    (tmp_path / "r3.tokens.state.json").write_text('{"retired": true}')
    (snapshot,) = read_directory(tmp_path)
    assert (snapshot.rollout_id, snapshot.entries, snapshot.incomplete) == ("r1", (), ("dangling_intent:a",))


def test_a_record_that_could_not_be_read_is_not_lost_as_well(tmp_path: Path) -> None:
    write(tmp_path, A | {"prompt_token_ids": [-1]})
    (tmp_path / "r1.tokens.intents").write_text("a\n")
    assert read_rollout(tmp_path, "r1").incomplete == ()


def test_the_state_names_the_snapshot(tmp_path: Path) -> None:
    write(tmp_path, A)
    unnamed = read_rollout(tmp_path, "r1")
    assert unnamed.snapshot_id == read_rollout(tmp_path, "r1").snapshot_id
    (tmp_path / "r1.tokens.state.json").write_text('{"frozen": true, "snapshot_id": "s7", "version": 4}')
    named = read_rollout(tmp_path, "r1")
    assert (named.snapshot_id, named.version) == ("s7", 4)
    write(tmp_path, A, B)
    (tmp_path / "r1.tokens.state.json").unlink()
    assert read_rollout(tmp_path, "r1").snapshot_id != unnamed.snapshot_id


@pytest.mark.parametrize("content", ["{", "[]", '{"incomplete": 1}'])
def test_a_corrupt_state_masks(tmp_path: Path, content: str) -> None:
    write(tmp_path, A)
    (tmp_path / "r1.tokens.state.json").write_text(content)
    assert build(read_rollout(tmp_path, "r1")).mask_reasons == ("corrupt_state",)


def test_a_file_name_that_is_no_rollout_id_masks(tmp_path: Path) -> None:
    write(tmp_path, A, rollout_id="r 1")
    (snapshot,) = read_directory(tmp_path)
    assert "invalid_rollout_id:rollout_id" in build(snapshot).mask_reasons


def test_rollouts_come_one_at_a_time_and_sorted(tmp_path: Path) -> None:
    for rollout_id in ("r2", "r10", "r1"):
        write(tmp_path, record("a", [1], [2], rollout_id=rollout_id), rollout_id=rollout_id)
    snapshots = read_directory(tmp_path)
    assert next(snapshots).rollout_id == "r1"
    write(tmp_path, b"", rollout_id="r10")
    assert next(snapshots).entries == (), "read when it is asked for"


def test_no_directory_is_an_error_and_no_rollout_is_empty(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such"):
        list(read_directory(tmp_path / "no-such"))
    assert read_rollout(tmp_path, "r1").entries == ()


# --- files that are none -------------------------------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # the whole path may be too long
        made.bind(path.name)


@pytest.mark.parametrize("make", [make_fifo, make_endless, make_socket, Path.mkdir])
@pytest.mark.parametrize("suffix", ["jsonl", "intents", "incomplete", "state.json"])
def test_what_is_no_file_masks_its_rollout_only_and_nobody_waits(
    tmp_path: Path, make: Callable[[Path], object], suffix: str
) -> None:
    write(tmp_path, A)
    write(tmp_path, record("a", [1], [2], rollout_id="r2"), rollout_id="r2")
    (tmp_path / f"r1.tokens.{suffix}").unlink(missing_ok=True)
    make(tmp_path / f"r1.tokens.{suffix}")
    bad, good = read_directory(tmp_path)
    (problem,) = bad.problems
    assert problem.reason == "unreadable"
    assert f"r1.tokens.{suffix}: is a" in problem.detail
    assert "unreadable" in build(bad).mask_reasons
    assert [len(bad.entries), len(good.entries)] == [suffix != "jsonl", 1]
    assert not build(good).masked


def test_a_file_that_may_not_be_read_masks_its_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, *arguments: Any, **options: Any) -> int:
        if path.endswith("r1.tokens.jsonl"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    opened = os.open
    write(tmp_path, A)
    monkeypatch.setattr(os, "open", refused)
    snapshot = read_rollout(tmp_path, "r1")
    assert [problem.detail for problem in snapshot.problems] == ["r1.tokens.jsonl: Permission denied"]
    assert names(snapshot) == [("unreadable", None, None)]


def test_a_file_that_is_larger_than_memory_masks_its_rollout(tmp_path: Path) -> None:
    write(tmp_path, A)
    with (tmp_path / "r1.tokens.jsonl").open("ab") as file:
        file.truncate(2**43)  # of nothing: it takes no room
    snapshot = read_rollout(tmp_path, "r1")
    assert [problem.detail for problem in snapshot.problems] == ["r1.tokens.jsonl: does not fit into memory"]
    assert names(snapshot) == [("unreadable", None, None)]


def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path) -> None:
    write(tmp_path, A)
    (tmp_path / "r1.tokens.intents").symlink_to(tmp_path / "gone")
    assert not build(read_rollout(tmp_path, "r1")).masked


# --- properties ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_the_digest_is_the_formats(ids: list[int]) -> None:
    assert gym_digest(np.array(ids, dtype=np.int32)) == digest(ids)


def as_line(entry: TokenEntry, rollout: Rollout, *, version: int, delta: bool) -> dict[str, Any]:
    """An entry as a writer of `version` would have written it."""
    parent = entry.parent
    whole = rollout.cumulative(entry)
    line: dict[str, Any] = {
        "schema_version": version,
        "rollout_id": entry.rollout_id,
        "model_call_id": entry.model_call_id,
        "model": entry.policy.model,
        "requested_model": entry.request.requested_model,
        "has_tools": entry.request.has_tools,
        "finish_reason": entry.reply.finish_reason,
        "max_tokens": entry.request.max_tokens,
        "sampling": dict(entry.request.sampling),
        "delivered": entry.delivered,
        "prefix_requested": entry.prefix.requested,
        "prompt_token_ids": entry.prompt_token_ids.tolist(),
        "generation_token_ids": entry.generation_token_ids.tolist(),
        "generation_log_probs": entry.generation_log_probs.tolist(),
    }
    if version >= 2:
        line |= {"cum_len": len(whole), "digest": digest(whole)}
        line |= {"parent_call_id": parent.call_id if isinstance(parent, Continues) else None}
    if version >= 3 and parent is not None:
        decision = {Root: "root", Continues: "resolved", Unresolved: "unresolved"}[type(parent)]
        line |= {"parent_resolution": decision}
    if version >= 5 and delta and isinstance(parent, Continues):
        line |= {"prompt_is_delta": True, "prompt_token_ids": line["prompt_token_ids"][parent.cum_len :]}
    return line


@given(honest_rollouts(), st.data())
def test_what_was_written_builds_as_if_it_had_never_been(rollout: Rollout, data: st.DataObject) -> None:
    versions = (3, 4, 5) if any(entry.parent is not None for entry in rollout.entries) else (1, 2, 3, 4, 5)
    lines = [
        as_line(entry, rollout, version=data.draw(st.sampled_from(versions)), delta=data.draw(st.booleans()))
        for entry in rollout.entries
    ]
    with TemporaryDirectory() as directory:
        write(Path(directory), *data.draw(st.permutations(lines)))
        built, expected = (
            build(read_rollout(Path(directory), "r1"), ALL_CHAINS),
            build(snapshot_of(rollout.entries), ALL_CHAINS),
        )
    assert (built.mask_reasons, built.counts, built.excluded) == (
        expected.mask_reasons,
        expected.counts,
        expected.excluded,
    )
    for mine, theirs in zip(built.trajectories, expected.trajectories, strict=True):
        assert mine.call_ids == theirs.call_ids
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.log_probs.tolist() == theirs.log_probs.tolist()
        assert mine.spans == theirs.spans


@given(st.data())
def test_no_content_of_a_file_raises(data: st.DataObject) -> None:
    """Cut anywhere, with bytes changed and lines put in: it is read, and the rollout beside it is not concerned."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in (A, B_DELTA, B | {"model_call_id": "b2"}))
    content = content[: data.draw(st.integers(0, len(content)))]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content)))
        content = content[:at] + data.draw(st.binary(max_size=4)) + content[at + data.draw(st.integers(0, 4)) :]
    with TemporaryDirectory() as directory:
        write(Path(directory), content)
        write(Path(directory), record("a", [1], [2], rollout_id="r2"), rollout_id="r2")
        first, second = read_directory(Path(directory))
    build(first)
    assert not build(second).masked


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*B_DELTA, "weight_versions", "routed_experts", "sampling_mask", "sampling"})),
        json_values,
        max_size=3,
    )
)
def test_no_value_of_a_field_raises(fields: dict[str, Any]) -> None:
    with TemporaryDirectory() as directory:
        write(Path(directory), A, B_DELTA | fields)
        snapshot = read_rollout(Path(directory), "r1")
    built = build(snapshot)
    assert all(reason_name(reason) for reason in built.mask_reasons)


def test_ids_with_halves_of_characters_can_be_written() -> None:
    assert shown_id("g\ud800x\udcff") == "g\ufffdx\ufffd"
    assert shown_id("naïve 👍") == "naïve 👍"
