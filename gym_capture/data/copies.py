"""Tables of trajectories as readers meet them: of this version or an earlier one, or copied by other tools.

Invariant: what `conformed` gives has the types of `SCHEMA` and the values of the table it was given, each one exactly,
or is refused: nothing is rounded or guessed. What a copy lost is null.

Flow: `check_schema` by the types, before anything is read -> `conformed` for each batch.

What tools do to a table, and what is undone here: Ray Data, pandas and `datasets` drop the metadata; pandas and Ray
Data narrow offsets, widen texts and numbers, and make a column without values, or the elements of lists that are all
empty, null, a missing number NaN, and whole numbers among which one is missing floats. In tables of version 1 the
columns of pairs are maps. What cannot be undone: Ray Data pickles lists of texts in steps over batches of numpy arrays,
and nothing that is read here may run code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import pyarrow as pa

from gym_capture.data.schema import OPTIONAL, SCHEMA, TRAJECTORY_SCHEMA_VERSION, VERSION_KEY
from gym_capture.errors import RecordError, SchemaVersionError

_Batch = TypeVar("_Batch", pa.Table, pa.RecordBatch)

_HOW_TO_KEEP: Final = "; give steps of Ray Data `batch_format='pyarrow'` or `'pandas'`, which keep lists as they are"
_ARRAYS: Final = frozenset({"token_ids", "loss_mask", "log_probs"})
"""Columns that are too large for Python values. A log probability may be NaN."""


def check_schema(schema: pa.Schema) -> None:
    """Whether this version reads a table of trajectories: nothing, or an error that says what to do.

    Raises `SchemaVersionError` for a table of a newer version, `RecordError` for one that is not of trajectories, i.e.
    lacks a column, whether or not it says its version. Columns that it does not know are somebody's own.
    """
    text = (schema.metadata or {}).get(VERSION_KEY)
    lost = "" if text is not None else "not a table of trajectories: its metadata has no schema version, and "
    if text is not None and not text.isdigit():
        raise RecordError(f"not a table of trajectories: its schema version is {text!r}", field="schema_version")
    if text is not None and int(text) > TRAJECTORY_SCHEMA_VERSION:
        raise SchemaVersionError(
            f"trajectories of schema version {int(text)} were written by a newer gym-capture; this one reads up to "
            f"{TRAJECTORY_SCHEMA_VERSION}: upgrade the reader, or build the trajectories again with this version",
            field="schema_version",
        )
    for field in SCHEMA:
        index = schema.get_field_index(field.name)
        if index < 0 and field.name in OPTIONAL:
            continue
        if index < 0:
            raise RecordError(f"{lost}the table of trajectories has no column {field.name!r}", field=field.name)
        found = schema.field(index).type
        if not _may_hold(found, field.type):
            hint = _HOW_TO_KEEP if isinstance(found, pa.BaseExtensionType) else ""
            raise RecordError(
                f"{lost}column {field.name!r} must be {field.type}: got {found}{hint}",
                field=field.name,
            )


def conformed(batch: _Batch) -> _Batch:
    """The same rows with the types of `SCHEMA`, in the columns that are of it. Raises `RecordError` for a value that
    its column cannot have."""
    is_copy = VERSION_KEY not in (batch.schema.metadata or {})
    for index, name in enumerate(batch.schema.names):
        if name not in SCHEMA.names:
            continue
        wanted = SCHEMA.field(name)
        found = batch.schema.field(index).type
        column = batch.column(index)
        may_have_nan = is_copy and wanted.nullable and pa.types.is_floating(found)
        if found == wanted.type and not may_have_nan:
            continue
        try:
            batch = batch.set_column(index, wanted.with_nullable(True), _converted(column, wanted.type, name))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise RecordError(
                f"column {name!r} must be {wanted.type}: got {found}: {' '.join(str(error).split())}", field=name
            ) from None
    return batch


def _may_hold(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can be those of the other, as far as types tell."""
    if pa.types.is_null(found) or found == wanted:
        return True
    if _is_list(wanted):
        element = wanted.value_type
        if pa.types.is_map(found):
            pair = pa.struct([("key", found.key_type), ("value", found.item_type)])
            return pa.types.is_struct(element) and _may_hold(pair, element)
        return _is_list(found) and _may_hold(found.value_type, element)
    if pa.types.is_struct(wanted):
        return pa.types.is_struct(found) and all(
            found.get_field_index(field.name) >= 0 and _may_hold(found.field(field.name).type, field.type)
            for field in wanted
        )
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(found) or pa.types.is_floating(found))
    kinds = _KINDS.get(wanted.id, ())
    return any(is_kind(found) for is_kind in kinds)


_TEXT: Final = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARY: Final = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
_NUMBER: Final = (pa.types.is_floating, pa.types.is_integer)
_KINDS: Final[dict[int, Iterable[Callable[[pa.DataType], bool]]]] = {
    pa.string().id: _TEXT,
    pa.large_binary().id: _BINARY,
    pa.float64().id: _NUMBER,
    pa.float32().id: _NUMBER,
    pa.bool_().id: (pa.types.is_boolean,),
}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _converted(column: Any, wanted: pa.DataType, name: str) -> Any:
    if name in _ARRAYS:
        return column.cast(wanted)
    return pa.array([_value(value, wanted) for value in column.to_pylist()], type=wanted)


def _value(value: Any, kind: pa.DataType) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if _is_list(kind):
        element = kind.value_type
        if pa.types.is_struct(element):  # a map gives tuples
            names = [field.name for field in element]
            value = [dict(zip(names, each, strict=True)) if isinstance(each, tuple) else each for each in value]
        return [_value(each, element) for each in value]
    if pa.types.is_struct(kind):
        return {field.name: _value(value[field.name], field.type) for field in kind}
    if pa.types.is_integer(kind) and isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"{value} is no whole number")
        return int(value)
    return value
