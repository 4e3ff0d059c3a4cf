"""Pieces put together are the text, however characters and ids lie to each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gym_capture.errors import ConfigError
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.models import tiny_dir

FOLDER = tiny_dir()
VOCABULARY = Vocabulary.of_folder(FOLDER)
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TEXT = "Grüße 🦀👩‍👩‍👧 \x00\x1b[31m <script>alert(1)</script>\n\tend"


def ids_of(text: str) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, dtype=np.int32)


@given(st.text())
def test_pieces_are_the_text(text: str) -> None:
    ids = ids_of(text)
    assume(TOKENIZER.decode(ids, skip_special_tokens=False) == text)  # its vocabulary lacks some bytes
    assert "".join(VOCABULARY.texts(ids)) == VOCABULARY.text(ids) == text


def test_a_range_has_the_pieces_of_the_whole() -> None:
    ids = ids_of(TEXT * 3)
    whole = VOCABULARY.texts(ids)
    for begin in range(ids.size):
        for end in (begin, begin + 1, begin + 3, ids.size):
            assert VOCABULARY.texts(ids, begin, min(end, ids.size)) == whole[begin:end]


def test_a_character_stands_where_it_is_complete() -> None:
    ids = ids_of("🦀")
    assert ids.size > 1
    assert VOCABULARY.texts(ids) == [*[""] * (ids.size - 1), "🦀"]
    assert VOCABULARY.texts(ids[:1]) == ["\ufffd"]


def test_special_tokens_and_unknown_ids() -> None:
    stop = TOKENIZER.token_to_id("<|im_end|>")
    assert stop in VOCABULARY.special
    assert VOCABULARY.texts(np.array([stop, 10**6], dtype=np.int32)) == ["<|im_end|>", "<id 1000000>"]


def test_where_the_bytes_of_each_id_end() -> None:
    ids = ids_of("a🦀b")
    text, ends = VOCABULARY.joined(ids)
    assert (text.decode(), ends[-1], len(ends)) == ("a🦀b", 6, ids.size)


def test_vocabularies_with_a_mark_for_spaces(tmp_path: Path) -> None:
    vocabulary = [["<unk>", 0.0], ["▁hi", -1.0], ["<0xF0>", 0], ["<0x9F>", 0], ["<0xA6>", 0], ["<0x80>", 0]]
    made = {"model": {"type": "Unigram", "vocab": vocabulary}, "decoder": {"type": "Metaspace"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    pieces = Vocabulary.of_folder(tmp_path).texts(np.arange(1, 6, dtype=np.int32))
    assert pieces == [" hi", "", "", "", "🦀"]


@pytest.mark.parametrize("text", [None, "", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_folder_without_a_tokenizer_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Vocabulary.of_folder(tmp_path)
