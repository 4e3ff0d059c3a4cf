"""One suite that any engine can be put through, whoever wrote it.

Invariant: a check is one sentence of the contract in `gym_capture.engines.base`; its docstring is that sentence. Checks
ask for prompts and lengths alone, never for what a model says, so that any model will do; and they leave the engine as
it was, so that one engine, which may take a minute to start, serves for all.

Flow: `run_engine_conformance(engine)` -> one `Result` per check -> a test asserts on them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeAlias
from uuid import uuid4

import numpy as np

from gym_capture.calls import ModelRequest, TurnBuilder
from gym_capture.capture.records import IdArray
from gym_capture.conformance import Result, contract_of, settled
from gym_capture.conformance.support import expect, expect_equal
from gym_capture.conversation import Conversation, Message
from gym_capture.engines.base import Engine, Generation, GenerationChunk
from gym_capture.errors import InvalidRequestError

__all__ = ["ENGINE_CHECKS", "EngineCheck", "run_engine_check", "run_engine_conformance"]

EngineCheck: TypeAlias = Callable[[Engine], Awaitable[None]]

LONG: Final = 2_000
"""Ids of a generation that is to be ended before its end. The model must have room for them."""

_SHORT: Final = 8
_FINISH_REASONS: Final = ("stop", "length", "abort", "error")


async def run_engine_conformance(engine: Engine, *, timeout_s: float = 60.0) -> list[Result]:
    """Puts `engine` through every check, one after the other."""
    return [await run_engine_check(name, engine, timeout_s=timeout_s) for name in ENGINE_CHECKS]


async def run_engine_check(name: str, engine: Engine, *, timeout_s: float = 60.0) -> Result:
    """One check by its name. Raises `KeyError` for a name that is not in the list."""
    check = ENGINE_CHECKS[name]
    return await settled(name, contract_of(check), check(engine), timeout_s)


# --- ids in, ids out ---------------------------------------------------------------------------------------------


async def prompt_is_reported(engine: Engine) -> None:
    """The first chunk, and no other, says the prompt that was run: exactly the ids that came in."""
    for stream in (False, True):
        prompt = _prompt(engine)
        first, *others = await _chunks(_generation(engine, prompt, stream=stream))
        reported = first.prompt_token_ids
        if reported is None:
            expect(False, "the first chunk does not say the prompt")
            return
        expect_equal(reported.dtype, np.dtype(np.int32), "dtype of the prompt ids")
        expect_equal(reported.tolist(), prompt.tolist(), "prompt ids")
        expect(all(chunk.prompt_token_ids is None for chunk in others), "a later chunk says the prompt again")


async def log_probs_align(engine: Engine) -> None:
    """Each chunk has as many log probabilities as ids: finite, and not above 0."""
    for stream in (False, True):
        for chunk in await _chunks(_generation(engine, stream=stream)):
            dtypes = (chunk.token_ids.dtype, chunk.log_probs.dtype)
            expect_equal(dtypes, (np.dtype(np.int32), np.dtype(np.float32)), "dtypes of ids and log probabilities")
            expect_equal(chunk.log_probs.shape, chunk.token_ids.shape, "log probabilities for the ids")
            values = chunk.log_probs.tolist()
            expect(all(math.isfinite(value) and value <= 0 for value in values), f"no log probabilities: {values}")


async def arrays_beside_ids_align(engine: Engine) -> None:
    """Where there is a sampling mask, it has a row with the sampled id for each id; routed experts, on the last chunk
    alone, a row for each id that was run."""
    for stream in (False, True):
        prompt = _prompt(engine)
        chunks = await _chunks(_generation(engine, prompt, stream=stream))
        for chunk in chunks:
            mask = chunk.sampling_mask
            if mask is not None:
                expect_equal(mask.dtype, np.dtype(np.int32), "dtype of the sampling mask")
                expect_equal(len(mask), chunk.token_ids.size, "rows of the sampling mask")
                expect(bool((mask == chunk.token_ids[:, None]).any(axis=1).all()), "a mask without the sampled id")
        expect(all(chunk.routed_experts is None for chunk in chunks[:-1]), "routed experts before the last chunk")
        experts = chunks[-1].routed_experts
        if experts is not None:
            expect_equal(experts.ndim, 3, "axes of routed experts")
            needed = prompt.size + len(_ids(chunks)) - 1
            expect(len(experts) >= needed, f"{len(experts)} rows of routed experts, where {needed} ids were run")


async def ids_are_of_the_model(engine: Engine) -> None:
    """Generated ids are those of the model's vocabulary."""
    ids = _ids(await _chunks(_generation(engine)))
    expect(bool(ids), "nothing was generated")
    expect(all(0 <= one < engine.model.vocab_size for one in ids), f"not in the vocabulary: {ids}")


