"""vLLM's own parsers over one generation, token by token, whether its tokens came one by one or all at once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from gym_capture.calls import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.engines.base import GenerationChunk
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

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        return (TextDelta(chunk.text),) if chunk.text else ()


class VllmParser:
    """vLLM's parser over one generation, token by token, whether they came one by one or all at once."""

    def __init__(
        self, parser: Parser, chat: ChatCompletionRequest, prompt_ids: list[int], splitter: StepSplitter
    ) -> None:
        self._parser = parser
        self._chat = chat
        self._prompt_ids = prompt_ids
        self._splitter = splitter
        self._started = 0

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        is_last = chunk.finish_reason is not None
        pieces = self._splitter.feed(chunk.token_ids.tolist(), chunk.text)
        if is_last:
            pieces += self._splitter.rest()
        events: list[ReplyEvent] = []
        prose: list[Piece] = []
        for piece in pieces:
            # In front of the first call prose is passed on, however much at once; read token by token it would cost
            # seconds in a long text, since many parsers go over all of it each time.
            if self._started == 0 and piece.is_prose:
                prose.append(piece)
                continue
            events += self._read(joined(prose), finished=False)
            events += self._read(piece, finished=False)
            prose = []
        events += self._read(joined(prose), finished=False)
        if is_last:
            # Apart from the last token, which may have come before anybody knew that it is the last.
            events += self._read(Piece([], ""), finished=True)
        return merged(events)

    def _read(self, piece: Piece, *, finished: bool) -> Iterable[ReplyEvent]:
        if not piece.token_ids and not piece.text and not finished:
            return
        delta = self._parser.parse_delta(
            piece.text, piece.token_ids, self._chat, prompt_token_ids=self._prompt_ids, finished=finished
        )
        if delta is None:
            return
        if delta.reasoning:
            yield ReasoningDelta(delta.reasoning)
        if delta.content:
            yield TextDelta(delta.content)
        for call in delta.tool_calls or ():
            function = call.function
            if function is not None and function.name is not None and call.index >= self._started:
                yield ToolCallStart(call.index, call.id or _tool_call_id(), function.name)
                self._started = call.index + 1
            if function is not None and function.arguments:
                yield ToolCallDelta(call.index, function.arguments)
