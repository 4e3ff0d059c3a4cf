"""The engine seam over one vLLM `AsyncLLM`.

Invariant: ids and log probabilities come from the engine's own outputs, the log probability of each position being
that of the *sampled* id, after sampling processors (`processed_logprobs`). vLLM's own protocol class maps the sampling
parameters, its own parsers read tool calls and reasoning; nothing of either is written again here.

A reply is the same turn streamed or whole, however the engine grouped its steps: the parsers always read it token by
token (`steps.py`). And what a request gets wrong is the request's error, with its parameter, not the engine's.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm import SamplingParams, TokensPrompt, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMClientError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import uses_fast_detokenizer
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from gym_capture.calls import ModelRequest, NamedToolChoice
from gym_capture.capture.records import IdArray
from gym_capture.engines.base import Generation, GenerationChunk, ModelInfo, OutputParser
from gym_capture.engines.guard import start_guard
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.limits import arguments_as_objects, check_sampling, check_schema, object_schema
from gym_capture.engines.steps import NO_CHARACTER, PromptEcho, StepSplitter
from gym_capture.engines.vllm_outputs import chunk_of, only_completion
from gym_capture.engines.vllm_parsing import CONTEXT_IDS, Parsers, PlainParser, VllmParser, text_of_next
from gym_capture.engines.vllm_sampling import ALWAYS, IF_SET, recorded_sampling
from gym_capture.engines.vllm_weights import WORKER_EXTENSION, VllmWeights
from gym_capture.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
)

_NO_PARSER_MESSAGES = [{"role": "user", "content": ""}]
_RIDES_ALONG = ("enable_return_routed_experts", "return_sampling_mask")
"""What is recorded beside ids where the engine gives it: by vLLM's newer model runner, which wants a GPU."""
_MAX_MESSAGE = 500
"""Characters of an error: vLLM repeats what it was given."""