async def shown_log_probs_align(engine: Engine) -> None:
    """Log probabilities to show are there for each id if the client asked for some, and else not."""
    for top, asked in ((None, False), (0, True), (2, True)):
        for chunk in await _chunks(_generation(engine, top_logprobs=top)):
            shown = None if chunk.shown_log_probs is None else len(chunk.shown_log_probs)
            expect_equal(shown, chunk.token_ids.size if asked else None, f"shown with top_logprobs={top}")


# --- how it ends -------------------------------------------------------------------------------------------------


async def finish_reason_comes_once(engine: Engine) -> None:
    """The last chunk has a finish reason, and no other."""
    for stream in (False, True):
        *before, last = await _chunks(_generation(engine, stream=stream))
        expect(last.finish_reason in _FINISH_REASONS, f"the last chunk has finish reason {last.finish_reason!r}")
        expect_equal([chunk.finish_reason for chunk in before], [None] * len(before), "finish reasons before the last")


async def max_tokens_are_the_most(engine: Engine) -> None:
    """A generation ends with `length` once it has `max_tokens` ids, and has no more."""
    for stream in (False, True):
        for limit in (1, _SHORT - 1):
            chunks = await _chunks(_generation(engine, max_tokens=limit, stream=stream))
            expect_equal((len(_ids(chunks)), chunks[-1].finish_reason), (limit, "length"), "ids, and how they end")


