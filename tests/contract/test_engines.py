"""The contract of engines, over the scripted one. The real one is put through it in `tests/engines`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gym_capture.conformance.engine import ENGINE_CHECKS, LONG, closing_twice_is_harmless, run_engine_conformance
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, ScriptedEngine, Step
from gym_capture.errors import InvalidRequestError
from gym_capture.models import tiny_dir


@pytest.fixture(scope="module")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


def obedient(call: EngineCall) -> Script:
    """As many ids as were asked for. A long generation is one that has not ended yet."""
    if call.request.sampling.get("temperature", 0) < 0:
        raise InvalidRequestError("temperature must not be negative", param="temperature")
    numbers = range(1, min(call.max_tokens, 50) + 1)
    steps = [Step(token_ids=[number], text="word ", sampling_mask=[[number, 0]]) for number in numbers]
    experts = np.zeros((call.prompt_ids.size + len(numbers) - 1, 2, 1), dtype=np.int16)
    return Script(steps=steps, finish_reason="length", hangs=call.max_tokens == LONG, routed_experts=experts)


def failures(template: HfChatTemplate, script: Callable[[EngineCall], Script]) -> dict[str, str]:
    results = asyncio.run(run_engine_conformance(ScriptedEngine(template, script), timeout_s=20.0))
    assert [result.name for result in results] == list(ENGINE_CHECKS)
    return {result.name: result.failure for result in results if result.failure is not None}


def test_the_scripted_engine_keeps_the_contract(template: HfChatTemplate) -> None:
    assert failures(template, obedient) == {}
    asyncio.run(closing_twice_is_harmless(ScriptedEngine(template, obedient)))


def without_prompt(call: EngineCall) -> Script:
    return replace(obedient(call), reports_prompt=False)


def without_log_probs(call: EngineCall) -> Script:
    script = obedient(call)
    return replace(script, steps=[replace(step, log_probs=[]) for step in script.steps])


def with_impossible_log_probs(call: EngineCall) -> Script:
    script = obedient(call)
    return replace(script, steps=[replace(step, log_probs=[0.5]) for step in script.steps])


def with_another_mask(call: EngineCall) -> Script:
    script = obedient(call)
    return replace(script, steps=[replace(step, sampling_mask=[[0]]) for step in script.steps])


def with_too_few_experts(call: EngineCall) -> Script:
    script = obedient(call)
    assert script.routed_experts is not None
    return replace(script, routed_experts=script.routed_experts[1:])


def without_end(call: EngineCall) -> Script:
    return replace(obedient(call), finish_reason=None)


def one_too_many(call: EngineCall) -> Script:
    script = obedient(call)
    return replace(script, steps=[*script.steps, Step(token_ids=[1])])


def of_another_vocabulary(call: EngineCall) -> Script:
    return replace(obedient(call), steps=[Step(token_ids=[10**9])] * min(call.max_tokens, 50))


def deaf(call: EngineCall) -> Script:
    """Is through before anybody can end it."""
    script = obedient(call)
    return replace(script, steps=[Step(token_ids=[1] * call.max_tokens)], hangs=False)


def taking_anything(call: EngineCall) -> Script:
    return obedient(replace(call, request=replace(call.request, sampling={})))


@pytest.mark.parametrize(
    ("script", "failing"),
    [
        (without_prompt, {"prompt_is_reported", "abort_says_what_was_generated", "concurrent_calls_do_not_mix"}),
        (without_log_probs, {"log_probs_align", "abort_says_what_was_generated", "shown_log_probs_align"}),
        (with_impossible_log_probs, {"log_probs_align"}),
        (with_another_mask, {"arrays_beside_ids_align"}),
        (with_too_few_experts, {"arrays_beside_ids_align"}),
        (without_end, {"finish_reason_comes_once"}),
        (one_too_many, {"max_tokens_are_the_most", "concurrent_calls_do_not_mix"}),
        (of_another_vocabulary, {"ids_are_of_the_model"}),
        (deaf, {"abort_says_what_was_generated"}),
        (taking_anything, {"bad_parameter_is_the_requests_error"}),
    ],
)
def test_the_suite_sees_what_an_engine_does_wrong(
    script: Callable[[EngineCall], Script], failing: set[str], template: HfChatTemplate
) -> None:
    assert failing <= set(failures(template, script))
