"""A `ChatTemplate` over a Hugging Face tokenizer and its Jinja chat template.

Invariant: `render` gives what vLLM renders for the same chat, wherever vLLM renders it at all: the same messages go
into the same template. Beyond that it only ever appends: a system message in the middle of a conversation, which
some templates refuse, is written there as a user message.

Flow: `from_tokenizer` asks the template a few questions by rendering probes (are contents strings or lists of parts,
may a system message stand in the middle, what ends a turn) -> `render` turns items into messages, the way the
answers say, and renders -> `encode` tokenizes.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import jinja2
import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoTokenizer, GenerationConfig

from gym_capture.conversation import (
    AssistantTurn,
    Conversation,
    Item,
    Message,
    Tool,
    ToolCall,
    ToolResult,
    without_surrogates,
)
from gym_capture.errors import ConfigError
from gym_capture.records import IdArray
from gym_capture.template import TemplateError, control_pattern, digest_id, nests_too_deep, new_nonce, split_controls

HfMessage: TypeAlias = dict[str, Any]

# Some models have control tokens that are not marked as special, such as <｜User｜>. Names in mere brackets, such as
# <think>, are no control tokens: clients write them in texts, and templates look for them there.
_IN_BARS: Final = re.compile(r"<[|｜].+>|<.+[|｜]>")

# What a template can raise besides its own refusal: operations on values that it did not expect.
_REFUSALS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class _Habits:
    """What a template wants of its messages; found out by rendering probes."""

    content_parts: bool = False
    """Contents are lists of parts, not strings."""
    developer_role: bool = True
    """It knows the developer role; else developer messages are written as system messages."""
    inline_system: bool = True
    """A system message may stand anywhere; else only first, and later ones are written as user messages."""
    short_call_ids: bool = False
    """Tool-call ids must be nine letters or digits."""
    text_arguments: bool = False
    """A call's arguments are JSON text, not an object."""
    thinking: bool = False
    """Reasoning is read from `thinking` alone - and not beside both text and calls."""


class _Codec(Protocol):
    def encode(self, text: str) -> IdArray: ...
    def encode_plain(self, text: str) -> IdArray: ...
    def decode(self, ids: IdArray) -> str: ...


