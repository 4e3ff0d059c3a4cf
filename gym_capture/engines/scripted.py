"""An engine that generates what a script says: for tests of dialects, of faults, and of everything around an engine.

Invariant: what the script gives is what is reported - ids, log probabilities, events - with nothing made up, except
for log probabilities that a step leaves out. It keeps the promises of the seam: streamed or whole, it can be aborted,
and what was asked of it can be read afterwards (`calls`, `aborted`).

Flow: `generate` notes the call and asks the script for a `Script` -> its steps come out as chunks, one each when
streamed, all in one otherwise -> the script ends with a finish reason, an error, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gym_capture.calls import ModelRequest, ReplyEvent, TextDelta, TokenLogProb
from gym_capture.capture.records import IdArray, LogProbArray, WeightSpan, as_ids
from gym_capture.capture.sampling_masks import mask_of
from gym_capture.engines.base import Generation, GenerationChunk, ModelInfo
from gym_capture.engines.scripted_weights import ScriptedWeights, Spans
from gym_capture.errors import EngineDeadError, EngineError
from gym_capture.splice.template import ChatTemplate

__all__ = ["DEFAULT_LOG_PROB", "EngineCall", "Script", "ScriptedEngine", "Scripter", "Step", "in_order", "saying"]

DEFAULT_LOG_PROB: Final = -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One chunk: its ids and its text."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None = None
    """One for each id; None: `DEFAULT_LOG_PROB` for all."""
    sampling_mask: Sequence[Sequence[int]] | None = None
    """For each id, those that it could have been."""
    text: str = ""
    events: Sequence[ReplyEvent] | None = None
    """The parser's events; None: the text, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One generation, from its first chunk to its end."""

    steps: Sequence[Step]
    finish_reason: str | None = "stop"
    """On the last chunk. None: the generation just ends."""
    stop_reason: str | None = None
    raises: Exception | None = None
    """Raised after the steps, in place of a finish."""
    hangs: bool = False
    """Nothing comes after the steps, until the generation is aborted."""
    reports_prompt: bool = True
    """Whether the first chunk says what the prompt was."""
    weight_versions: tuple[WeightSpan, ...] = ()
    """Empty: those of the engine's weights, once these have a version."""
    routed_experts: npt.NDArray[Any] | None = None
    """On the last chunk."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineCall:
    """A call as the engine was asked for it."""

    call_id: str
    prompt_ids: IdArray
    request: ModelRequest
    max_tokens: int
    stream: bool


_NOTHING: Final = Step(token_ids=())

Scripter: TypeAlias = Callable[[EngineCall], Script]
"""Writes the script of a call. What it raises, `generate` raises."""


def in_order(scripts: Iterable[Script]) -> Scripter:
    """A scripter for calls that come one after another. One call too many raises `StopIteration`."""
    remaining = iter(scripts)
    return lambda _: next(remaining)


def saying(template: ChatTemplate, text: str, *, stop_token: str) -> Script:
    """A whole reply of one step for each id of `text`, with the sampled stop token behind it, which has no text.

    A step whose ids end inside a character has no text; the step that completes it has the whole character.
    """
    ids = template.encode_plain(text)
    steps = []
    said = ""
    for end in range(1, ids.size + 1):
        whole = template.decode(ids[:end])
        new = "" if whole.endswith("\ufffd") and end < ids.size else whole[len(said) :]
        said += new
        steps.append(Step(token_ids=[int(ids[end - 1])], text=new))
    steps.append(Step(token_ids=template.encode(stop_token).tolist()))
    return Script(steps=steps)


class ScriptedEngine:
    """One policy replica whose every generation is written down beforehand."""

    def __init__(
        self,
        template: ChatTemplate,
        scripter: Scripter,
        *,
        name: str = "policy",
        max_model_len: int = 4096,
        vocab_size: int = 2**16,
        longest_token: int | None = None,
        weights: ScriptedWeights | None = None,
    ) -> None:
        self._weights = ScriptedWeights() if weights is None else weights
        self._template = template
        self._scripter = scripter
        self._model = ModelInfo(
            name=name, max_model_len=max_model_len, vocab_size=vocab_size, longest_token=longest_token
        )
        self.calls: list[EngineCall] = []
        """Every call, in the order in which they came."""
        self.aborted: list[str] = []
        """Ids of the calls that were aborted, or whose iterator was closed before its end."""
        self.is_dead = False
        """Set it to make health checks fail."""
        self.is_closed = False

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def template(self) -> ChatTemplate:
        return self._template

    @property
    def weights(self) -> ScriptedWeights:
        return self._weights

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
        call = EngineCall(call_id=call_id, prompt_ids=prompt_ids, request=request, max_tokens=max_tokens, stream=stream)
        self.calls.append(call)
        script = self._scripter(call)
        parser = _ScriptedParser(script.reasoning_tokens)
        aborted = asyncio.Event()

        async def abort() -> None:
            aborted.set()

        return Generation(
            chunks=self._chunks(call, script, parser, aborted),
            parser=parser,
            abort=abort,
            sampling={**request.sampling, "max_tokens": max_tokens},
        )

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("the scripted engine is dead")

    async def close(self) -> None:
        self.is_closed = True

    async def _chunks(
        self, call: EngineCall, script: Script, parser: _ScriptedParser, aborted: asyncio.Event
    ) -> AsyncGenerator[GenerationChunk]:
        has_ended = False
        spans = Spans(self._weights)
        try:
            finishes = script.raises is None and not script.hangs
            steps = list(script.steps) if call.stream else [_merged(script.steps)] if finishes else []
            for number, step in enumerate(steps):
                await asyncio.sleep(0)
                await self._weights.runs()
                if aborted.is_set():
                    yield self._chunk(call, script, _NOTHING, spans, is_first=number == 0, finish_reason="abort")
                    return
                parser.expect(_events(step))
                is_last = finishes and number == len(steps) - 1
                reason = script.finish_reason if is_last else None
                yield self._chunk(call, script, step, spans, is_first=number == 0, finish_reason=reason)
            if script.hangs:
                await aborted.wait()
                rest = _NOTHING if call.stream else _merged(script.steps)
                parser.expect(_events(rest))
                yield self._chunk(call, script, rest, spans, is_first=not steps, finish_reason="abort")
                return
            has_ended = True
            if script.raises is not None:
                raise script.raises
        finally:
            if not has_ended:
                self.aborted.append(call.call_id)

    def _chunk(
        self, call: EngineCall, script: Script, step: Step, spans: Spans, *, is_first: bool, finish_reason: str | None
    ) -> GenerationChunk:
        is_last = finish_reason is not None
        ids, log_probs = as_ids(np.array(step.token_ids, dtype=np.int32)), _log_probs(step)
        spans.count(ids.size)
        return GenerationChunk(
            token_ids=ids,
            log_probs=log_probs,
            text=step.text,
            prompt_token_ids=call.prompt_ids if is_first and script.reports_prompt else None,
            cached_tokens=script.cached_tokens if is_last else 0,
            finish_reason=finish_reason,
            stop_reason=script.stop_reason if is_last else None,
            weight_versions=(script.weight_versions or spans.all()) if is_last else (),
            routed_experts=script.routed_experts if is_last else None,
            sampling_mask=None if step.sampling_mask is None else mask_of(step.sampling_mask),
            shown_log_probs=None if call.request.top_logprobs is None else self._shown(call.request, ids, log_probs),
        )

    def _shown(self, request: ModelRequest, ids: IdArray, log_probs: LogProbArray) -> tuple[TokenLogProb, ...]:
        if ids.size != log_probs.size:
            raise EngineError("the engine's log probabilities do not belong to the tokens that it sampled")
        tokens = [self._template.decode(ids[n : n + 1]) for n in range(ids.size)]
        return tuple(
            TokenLogProb(token, log_prob, ((token, log_prob),) if request.top_logprobs else ())
            for token, log_prob in zip(tokens, log_probs.tolist(), strict=True)
        )


class _ScriptedParser:
    """Says what the script says of each chunk."""

    def __init__(self, reasoning_tokens: int) -> None:
        self.reasoning_tokens = reasoning_tokens
        self._expected: list[ReplyEvent] = []

    def expect(self, events: Sequence[ReplyEvent]) -> None:
        """Sets the events that the next chunk will be parsed into."""
        self._expected.extend(events)

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        events, self._expected = self._expected, []
        return events


def _events(step: Step) -> Sequence[ReplyEvent]:
    if step.events is not None:
        return step.events
    return (TextDelta(step.text),) if step.text else ()


def _log_probs(step: Step) -> LogProbArray:
    values = [DEFAULT_LOG_PROB] * len(step.token_ids) if step.log_probs is None else step.log_probs
    return np.array(values, dtype=np.float32)


def _merged(steps: Sequence[Step]) -> Step:
    return Step(
        token_ids=[token_id for step in steps for token_id in step.token_ids],
        log_probs=[float(value) for step in steps for value in _log_probs(step)],
        sampling_mask=None
        if any(step.sampling_mask is None for step in steps)
        else [row for step in steps for row in step.sampling_mask or ()],
        text="".join(step.text for step in steps),
        events=[event for step in steps for event in _events(step)],
    )
