"""What is asked of a build: read from lines or tables, split into parts of whole groups."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.data import requests
from gym_capture.data.requests import (
    REQUEST_SCHEMA,
    check_requests,
    each_alone,
    groups_of,
    read_requests,
    request_table,
    split_into_parts,
)
from gym_capture.errors import ConfigError, InvalidRolloutIdError, RecordError


def lines(folder: Path, text: str) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text(text)
    return path


def test_DJ_07_lines_of_different_ages_and_a_last_one_that_was_cut(tmp_path: Path) -> None:
    read = read_requests(
        lines(
            tmp_path,
            '{"rollout_id": "c1", "group_id": "g", "reward": 1, "reward_components": {"a": 1}}\n'
            '{"rollout_id": "c2", "group_id": "g"}\n'
            '{"rollout_id": "c3", "group_id": "g", "reward": null, "judge": {"notes": 1}}\n'
            '{"rollout_id": "c4", "gro',
        )
    )
    assert read.cut_lines == 1
    assert read.table.schema.equals(REQUEST_SCHEMA)
    assert read.table.column("rollout_id").to_pylist() == ["c1", "c2", "c3"]
    assert read.table.column("reward").to_pylist() == [1.0, None, None]
    assert read.table.column("reward_components").to_pylist() == [[("a", 1.0)], None, None]


def test_a_rollout_that_outgrew_the_context_says_so(tmp_path: Path) -> None:
    said = ("true", "false", "null")
    text = "".join(
        f'{{"rollout_id": "r{number}", "group_id": "g", "truncated": {value}}}\n' for number, value in enumerate(said)
    )
    assert read_requests(lines(tmp_path, text)).table.column("truncated").to_pylist() == [True, False, None]


def test_a_rollout_that_failed_says_why(tmp_path: Path) -> None:
    read = read_requests(
        lines(
            tmp_path,
            '{"rollout_id": "a", "group_id": "g", "reward": 0, "status": "failed", "error": "timeout"}\n'
            '{"rollout_id": "b", "group_id": "g", "reward": 1, "status": "finished", "error": null}\n'
            '{"rollout_id": "c", "group_id": "g", "failure": "agent_crashed"}\n',
        )
    )
    assert read.table.column("failure").to_pylist() == ["timeout", None, "agent_crashed"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"rollout_id": "a", "group', "line 1"),
        ("[1]", "must be an object"),
        ('{"group_id": "g"}', "rollout_id must be a string: got None"),
        ('{"rollout_id": "a"}', "group_id must be a string: got None"),
        ('{"rollout_id": "a", "group_id": "g", "reward": "1"}', "reward must be a number: got '1'"),
        ('{"rollout_id": "a", "group_id": "g", "reward": true}', "reward must be a number: got True"),
        ('{"rollout_id": "a", "group_id": "g", "truncated": 1}', "truncated must be true or false: got 1"),
        ('{"rollout_id": "a", "group_id": "g", "reward_components": {"x": []}}', "x must be a number"),
        ('{"rollout_id": "a", "group_id": "g", "reward_components": [1]}', "reward_components must be an object"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_requests(lines(tmp_path, line + "\n"))


def test_what_is_no_file_is_an_error_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: is a .*, not a regular file"):
            read_requests(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_requests(tmp_path / "nothing")


def test_a_line_without_an_end_is_not_read_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_LINE_BYTES", 1_000)
    with pytest.raises(RecordError, match="line 2: longer than 1000 bytes"):
        read_requests(lines(tmp_path, '{"rollout_id": "a", "group_id": "g"}\n' + "0" * 2_000))


def test_tables_may_lack_columns_have_others_and_other_widths() -> None:
    table = pa.table(
        {
            "rollout_id": pa.array(["a", "b"], pa.large_string()),
            "group_id": ["g", "g"],
            "reward": pa.array([1, None], pa.int32()),
            "reward_components": [{"x": 1.0, "y": None}, {"x": None, "y": 2.0}],
            "task": ["t", "t"],
        }
    )
    checked = check_requests(table)
    assert checked.schema.equals(REQUEST_SCHEMA)
    assert checked.column("reward").to_pylist() == [1.0, None]
    assert checked.column("reward_components").to_pylist() == [[("x", 1.0)], [("y", 2.0)]]
    assert checked.column("failure").to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"group_id": ["g"]}, "every rollout needs a rollout_id"),
        ({"rollout_id": ["a", "b"], "group_id": ["g", None]}, "every rollout needs a group_id: 1 have none"),
        ({"rollout_id": ["a", "a"], "group_id": ["g", "h"]}, "must be unique"),
        ({"rollout_id": ["a"], "group_id": ["g"], "reward": ["x"]}, "column reward must be double"),
    ],
)
def test_tables_that_do_not_name_their_rollouts_are_refused(columns: dict[str, list[object]], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        check_requests(pa.table(columns))


def test_ids_that_would_leave_their_directory_are_refused() -> None:
    with pytest.raises(InvalidRolloutIdError):
        check_requests(pa.table({"rollout_id": ["../x"], "group_id": ["g"]}))


@given(groups=st.lists(st.sampled_from("abcde"), min_size=1, max_size=30), size=st.integers(1, 10))
def test_parts_hold_whole_groups_and_each_rollout_once(groups: list[str], size: int) -> None:
    table = request_table({"rollout_id": f"r{i}", "group_id": group} for i, group in enumerate(groups))
    parts = split_into_parts(groups_of(table), rollouts_per_part=size)
    seen = [(request.rollout_id, request.group_id) for part in parts for group in part for request in group]
    assert sorted(seen) == sorted((f"r{i}", group) for i, group in enumerate(groups))
    found = [group[0].group_id for part in parts for group in part]
    assert found == list(dict.fromkeys(groups))
    assert all(sum(map(len, part)) >= size for part in parts[:-1])
    assert all(sum(map(len, part)) < size + max(map(groups.count, groups)) for part in parts)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=30), most=st.integers(1, 40))
def test_parts_stay_below_so_many_bytes_unless_one_rollout_does_not(sizes: list[int], most: int) -> None:
    groups = each_alone({f"r{i}": size for i, size in enumerate(sizes)})
    parts = split_into_parts(groups, rollouts_per_part=1_000, bytes_per_part=most)
    assert [group for part in parts for group in part] == groups
    assert all(len(part) == 1 or sum(request.nbytes for (request,) in part) <= most for part in parts)


def test_who_played_it_and_what_it_was_given_are_kept(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        '{"rollout_id": "a", "group_id": "g", "agent_name": "coder", '
        '"input": [{"role": "user", "content": "\\u00e9"}]}\n'
        '{"rollout_id": "b", "group_id": "g", "input": "go"}\n'
        '{"rollout_id": "c", "group_id": "g"}\n',
    )
    ((a, b, c),) = groups_of(read_requests(path).table)
    assert (a.agent_name, json.loads(a.input or "")) == ("coder", [{"role": "user", "content": "\u00e9"}])
    assert (b.agent_name, b.input) == (None, '"go"')
    assert (c.agent_name, c.input) == (None, None)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"agent_name": 1', "agent_name must be a string"),
        ('"agent_name": "\\ud83d"', "agent_name must be text"),
        ('"input": {"role": "user"}', "input must be a text or a list"),
        ('"input": ["go"]', "input must be a text or a list"),
    ],
)
def test_an_agent_or_an_input_that_is_none_is_an_error(tmp_path: Path, field: str, message: str) -> None:
    with pytest.raises(RecordError, match=f"line 1: {message}"):
        read_requests(lines(tmp_path, f'{{"rollout_id": "a", "group_id": "g", {field}}}\n'))