@dataclass(frozen=True, slots=True)
class _ParserSetup:
    """The model's parsers, and what each request's parser is made with."""

    names: Parsers
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
        guard: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """`guard`: sees to it that the engine's process ends with this one; terminated when the engine is closed."""
        self._llm = llm
        self._guard = guard
        self._template = template
        config = llm.model_config
        tokenizer = llm.renderer.tokenizer
        self._model = ModelInfo(
            name=name,
            max_model_len=config.max_model_len,
            vocab_size=config.get_vocab_size(),
            reads_reasoning=reasoning_parser is not None,
            longest_token=max(map(len, tokenizer.get_vocab())),
        )
        self._parsers = _ParserSetup(
            Parsers(tool_parser, reasoning_parser),
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
        self._weights = VllmWeights(llm, model=config.model)

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
        forced = {
            "model": model,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "worker_extension_cls": WORKER_EXTENSION,
        }
        if reasoning_parser is not None:
            # The engine waits with a forced call's grammar until the model has thought.
            forced["reasoning_parser"] = reasoning_parser
        overridden = sorted(set(engine_args) & set(forced))
        if overridden:
            raise ConfigError(f"engine_args: {', '.join(overridden)} cannot be set here; the graph sets them")
        try:
            args = AsyncEngineArgs(**forced, **engine_args)
        except TypeError as error:
            raise ConfigError(f"engine_args: {error}") from error
        asked = [name for name in _RIDES_ALONG if engine_args.get(name)]
        if asked:
            try:
                args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            except ValueError as error:
                said = " ".join(str(error).split())[:_MAX_MESSAGE]
                raise ConfigError(f"engine_args: {', '.join(asked)}: the engine cannot do this here: {said}") from error
        guard = start_guard(title=f"{envs.VLLM_PROCESS_NAME_PREFIX}::EngineCore")
        # The context decides some defaults, e.g. how many tokens a step takes: those of vLLM's own server.
        llm = AsyncLLM.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)
        eos = llm.model_config.try_get_generation_config().get("eos_token_id") or ()
        template = HfChatTemplate.from_tokenizer(
            llm.renderer.tokenizer, stop_token_ids=(eos,) if isinstance(eos, int) else tuple(eos)
        )
        return cls(
            llm,
            name=name,
            template=template,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            guard=guard,
        )

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def template(self) -> HfChatTemplate:
        return self._template

    @property
    def weights(self) -> VllmWeights:
        return self._weights

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own, for what the seam does not have."""
        return self._llm

    def generate(
        self,
        *,
        call_id: str,
        prompt_ids: IdArray,
        request: ModelRequest,
        max_tokens: int,
        stream: bool,
        turn_start: int | None = None,
    ) -> Generation:
        try:
            return self._generate(
                call_id, prompt_ids.tolist(), request, max_tokens=max_tokens, stream=stream, turn_start=turn_start or 0
            )
        except (VLLMClientError, ValueError, RecursionError) as error:
            raise _refused(error, param=_schema_param(request), call_id=call_id) from error

    def _generate(
        self,
        call_id: str,
        ids: list[int],
        request: ModelRequest,
        *,
        max_tokens: int,
        stream: bool,
        turn_start: int,
    ) -> Generation:
        # Thinking of earlier turns, which a prompt of their exact ids shows, is over; that of this one is not.
        turn_ids = ids[turn_start:]
        check_sampling(request.sampling, vocab_size=self._model.vocab_size)
        chat = chat_request(request)
        parser = None
        if self._parsers.parser_cls is not None and request.raw_prompt is None:
            parser = self._parsers.parser_cls(
                self._parsers.tokenizer, chat.tools, model_config=self._parsers.model_config, chat_template_kwargs={}
            )
            # Forced tool choice becomes structured output here, and parsers ask for the special tokens they read.
            chat = constrained(parser.adjust_request(chat), request)
        params = chat.to_sampling_params(max_tokens, self._default_sampling)
        params.logprobs = request.top_logprobs or 0
        params.detokenize = True
        params.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        constrained_by = None
        if params.structured_outputs is not None:
            constrained_by = _schema_param(request)
            _check_grammar(params.structured_outputs, param=constrained_by)
        output_parser: OutputParser = PlainParser()
        if parser is not None:
            splitter = StepSplitter(text_of_next(self._parsers.tokenizer, ids, params))
            output_parser = VllmParser(parser, self._parsers.names, chat, turn_ids, splitter, self._parsers.tokenizer)
        outputs = self._llm.generate(
            TokensPrompt(prompt_token_ids=ids),
            params,
            call_id,
            reasoning_ended=chat.resolve_reasoning_ended(parser, turn_ids),
        )
        return Generation(
            chunks=self._chunks(outputs, call_id, request, self._prompt_echo(ids, params), constrained_by),
            parser=output_parser,
            abort=partial(self._abort, call_id),
            sampling=recorded_sampling(params),
        )

    async def _abort(self, call_id: str) -> None:
        with suppress(VllmEngineDeadError):  # whoever iterates learns it
            await self._llm.abort(call_id)

    def _prompt_echo(self, prompt_ids: list[int], params: SamplingParams) -> PromptEcho:
        """vLLM's fast detokenizer repeats a prompt that ends in what is no whole character to it."""
        tokenizer = self._parsers.tokenizer
        if not uses_fast_detokenizer(tokenizer):
            return PromptEcho("")
        if not tokenizer.decode(prompt_ids[-CONTEXT_IDS:]).endswith(NO_CHARACTER):
            return PromptEcho("")
        return PromptEcho(tokenizer.decode(prompt_ids, skip_special_tokens=params.skip_special_tokens))

    async def _chunks(
        self,
        outputs: AsyncGenerator[RequestOutput],
        call_id: str,
        request: ModelRequest,
        echo: PromptEcho,
        constrained_by: str | None,
    ) -> AsyncGenerator[GenerationChunk]:
        """Raises an `EngineError`; `InvalidRequestError` for what vLLM refuses, before it generates, of the request."""
        first = True
        try:
            # Closing this generator closes vLLM's, which aborts the request and frees its slot.
            async with aclosing(outputs):
                async for output in outputs:
                    completion = only_completion(output)
                    if completion.finish_reason is None and not (
                        completion.token_ids or completion.text or completion.logprobs
                    ):
                        continue
                    if completion.finish_reason == "error" and constrained_by is not None:
                        # What the engine's log says of it: its grammar cannot be compiled, or has no way on.
                        raise InvalidRequestError(
                            f"{constrained_by}: the engine cannot generate what this schema asks for",
                            param=constrained_by,
                            call_id=call_id,
                        )
                    text = echo.strip(completion.text, is_last=completion.finish_reason is not None)
                    yield chunk_of(output, completion, text, first=first, top_logprobs=request.top_logprobs)
                    first = False
        except VllmEngineDeadError as error:
            raise EngineDeadError("the engine process died", call_id=call_id) from error
        except EngineGenerateError as error:
            raise EngineError(f"the engine failed: {error.__cause__ or error}", call_id=call_id) from error
        except (QueueOverflowError, MaxQueuedTokensError) as error:
            raise EngineOverloadedError(error.message) from error
        except (VLLMClientError, ValueError) as error:
            if not first:
                raise EngineError(f"the engine failed: {error}", call_id=call_id) from error
            raise _refused(error, param=constrained_by, call_id=call_id) from error

    async def check_health(self) -> None:
        try:
            await self._llm.check_health()
        except VllmEngineDeadError as error:
            raise EngineDeadError("the engine process died") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._llm.shutdown()
        if self._guard is not None:
            self._guard.terminate()
            self._guard.wait()


