"""Which rollouts to build trajectories of, and what was said of them outside of the records: group, reward, agent...

Invariant: one row a rollout id, and all rollouts of a group stand together in one part, so a worker that has a part
can compare a group's rollouts without any other worker. Rewards are as given, a missing one is null - never 0.

Flow: a table (or lines of JSON, as a rollout job writes them) -> `check_requests` -> `groups_of` -> `split_into_parts`
-> one worker a part. Without a table, `groups_recorded` asks for all rollouts of a source, by what is on record of
them; where nothing can be, `each_alone` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from gym_capture.capture.outcomes import Standing
from gym_capture.capture.record_rows import row_json
from gym_capture.errors import ConfigError, RecordError
from gym_capture.reasons import AttemptFailure
from gym_capture.regular_files import open_regular
from gym_capture.rollout_ids import check_rollout_id

__all__ = ["REQUEST_SCHEMA", "Request", "read_requests"]

ROLLOUTS_PER_PART: Final = 64
"""How many a part has, if nobody says otherwise: it is one file and one task of a worker."""

_LINE_BYTES: Final = 64 * 2**20
"""A longer line is no rollout."""

REQUEST_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_components", pa.map_(pa.string(), pa.float64())),
        # Why the rollout did not come to its end, e.g. `agent_crashed`: masks it. Null: it did.
        pa.field("failure", pa.string()),
        # Whether the conversation outgrew the model's context. Masks nothing; trainers may leave it out.
        pa.field("truncated", pa.bool_()),
        # What trainers want to know of how it was played: the agent's name, and the task as it was given to the agent,
        # i.e. `input` of a Responses request, as JSON.
        pa.field("agent_name", pa.string()),
        pa.field("input", pa.string()),
        # What the agent itself gave to single calls, by call id: no part of the reward.
        pa.field("call_rewards", pa.map_(pa.string(), pa.float64())),
        # Which sample of its task it is, and which attempt at it.
        pa.field("sample", pa.int64()),
        pa.field("attempt", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rollout to build."""

    rollout_id: str
    group_id: str
    reward: float | None
    reward_components: Mapping[str, float] | None
    failure: str | None
    truncated: bool = False
    """The conversation outgrew the model's context."""
    agent_name: str | None = None
    input: str | None = None
    """JSON."""
    call_rewards: Mapping[str, float] | None = None
    """By call id. Null: the agent gave none."""
    sample: int | None = None
    attempt: int | None = None
    """Which sample of its task it is, from 0, and which attempt at it, from 1. None: nobody said."""
    compared: bool = True
    """Whether it is one of a group. If not, nothing is known of its reward, which then masks nothing."""
    nbytes: int = 0
    """About the size of its records, where that is known: bounds a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequests:
    """A file of rollouts, read."""

    table: pa.Table
    """Of `REQUEST_SCHEMA`."""
    cut_lines: int
    """1 if the last line was cut off in writing and was left out, else 0."""


def read_requests(path: Path) -> ReadRequests:
    """Rollouts from lines of JSON, one object a line: `rollout_id`, `group_id`, and `reward`, `reward_components`,
    `call_rewards`, `failure`, `truncated`, `agent_name`, `input`, `sample`, `attempt` where they are known; `status`
    "failed" with `error`, as a rollout job writes them, is a failure.

    Other keys are somebody's own and are left out. A last line that was cut off in writing is left out and counted.
    Raises `RecordError` for any other line that cannot be read, `ConfigError` for what is no file or may not be read.
    """
    records: list[dict[str, Any]] = []
    cut_lines = 0
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), start=1):
            if len(line) == _LINE_BYTES:
                raise RecordError(f"{path}, line {number}: longer than {_LINE_BYTES} bytes", field=f"line {number}")
            if not line.strip():
                continue
            try:
                records.append(_record(json.loads(line)))
            except RecursionError:
                raise RecordError(f"{path}, line {number}: nested too deeply", field=f"line {number}") from None
            except (ValueError, TypeError) as error:
                if line.endswith(b"\n"):
                    raise RecordError(f"{path}, line {number}: {error}", field=f"line {number}") from None
                cut_lines = 1
    return ReadRequests(table=request_table(records), cut_lines=cut_lines)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def request_table(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """A table of `REQUEST_SCHEMA` from mappings with its names; what a mapping lacks is null."""
    present = [{name: record.get(name) for name in REQUEST_SCHEMA.names} for record in records]
    for record in present:
        for name in ("reward_components", "call_rewards"):
            record[name] = _items(record[name])
    return pa.Table.from_pylist(present, schema=REQUEST_SCHEMA)


def check_requests(table: pa.Table) -> pa.Table:
    """The same rollouts as a table of `REQUEST_SCHEMA`, each named once.

    Raises `RecordError` for rollouts without an id or a group or named twice and for columns of another type,
    `InvalidRolloutIdError` for ids that are none.
    """
    checked = conform(table)
    seen: set[str] = set()
    for rollout_id in checked.column("rollout_id").to_pylist():
        if rollout_id in seen:
            raise RecordError("rollout_id must be unique: named twice", field="rollout_id", rollout_id=rollout_id)
        seen.add(check_rollout_id(rollout_id))
    return checked


def conform(table: pa.Table) -> pa.Table:
    """The same rows as a table of `REQUEST_SCHEMA`: columns that are missing are null, others are left out."""
    columns = []
    for field in REQUEST_SCHEMA:
        if field.name in table.column_names:
            column = _cast(table.column(field.name), field)
        else:
            column = pa.nulls(table.num_rows, type=field.type)
        if column.null_count and not field.nullable:
            raise RecordError(f"every rollout needs a {field.name}: {column.null_count} have none", field=field.name)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=REQUEST_SCHEMA)


def groups_of(table: pa.Table) -> list[tuple[Request, ...]]:
    """The groups of a table of `REQUEST_SCHEMA`, in the order of each group's first rollout."""
    groups: dict[str, list[Request]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group_id"], []).append(_request(row))
    return [tuple(group) for group in groups.values()]


def read_group(rows: Iterable[Mapping[str, Any]]) -> tuple[Request, ...]:
    """The rollouts of one group, of objects as `read_requests` reads them from lines. Raises `RecordError`."""
    try:
        records = [_record(dict(row)) for row in rows]
    except (ValueError, TypeError) as error:
        raise RecordError(str(error), field="rollouts") from None
    (group,) = groups_of(check_requests(request_table(records)))
    return group


def each_alone(sizes: Mapping[str, int]) -> list[tuple[Request, ...]]:
    """Rollouts of which nothing but the records is known, each a group of its own: ids, with the bytes of each."""
    return [
        (
            Request(
                rollout_id=rollout_id,
                group_id=rollout_id,
                reward=None,
                reward_components=None,
                failure=None,
                compared=False,
                nbytes=nbytes,
            ),
        )
        for rollout_id, nbytes in sizes.items()
    ]


def groups_recorded(standings: Iterable[Standing]) -> list[tuple[Request, ...]]:
    """The rollouts that a source has, as what was said of them says: registered ones in their groups, with their
    rewards; others each alone, and compared with none.
    """
    groups: dict[str, list[Request]] = {}
    alone: list[tuple[Request, ...]] = []
    for rollout_id, registration, outcome in standings:
        request = Request(
            rollout_id=rollout_id,
            group_id=rollout_id if registration is None else registration.group_id,
            reward=None if outcome is None else outcome.reward,
            reward_components=None if outcome is None else dict(outcome.reward_components) or None,
            failure=None if outcome is None else outcome.failure,
            input=None if registration is None else _task_as_input(registration.task),
            compared=registration is not None,
        )
        if registration is None:
            alone.append((request,))
        else:
            groups.setdefault(request.group_id, []).append(request)
    return [*map(tuple, groups.values()), *alone]


def split_into_parts(
    groups: Iterable[tuple[Request, ...]], *, rollouts_per_part: int, bytes_per_part: int = 64 * 2**20
) -> list[tuple[tuple[Request, ...], ...]]:
    """Parts of whole groups, in their order.

    A part is closed once it has `rollouts_per_part` rollouts, or before a group with which it would have more than
    `bytes_per_part` of records; a group that is larger makes a larger part.
    """
    parts: list[tuple[tuple[Request, ...], ...]] = []
    part: list[tuple[Request, ...]] = []
    rollouts = nbytes = 0
    for group in groups:
        group_bytes = sum(request.nbytes for request in group)
        if part and (rollouts >= rollouts_per_part or nbytes + group_bytes > bytes_per_part):
            parts.append(tuple(part))
            part, rollouts, nbytes = [], 0, 0
        part.append(group)
        rollouts += len(group)
        nbytes += group_bytes
    return [*parts, tuple(part)] if part else parts


def _request(row: Mapping[str, Any]) -> Request:
    components, call_rewards = row["reward_components"], row["call_rewards"]
    return Request(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        reward=row["reward"],
        reward_components=None if components is None else dict(components),
        failure=row["failure"],
        truncated=bool(row["truncated"]),
        agent_name=row["agent_name"],
        input=row["input"],
        call_rewards=dict(call_rewards) if call_rewards else None,
        sample=row["sample"],
        attempt=row["attempt"],
    )


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if pa.types.is_struct(column.type) and pa.types.is_map(field.type):
        # What Arrow makes of dictionaries: names that a rollout does not have are null in it.
        return pa.chunked_array([pa.array([_items(value) for value in column.to_pylist()], type=field.type)])
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RecordError(f"column {field.name} must be {field.type}: {error}", field=field.name) from None


def _items(components: Mapping[str, float | None] | None) -> list[tuple[str, float]] | None:
    if components is None:
        return None
    return [(name, value) for name, value in components.items() if value is not None]


def _record(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"must be an object: got {type(found).__name__}")
    for name in ("rollout_id", "group_id"):
        if not isinstance(found.get(name), str):
            raise TypeError(f"{name} must be a string: got {found.get(name)!r}")
        _check_text(name, found[name])
    components, call_rewards = _numbers(found, "reward_components"), _numbers(found, "call_rewards")
    failure = found.get("failure")
    if failure is None and found.get("status") == "failed":
        failure = found.get("error") or AttemptFailure.FAILED
    if failure is not None:
        if not isinstance(failure, str):
            raise TypeError(f"failure must be a string: got {failure!r}")
        _check_text("failure", failure)
    truncated = found.get("truncated")
    if not (truncated is None or isinstance(truncated, bool)):
        raise TypeError(f"truncated must be true or false: got {truncated!r}")
    agent_name, task = found.get("agent_name"), found.get("input")
    if agent_name is not None:
        if not isinstance(agent_name, str):
            raise TypeError(f"agent_name must be a string: got {agent_name!r}")
        _check_text("agent_name", agent_name)
    if not (task is None or _is_input(task)):
        raise TypeError("input must be a text or a list of Responses items")
    return {
        "rollout_id": found["rollout_id"],
        "group_id": found["group_id"],
        "reward": _number("reward", found.get("reward")),
        "reward_components": components,
        "call_rewards": call_rewards,
        "failure": failure,
        "truncated": truncated,
        "agent_name": agent_name,
        "input": None if task is None else row_json(task).decode(),
        "sample": _index(found.get("sample")),
        "attempt": _index(found.get("attempt")),
    }


def _task_as_input(task: str | None) -> str | None:
    """A task that is what `input` may be; of any other it is not known how the agent was given it."""
    found = None if task is None else json.loads(task)
    return task if _is_input(found) else None


def _is_input(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_object, value)))


def _numbers(found: Mapping[str, Any], key: str) -> dict[str, float | None] | None:
    numbers = found.get(key)
    if numbers is None:
        return None
    if not isinstance(numbers, dict):
        raise TypeError(f"{key} must be an object: got {numbers!r}")
    for name in numbers:
        _check_text(key, name)
    return {name: _number(name, value) for name, value in numbers.items()}


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text: it has half a surrogate pair, {text[error.start]!r}") from None


def _index(value: object) -> int | None:
    """As a rollout job writes it; a key of the same name that holds something else is somebody's own."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number: got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that float64 holds") from None
