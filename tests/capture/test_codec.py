"""Records survive their encoding, and bytes that are not a record of this version say so."""

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gym_capture.capture.codec import (
    decode_entry,
    decode_intent,
    encode_entry,
    encode_intent,
    encode_suffix,
    payload_digest,
    peek_entry,
)
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import (
    Continues,
    PolicyTrace,
    RecordProblem,
    Root,
    Snapshot,
    TokenEntry,
    Unresolved,
    WeightSpan,
    suffix_of,
)
from gym_capture.capture.rollout_state import call_counts
from gym_capture.capture.snapshot_codec import decode_snapshot, encode_snapshot
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import RecordError, SchemaVersionError
from tests.calls import entry_of

# Any code point, lone surrogates included: both models and clients produce half an emoji.
TEXT = st.text(st.characters(), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=8,
)
IDS = npst.arrays(np.int32, st.integers(0, 40), elements=st.integers(0, 2**31 - 1))
PLAIN_DTYPES = npst.boolean_dtypes() | npst.integer_dtypes() | npst.unsigned_integer_dtypes() | npst.floating_dtypes()


@st.composite
def entries(draw: st.DrawFn) -> TokenEntry:
    generation = draw(IDS)
    log_probs = draw(npst.arrays(np.float32, generation.size, elements=st.floats(-(2.0**60), 0, width=32)))
    prompt = draw(IDS.filter(lambda ids: ids.size > 0))
    parent = draw(
        st.one_of(
            st.none(),
            st.just(Root()),
            TEXT.map(Unresolved),
            st.builds(Continues, TEXT, st.integers(1, int(prompt.size))),
        )
    )
    cut = draw(st.integers(0, int(generation.size)))
    spans = (WeightSpan(0, cut, draw(TEXT)), WeightSpan(cut, int(generation.size), draw(TEXT)))
    extra = st.none() | npst.arrays(PLAIN_DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    entry = entry_of(
        rollout_id=draw(st.text("abcXYZ019_.-", min_size=3, max_size=9)),
        model_call_id=draw(TEXT.filter(bool)),
        model=draw(TEXT),
        requested_model=draw(TEXT),
        has_tools=draw(st.booleans()),
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=log_probs,
        parent=parent,
        output_items=tuple(draw(st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3))),
        token_item_index=draw(st.none() | st.integers(0, 3)),
        turn_key=draw(st.none() | TEXT),
        digest=draw(st.none() | TEXT),
        finish_reason=draw(st.none() | TEXT),
        stop_reason=draw(st.none() | TEXT),
        delivered=draw(st.none() | st.booleans()),
        prefix_requested=draw(st.booleans()),
        prefix_supplied=draw(st.booleans()),
        weight_versions=draw(st.sampled_from([(), spans])),
        sampling=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        max_tokens=draw(st.none() | st.integers(0, 2**40)),
        normalized=tuple(draw(st.lists(TEXT, max_size=2))),
        routed_experts=draw(extra),
        sampling_mask=draw(extra),
        created_at=draw(st.floats(0, 1e11)),
    )
    return draw(st.sampled_from([entry, suffix_of(entry)])) if isinstance(parent, Continues) else entry


def assert_same(got: Any, expected: Any) -> None:
    """Every attribute, those of the parts included."""
    assert type(got) is type(expected)
    for item in fields(expected):
        left, right = getattr(got, item.name), getattr(expected, item.name)
        if isinstance(right, PolicyTrace):
            assert_same(left, right)
        elif isinstance(right, np.ndarray):
            assert left.shape == right.shape, item.name
            assert left.dtype == right.dtype.newbyteorder("="), item.name
            assert np.array_equal(left, right, equal_nan=right.dtype.kind == "f"), item.name
        else:
            assert left == right, item.name


@given(entries())
def test_entry_survives_with_every_field(entry: TokenEntry) -> None:
    data = encode_entry(entry)
    decoded = decode_entry(data)
    assert_same(decoded, entry)
    assert encode_entry(decoded) == data
    assert peek_entry(data) == (
        entry.rollout_id,
        entry.model_call_id,
        payload_digest(data),
        call_counts(entry),
    )
    assert encode_suffix(entry) == encode_entry(suffix_of(entry))


