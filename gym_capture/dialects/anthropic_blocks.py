"""Content blocks of Anthropic Messages, and the text that the policy sees of them.

Invariant: a block's text is in the prompt whole, with what the client says that it is (title, source, context), or the
block is an error that names it. Nothing is taken out of a PDF or an image: what cannot be read is not guessed.

Documents, search results and references to tools are text by another name. Each stands in tags, since blocks are
joined with nothing between them, and without tags nobody could tell where a document ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gym_capture.dialects import fields
from gym_capture.errors import InvalidRequestError


class Block(NamedTuple):
    """One content block."""

    kind: str
    value: Mapping[str, Any]
    at: str

    def text(self) -> str:
        """Of a text block. Raises `InvalidRequestError` for any other."""
        if self.kind != "text":
            raise self._unsupported(self.kind, "type")
        return fields.required_string(self.value, "text", at=f"{self.at}.")

    def shown(self) -> str:
        """The text that the policy sees of a block from a user or a tool. Raises `InvalidRequestError`."""
        match self.kind:
            case "document":
                title, context = (fields.string(self.value, key, at=f"{self.at}.") for key in ("title", "context"))
                return _tagged("document", {"title": title, "context": context}, self._document_text())
            case "search_result":
                title, source = (
                    fields.required_string(self.value, key, at=f"{self.at}.") for key in ("title", "source")
                )
                return _tagged("search_result", {"title": title, "source": source}, self._texts(self.value, self.at))
            case "tool_reference":
                name = fields.required_string(self.value, "tool_name", at=f"{self.at}.")
                return f"<tool_reference>{name}</tool_reference>\n"
            case _:
                return self.text()

    def _document_text(self) -> str:
        at = f"{self.at}.source"
        source = fields.mapping(self.value.get("source"), at)
        match fields.required_string(source, "type", at=f"{at}."):
            case "text":
                return fields.required_string(source, "data", at=f"{at}.")
            case "content":
                return self._texts(source, at)
            case kind:
                raise self._unsupported(f"document with a source of type {kind}", "source.type")

    def _texts(self, holder: Mapping[str, Any], at: str) -> str:
        return "".join(block.text() for block in blocks(holder.get("content"), f"{at}.content"))

    def _unsupported(self, what: str, member: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self.at}: a block of type {what[:60]!r} is not supported here: this model takes text only",
            param=f"{self.at}.{member}",
        )


def blocks(content: object, at: str) -> Iterator[Block]:
    """The blocks of a content; a string is one text block, null is none."""
    if content is None:
        return
    if isinstance(content, str):
        yield Block("text", {"text": content}, at)
        return
    for index, value in enumerate(fields.array(content, at)):
        block = fields.mapping(value, f"{at}.{index}")
        yield Block(fields.required_string(block, "type", at=f"{at}.{index}."), block, f"{at}.{index}")


def _tagged(tag: str, about: Mapping[str, str | None], text: str) -> str:
    heads = "".join(f"<{name}>{value}</{name}>\n" for name, value in about.items() if value)
    return f"<{tag}>\n{heads}{text}\n</{tag}>\n"
