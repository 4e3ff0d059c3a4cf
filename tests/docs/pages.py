"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/trainers").glob("*.md")),
)

_FILE: Final = re.compile(r"# ([\w/]+\.py)\n")


class Block(NamedTuple):
    """A block of code."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is the whole of, if its first line says so."""
        found = _FILE.match(self.text)
        return found[1] if found else None


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt("gfm-like", {"linkify": False}).parse(page.read_text(encoding="utf-8")))


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in one of these languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def blocks_of(page: Path) -> Iterator[Block]:
    for token in tokens(page):
        if token.type == "fence":
            line = 0 if token.map is None else token.map[0] + 1
            yield Block(page, line, token.info.strip(), token.content)


def inline(page: Path, kind: str) -> Iterator[Token]:
    """What stands in the text of a page: `code_inline`, `link_open`, ..."""
    for token in tokens(page):
        yield from (child for child in token.children or () if child.type == kind)


def applied(diff: str, text: str) -> str:
    """`text` with the hunks of a diff applied, each where its old lines stand: they must stand there once."""
    _, *hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)
    assert hunks, "a diff without a hunk"
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
        assert text.count(old) == 1, f"not there, or not once:\n{old}"
        text = text.replace(old, new)
    return text


def target(diff: str) -> str:
    """The file that a diff changes."""
    found = re.search(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)
    assert found is not None
    return found[1]
