"""A template that is small enough to write its ids down, and requests on it.

`WordTemplate` tokenizes a ChatML-like text by longest match over a handful of words; anything else is one id per
character.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gym_capture.capture.records import IdArray
from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.splice.splicer import NotSpliced, Spliced
from gym_capture.splice.template import Adapted

IDS = {
    "<|im_start|>": 1,
    "user": 2,
    "assistant": 3,
    "system": 4,
    "\n": 8,
    "<|im_end|>": 9,
    "hello": 21,
    "more": 22,
    "again": 23,
    "an": 30,
    "swer": 31,
    "answer": 35,
    "You are": 50,
    " helpful": 51,
    "<think>": 60,
    "hm": 61,
    "</think>": 62,
    "<call>": 70,
    "</call>": 71,
    "tool": 72,
    "literal": 77,
    "<|endoftext|>": 100,
}
WORDS = {number: word for word, number in IDS.items()}
CONTROLS = frozenset({"<|im_start|>", "<|im_end|>", "<|endoftext|>"})
FIRST_CHARACTER_ID = 1000

Render = Callable[[Conversation, bool], str]


@dataclass
class WordTemplate:
    """A chat template over small integers; `encoded` has every text that was tokenized."""

    rendering: Render
    special_tokens: frozenset[str] = CONTROLS
    stop_tokens: frozenset[str] = frozenset({"<|im_end|>", "<|endoftext|>"})
    encoded: list[str] = field(default_factory=list)

    def adapt(self, conversation: Conversation) -> Adapted:
        return Adapted(conversation)

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        return self.rendering(conversation, add_generation_prompt)

    def encode(self, text: str) -> IdArray:
        self.encoded.append(text)
        return longest_matches(text, IDS)

    def encode_plain(self, text: str) -> IdArray:
        self.encoded.append(text)
        return longest_matches(text, {word: number for word, number in IDS.items() if word not in CONTROLS})

    def decode(self, ids: IdArray) -> str:
        return "".join(WORDS.get(n) or chr(n - FIRST_CHARACTER_ID) for n in ids.tolist())


def longest_matches(text: str, words: dict[str, int]) -> IdArray:
    ids: list[int] = []
    at = 0
    while at < len(text):
        word = max((word for word in words if text.startswith(word, at)), key=len, default="")
        ids.append(words[word] if word else FIRST_CHARACTER_ID + ord(text[at]))
        at += len(word) or 1
    return np.asarray(ids, dtype=np.int32)


def chatml(conversation: Conversation, prompted: bool) -> str:
    return "".join(map(chatml_item, conversation.items)) + ("<|im_start|>assistant" if prompted else "")


def chatml_item(item: Item) -> str:
    match item:
        case Message(role, text):
            return f"<|im_start|>{role}{text}<|im_end|>\n"
        case ToolResult(_, text):
            return f"<|im_start|>tool{text}<|im_end|>\n"
        case AssistantTurn(text, calls, reasoning):
            thought = f"<think>{reasoning}</think>" if reasoning else ""
            called = "".join(f"<call>{call.name} {call.arguments}</call>" for call in calls)
            return f"<|im_start|>assistant{thought}{text}{called}<|im_end|>\n"


def strips_thinking(conversation: Conversation, prompted: bool) -> str:
    items = [i._replace(reasoning="") if isinstance(i, AssistantTurn) else i for i in conversation.items]
    return chatml(Conversation(tuple(items)), prompted)


def drops_empty_turns(conversation: Conversation, prompted: bool) -> str:
    said = [i for i in conversation.items if not (isinstance(i, AssistantTurn) and not i.text and not i.tool_calls)]
    return strips_thinking(Conversation(tuple(said)), prompted)


def has_default_system(conversation: Conversation, prompted: bool) -> str:
    first = conversation.items[0]
    default = (
        "" if isinstance(first, Message) and first.role == "system" else "<|im_start|>systemYou are helpful<|im_end|>\n"
    )
    return default + chatml(conversation, prompted)


def ids(*values: int) -> IdArray:
    return np.asarray(values, dtype=np.int32)


def ask(*items: Item) -> Conversation:
    return Conversation((Message("user", "hello"), *items))


PROMPT = (1, 2, 21, 9, 8, 1, 3)
ANSWER = AssistantTurn("answer")
MORE = Message("user", "more")
CALL = AssistantTurn(tool_calls=(ToolCall("c1", "more", '{"n": 1}'),))
RESULT = ToolResult("c1", "again")
SYSTEM = Message("system", "You are helpful")
TOOL = Tool("more", "Says more.", "{}")
NEXT = (8, 1, 2, 22, 9, 8, 1, 3)
"""What follows the close of a turn when the user says `more`."""


def spliced(result: Spliced | NotSpliced) -> Spliced:
    assert isinstance(result, Spliced), result
    return result