@given(entries(), st.data())
def test_damaged_bytes_never_decode_to_a_record(entry: TokenEntry, data: st.DataObject) -> None:
    encoded = encode_entry(entry)
    place = data.draw(st.integers(0, len(encoded) - 1))
    created_at = range(16, 24)  # the one field outside the digest
    damaged = bytearray(encoded)
    damaged[place] ^= data.draw(st.integers(1, 255))
    if place not in created_at:
        with pytest.raises(RecordError):
            decode_entry(bytes(damaged))
    with pytest.raises(RecordError):
        decode_entry(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    for decode in (decode_entry, peek_entry, decode_snapshot, decode_intent):
        with pytest.raises(RecordError):
            decode(data)


def test_arrays_are_views_of_the_bytes_and_aligned() -> None:
    entry = with_values(
        sample_entry("r", "c", prompt=range(1, 4), generation=(7,)),
        routed_experts=np.ones((3, 2, 5), dtype=np.float64),
        sampling_mask=np.ones((1, 3), dtype=bool),
    )
    decoded = decode_entry(encode_entry(entry))
    for array in (decoded.prompt_token_ids, decoded.generation_log_probs, decoded.policy.routed_experts):
        assert array is not None
        assert array.flags.aligned
        assert not array.flags.writeable
        assert not array.flags.owndata


def test_time_of_recording_is_no_part_of_the_content() -> None:
    entry = sample_entry("r", "c")
    later = replace(entry, created_at=entry.created_at + 60)
    assert peek_entry(encode_entry(entry)) == peek_entry(encode_entry(later))
    assert decode_entry(encode_entry(later)).created_at == later.created_at
    other = with_values(entry, stop_reason="x")
    assert peek_entry(encode_entry(entry)).payload_digest != peek_entry(encode_entry(other)).payload_digest


def test_numbers_outside_of_json_come_back() -> None:
    sampling = {"seed": 2**80, "temperature": math.inf, "nothing": math.nan}
    decoded = decode_entry(encode_entry(with_values(sample_entry("r", "c"), sampling=sampling))).request.sampling
    assert decoded["seed"] == 2**80
    assert decoded["temperature"] == math.inf
    assert math.isnan(decoded["nothing"])


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, np.float32(1), object(), _nested(100_000)])
def test_content_that_is_not_json_names_its_field(value: object) -> None:
    entry = sample_entry("r", "c")
    with pytest.raises(RecordError, match="output_items must be JSON") as raised:
        encode_entry(with_values(entry, output_items=({"x": value},)))
    assert (raised.value.field, raised.value.rollout_id, raised.value.call_id) == ("output_items", "r", "c")
    with pytest.raises(RecordError, match="sampling must be JSON"):
        encode_entry(with_values(entry, sampling={"x": value}))


def test_number_of_an_array_is_no_json_and_is_named() -> None:
    with pytest.raises(RecordError, match="max_tokens must be JSON"):
        encode_entry(with_values(sample_entry("r", "c"), max_tokens=np.int64(3)))  # type: ignore[arg-type]


def test_array_of_objects_is_refused() -> None:
    experts = np.array([[[None]]], dtype=object)
    with pytest.raises(RecordError, match="routed_experts must be booleans, integers or floats: got dtype object"):
        encode_entry(with_values(sample_entry("r", "c"), routed_experts=experts))


def test_newer_version_says_what_to_do() -> None:
    data = bytearray(encode_entry(sample_entry("r", "c")))
    data[4:6] = (2).to_bytes(2, "little")
    for read in (decode_entry, peek_entry):
        with pytest.raises(SchemaVersionError, match="codec version 2, this gym-capture reads 1: upgrade"):
            read(bytes(data))
    intent = json.loads(encode_intent(sample_intent("r", "c")))
    with pytest.raises(SchemaVersionError, match="upgrade"):
        decode_intent(json.dumps({**intent, "v": 2}).encode())
    snapshot = bytearray(encode_snapshot(_snapshot()))
    snapshot[4:6] = (2).to_bytes(2, "little")
    with pytest.raises(SchemaVersionError, match="upgrade"):
        decode_snapshot(bytes(snapshot))


def test_unknown_field_says_what_to_do() -> None:
    intent = json.loads(encode_intent(sample_intent("r", "c")))
    with pytest.raises(SchemaVersionError, match="does not know: priority") as raised:
        decode_intent(json.dumps({**intent, "priority": 1}).encode())
    assert raised.value.field == "priority"
    assert "upgrade" in raised.value.message


@given(st.builds(sample_intent, st.just("r"), TEXT))
def test_intent_survives(intent: Any) -> None:
    assert decode_intent(encode_intent(intent)) == intent


def test_intent_without_a_field_is_refused() -> None:
    intent = json.loads(encode_intent(sample_intent("r", "c")))
    del intent["created_at"]
    with pytest.raises(RecordError, match="lacks 'created_at'"):
        decode_intent(json.dumps(intent).encode())


def test_snapshot_survives() -> None:
    snapshot = _snapshot()
    decoded = decode_snapshot(encode_snapshot(snapshot))
    for name in ("rollout_id", "snapshot_id", "version", "incomplete", "problems"):
        assert getattr(decoded, name) == getattr(snapshot, name)
    for got, expected in zip(decoded.entries, snapshot.entries, strict=True):
        assert_same(got, expected)


def test_bad_entry_becomes_a_problem_of_its_snapshot() -> None:
    encoded = encode_snapshot(_snapshot())
    damaged = bytearray(encoded)
    damaged[-1] ^= 1
    decoded = decode_snapshot(bytes(damaged))
    assert [entry.model_call_id for entry in decoded.entries] == ["c1"]
    assert [problem.reason for problem in decoded.problems] == ["conflicting_call_id", "malformed_record"]
    with pytest.raises(RecordError, match="cut short"):
        decode_snapshot(encoded[:-8])


def _snapshot() -> Snapshot:
    return Snapshot(
        rollout_id="r",
        snapshot_id="s",
        version=3,
        entries=(sample_entry("r", "c1"), sample_entry("r", "c2")),
        incomplete=("dangling_intent:\ud800",),
        problems=(RecordProblem(reason="conflicting_call_id", call_id="c1", field=None, detail="twice"),),
    )
