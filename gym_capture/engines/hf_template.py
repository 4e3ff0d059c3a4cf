"""A `ChatTemplate` over a Hugging Face tokenizer and its Jinja chat template.

Invariant: `render` gives what vLLM renders for the same chat, wherever that has all of it, and in order: the same
messages go into the same template. Where it has not - the template refuses a system message in the middle, leaves it
out, or moves it to the top - named rules find it a place (`hf_messages`).

Flow: `from_tokenizer` asks the template a few questions by rendering probes (are contents strings or lists of parts,
where does a message of the system go, do results say which call they answer, what ends a turn) -> `adapt` -> `render`
turns items into messages, the way the answers say, and renders -> `encode` tokenizes.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, get_args

import jinja2
import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoTokenizer, GenerationConfig

from gym_capture.capture.records import IdArray
from gym_capture.conversation import (
    AssistantTurn,
    Conversation,
    Item,
    Message,
    Tool,
    ToolCall,
    ToolResult,
)
from gym_capture.engines.hf_messages import FirstSystem, Habits, LateSystem, in_call_order, place, to_messages
from gym_capture.errors import ConfigError
from gym_capture.reasons import TemplateRule
from gym_capture.splice.template import Adapted, TemplateError, control_pattern, new_nonce, split_controls

__all__ = ["HfChatTemplate"]

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

    def adapt(self, conversation: Conversation) -> Adapted:
        items = conversation.items if self._habits.result_ids else in_call_order(conversation.items)
        ordered = () if items == conversation.items else (TemplateRule.RESULTS_IN_CALL_ORDER,)
        return Adapted(conversation._replace(items=items), (*place(items, self._habits).rules, *ordered))

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        return self._render(
            self.adapt(conversation).conversation, self._habits, add_generation_prompt=add_generation_prompt
        )

    def encode(self, text: str) -> IdArray:
        return self._codec.encode(text)

    def encode_plain(self, text: str) -> IdArray:
        return self._codec.encode_plain(text)

    def decode(self, ids: IdArray) -> str:
        return self._codec.decode(ids)

    # --- messages ---

    def _render(self, conversation: Conversation, habits: Habits, *, add_generation_prompt: bool) -> str:
        messages = to_messages(place(conversation.items, habits).items, habits)
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

    def _probe_habits(self) -> Habits:
        user, reply, later = new_nonce(), new_nonce(), new_nonce()
        plain = (Message("user", user), AssistantTurn(reply), Message("user", later))
        habits = Habits()
        # A template that reads parts is given parts, even if it reads strings too: some write the two differently.
        in_parts = replace(habits, content_parts=True)
        dumped = any(self._writes(quote + user, plain, in_parts) for quote in "'\"")
        if self._writes(user, plain, in_parts) and not dumped:
            habits = in_parts

        def answered(call_id: str) -> tuple[Item, ...]:
            call = ToolCall(call_id, "probe", '{"value":"word"}')
            return (plain[0], AssistantTurn(tool_calls=(call,)), ToolResult(call_id, reply))

        variants = (habits, replace(habits, short_call_ids=True), replace(habits, text_arguments=True))
        habits = next((variant for variant in variants if self._rendered(answered("call_0123456789"), variant)), habits)
        call_id = new_nonce()[:9]
        of_call, of_both = (self._rendered(answered(call_id)[:n], habits).count(call_id) for n in (2, 3))
        habits = replace(habits, result_ids=of_both > of_call)
        thought = (plain[0], AssistantTurn(reply, reasoning=later))
        with_thinking = replace(habits, thinking=True)
        if self._writes(later, thought, with_thinking) and not self._writes(later, thought, habits):
            habits = with_thinking
        return self._probe_places(habits)

    def _probe_places(self, habits: Habits) -> Habits:
        """Where messages of the system and the developer go: the first place in which the template keeps them.

        Where it keeps them nowhere, it is left to refuse them.
        """
        one, other = Message("system", new_nonce()), Message("system", new_nonce())
        user, turn, more = Message("user", new_nonce()), AssistantTurn(new_nonce()), Message("user", new_nonce())
        call = ToolCall("call00000", "probe", '{"value":"word"}')
        answered = (user, AssistantTurn(tool_calls=(call,)), ToolResult(call.id, new_nonce()))

        def keeps_first(variant: Habits, *said: Message) -> bool:
            return self._keeps((*said, user, turn, more), variant)

        def keeps_late(variant: Habits, said: Message) -> bool:
            begins: list[tuple[Item, ...]] = [(one, user), (one, user, turn, more)]
            if self._keeps(answered, variant):
                begins.append(answered)
            return (
                all(self._keeps((*begin, said), variant) for begin in begins)
                and all(self._keeps((*first, user, turn, said, more), variant) for first in ((), (one,)))
                # What is said later changes nothing that was written before.
                and self._before(turn, (user, turn, said, more), variant)
                == self._before(turn, (user, turn, more), variant)
            )

        def choose(variants: Iterable[Habits], keeps: Callable[..., bool], *said: Message) -> Habits:
            return next((variant for variant in variants if keeps(variant, *said)), habits)

        def as_developer(message: Message) -> Message:
            return message._replace(role="developer")

        # Most templates that know no developer would write one all the same, in words that their models never saw.
        knows_developers = re.search("[\"']developer[\"']", self._chat_template) is not None
        habits = choose((replace(habits, first_system=place) for place in get_args(FirstSystem)), keeps_first, one)
        if knows_developers:
            habits = choose([replace(habits, first_developer=True)], keeps_first, as_developer(one))
        habits = choose([replace(habits, several_first=is_so) for is_so in (True, False)], keeps_first, one, other)
        habits = choose([replace(habits, late_system=place) for place in get_args(LateSystem)], keeps_late, other)
        if knows_developers:
            habits = choose([replace(habits, late_developer=True)], keeps_late, as_developer(other))
        return habits

    def _keeps(self, items: Sequence[Item], habits: Habits) -> bool:
        """Whether every text of a conversation is written once, and in order."""
        text = self._rendered(items, habits)
        said = [item.text for item in items if item.text]
        places = [text.find(word) for word in said]
        return all(text.count(word) == 1 for word in said) and places == sorted(places)

    def _before(self, turn: AssistantTurn, items: Sequence[Item], habits: Habits) -> str:
        """The rendering up to the text of `turn`."""
        return self._rendered(items, habits).partition(turn.text)[0]

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

    def _writes(self, word: str, items: tuple[Item, ...], habits: Habits) -> bool:
        return word in self._rendered(items, habits, add_generation_prompt=False)

    def _rendered(self, items: Sequence[Item], habits: Habits, *, add_generation_prompt: bool = True) -> str:
        """Empty if the template refuses it."""
        has_calls = any(isinstance(item, AssistantTurn) and item.tool_calls for item in items)
        conversation = Conversation(tuple(items), (_PROBE_TOOL,) if has_calls else ())
        try:
            return self._render(conversation, habits, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            return ""


_PROBE_TOOL: Final = Tool(
    "probe", "Probes.", '{"properties":{"value":{"description":"A word.","type":"string"}},"type":"object"}'
)
