"""Tokens are told apart again, whatever the steps in which they came."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.calls import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart, TurnBuilder
from gym_capture.engines.steps import Piece, PromptEcho, StepSplitter, joined, merged


@st.composite
def generations(draw: st.DrawFn) -> tuple[list[str], str, list[tuple[int, int]]]:
    """Texts of tokens; the engine's text, which a stop string may have cut; ends of steps, in ids and characters."""
    texts = draw(st.lists(st.text("ab <", max_size=3), max_size=12))
    whole = "".join(texts)
    text = whole[: draw(st.integers(0, len(whole)))] + draw(st.sampled_from(["", "", "\ufffd"]))
    ids = sorted(draw(st.lists(st.integers(0, len(texts)), max_size=4)))
    # Text may lag behind its ids, as behind a stop string that is not there yet, but is never early.
    ends = [(n, draw(st.integers(0, min(len("".join(texts[:n])), len(text))))) for n in ids]
    ends = [(n, max(length for m, length in ends if m <= n)) for n, _ in ends]
    return texts, text, [*ends, (len(texts), len(text))]


def split(texts: list[str], text: str, ends: list[tuple[int, int]]) -> list[Piece]:
    decoded: Iterator[str] = iter(texts)
    splitter = StepSplitter(lambda _: next(decoded))
    pieces: list[Piece] = []
    ids_before = length_before = 0
    for n_ids, length in ends:
        pieces += splitter.feed(range(ids_before, n_ids), text[length_before:length])
        ids_before, length_before = n_ids, length
    return pieces + splitter.rest()


@given(generations())
def test_pieces_are_what_was_fed_and_do_not_depend_on_the_steps(
    generation: tuple[list[str], str, list[tuple[int, int]]],
) -> None:
    texts, text, ends = generation
    pieces = split(texts, text, ends)
    assert "".join(piece.text for piece in pieces) == text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == list(range(len(texts)))
    assert pieces == split(texts, text, ends[-1:])
    assert joined(pieces) == Piece(list(range(len(texts))), text)


def test_a_piece_is_one_token_as_soon_as_its_text_is_there() -> None:
    texts = iter(["He", "", "llo", "<|end|>"])
    splitter = StepSplitter(lambda _: next(texts))
    assert splitter.feed([1, 2, 3], "Hel") == [Piece([1], "He"), Piece([2], "")]
    assert splitter.feed([], "lo") == [Piece([3], "llo")]
    assert splitter.feed([4], "") == []
    assert splitter.rest() == [Piece([4], "")]


@pytest.mark.parametrize("text", ["He", " wörld 1", "don't, no_w.", " "])
def test_prose(text: str) -> None:
    assert Piece([1], text).is_prose


@pytest.mark.parametrize("text", ["", "a<", "a\n", "[", '"', "{a", "f(", "<|end|>", "｜"])
def test_what_may_be_markup(text: str) -> None:
    assert not Piece([1], text).is_prose


EVENTS = st.one_of(
    st.builds(TextDelta, st.text(max_size=2)),
    st.builds(ReasoningDelta, st.text(max_size=2)),
    st.builds(ToolCallDelta, st.integers(0, 1), st.text(max_size=2)),
)


@given(st.lists(EVENTS))
def test_merged_events_make_the_same_turn(events: list[ReplyEvent]) -> None:
    def turn(events: list[ReplyEvent]) -> object:
        builder = TurnBuilder()
        for event in (ToolCallStart(0, "c0", "f"), ToolCallStart(1, "c1", "g"), *events):
            builder.add(event)
        return builder.turn()

    few = merged(events)
    assert turn(few) == turn(events)
    kinds = [(type(event), event[0] if isinstance(event, ToolCallDelta) else None) for event in few]
    assert all(kind != following for kind, following in pairwise(kinds))


@pytest.mark.parametrize(
    ("prompt", "text", "generated"),
    [
        ("", "anything", "anything"),
        ("ab\ufffd", "ab\ufffdX yes", "X yes"),  # the character stayed incomplete, or was one of the prompt's own
        ("ab\ufffd\ufffd", "ab😀!", "😀!"),  # it was completed
        ("\ufffd", "é", "é"),
        ("ab\ufffd", "", ""),
        ("ab\ufffd", "X", "X"),  # an engine that repeats nothing
    ],
)
def test_ST_07_only_generated_text_is_left(prompt: str, text: str, generated: str) -> None:
    whole = PromptEcho(prompt)
    assert whole.strip(text, is_last=True) == generated
    streamed = PromptEcho(prompt)
    parts = [streamed.strip(character, is_last=False) for character in text]
    assert "".join([*parts, streamed.strip("", is_last=True)]) == generated
