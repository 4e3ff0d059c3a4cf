"""Text of others as a terminal may show it.

Invariant: recorded text is data. What is not printable - escape sequences, marks that turn the direction of writing,
halves of emoji - is shown as its code, so that no text of an agent does anything to a terminal.
"""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Text in one line that does nothing to a terminal."""
    return printable(text.replace("\n", "↵"))


def printable(text: str) -> str:
    """Text that does nothing to a terminal but begin lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == "\n":  # `visible` has shown those already
        return character
    if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029":
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character
