"""The engine seam over one vLLM `AsyncLLM`.

Invariant: ids and log probabilities come from the engine's own outputs, the log probability of each position being
that of the *sampled* id, after sampling processors (`processed_logprobs`). vLLM's own protocol class maps the sampling
parameters, its own parsers read tool calls and reasoning; nothing of either is written again here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from gym_capture.calls import (
    ModelRequest,
    NamedToolChoice,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenLogProb,
    ToolCallDelta,
    ToolCallStart,
)
from gym_capture.engines.base import Generation, GenerationChunk, ModelInfo, OutputParser
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.errors import ConfigError, EngineDeadError, EngineError, InvalidRequestError
from gym_capture.records import IdArray, LogProbArray, WeightSpan, as_ids

_NO_PARSER_MESSAGES = [{"role": "user", "content": ""}]


@dataclass(frozen=True, slots=True)
class _ParserSetup:
    """What every request's parser is made from."""

    parser_cls: type[Parser] | None
    tokenizer: Any
    model_config: Any


class VllmEngine:
    """One `AsyncLLM` and everything that belongs to its model."""

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        name: str,
        template: HfChatTemplate,
        tool_parser: str | None,
        reasoning_parser: str | None,
    ) -> None:
        self._llm = llm
        self._template = template
        config = llm.model_config
        self._model = ModelInfo(name=name, max_model_len=config.max_model_len, vocab_size=config.get_vocab_size())
        tokenizer = llm.renderer.tokenizer
        self._parsers = _ParserSetup(
            ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                tokenizer=tokenizer,
            ),
            tokenizer,
            config,
        )
        self._default_sampling: dict[str, Any] = config.get_diff_sampling_param()

    @classmethod
    def start(
        cls,
        *,
        model: str,
        name: str,
        tool_parser: str | None,
        reasoning_parser: str | None,
        engine_args: Mapping[str, Any],
    ) -> VllmEngine:
        """Loads the model folder `model` and starts the engine process (tens of seconds).

        Raises `ConfigError` for a folder that is not there, or arguments that vLLM does not know.
        """
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"model: {model!r} is not a model folder (it has no config.json)")
        forced = {"model": model, "logprobs_mode": "processed_logprobs", "disable_log_stats": True}
        overridden = sorted(set(engine_args) & set(forced))
        if overridden:
            raise ConfigError(f"engine_args: {', '.join(overridden)} cannot be set here; the graph sets them")
        try:
            args = AsyncEngineArgs(**forced, **engine_args)
        except TypeError as error:
            raise ConfigError(f"engine_args: {error}") from error
        llm = AsyncLLM.from_engine_args(args)
        eos = llm.model_config.try_get_generation_config().get("eos_token_id") or ()
        template = HfChatTemplate.from_tokenizer(
            llm.renderer.tokenizer, stop_token_ids=(eos,) if isinstance(eos, int) else tuple(eos)
        )
        return cls(llm, name=name, template=template, tool_parser=tool_parser, reasoning_parser=reasoning_parser)

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def template(self) -> HfChatTemplate:
        return self._template

    def generate(
        self, *, call_id: str, prompt_ids: IdArray, request: ModelRequest, max_tokens: int, stream: bool
    ) -> Generation:
        chat = _chat_request(request)
        parser = None
        if self._parsers.parser_cls is not None:
            parser = self._parsers.parser_cls(
                self._parsers.tokenizer, chat.tools, model_config=self._parsers.model_config, chat_template_kwargs={}
            )
        ids = prompt_ids.tolist()
        try:
            if parser is not None:
                # Forced tool choice becomes structured output here, and parsers ask for the special tokens they read.
                chat = parser.adjust_request(chat)
            params = chat.to_sampling_params(max_tokens, self._default_sampling)
            params.logprobs = request.top_logprobs or 0
            params.detokenize = True
            params.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
            reasoning_ended = chat.resolve_reasoning_ended(parser, ids)
        except VLLMValidationError as error:
            raise InvalidRequestError(str(error), param=error.parameter, call_id=call_id) from error
        except ValueError as error:
            raise InvalidRequestError(str(error), call_id=call_id) from error
        if parser is not None:
            parser.set_prompt_token_ids(ids)
        outputs = self._llm.generate(
            TokensPrompt(prompt_token_ids=ids), params, call_id, reasoning_ended=reasoning_ended
        )
        output_parser: OutputParser = (
            PlainParser() if parser is None else _VllmParser(parser, chat, ids, streaming=stream)
        )
        return Generation(
            chunks=self._chunks(outputs, call_id, request.top_logprobs),
            parser=output_parser,
            sampling=_recorded_sampling(params),
        )

    async def _chunks(
        self, outputs: AsyncGenerator[RequestOutput], call_id: str, top_logprobs: int | None
    ) -> AsyncGenerator[GenerationChunk]:
        first = True
        try:
            # Closing this generator closes vLLM's, which aborts the request and frees its slot.
            async with aclosing(outputs):
                async for output in outputs:
                    (completion,) = output.outputs
                    if completion.finish_reason is None and not completion.token_ids and not completion.text:
                        continue
                    yield self._chunk(output, completion, first=first, top_logprobs=top_logprobs)
                    first = False
        except VllmEngineDeadError as error:
            raise EngineDeadError("the engine process died", call_id=call_id) from error
        except EngineGenerateError as error:
            raise EngineError(f"the engine failed: {error}", call_id=call_id) from error
        except (ValueError, VLLMValidationError) as error:
            raise InvalidRequestError(str(error), call_id=call_id) from error

    def _chunk(
        self, output: RequestOutput, completion: CompletionOutput, *, first: bool, top_logprobs: int | None
    ) -> GenerationChunk:
        ids = as_ids(np.fromiter(completion.token_ids, dtype=np.int32, count=len(completion.token_ids)))
        positions = completion.logprobs or []
        log_probs = sampled_log_probs(completion.token_ids, positions)
        shown = None
        if top_logprobs is not None:
            shown = tuple(
                TokenLogProb(
                    position[token].decoded_token or "",
                    position[token].logprob,
                    tuple(
                        (alternative.decoded_token or "", alternative.logprob)
                        for alternative in sorted(position.values(), key=lambda item: item.rank or 0)[:top_logprobs]
                    ),
                )
                for token, position in zip(completion.token_ids, positions, strict=True)
            )
        prompt = None
        if first and output.prompt_token_ids is not None:
            prompt = as_ids(np.array(output.prompt_token_ids, dtype=np.int32))
        return GenerationChunk(
            token_ids=ids,
            log_probs=log_probs,
            text=completion.text,
            prompt_token_ids=prompt,
            cached_tokens=output.num_cached_tokens or 0,
            finish_reason=completion.finish_reason,
            stop_reason=None if completion.stop_reason is None else str(completion.stop_reason),
            weight_versions=tuple(
                WeightSpan(span.start, span.end, str(span.version)) for span in completion.weight_versions or ()
            ),
            shown_log_probs=shown,
            routed_experts=completion.routed_experts,
        )

    async def check_health(self) -> None:
        try:
            await self._llm.check_health()
        except VllmEngineDeadError as error:
            raise EngineDeadError("the engine process died") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)


