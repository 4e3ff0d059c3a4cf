"""Lines of token files: what the fast way accepts, the strict one reads the same, and a plain parser says so too."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_capture.capture.records import RecordProblem
from gym_capture.data.token_lines import LineReader, Record, read_strictly

ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
A: dict[str, Any] = {
    "schema_version": 4,
    "rollout_id": "r1",
    "model_call_id": "a",
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3, 9],
    "generation_log_probs": [-0.5, -1.25],
}


def spelled(fields: dict[str, Any] | Sequence[tuple[str, str]], separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """A line; from pairs whose values are spelled already, keys may stand twice."""
    if isinstance(fields, dict):
        pairs = [(key, json.dumps(value, separators=separators)) for key, value in fields.items()]
    else:
        pairs = list(fields)
    comma, colon = separators
    return ("{" + comma.join(f"{json.dumps(key)}{colon}{value}" for key, value in pairs) + "}\n").encode()


def read(*lines: bytes) -> list[Record | RecordProblem | None]:
    text = b"".join(lines)
    reader = LineReader(text)
    found, begin = [], 0
    for line in lines:
        found.append(reader.read(begin, begin + len(line)))
        begin += len(line)
    return found


def seen(found: Record | RecordProblem | None) -> object:
    if isinstance(found, Record):
        arrays = (found.prompt_token_ids, found.generation_token_ids, found.generation_log_probs)
        return found.header, [(array.dtype, array.tobytes()) for array in arrays]
    return found


def is_read_fast(*lines: bytes) -> list[bool]:
    """Whether the reader took the lines without the strict way."""
    text = b"".join(lines)
    reader = LineReader(text)
    taken, begin = [], 0
    for line in lines:
        taken.append(reader._read_fast(begin, begin + len(line)) is not None)
        begin += len(line)
    return taken


# --- what is refused, and in whose name ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("prompt_token_ids", "[1, true, 3]", "true at 1"),
        ("generation_token_ids", "[false, 4]", "false at 0"),
        ("prompt_token_ids", "[1, 2.0]", "2.0 at 1"),
        ("prompt_token_ids", "[1, 2e0]", "2.0 at 1"),
        ("prompt_token_ids", '[1, "2"]', '"2" at 1'),
        ("prompt_token_ids", "[1, null]", "null at 1"),
        ("prompt_token_ids", "[1, [2]]", "[2] at 1"),
        ("prompt_token_ids", "[1, -2]", "-2 at 1"),
        ("prompt_token_ids", "[1, 2147483648]", "2147483648 at 1"),
        ("prompt_token_ids", "[1, 18446744073709551616]", "18446744073709551616 at 1"),
        ("prompt_token_ids", "1", "an array"),
        ("prompt_token_ids", "null", "missing"),
        ("generation_log_probs", "[-0.5, true]", "true at 1"),
        ("generation_log_probs", '[-0.5, "-0.5"]', '"-0.5" at 1'),
        ("generation_log_probs", "[-0.5, null]", "null at 1"),
        ("generation_log_probs", "[-0.5, NaN]", ""),
        ("generation_log_probs", "[-0.5, -Infinity]", ""),
        ("generation_log_probs", "[-0.5, -1e400]", ""),
        ("generation_log_probs", f"[-0.5, -1{'0' * 400}]", ""),
        ("max_tokens", "9223372036854775808", ""),
        ("has_tools", "1", ""),
        ("created_at", "true", ""),
        ("stop_reason", "true", ""),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: str, word: str) -> None:
    pairs = [(key, json.dumps(each)) for key, each in A.items() if key != field]
    (found,) = read(spelled([*pairs, (field, value)]))
    assert isinstance(found, RecordProblem)
    assert (found.reason, found.call_id, found.field) == ("malformed_record", "a", field)
    assert word in found.detail


@pytest.mark.parametrize(
    ("again", "field"),
    [
        (("prompt_token_ids", "[7, 8]"), "prompt_token_ids"),
        (("prompt_token_ids", "[1, 2]"), "prompt_token_ids"),
        (("generation_log_probs", "[-0.5, -1.25]"), "generation_log_probs"),
        (("rollout_id", '"r2"'), "rollout_id"),
        (("unknown", '{"a": 1, "a": 1}'), "unknown"),
        (("output_items", '[{"type": "message", "content": [{"text": "a", "text": "b"}]}]'), "output_items"),
        (("sampling", '{"top_p": 1, "top\\u005fp": 0.5}'), "sampling"),
    ],
)
def test_a_line_that_says_two_things_of_one_field_is_refused(again: tuple[str, str], field: str) -> None:
    pairs = [(key, json.dumps(value)) for key, value in A.items()]
    for line in (spelled([*pairs, again]), spelled([again, *pairs])):
        (found,) = read(line)
        assert isinstance(found, RecordProblem)
        assert (found.reason, found.call_id, found.field) == ("malformed_record", "a", field)
        assert "duplicate key" in found.detail


def test_whose_line_it_is_is_not_said_where_the_line_says_it_twice() -> None:
    (found,) = read(spelled([*((key, json.dumps(value)) for key, value in A.items()), ("model_call_id", '"b"')]))
    assert isinstance(found, RecordProblem)
    assert (found.call_id, found.field) == (None, "model_call_id")


def test_nesting_without_end_is_refused() -> None:
    for depth in (150, 250, 900, 1_100, 100_000):
        (found,) = read(spelled([*((k, json.dumps(v)) for k, v in A.items()), ("x", "[" * depth + "]" * depth)]))
        assert isinstance(found, Record if depth < 200 else RecordProblem)


def test_an_integer_of_any_size_stays_what_it_is_where_any_is_allowed() -> None:
    (found,) = read(spelled(A | {"sampling": {"seed": 2**70}}))
    assert isinstance(found, Record)
    assert found.header.sampling == {"seed": 2**70}


# --- text that looks like an array of the record ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        A | {"output_items": [{"prompt_token_ids": [7, 8], "generation_token_ids": [9], "generation_log_probs": [0]}]},
        {"output_items": [{"prompt_token_ids": [7, 8], "generation_token_ids": [9]}]} | A,
        {"x": {"prompt_token_ids": [7, 8]}} | {key: A[key] for key in A if key != "prompt_token_ids"},
        {"x": '"prompt_token_ids":[7,8]', 'x"prompt_token_ids': [7, 8]} | A,
        {"x": -4611686018427388137} | A,
        {"x": {"prompt_token_ids": [7, 8]}, "prompt_token_ids": -4611686018427388137}
        | {key: A[key] for key in A if key != "prompt_token_ids"},
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_only_fields_of_the_record_itself_are_its_arrays(fields: dict[str, Any], separators: tuple[str, str]) -> None:
    line = spelled(fields, separators)
    (found,) = read(line)
    assert seen(found) == seen(read_strictly(line))
    assert isinstance(found, Record) == isinstance(fields.get("prompt_token_ids"), list)


# --- conversations ---------------------------------------------------------------------------------------------------


def call(call_id: str, prompt: list[int], generation: list[int], **fields: Any) -> bytes:
    log_probs = [-0.5] * len(generation)
    arrays = {"prompt_token_ids": prompt, "generation_token_ids": generation, "generation_log_probs": log_probs}
    return spelled(A | arrays | {"model_call_id": call_id} | fields, (",", ":"))


def test_prompts_that_begin_alike_are_each_what_they_say() -> None:
    """Continued, tried again, branched, cut in the middle of a number, and of two agents in turn."""
    lines = [
        call("a", [1, 2], [3]),
        call("b", [1, 2, 3, 40], [5]),
        call("f", [1, 2, 30], [0]),
        call("f2", [1, 2, 345, 6], [0]),
        call("b2", [1, 2, 3, 40], [6]),
        call("c", [1, 2, 3, 40, 5, 7], [8]),
        call("d", [1, 2, 3, 40, 6, 7], [8]),
        call("e", [1, 2, 3, 4], [0]),
        call("g", [9, 9], [1, 2, 3]),
        call("h", [1, 2, 3], [40]),
        call("i", [9, 9, 1, 2, 3], []),
        call("j", [9, 9, 1, 2, 3, 4], [5], prompt_is_delta=True),
        call("k", [9, 9, 1, 2, 3, 4, 5], [6]),
        call("l", [], [6]),
    ]
    assert is_read_fast(*lines) == [True] * len(lines)
    found = read(*lines)
    assert [seen(each) for each in found] == [seen(read_strictly(line)) for line in lines]


def test_a_conversation_without_a_prompt_does_not_begin_another_with_a_comma() -> None:
    first = spelled(A | {"prompt_token_ids": []}, (",", ":"))
    wrong = first.replace(b'"prompt_token_ids":[]', b'"prompt_token_ids":[,3,9]')
    _, found = read(first, wrong)
    assert isinstance(found, RecordProblem)
    assert found == read_strictly(wrong)


def test_ids_of_a_conversation_are_held_once() -> None:
    prompt, lines = [1, 2], []
    for turn in range(50):
        lines.append(call(f"c{turn}", prompt, [3, 4]))
        prompt = [*prompt, 3, 4, 5]
    found = [each for each in read(*lines) if isinstance(each, Record)]
    owners = {id(each.prompt_token_ids.base) for each in found}
    assert len(found) == 50
    assert len(owners) < 10


def test_what_only_repeats_counts_for_what_the_lines_are() -> None:
    def content(*lines: bytes) -> str:
        text, begin = b"".join(lines), 0
        reader = LineReader(text)
        for line in lines:
            reader.read(begin, begin + len(line))
            begin += len(line)
        return reader.content()

    a, b, c = call("a", [1, 2], [3]), call("b", [1, 2], [4]), call("c", [1, 2, 3, 5], [6])
    variants = [(a,), (b,), (a, b), (b, a), (a, c), (a, b, c), (a, b, call("c", [1, 2, 4, 5], [6])), (b"x\n",), ()]
    assert len({content(*lines) for lines in variants}) == len(variants)


# --- the same as a plain parser --------------------------------------------------------------------------------------

texts = st.text(max_size=6) | st.sampled_from(['"', "\\", '"prompt_token_ids":[1]', "],[", "\u2028", "😀", "}"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 12), max_size=8)
log_probs = st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False) | st.integers(-3, 0), max_size=8)
numbers = st.one_of(
    st.integers(-3, 2**33).map(str),
    st.floats().map(repr),
    st.sampled_from(["-0", "0", "00", "01", "-0.0", "1E2", "1e-7", "1e400", "-1e400", "1.", ".5", "+1", "0x1", "1_0"]),
    st.sampled_from(["true", "null", "NaN", "Infinity", '"1"', '"-0.5"', "[1]", "{}", "", " ", "1 2", "9" * 25]),
)
blanks = st.sampled_from(["", "", "", " ", "\t", "\r", "\n", "\x0b"])


@st.composite
def lines_of_a_file(draw: st.DrawFn) -> list[bytes]:
    """Calls that continue one another or do not, spelled in every way that JSON has, and in some that it has not."""
    lines: list[bytes] = []
    history: list[str] = []
    for number in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(history)))
        prompt = history[:start] + [str(each) for each in draw(ids)]
        generation = [str(each) for each in draw(ids)]
        history = prompt + generation
        values = {
            "prompt_token_ids": prompt,
            "generation_token_ids": generation,
            "generation_log_probs": [json.dumps(each) for each in draw(log_probs)],
        }
        for array in values.values():
            if draw(st.integers(0, 9)) == 0:
                array.insert(draw(st.integers(0, len(array))), draw(numbers))
        comma = draw(st.sampled_from([",", ", ", ",\t", " ,"]))
        pairs = [("rollout_id", '"r1"'), ("model_call_id", json.dumps(f"c{number}"))]
        pairs += [(name, f"[{draw(blanks)}{comma.join(array)}{draw(blanks)}]") for name, array in values.items()]
        extra = draw(st.lists(st.tuples(texts | st.sampled_from(sorted(A)), json_values), max_size=2))
        pairs += [(name, json.dumps(value, ensure_ascii=draw(st.booleans()))) for name, value in extra]
        if draw(st.booleans()):
            pairs.append(("output_items", json.dumps([{draw(texts): draw(json_values)}])))
        pairs = draw(st.permutations(pairs))
        line = spelled(pairs, (comma, draw(st.sampled_from([":", ": ", " : "]))))
        if draw(st.integers(0, 9)) == 0:
            at = draw(st.integers(0, len(line) - 1))
            line = line[:at] + draw(st.binary(max_size=2)) + line[at + draw(st.integers(0, 2)) :]
        lines.append(line.replace(b"\n", b" ") + b"\n")
    return lines


class AmbiguousError(ValueError):
    """What a line says is not said once, or not said in JSON."""


def plainly(line: bytes) -> dict[str, Any] | None:
    """The fields of a record, by the standard library; None: there is no record in the line, or none that is sound."""

    def one_thing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise AmbiguousError
        return dict(pairs)

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise AmbiguousError
        return float(text)

    def refuse(text: str) -> float:
        raise AmbiguousError

    try:
        found = json.loads(
            line.decode(), object_pairs_hook=one_thing, parse_float=finite, parse_constant=refuse, strict=True
        )
        json.dumps(found, ensure_ascii=False).encode()  # half a character is not text
    except ValueError:
        return None
    sound = (
        isinstance(found, dict)
        and all(type(found.get(name)) is list for name in ARRAYS)
        and all(type(each) is int and 0 <= each < 2**31 for name in ARRAYS[:2] for each in found[name])
        and all(type(each) in (int, float) for each in found["generation_log_probs"])
    )
    return found if sound else None


@given(lines_of_a_file())
@example([call("a", [1, 2], [3]).replace(b"rollout_id", b"ollout_id")])
@example([call("a", [1, 2], [3]), call("b", [1, 2, 3], [4]).replace(b"[1,2,3]", b"[1,2,3,]")])
def test_both_ways_and_a_plain_parser_agree(lines: list[bytes]) -> None:
    found = read(*lines)
    assert [seen(each) for each in found] == [seen(read_strictly(line)) for line in lines]
    for line, each in zip(lines, found, strict=True):
        plain = plainly(line)
        if isinstance(each, Record):
            assert plain is not None
            assert each.prompt_token_ids.tolist() == plain["prompt_token_ids"]
            assert each.generation_token_ids.tolist() == plain["generation_token_ids"]
            with np.errstate(over="ignore"):
                rounded = np.array(plain["generation_log_probs"], dtype=np.float64).astype(np.float32)
            assert each.generation_log_probs.tobytes() == rounded.tobytes()
            for name, value in each.header.model_dump(exclude_unset=True).items():
                assert value == plain[name]
                assert type(value) is type(plain[name]) or name == "created_at"
        elif plain is not None:
            # The plain parser knows the arrays only; that a scalar is wrong has to be said of that scalar.
            assert each is not None
            missing = {"rollout_id", "model_call_id"} - plain.keys()
            assert each.field in {*plain, *missing, "schema_version"} - {*ARRAYS}


@given(st.lists(ids, min_size=1, max_size=6), st.lists(log_probs, min_size=6, max_size=6))
def test_lines_as_writers_write_them_are_read_fast(turns: list[list[int]], chances: list[list[float]]) -> None:
    history: list[int] = []
    lines = []
    for number, (turn, each) in enumerate(zip(turns, chances, strict=False)):
        history = history + turn
        fields = A | {"model_call_id": f"c{number}", "prompt_token_ids": history, "generation_log_probs": each}
        lines.append(spelled(fields, (",", ":") if number % 2 else (", ", ": ")))
    assert all(is_read_fast(*lines))
