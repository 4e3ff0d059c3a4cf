"""The texts of token ids, piece by piece, from a model folder's `tokenizer.json` alone.

Invariant: the pieces of a sequence put together are its text, each byte of it once. A character that several ids spell
stands at the id that completes it. Bytes that are no UTF-8 are U+FFFD. Nothing is loaded but JSON: no tokenizer runs,
nothing is encoded.

Flow: `Vocabulary.of_folder` reads what each id stands for as bytes -> `texts` decodes the ids of a range; it looks at a
few ids before the range, where a character may have begun.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from gym_capture.capture.records import IdArray
from gym_capture.errors import ConfigError
from gym_capture.regular_files import read_regular

TOKENIZER_FILE: Final = "tokenizer.json"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CHARACTER: Final = 4
"""Bytes, and so at most as many ids."""


class Vocabulary:
    """What ids stand for."""

    def __init__(self, pieces: Mapping[int, bytes], special: frozenset[int]) -> None:
        self._pieces = pieces
        self.special = special
        """Ids of tokens that the template writes, and no text is encoded to."""

    @classmethod
    def of_folder(cls, folder: Path) -> Vocabulary:
        """Of a model folder. Raises `ConfigError` if it has no `tokenizer.json` that says so."""
        path = folder / TOKENIZER_FILE
        try:
            found = orjson.loads(read_regular(path))
            return cls(*_read(found))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}: name a folder with a tokenizer") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is not a tokenizer that is read here: {error!r}") from None

    def piece(self, token_id: int) -> bytes:
        """Bytes of one id; those of an id that the vocabulary does not have say so."""
        found = self._pieces.get(token_id)
        return f"<id {token_id}>".encode() if found is None else found

    def texts(self, ids: IdArray, begin: int = 0, end: int | None = None) -> list[str]:
        """The pieces of `ids[begin:end]`."""
        end = ids.size if end is None else end
        start = max(begin - _LONGEST_CHARACTER, 0)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        pieces = [decode(self.piece(token_id)) for token_id in ids[start:end].tolist()][begin - start :]
        if pieces and end == ids.size:
            pieces[-1] += decode(b"", True)
        return pieces

    def text(self, ids: IdArray) -> str:
        return b"".join(map(self.piece, ids.tolist())).decode("utf-8", "replace")

    def joined(self, ids: IdArray) -> tuple[bytes, np.ndarray[Any, np.dtype[np.int64]]]:
        """All bytes, and where those of each id end: for searching."""
        pieces = list(map(self.piece, ids.tolist()))
        return b"".join(pieces), np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))


def _read(tokenizer: Mapping[str, Any]) -> tuple[dict[int, bytes], frozenset[int]]:
    vocabulary = tokenizer["model"]["vocab"]
    named = vocabulary.items() if isinstance(vocabulary, dict) else ((each[0], n) for n, each in enumerate(vocabulary))
    as_bytes = _of_bytes if _is_byte_level(tokenizer.get("decoder")) else _of_words
    pieces = {int(token_id): as_bytes(token) for token, token_id in named}
    added: Sequence[Mapping[str, Any]] = tokenizer.get("added_tokens") or ()
    pieces.update((int(each["id"]), each["content"].encode()) for each in added)
    return pieces, frozenset(int(each["id"]) for each in added if each.get("special"))


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders") or ()))


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies write bytes: a printable one as itself, others as letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_LETTERS: Final = _byte_letters()


def _of_bytes(token: str) -> bytes:
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:  # a token that was put in by hand
        return token.encode()


def _of_words(token: str) -> bytes:
    """Of vocabularies with a mark for spaces, and tokens for single bytes."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8", "replace")