def sampled_log_probs(token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]]) -> LogProbArray:
    """float32 [G]: of each position's alternatives, that of the id which was sampled; never simply the first.

    Raises `ValueError` if there is not one position for each id, `KeyError` if an id is not among its alternatives.
    """
    return np.fromiter(
        (position[token].logprob for token, position in zip(token_ids, positions, strict=True)),
        dtype=np.float32,
        count=len(token_ids),
    )


def _chat_request(request: ModelRequest) -> ChatCompletionRequest:
    """vLLM's own request class, for its sampling mapping and its parsers; the messages do not matter to either."""
    body: dict[str, Any] = {
        "messages": _NO_PARSER_MESSAGES,
        "stream": request.stream,
        **request.sampling,
    }
    if request.response_format is not None:
        body["response_format"] = dict(request.response_format)
    if request.conversation.tools:
        body["tools"] = [tool.as_openai() for tool in request.conversation.tools]
        body["tool_choice"] = (
            {"type": "function", "function": {"name": request.tool_choice.name}}
            if isinstance(request.tool_choice, NamedToolChoice)
            else request.tool_choice
        )
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.top_logprobs is not None:
        body["logprobs"] = True
        body["top_logprobs"] = request.top_logprobs
    try:
        return ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise InvalidRequestError(f"{where or 'request'}: {first['msg']}", param=where) from error
    except VLLMValidationError as error:
        raise InvalidRequestError(str(error)) from error


def _recorded_sampling(params: SamplingParams) -> dict[str, Any]:
    """The parameters that shape the distribution, as they were in force."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "max_tokens",
    )
    recorded: dict[str, Any] = {name: value for name in names if (value := params.__getattribute__(name)) is not None}
    if params.stop:
        recorded["stop"] = list(params.stop)
    if params.structured_outputs is not None:
        recorded["structured_outputs"] = True
    return recorded


def _tool_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class PlainParser:
    """For a model without tool calls and reasoning: everything is text."""

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        return (TextDelta(chunk.text),) if chunk.text else ()


class _VllmParser:
    """vLLM's parser over one generation, streamed or whole."""

    def __init__(self, parser: Parser, chat: ChatCompletionRequest, prompt_ids: list[int], *, streaming: bool) -> None:
        self._parser = parser
        self._chat = chat
        self._prompt_ids = prompt_ids
        self._streaming = streaming
        self._started = 0

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        return self._delta(chunk) if self._streaming else self._whole(chunk)

    def _whole(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        reasoning, content, calls = self._parser.parse(
            chunk.text,
            self._chat,
            enable_auto_tools=self._parser.tool_parser is not None and bool(self._chat.tools),
            model_output_token_ids=chunk.token_ids.tolist(),
        )
        events: list[ReplyEvent] = []
        if reasoning:
            events.append(ReasoningDelta(reasoning))
        if content:
            events.append(TextDelta(content))
        for index, call in enumerate(calls or ()):
            events.append(ToolCallStart(index, call.id or _tool_call_id(), call.name))
            events.append(ToolCallDelta(index, call.arguments))
        return events

    def _delta(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        delta = self._parser.parse_delta(
            chunk.text,
            chunk.token_ids.tolist(),
            self._chat,
            prompt_token_ids=self._prompt_ids,
            finished=chunk.finish_reason is not None,
        )
        if delta is None:
            return ()
        events: list[ReplyEvent] = []
        if delta.reasoning:
            events.append(ReasoningDelta(delta.reasoning))
        if delta.content:
            events.append(TextDelta(delta.content))
        for call in delta.tool_calls or ():
            function = call.function
            if function is not None and function.name is not None and call.index >= self._started:
                events.append(ToolCallStart(call.index, call.id or _tool_call_id(), function.name))
                self._started = call.index + 1
            if function is not None and function.arguments:
                events.append(ToolCallDelta(call.index, function.arguments))
        return events
