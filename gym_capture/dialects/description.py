"""JSON Schemas of what routes take and answer: each dialect describes its own with these.

Invariant: a body that does not fit the schema of its route is refused with 400, and what is answered fits it. The
schemas name the fields that a dialect reads; others are ignored, which is what `additionalProperties` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gym_capture.dialects.base import Schema
from gym_capture.dialects.fields import MAX_COUNT, MAX_STOP_STRINGS

__all__ = [
    "BOOLEAN",
    "NAME",
    "NUMBER",
    "OBJECT",
    "OPENAI_ERROR",
    "POSITIVE",
    "SAMPLING",
    "STOP",
    "STOPS",
    "STRING",
    "array_of",
    "content_of",
    "object_of",
    "one_of",
    "reply_of",
]

STRING: Final[Schema] = {"type": "string"}
NAME: Final[Schema] = {"type": "string", "minLength": 1}
BOOLEAN: Final[Schema] = {"type": "boolean"}
OBJECT: Final[Schema] = {"type": "object"}
NUMBER: Final[Schema] = {"type": "number"}
"""Of sampling parameters: their ranges are the engine's to judge."""
POSITIVE: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}


def one_of(*values: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(values)}


def object_of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """`optional` members may be null too, which means what leaving them out means."""
    may_be_null = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in (optional or {}).items()}
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **may_be_null},
        "additionalProperties": True,
    }


def array_of(items: Schema, *, at_least: int = 0, at_most: int | None = None) -> Schema:
    """A list of values that each fit `items`."""
    array = {"type": "array", "items": items, "minItems": at_least}
    return array if at_most is None else {**array, "maxItems": at_most}


SAMPLING: Final[Mapping[str, Schema]] = {"temperature": NUMBER, "top_p": NUMBER}
STOPS: Final = array_of(NAME, at_most=MAX_STOP_STRINGS)
STOP: Final[Schema] = {"anyOf": [NAME, STOPS]}


def content_of(*types: str, is_typed: bool = True) -> Schema:
    """Text, or parts of it."""
    kind = {"type": one_of(*types)}
    part = object_of({**kind, "text": STRING}) if is_typed else object_of({"text": STRING}, kind)
    return {"anyOf": [STRING, array_of(part)]}


OPENAI_ERROR: Final = object_of({"error": object_of({"message": STRING, "type": STRING}, {"param": {}, "code": {}})})


def reply_of(**fields: Schema) -> Schema:
    """A whole reply: what all APIs say, and `fields`."""
    return object_of({"id": NAME, "model": STRING, **fields})