def chat_request(request: ModelRequest) -> ChatCompletionRequest:
    """vLLM's own request class, for its sampling mapping and its parsers; the messages do not matter to either."""
    body: dict[str, Any] = {
        "messages": _NO_PARSER_MESSAGES,
        "stream": request.stream,
        **request.sampling,
    }
    if request.response_format is not None:
        body["response_format"] = dict(request.response_format)
    if request.conversation.tools:
        body["tools"] = [_for_grammars(tool.as_openai()) for tool in request.conversation.tools]
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
        param = str(first["loc"][0]) if first["loc"] else None
        raise InvalidRequestError(f"{param or 'request'}: {first['msg']}"[:_MAX_MESSAGE], param=param) from error


def _for_grammars(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": object_schema(function["parameters"])}}


def constrained(chat: ChatCompletionRequest, request: ModelRequest) -> ChatCompletionRequest:
    """`chat` with the constraint that vLLM made for its tools: arguments are objects, where it takes any JSON."""
    made = chat.structured_outputs
    if made is not None and made.structural_tag is not None and request.conversation.tools:
        chat.structured_outputs = replace(made, structural_tag=arguments_as_objects(made.structural_tag))
    return chat


def _schema_param(request: ModelRequest) -> str:
    """The parameter whose schema constrains this generation, if any does: forced calls come before formats."""
    is_forced = request.tool_choice not in ("auto", "none")
    return (
        "tools" if request.conversation.tools and (is_forced or request.response_format is None) else "response_format"
    )


def _check_grammar(constraint: StructuredOutputsParams, *, param: str) -> None:
    for schema in (constraint.json, constraint.structural_tag):
        check_schema(json.loads(schema) if isinstance(schema, str) else schema, param=param)


def _refused(error: Exception, *, param: str | None, call_id: str) -> InvalidRequestError:
    """vLLM's refusal, with the name that clients have for what it is about; `param` if it is about none by name."""
    message = str(error.args[0] if error.args else error)[:_MAX_MESSAGE]
    if isinstance(error, RecursionError):
        message = f"{param} is nested too deep"
    named = next((name for name in (*ALWAYS, *IF_SET) if message.startswith(name)), param)
    if isinstance(error, VLLMValidationError) and error.parameter is not None:
        named = {"logprobs": "top_logprobs"}.get(error.parameter, error.parameter)
    return InvalidRequestError(message, param=named, call_id=call_id)
