"""vLLM's own parsers over one generation, token by token, whether its tokens came one by one or all at once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.tool_parsers.utils import partial_tag_overlap
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from gym_capture.calls import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.engines.base import GenerationChunk
from gym_capture.engines.formats import JSON_FORMATS, OPENS_CALL_IN_THOUGHT, READ_WHOLE, THINKS_WHOLE
from gym_capture.engines.screens import JsonScreen, PartRestorer, ThoughtScreen, restore
from gym_capture.engines.steps import Piece, StepSplitter, joined, merged

CONTEXT_IDS: Final = 8
"""How many ids before the first generated one tell how that one is written."""


def text_of_next(tokenizer: Any, prompt_ids: list[int], params: SamplingParams) -> Callable[[int], str]:
    """vLLM's own way from ids to text, once more: what each next id adds."""
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer,
        EngineCoreRequest(
            request_id="",
            prompt_token_ids=prompt_ids[-CONTEXT_IDS:],
            mm_features=None,
            sampling_params=SamplingParams(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        ),
    )

    def decode_next(token_id: int) -> str:
        detokenizer.update([token_id], False)
        text: str = detokenizer.get_next_output_text(False, True)
        return text

    return decode_next


def _tool_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class PlainParser:
    """For a model without tool calls and reasoning: everything is text."""

    reasoning_tokens = 0

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        return (TextDelta(chunk.text),) if chunk.text else ()


class Parsers(NamedTuple):
    """The names by which vLLM knows a model's parsers."""

    tools: str | None
    reasoning: str | None


class VllmParser:
    """vLLM's parser over one generation, token by token, whether they came one by one or all at once."""

    def __init__(
        self,
        parser: Parser,
        names: Parsers,
        chat: ChatCompletionRequest,
        turn_ids: list[int],
        splitter: StepSplitter,
        tokenizer: Any,
    ) -> None:
        """`turn_ids`: the prompt's ids from the generation prompt on, which tell whether the model is thinking."""
        parser.set_prompt_token_ids(turn_ids)
        self._parser = parser
        self._chat = chat
        self._turn_ids = turn_ids
        self._splitter = splitter
        plain_id = tokenizer.encode("x", add_special_tokens=False)[-1]
        self._thoughts = _thought_screen(parser, names, tokenizer.decode(turn_ids), turn_ids, plain_id)
        form = None if names.tools is None or chat.tool_choice == "none" else JSON_FORMATS.get(names.tools)
        self._json = None if form is None else JsonScreen(form, plain_id=plain_id)
        self._is_chosen = names.tools is not None and chat.tool_choice != "none"
        self._generated: list[int] = []
        self._reasoned = 0
        self._calls: list[_CallSoFar] = []
        self._thinks_whole = names.reasoning in THINKS_WHOLE
        self._text = ""
        """Text that is parsed only once it is whole."""
        self._call_mark = None if chat.tool_choice != "auto" else READ_WHOLE.get(names.tools or "")
        if self._call_mark is not None:
            # vLLM passes everything on as text.
            self._streamed_chat = chat.model_copy(update={"tool_choice": "none"})
        else:
            self._streamed_chat = chat

    @property
    def reasoning_tokens(self) -> int:
        if self._reasoned == 0:  # parsers that were not asked take everything for thinking
            return 0
        # Not every parser counts, and most do not where thinking was opened in the prompt.
        return self._parser.count_reasoning_tokens(self._generated) or self._reasoned

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        is_last = chunk.finish_reason is not None
        self._generated += chunk.token_ids.tolist()
        pieces = self._splitter.feed(chunk.token_ids.tolist(), chunk.text)
        if is_last:
            pieces += self._splitter.rest()
        events: list[ReplyEvent] = []
        prose: list[Piece] = []
        for piece in self._screened(pieces, is_last=is_last):
            # In front of the first call prose is passed on, however much at once; read token by token it would cost
            # seconds in a long text, since many parsers go over all of it each time.
            if not self._calls and piece.is_prose:
                prose.append(piece)
                continue
            events += self._read(joined(prose), finished=False)
            events += self._read(piece, finished=False)
            prose = []
        events += self._read(joined(prose), finished=False)
        if is_last:
            events += self._rest(is_cut=chunk.finish_reason != "stop")
        return merged(events)

    def _screened(self, pieces: Iterable[Piece], *, is_last: bool) -> Iterable[Piece]:
        for piece in pieces:
            if self._thoughts is None or not self._thoughts.is_thinking():
                yield from self._outside_of_thought(piece)
                continue
            known = self._thoughts.feed(piece)
            if self._thoughts.is_thinking():
                yield from known
            else:
                *thought, last = known
                yield from thought
                yield from self._outside_of_thought(last)
        if is_last:
            for piece in () if self._thoughts is None else self._thoughts.rest():
                yield from self._outside_of_thought(piece)
            if self._json is not None:
                yield from self._json.rest()

    def _outside_of_thought(self, piece: Piece) -> Iterable[Piece]:
        return (piece,) if self._json is None else self._json.feed(piece)

    def _read(self, piece: Piece, *, finished: bool) -> Iterable[ReplyEvent]:
        if not piece.token_ids and not piece.text and not finished:
            return
        if self._thinks_whole:
            self._text += piece.text
            return
        delta = self._parser.parse_delta(
            piece.text, piece.token_ids, self._streamed_chat, prompt_token_ids=self._turn_ids, finished=finished
        )
        if delta is None:
            return
        if delta.reasoning:
            self._reasoned += len(piece.token_ids)
            yield ReasoningDelta(restore(delta.reasoning))
        if delta.content:
            text = delta.content if self._call_mark is None else self._before_call(delta.content, self._call_mark)
            if text:
                yield TextDelta(restore(text))
        for call in delta.tool_calls or ():
            function = call.function
            if function is not None and function.name is not None and call.index >= len(self._calls):
                yield from self._start(call.id, function.name)
            if function is not None and function.arguments and call.index < len(self._calls):
                yield from self._calls[call.index].add(function.arguments)

    def _before_call(self, text: str, mark: str) -> str:
        """The text that is certainly before a call. The beginning of one is kept, with all that follows it."""
        text = self._text + text
        at = text.find(mark)
        if at < 0:
            at = len(text) - partial_tag_overlap(text, mark)
        self._text = text[at:]
        return text[:at]

    def _rest(self, *, is_cut: bool) -> Iterable[ReplyEvent]:
        """`is_cut`: the reply has no end of its own."""
        if self._thinks_whole:
            reasoning, content, calls = self._parser.parse(
                self._text, self._chat, enable_auto_tools=self._is_chosen, model_output_token_ids=self._generated
            )
            if reasoning:
                self._reasoned = _share(reasoning, self._text, len(self._generated))
                yield ReasoningDelta(restore(reasoning))
            yield from self._whole(content, calls or ())
        else:
            # Apart from the last token, which may have come before anybody knew that it is the last. What parsers say
            # only now of a call that was cut is made up: that its name was whole, that it had no arguments.
            for event in self._read(Piece([], ""), finished=True):
                if not (is_cut and isinstance(event, ToolCallStart | ToolCallDelta)):
                    yield event
        if self._call_mark is not None and self._text:
            found = None
            if not is_cut and self._parser.tool_parser is not None:
                found = self._parser.tool_parser.extract_tool_calls(self._text, self._chat)
            if found is not None and found.tool_calls:
                yield from self._whole(found.content, [call.function for call in found.tool_calls])
            else:
                yield TextDelta(restore(self._text))
        for call in self._calls:
            yield from call.rest()
        if self._calls and not is_cut:
            yield from self._completed()

    def _whole(self, content: str | None, calls: Iterable[FunctionCall]) -> Iterable[ReplyEvent]:
        if content:
            yield TextDelta(restore(content))
        for call in calls:
            yield from self._start(call.id, call.name)
            yield from self._calls[-1].add(call.arguments)

    def _start(self, call_id: str | None, name: str) -> Iterable[ReplyEvent]:
        if self._calls:
            yield from self._calls[-1].rest()
            yield from self._completed()
        self._calls.append(_CallSoFar(len(self._calls), restore(name)))
        yield ToolCallStart(self._calls[-1].position, call_id or _tool_call_id(), self._calls[-1].name)

    def _completed(self) -> Iterable[ReplyEvent]:
        """Arguments of the last call, which is over: parsers that look for some say nothing of none, and of a call that
        lacks its last brackets not all."""
        last = self._calls[-1]
        if self._json is None or last.position >= len(self._json.calls):
            return
        written = self._json.calls[last.position]
        if written.name not in (None, last.name):  # a parser may have passed over one that is none
            return
        said = "".join(last.said)
        if not said or (written.name is None and written.arguments.startswith(said)):
            yield from last.add(written.arguments[len(said) :])
            yield from last.rest()


