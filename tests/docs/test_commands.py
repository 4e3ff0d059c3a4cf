"""Every command of a shell block is run by a test, or a table says why not. `make test-docs` runs those of a graph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.docs.shell import INLINE, LEFT_OUT, NO_GRAPH, Placeholders, commands, in_text
from tests.docs.walk import BEFORE, GOES_ON, Reader, furnished

EVERY = [command.text for command in commands()]
COMMAND = re.compile(r"(gym-capture|make|python|pip|ray|serve|curl|export|source|pytest) \S")


def test_a_block_of_commands_is_one_of_the_shell() -> None:
    """Others are not run."""
    assert [block.where for block in blocks("", "text") if any(map(COMMAND.match, block.text.splitlines()))] == []


@pytest.mark.parametrize("begins", [*LEFT_OUT, *BEFORE, *GOES_ON, *NO_GRAPH])
def test_no_row_of_the_tables_is_about_nothing(begins: str) -> None:
    assert any(re.match(begins, text) for text in EVERY)


def test_what_is_run_of_the_texts_stands_in_them() -> None:
    assert set(INLINE) <= in_text()


@pytest.mark.parametrize(
    "text",
    [
        "false",
        "false\ntrue",
        "false | true",
        "echo 'Traceback (most recent call last):' >&2",
        "echo '(Worker pid=7) hello' >&2",
        "printf '2026-11-30 22:43:17,765\\tWARNING services.py:442 -- Something' >&2",
        "echo '[2026-11-30 22:43:17,765 W 21455 21455] network_util.cc:330: Failed' >&2",
    ],
)
def test_what_is_not_in_order(text: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path, {}, Placeholders("no model"))
    reader.run("here", text)
    assert len(reader.failed) == 1
    reader.run("here", "echo WARNING; echo rollouts 16/16 >&2")
    assert len(reader.failed) == 1


def test_what_needs_no_graph_is_run(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "work", furnished(tmp_path), Placeholders("no model"))
    told = [each for each in commands() if any(re.match(begins, each.text) for begins in NO_GRAPH)]
    for command in told:
        reader.run(command.block.where, command.text)
    assert reader.failed == []
    assert len(told) > 8
