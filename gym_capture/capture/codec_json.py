"""JSON in the codec: everything that a model or a client can write comes back as it was.

Invariant: `load_json(dump_json(value), ...)` is `value` for whatever is JSON, lone surrogates, infinities and integers
of any size included. Most of it goes through orjson, which is fast; what orjson would change goes through the standard
library.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

from gym_capture.errors import RecordError

# The standard library's encoder keeps what orjson refuses (lone surrogates, integers over 64 bits, keys that are
# numbers) and what orjson would silently write as null (infinities).
to_text: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_from_json: Final = json.JSONDecoder().decode
_NULL: Final = b"null"
"""orjson's word for an infinity; also for None, and in texts."""
_MANY_DIGITS: Final = b"0" * 19
"""An integer beyond 64 bits, maybe: orjson would make it a float."""
_ANY_DIGIT_AS_0: Final = bytes.maketrans(b"123456789", b"000000000")
_BY_THE_BOOK: Final = (
    orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
)
"""Refuses values that are not JSON, as the standard library does."""


def dump_json(value: object) -> bytes:
    """JSON. What is none raises, but for an enum or a UUID, which is written as its value."""
    try:
        data = orjson.dumps(value, option=_BY_THE_BOOK)
    except orjson.JSONEncodeError:
        pass  # what the slower one writes, or has the better words for
    else:
        if _NULL not in data:
            return data
    return to_text(value).encode("utf-8", "surrogatepass")


def load_json(data: bytes, field: str) -> Any:
    """The value of the bytes. Raises `RecordError`, naming `field`, if they are no JSON."""
    if _MANY_DIGITS not in data.translate(_ANY_DIGIT_AS_0):
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass  # lone surrogates, numbers that are none: what the slower one reads, or has the better words for
    try:
        return _from_json(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{field} is not readable JSON: {error}", field=field) from error


def load_object(data: bytes, field: str) -> dict[str, Any]:
    """As `load_json`, of an object alone."""
    value = load_json(data, field)
    if not isinstance(value, dict):
        raise RecordError(f"{field} must be a JSON object", field=field)
    return value