class _CallSoFar:
    """A call that streams."""

    def __init__(self, position: int, name: str) -> None:
        self.position = position
        self.name = name
        self.said: list[str] = []
        """Its arguments."""
        self._restorer = PartRestorer()

    def add(self, arguments: str) -> Iterable[ReplyEvent]:
        yield from self._say(self._restorer.feed(arguments))

    def rest(self) -> Iterable[ReplyEvent]:
        yield from self._say(self._restorer.rest())

    def _say(self, text: str) -> Iterable[ReplyEvent]:
        if text:
            self.said.append(text)
            yield ToolCallDelta(self.position, text)


def _share(part: str, text: str, count: int) -> int:
    """How many of `count` tokens of a text are a part of it, by their characters."""
    return min(count, max(1, round(count * len(part) / max(len(text), 1))))


def _thought_screen(
    parser: Parser, names: Parsers, before: str, turn_ids: list[int], plain_id: int
) -> ThoughtScreen | None:
    """None if the model is not thinking, or thinks in no words of its own."""
    reasoning = parser.reasoning_parser
    if reasoning is None or parser.is_reasoning_end(turn_ids):
        return None
    start, end = reasoning.reasoning_start_str, reasoning.reasoning_end_str
    if not start or not end:
        return None
    mark = OPENS_CALL_IN_THOUGHT.get(names.reasoning or "")

    def is_call(piece: Piece) -> bool:
        if mark is not None and mark in piece.text:
            return True
        if not isinstance(reasoning, ParserEngineReasoningAdapter):
            return False
        found = reasoning.find_reasoning_end(piece.token_ids)
        return found is not None and found.implicit

    return ThoughtScreen(
        start=start.strip(),
        end=end.strip(),
        end_id=reasoning.vocab.get(end.strip()),
        before=before,
        is_call=is_call,
        plain_id=plain_id,
    )
