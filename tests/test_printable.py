"""No text of others does anything to a terminal."""

from __future__ import annotations

import pytest

from gym_capture.commands.loading import one_line
from gym_capture.printable import printable, visible


@pytest.mark.parametrize(
    "character",
    ["\x1b", "\x00", "\x07", "\x08", "\r", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\ud83d", "\U000e0001"],
)
def test_what_is_not_printable_is_shown_as_its_code(character: str) -> None:
    for shown in (visible(f"a{character}b"), printable(f"a{character}b")):
        assert shown[0] + shown[-1] == "ab"
        assert shown[1] == "\\"
        assert shown.isprintable()
        assert shown.encode()
    assert character not in one_line(f"a{character}b")


def test_text_stays_as_it_is() -> None:
    assert visible("naïve 日本 👍") == "naïve 日本 👍"
    assert (visible("a\nb"), printable("a\nb")) == ("a↵b", "a\nb")
