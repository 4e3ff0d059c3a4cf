"""The fields of a record, each said once: its name in bytes and files, its place in a `TokenEntry`, and its kind.

Invariant: every field of a record is here, and nothing else is; whoever writes or reads records - the codec, the rows
of files and of `/token-records`, the importer and exporter of NeMo Gym's files, the folding of repeated records - goes
by this list. Names, kinds and the order are what is on disks: a field is added at the end, and bytes leave it out at
its default, as those from before do.

Flow: a fact is added as an attribute in `records`, and as a line in `FIELDS`. How values of a kind are written is said
where they are written: a new kind has a place in each of those modules.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from gym_capture.capture.records import CallRecord, CallReply, CallRequest, PolicyTrace, PrefixSupply, TurnKeys

_Record = TypeVar("_Record", bound=CallRecord)


class Kind(enum.Enum):
    """The kind of a field's values."""

    TEXT = enum.auto()
    """`str`; empty: not known."""
    OPTIONAL_TEXT = enum.auto()
    """`str | None`, as the next ones."""
    FLAG = enum.auto()
    OPTIONAL_FLAG = enum.auto()
    OPTIONAL_COUNT = enum.auto()
    TIME = enum.auto()
    """Unix seconds."""
    PARENT = enum.auto()
    PROMPT = enum.auto()
    """The ids that a record has of its prompt, and how many come before them (`suffixes.prompt_part`)."""
    IDS = enum.auto()
    LOG_PROBS = enum.auto()
    TENSOR = enum.auto()
    """An array of booleans, integers or floats, of any shape; or None."""
    OBJECT = enum.auto()
    """A JSON object."""
    ITEMS = enum.auto()
    """JSON objects."""
    NAMES = enum.auto()
    RULES_BY_KEY = enum.auto()
    SPANS = enum.auto()


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    name: str
    path: str
    """Where its value is in a record; of a `PROMPT`, in one that is whole."""
    kind: Kind
    is_content: bool
    """Whether two records of one call that differ in it contradict each other. Else it is a matter of how, or how well,
    the call was recorded."""
    in_nemo_gym: bool = True
    """Whether NeMo Gym's files have it, under this name."""
    is_always_written: bool = False
    """Whether bytes have it at its default, too: that is so of the oldest fields."""


FIELDS: Final = (
    RecordField("rollout_id", "rollout_id", Kind.TEXT, is_content=True, is_always_written=True),
    RecordField("model_call_id", "model_call_id", Kind.TEXT, is_content=True, is_always_written=True),
    RecordField("model", "policy.model", Kind.TEXT, is_content=True, is_always_written=True),
    RecordField("requested_model", "request.requested_model", Kind.TEXT, is_content=True, is_always_written=True),
    RecordField("has_tools", "request.has_tools", Kind.FLAG, is_content=True, is_always_written=True),
    RecordField("parent", "parent", Kind.PARENT, is_content=True),
    RecordField("prompt_token_ids", "prompt_token_ids", Kind.PROMPT, is_content=True),
    RecordField("generation_token_ids", "generation_token_ids", Kind.IDS, is_content=True),
    RecordField("generation_log_probs", "generation_log_probs", Kind.LOG_PROBS, is_content=True),
    RecordField("output_items", "reply.output_items", Kind.ITEMS, is_content=False),
    RecordField("token_item_index", "reply.token_item_index", Kind.OPTIONAL_COUNT, is_content=False),
    RecordField("turn_key", "keys.turn_key", Kind.OPTIONAL_TEXT, is_content=False, in_nemo_gym=False),
    RecordField("asked_key", "keys.asked_key", Kind.OPTIONAL_TEXT, is_content=False, in_nemo_gym=False),
    RecordField("other_turn_keys", "keys.other_turn_keys", Kind.RULES_BY_KEY, is_content=False, in_nemo_gym=False),
    RecordField("digest", "digest", Kind.OPTIONAL_TEXT, is_content=True, in_nemo_gym=False),  # they have one of theirs
    RecordField("finish_reason", "reply.finish_reason", Kind.OPTIONAL_TEXT, is_content=True),
    RecordField("stop_reason", "reply.stop_reason", Kind.OPTIONAL_TEXT, is_content=True),
    RecordField("delivered", "delivered", Kind.OPTIONAL_FLAG, is_content=False),
    RecordField("prefix_requested", "prefix.requested", Kind.FLAG, is_content=True),
    RecordField("prefix_supplied", "prefix.supplied", Kind.FLAG, is_content=True),
    RecordField("weight_versions", "policy.weight_versions", Kind.SPANS, is_content=True),
    RecordField("sampling", "request.sampling", Kind.OBJECT, is_content=False),
    # No content by itself: `CallRequest.asked_max_tokens` is, which may come from the sampling parameters.
    RecordField("max_tokens", "request.max_tokens", Kind.OPTIONAL_COUNT, is_content=False),
    RecordField("normalized", "request.normalized", Kind.NAMES, is_content=False, in_nemo_gym=False),
    RecordField("routed_experts", "policy.routed_experts", Kind.TENSOR, is_content=True),
    RecordField("sampling_mask", "policy.sampling_mask", Kind.TENSOR, is_content=True),
    RecordField("created_at", "created_at", Kind.TIME, is_content=False),
    RecordField("options_key", "request.options_key", Kind.TEXT, is_content=False, in_nemo_gym=False),
    RecordField("replayed_from", "policy.replayed_from", Kind.OPTIONAL_TEXT, is_content=True, in_nemo_gym=False),
)
"""In the order of the columns of files."""

