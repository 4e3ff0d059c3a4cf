"""Which rollouts to build trajectories of, and what was said of them outside of the records: group and reward.

Invariant: one row a rollout id, and all rollouts of a group stand together in one part, so a worker that has a part
can compare a group's rollouts without any other worker. Rewards are as given, a missing one is null - never 0.

Flow: a table (or lines of JSON, as a rollout job writes them) -> `check_requests` -> `split_into_parts` -> one worker
a part.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from gym_capture.errors import ConfigError, RecordError
from gym_capture.reasons import AttemptFailure
from gym_capture.records import check_rollout_id
from gym_capture.regular_files import open_regular

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequests:
    """What a file of rollouts held."""

    table: pa.Table
    """Of `REQUEST_SCHEMA`."""
    cut_lines: int
    """1 if the last line was cut off in writing and was left out, else 0."""


def read_requests(path: Path) -> ReadRequests:
    """Rollouts from lines of JSON, one object a line: `rollout_id`, `group_id`, and `reward`, `reward_components`,
    `failure` where they are known; `status` "failed" with `error`, as a rollout job writes them, is a failure.

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
        record["reward_components"] = _items(record["reward_components"])
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


def split_into_parts(table: pa.Table, *, rollouts_per_part: int) -> list[pa.Table]:
    """Tables of whole groups, in the order of each group's first rollout.

    A part is closed once it has `rollouts_per_part` rollouts; a group that is larger makes a larger part.
    """
    groups: dict[str, list[int]] = {}
    for index, group_id in enumerate(table.column("group_id").to_pylist()):
        groups.setdefault(group_id, []).append(index)
    parts: list[pa.Table] = []
    indices: list[int] = []
    for group in groups.values():
        indices += group
        if len(indices) >= rollouts_per_part:
            parts.append(table.take(indices))
            indices = []
    return [*parts, table.take(indices)] if indices else parts


def groups_of(part: pa.Table) -> Iterator[list[Request]]:
    """The groups of a part, one after the other."""
    for _, group in itertools.groupby(part.to_pylist(), key=lambda row: row["group_id"]):
        yield [_request(row) for row in group]


def _request(row: Mapping[str, Any]) -> Request:
    components = row["reward_components"]
    return Request(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        reward=row["reward"],
        reward_components=None if components is None else dict(components),
        failure=row["failure"],
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
    components = found.get("reward_components")
    if components is not None and not isinstance(components, dict):
        raise TypeError(f"reward_components must be an object: got {components!r}")
    for name in components or ():
        _check_text("reward_components", name)
    failure = found.get("failure")
    if failure is None and found.get("status") == "failed":
        failure = found.get("error") or AttemptFailure.FAILED
    if failure is not None:
        if not isinstance(failure, str):
            raise TypeError(f"failure must be a string: got {failure!r}")
        _check_text("failure", failure)
    return {
        "rollout_id": found["rollout_id"],
        "group_id": found["group_id"],
        "reward": _number("reward", found.get("reward")),
        "reward_components": None
        if components is None
        else {name: _number(name, value) for name, value in components.items()},
        "failure": failure,
    }


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text: it has half a surrogate pair, {text[error.start]!r}") from None


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number: got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that float64 holds") from None