class _FastCodec:
    """Over copies of a Rust tokenizer: whether to truncate and to parse special tokens is state of the original."""

    def __init__(self, original: Tokenizer, special_tokens: frozenset[str]) -> None:
        self._special_tokens = special_tokens
        self._special_ids = [n for n in map(original.token_to_id, special_tokens) if n is not None]
        self._tokenizer = copy.deepcopy(original)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = False

    def encode(self, text: str) -> IdArray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_plain(self, text: str) -> IdArray:
        ids = self._encode_plain(text)
        # A vocabulary may have a special token's spelling among its words, under the same id.
        return (
            _in_parts(self._encode_plain, text, self._special_tokens) if np.isin(ids, self._special_ids).any() else ids
        )

    def decode(self, ids: IdArray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _encode_plain(self, text: str) -> IdArray:
        return np.asarray(self._plain.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    @cached_property
    def _plain(self) -> Tokenizer:
        plain = copy.deepcopy(self._tokenizer)
        plain.add_special_tokens([AddedToken(token, special=True) for token in sorted(self._special_tokens)])
        plain.encode_special_tokens = True
        words = plain.pre_tokenizer
        if isinstance(words, Metaspace) and words.prepend_scheme == "first":
            words.prepend_scheme = "never"  # what it encodes stands behind other text
            plain.pre_tokenizer = words
        return plain


class _SlowCodec:
    """Over a tokenizer in Python, which may know no way to leave special tokens alone."""

    def __init__(self, tokenizer: Any, special_tokens: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens

    def encode(self, text: str) -> IdArray:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def encode_plain(self, text: str) -> IdArray:
        return _in_parts(self.encode, text, self._special_tokens)

    def decode(self, ids: IdArray) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _in_parts(encode: Callable[[str], IdArray], text: str, special_tokens: frozenset[str]) -> IdArray:
    """`text` cut behind the first character of every special token that it spells: no part spells one."""
    pattern = control_pattern(special_tokens)
    cuts = [0]
    while match := pattern.search(text, cuts[-1]):
        cuts.append(match.start() + 1)
    return np.concatenate([encode(text[start:end]) for start, end in pairwise([*cuts, len(text)])])


class HfChatTemplate:
    """See the module's docstring. Safe to share between threads once made."""

    def __init__(
        self, tokenizer: Any, chat_template: str, *, stop_token_ids: Iterable[int], kwargs: dict[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._kwargs = kwargs
        added = [(str(token), token.special) for token in tokenizer.added_tokens_decoder.values()]
        self.special_tokens: frozenset[str] = frozenset(
            [text for text, special in added if special or _IN_BARS.fullmatch(text)]
            + list(tokenizer.all_special_tokens)
        )
        self._codec: _Codec = (
            _FastCodec(tokenizer.backend_tokenizer, self.special_tokens)
            if tokenizer.is_fast
            else _SlowCodec(tokenizer, self.special_tokens)
        )
        self._habits = self._probe_habits()
        stops = {self.decode(np.asarray([token_id], dtype=np.int32)) for token_id in stop_token_ids}
        if tokenizer.eos_token is not None:
            stops.add(str(tokenizer.eos_token))
        self.stop_tokens: frozenset[str] = self.special_tokens & (stops | self._probe_closes())

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        stop_token_ids: Iterable[int] = (),
        **chat_template_kwargs: Any,
    ) -> HfChatTemplate:
        """`chat_template`: Jinja text in place of the tokenizer's own. `stop_token_ids`: ids that end a generation,
        besides the tokenizer's eos and what the template closes turns with (the model's generation config has them).
        `chat_template_kwargs` go to every rendering, e.g. `enable_thinking=False`.

        Raises `ConfigError` if there is no chat template, or it cannot be compiled.
        """
        try:
            # Of several named templates the one for tools, whether or not a request has some: one conversation may
            # have both kinds of requests, and has one template.
            source = tokenizer.get_chat_template(chat_template, tools=[])
        except ValueError as error:
            raise ConfigError(f"the tokenizer has no chat template, so one must be given: {error}") from error
        try:
            return cls(tokenizer, source, stop_token_ids=stop_token_ids, kwargs=chat_template_kwargs)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template cannot be compiled: line {error.lineno}: {error}") from error

    @classmethod
    def from_model_dir(
        cls, path: str | Path, chat_template: str | None = None, **chat_template_kwargs: Any
    ) -> HfChatTemplate:
        """Of a model folder: its tokenizer, chat template and, where it has one, generation config."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"model: {str(path)!r} is not a folder")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stop_ids: list[int] = []
        if (folder / "generation_config.json").is_file():
            eos = GenerationConfig.from_pretrained(folder).eos_token_id
            stop_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return cls.from_tokenizer(tokenizer, chat_template, stop_token_ids=stop_ids, **chat_template_kwargs)

    # --- ChatTemplate ---

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        return self._render(conversation, self._habits, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str) -> IdArray:
        return self._codec.encode(without_surrogates(text))

    def encode_plain(self, text: str) -> IdArray:
        return self._codec.encode_plain(without_surrogates(text))

    def decode(self, ids: IdArray) -> str:
        return self._codec.decode(ids)

    # --- messages ---

    def _render(self, conversation: Conversation, habits: _Habits, *, add_generation_prompt: bool) -> str:
        messages = _to_messages(conversation.items, habits)
        try:
            tools = [tool.as_openai() for tool in conversation.tools]
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except jinja2.TemplateSyntaxError:
            raise
        except _REFUSALS as error:
            raise TemplateError(f"the chat template refuses this conversation: {error}", param="messages") from error
        return text

    # --- probes ---

    def _probe_habits(self) -> _Habits:
        source = self._chat_template
        habits = _Habits(developer_role='"developer"' in source or "'developer'" in source)
        user, reply, later = new_nonce(), new_nonce(), new_nonce()
        plain = (Message("user", user), AssistantTurn(reply), Message("user", later))
        # A template that reads parts is given parts, even if it reads strings too: some write the two differently.
        in_parts = replace(habits, content_parts=True)
        dumped = any(self._writes(quote + user, plain, in_parts) for quote in "'\"")
        if self._writes(user, plain, in_parts) and not dumped:
            habits = in_parts
        inline = (*plain[:2], Message("system", later), plain[2])
        habits = replace(habits, inline_system=not self._refuses(inline, (), habits))
        call = ToolCall("call_0123456789", "probe", '{"value":"word"}')
        with_call = (plain[0], AssistantTurn(tool_calls=(call,)), ToolResult(call.id, reply))
        variants = (replace(habits, short_call_ids=True), replace(habits, text_arguments=True))
        if self._refuses(with_call, (_PROBE_TOOL,), habits):
            habits = next(
                (variant for variant in variants if not self._refuses(with_call, (_PROBE_TOOL,), variant)), habits
            )
        thought = (plain[0], AssistantTurn(reply, reasoning=later))
        with_thinking = replace(habits, thinking=True)
        if self._writes(later, thought, with_thinking) and not self._writes(later, thought, habits):
            habits = with_thinking
        return habits

    def _probe_closes(self) -> set[str]:
        """The control tokens that the template ends a last turn with."""
        word = new_nonce()
        call = ToolCall("call_0", "probe", json.dumps({"value": word}))
        text, with_call = (
            self._controls_after(word, turn) for turn in (AssistantTurn(word), AssistantTurn(tool_calls=(call,)))
        )
        # Some write the end of the whole text after the end of the turn. A call has closings of its own before both.
        return {*text[:1], *text[-1:], *with_call[-1:]}

    def _controls_after(self, word: str, turn: AssistantTurn) -> list[str]:
        conversation = Conversation((Message("user", "probe"), turn), (_PROBE_TOOL,))
        try:
            text = self.render(conversation, add_generation_prompt=False)
        except TemplateError:
            return []
        _, found, after = text.rpartition(word)
        pieces = split_controls(self.special_tokens, after) if found else []
        return [piece for piece in pieces if piece in self.special_tokens]

    def _writes(self, word: str, items: tuple[Item, ...], habits: _Habits) -> bool:
        try:
            return word in self._render(Conversation(items), habits, add_generation_prompt=False)
        except TemplateError:
            return False

    def _refuses(self, items: tuple[Item, ...], tools: tuple[Tool, ...], habits: _Habits) -> bool:
        try:
            self._render(Conversation(items, tools), habits, add_generation_prompt=True)
        except TemplateError:
            return True
        return False


_PROBE_TOOL: Final = Tool(
    "probe", "Probes.", '{"properties":{"value":{"description":"A word.","type":"string"}},"type":"object"}'
)


def _to_messages(items: Sequence[Item], habits: _Habits) -> list[HfMessage]:
    names = {call.id: call.name for item in items if isinstance(item, AssistantTurn) for call in item.tool_calls}
    content: Callable[[str], Any] = _as_parts if habits.content_parts else str
    call_id: Callable[[str], str] = _short_id if habits.short_call_ids else str
    n_leading = _n_leading_system(items)
    messages: list[HfMessage] = []
    for role, text in _leading_messages(items[:n_leading], habits):
        messages.append({"role": role, "content": content(text)})
    for item in items[n_leading:]:
        match item:
            case Message(role, text):
                messages.append({"role": _later_role(role, habits), "content": content(text)})
            case AssistantTurn(text, calls, reasoning):
                message: HfMessage = {"role": "assistant", "content": content(text)}
                if reasoning:
                    # Templates of this and that time read this and that name.
                    message |= {"reasoning": reasoning, "reasoning_content": reasoning}
                    if habits.thinking and not (text and calls):
                        message["thinking"] = reasoning
                if calls:
                    message["tool_calls"] = [_call(call, call_id(call.id), habits) for call in calls]
                messages.append(message)
            case ToolResult(of, text):
                # Always a string: templates that take parts elsewhere do not take them here.
                result: HfMessage = {"role": "tool", "tool_call_id": call_id(of), "content": text}
                if of in names:
                    result["name"] = names[of]
                messages.append(result)
    return messages


def _call(call: ToolCall, call_id: str, habits: _Habits) -> dict[str, Any]:
    value = _arguments(call.arguments)
    arguments = json.dumps(value, ensure_ascii=False) if habits.text_arguments else value
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _later_role(role: str, habits: _Habits) -> str:
    if role == "developer" and not habits.developer_role:
        role = "system"
    return "user" if role == "system" and not habits.inline_system else role


def _n_leading_system(items: Sequence[Item]) -> int:
    for n, item in enumerate(items):
        if not isinstance(item, Message) or item.role == "user":
            return n
    return len(items)


def _leading_messages(items: Sequence[Item], habits: _Habits) -> list[tuple[str, str]]:
    """The system and developer messages that a conversation begins with, merged where the template wants one."""
    messages = [(item.role, item.text) for item in items if isinstance(item, Message)]
    has_developer = any(role == "developer" for role, _ in messages)
    if (has_developer and not habits.developer_role) or (len(messages) > 1 and not habits.inline_system):
        return [("system", "\n\n".join(text for _, text in messages if text))]
    return messages


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _arguments(text: str) -> dict[str, Any]:
    """What templates want: an object. Text that is none becomes an empty one, as vLLM does it, and so does what nests
    deeper than templates can write.

    The policy's own words are not lost by that: they are in the parent's ids, which a splice supplies as they are.
    """
    if nests_too_deep(text):
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _short_id(call_id: str) -> str:
    """The id itself if nine letters or digits, else nine that it determines."""
    return call_id if _SHORT_ID.fullmatch(call_id) else digest_id(call_id)
