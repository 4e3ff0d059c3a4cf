"""When two texts of tool arguments mean the same: JSON by value, everything else to the character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gym_capture.lineage.fingerprint import canonical_arguments


def test_a_number_too_large_for_a_double_is_infinite_and_names_of_numbers_are_not_json() -> None:
    assert canonical_arguments("9" * 10_000) == canonical_arguments("1e999")
    assert canonical_arguments("1e999") != canonical_arguments("Infinity")
    assert canonical_arguments("NaN") != canonical_arguments(" NaN")


def test_surrogates_that_form_a_character_are_that_character_only_if_json_says_so() -> None:
    assert canonical_arguments('"\\ud83d\\ude00"') == canonical_arguments('"😀"')
    assert canonical_arguments('"\\ud83d"') != canonical_arguments('"\\ude00"')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def spell(value: object, draw: st.DataObject) -> str:
    """JSON text of a value in one of its many spellings, written without the json module's help."""

    def gap() -> str:
        return draw.draw(st.sampled_from(["", " ", "\n\t"]))

    def character(char: str) -> str:
        code = ord(char)
        if code < 0x20 or char in '"\\' or (code < 0x10000 and draw.draw(st.booleans())):
            return f"\\u{code:04x}"
        return char

    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return draw.draw(st.sampled_from([str(value), f"{value}.0", f"{value}e0", f"{value}.00E+0"]))
        case float():
            return "1e999" if value == float("inf") else "-1e999" if value == float("-inf") else repr(value)
        case str():
            return '"' + "".join(map(character, value)) + '"'
        case list():
            return "[" + gap() + ",".join(spell(item, draw) + gap() for item in value) + "]"
        case dict():
            items = draw.draw(st.permutations(list(value.items())))
            return "{" + ",".join(f"{gap()}{spell(k, draw)}{gap()}:{spell(v, draw)}{gap()}" for k, v in items) + "}"
    raise AssertionError(value)


def same_json(a: object, b: object) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None or isinstance(a, str):
        return type(a) is type(b) and a == b
    if isinstance(a, int | float):
        return isinstance(b, int | float) and float(a) == float(b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same_json, a, b))
    assert isinstance(a, dict)
    return isinstance(b, dict) and a.keys() == b.keys() and all(same_json(a[name], b[name]) for name in a)


@given(json_values, json_values, st.data())
def test_arguments_are_equal_exactly_when_their_values_are(a: object, b: object, data: st.DataObject) -> None:
    assert canonical_arguments(spell(a, data)) == canonical_arguments(spell(a, data))
    same = same_json(a, b) or (a in (None, {}) and b in (None, {}))
    assert (canonical_arguments(spell(a, data)) == canonical_arguments(spell(b, data))) is same


def test_arguments_beyond_a_fixed_depth_are_compared_as_they_are() -> None:
    """Fixed, and not where a parser happens to give up: a key must not depend on who asks for it."""

    def nested(depth: int) -> str:
        return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    assert canonical_arguments(nested(100)) == canonical_arguments(nested(100).replace(":", ": "))
    assert canonical_arguments(nested(101)) != canonical_arguments(nested(101).replace(":", ": "))
    hidden = nested(101)[:-1] + ',"a":1}'
    assert canonical_arguments(hidden) == f"text:{hidden}"