_GROUPS: Final[Mapping[str, type[Any]]] = {
    "request": CallRequest,
    "reply": CallReply,
    "keys": TurnKeys,
    "prefix": PrefixSupply,
    "policy": PolicyTrace,
}
_PLACES: Final = {field.name: field.path.rpartition(".")[::2] for field in FIELDS}
"""By name: the part of a record that has the field, or nothing, and what it is called there."""
_IN_GROUPS: Final = {name: place for name, place in _PLACES.items() if place[0]}


def of_kinds(*kinds: Kind) -> tuple[RecordField, ...]:
    return tuple(field for field in FIELDS if field.kind in kinds)


def reader(fields: Iterable[RecordField]) -> attrgetter[tuple[Any, ...]]:
    """Reads the values of (at least two) fields of a record, in their order."""
    return attrgetter(*(field.path for field in fields))


def parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their fields -> what the constructor of a record takes. Those not given: their defaults.

    What is no field is passed on; the constructor refuses what it does not know.
    """
    own, groups = _sorted_names(tuple(values))
    made: dict[str, Any] = {name: values[name] for name in own}
    for group, make, attributes in groups:
        made[group] = make(**{attribute: values[name] for name, attribute in attributes})
    return made


@lru_cache(maxsize=256)
def _sorted_names(
    names: tuple[str, ...],
) -> tuple[tuple[str, ...], tuple[tuple[str, type[Any], tuple[tuple[str, str], ...]], ...]]:
    """Names that stand in a record itself; and by the part that has them the others, with what they are called there.

    Most records of a log have the same fields.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        if name in _IN_GROUPS:
            group, attribute = _IN_GROUPS[name]
            groups.setdefault(group, []).append((name, attribute))
    own = tuple(name for name in names if name not in _IN_GROUPS)
    return own, tuple((group, _GROUPS[group], tuple(attributes)) for group, attributes in groups.items())


def with_values(record: _Record, **values: Any) -> _Record:
    """The record with other values of some fields, by their names. `dataclasses.replace`, into the parts."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        group, attribute = _PLACES.get(name, ("", name))
        if group:
            part = changed.get(group, attrgetter(group)(record))
            changed[group] = replace(part, **{attribute: value})
        else:
            changed[attribute] = value
    return replace(record, **changed)