async def abort_says_what_was_generated(engine: Engine) -> None:
    """An aborted generation ends at once, with what had been generated, streamed or not."""
    for stream in (False, True):
        aborted = _generation(engine, max_tokens=LONG, stream=stream)
        reading = asyncio.ensure_future(_chunks(aborted))
        beside = _generation(engine, max_tokens=LONG)
        # Engines that run both run both in step: the one that is aborted has generated something by then.
        await _until_generated(beside, _SHORT // 2)
        await aborted.abort()
        chunks = await reading
        expect_equal(chunks[-1].finish_reason, "abort", "finish reason")
        expect(0 < len(_ids(chunks)) < LONG, f"{len(_ids(chunks))} ids of an aborted generation of {LONG}")
        prompt = chunks[0].prompt_token_ids
        expect(prompt is not None and prompt.tolist() == _prompt(engine).tolist(), f"prompt ids: got {prompt}")
        sizes = [(chunk.token_ids.size, chunk.log_probs.size) for chunk in chunks]
        expect(all(ids == log_probs for ids, log_probs in sizes), f"ids and log probabilities: {sizes}")


async def abort_of_what_has_ended_is_harmless(engine: Engine) -> None:
    """Aborting a generation that has ended does nothing."""
    generation = _generation(engine)
    await _chunks(generation)
    await generation.abort()
    await max_tokens_are_the_most(engine)


async def closed_iterator_frees_its_slot(engine: Engine) -> None:
    """Generations whose iterator is closed are over: however many there were, the next call is served."""
    for _ in range(4):
        await asyncio.gather(*(_until_generated(_generation(engine, max_tokens=LONG), 1) for _ in range(8)))
    await max_tokens_are_the_most(engine)


async def bad_parameter_is_the_requests_error(engine: Engine) -> None:
    """A sampling parameter that cannot be is `InvalidRequestError`, before anything is generated."""

    async def ask() -> None:
        await _chunks(_generation(engine, sampling={"temperature": -1.0}))

    (outcome,) = await asyncio.gather(ask(), return_exceptions=True)
    expect(isinstance(outcome, InvalidRequestError), f"temperature -1: got {outcome!r}, expected InvalidRequestError")
    await engine.check_health()


# --- beside each other -------------------------------------------------------------------------------------------


async def concurrent_calls_do_not_mix(engine: Engine) -> None:
    """Each of many calls at the same time has its own prompt, its own length, and its own end."""
    prompt = _prompt(engine)
    longest = min(24, prompt.size)

    async def call(number: int) -> None:
        own = prompt[: longest - number % longest]
        chunks = await _chunks(_generation(engine, own, max_tokens=number + 1, stream=number % 2 == 0))
        reported = chunks[0].prompt_token_ids
        expect(reported is not None and reported.tolist() == own.tolist(), f"prompt of call {number}: got {reported}")
        expect_equal((len(_ids(chunks)), chunks[-1].finish_reason), (number + 1, "length"), f"ids of call {number}")

    await asyncio.gather(*(call(number) for number in range(16)))


# --- what else is said -------------------------------------------------------------------------------------------


async def sampling_is_on_record(engine: Engine) -> None:
    """`Generation.sampling` has the parameters that were asked for, as they are in force, and the limit."""
    generation = _generation(engine, sampling={"temperature": 0.5})
    await _chunks(generation)
    found = {name: generation.sampling.get(name) for name in ("temperature", "max_tokens")}
    expect_equal(found, {"temperature": 0.5, "max_tokens": _SHORT}, "sampling")


async def events_make_a_turn(engine: Engine) -> None:
    """The parser's events for the chunks, streamed or not, can be put together to a turn."""
    for stream in (False, True):
        generation = _generation(engine, stream=stream)
        builder = TurnBuilder()
        for chunk in await _chunks(generation):
            for event in generation.parser.feed(chunk):
                builder.add(event)
        builder.turn()
        expect(0 <= generation.parser.reasoning_tokens <= _SHORT, "more ids are thinking than were generated")


async def closing_twice_is_harmless(engine: Engine) -> None:
    """An engine may be closed again. Not among the checks that every engine is put through: it ends the engine."""
    await engine.close()
    await engine.close()


def _prompt(engine: Engine) -> IdArray:
    return engine.template.encode_plain("Once upon a time there was an engine, and it said what it had been given.")


def _generation(
    engine: Engine,
    prompt: IdArray | None = None,
    *,
    max_tokens: int = _SHORT,
    stream: bool = True,
    top_logprobs: int | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Generation:
    """A call that generates exactly `max_tokens` ids."""
    request = ModelRequest(
        requested_model=engine.model.name,
        conversation=Conversation((Message("user", "hi"),)),
        sampling={"min_tokens": max_tokens, **(sampling or {})},
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        stream=stream,
    )
    return engine.generate(
        call_id=uuid4().hex,
        prompt_ids=_prompt(engine) if prompt is None else prompt,
        request=request,
        max_tokens=max_tokens,
        stream=stream,
    )


async def _chunks(generation: Generation) -> list[GenerationChunk]:
    async with aclosing(generation.chunks) as chunks:
        found = [chunk async for chunk in chunks]
    expect(bool(found), "a generation without a chunk")
    return found


async def _until_generated(generation: Generation, least: int) -> None:
    """Reads until so many ids are there, then closes the iterator."""
    seen = 0
    async with aclosing(generation.chunks) as chunks:
        async for chunk in chunks:
            seen += chunk.token_ids.size
            if seen >= least:
                return


def _ids(chunks: Sequence[GenerationChunk]) -> list[int]:
    return [int(one) for chunk in chunks for one in chunk.token_ids]


ENGINE_CHECKS: Final[Mapping[str, EngineCheck]] = {
    check.__name__: check
    for check in (
        prompt_is_reported,
        log_probs_align,
        arrays_beside_ids_align,
        ids_are_of_the_model,
        shown_log_probs_align,
        finish_reason_comes_once,
        max_tokens_are_the_most,
        abort_says_what_was_generated,
        abort_of_what_has_ended_is_harmless,
        closed_iterator_frees_its_slot,
        bad_parameter_is_the_requests_error,
        concurrent_calls_do_not_mix,
        sampling_is_on_record,
        events_make_a_turn,
    )
}
"""The checks that every engine is put through, by name."""
