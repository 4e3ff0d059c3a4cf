"""Outputs of vLLM that do not align are the engine's fault, and never a record that looks sound."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
from vllm.tokenizers.hf import get_cached_tokenizer

from gym_capture.engines.vllm_outputs import chunk_of, sampled_log_probs
from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.models import tiny_dir
from gym_capture.serving.call_service import CallService
from tests.engines.doctored import Doctor, DoctoredLlm, engine_over
from tests.serving.replica import LocalState, gateway_over

SAID = [2, 3, 4, 5]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16},
}


def log_probs_of(output: RequestOutput) -> list[dict[int, Logprob]]:
    found = output.outputs[0].logprobs
    assert isinstance(found, list)
    return found


def one_too_few(n: int, output: RequestOutput) -> None:
    if n == 0:
        log_probs_of(output).pop()


def one_too_many(n: int, output: RequestOutput) -> None:
    if n == 0:
        log_probs_of(output).append({9: Logprob(-0.1)})


def none_at_all(n: int, output: RequestOutput) -> None:
    output.outputs[0].logprobs = None


def one_moved_to_the_next_step(n: int, output: RequestOutput) -> None:
    """Added up it is as many as there are ids. Whole, there is no next step."""
    if n == 0:
        log_probs_of(output).pop()
    if n == 1:
        log_probs_of(output).append({9: Logprob(-0.1)})


def surplus_without_an_id(n: int, output: RequestOutput) -> None:
    if n == 0:
        output.outputs[0].token_ids, output.outputs[0].text = [], ""


def another_id(n: int, output: RequestOutput) -> None:
    if n == 0:
        log_probs_of(output)[0] = {9: Logprob(-0.1)}


def not_a_number(n: int, output: RequestOutput) -> None:
    if n == 0:
        log_probs_of(output)[0] = {SAID[0]: Logprob(float("nan"))}


def no_prompt(n: int, output: RequestOutput) -> None:
    output.prompt_token_ids = None


def two_completions(n: int, output: RequestOutput) -> None:
    output.outputs *= 2


def no_completion(n: int, output: RequestOutput) -> None:
    output.outputs = []


def ids_that_are_none(n: int, output: RequestOutput) -> None:
    output.outputs[0].token_ids = [-1] * len(output.outputs[0].token_ids)


UNALIGNED: list[Doctor] = [
    one_too_few,
    one_too_many,
    none_at_all,
    one_moved_to_the_next_step,
    surplus_without_an_id,
    another_id,
    not_a_number,
    no_prompt,
]
MALFORMED: list[Doctor] = [two_completions, no_completion, ids_that_are_none]


@cache
def tokenizer() -> Any:
    return get_cached_tokenizer(AutoTokenizer.from_pretrained(tiny_dir()))


def ask(route: str, doctor: Doctor, **fields: Any) -> tuple[httpx.Response, LocalState]:
    """One call through the real gateway, call service and adapter."""
    state = LocalState()
    service = CallService(
        engine_over(DoctoredLlm(tokenizer(), SAID, doctor)),
        state=state,
        fingerprinter=Fingerprinter(),
        prefix_supply=True,
        sampling_pin={},
        session_cache=4,
    )
    app = gateway_over(service)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", trust_env=False) as http:
            return await http.post(f"/ng-rollout/r1/v1/{route}", json={"model": "policy", **BODIES[route], **fields})

    return asyncio.run(run()), state


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("doctor", UNALIGNED, ids=lambda doctor: doctor.__name__)
def test_CP_05_what_does_not_align_is_served_and_masks_the_rollout(doctor: Doctor, route: str, stream: bool) -> None:
    response, state = ask(route, doctor, stream=stream)
    assert response.status_code == 200
    assert "error" not in response.text.replace('"error":null', "")
    snapshot = asyncio.run(state.snapshot())
    assert snapshot.entries == ()
    assert any(reason.startswith("capture_failed:") for reason in snapshot.incomplete)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("doctor", [one_too_few, one_too_many, none_at_all, another_id], ids=lambda it: it.__name__)
def test_log_probabilities_that_a_client_asked_for_and_cannot_get_are_the_engines_fault(
    doctor: Doctor, stream: bool
) -> None:
    response, state = ask("chat/completions", doctor, stream=stream, logprobs=True, top_logprobs=1)
    check_engine_fault(response, state, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("doctor", MALFORMED, ids=lambda doctor: doctor.__name__)
def test_malformed_outputs_are_the_engines_fault(doctor: Doctor, route: str, stream: bool) -> None:
    response, state = ask(route, doctor, stream=stream)
    check_engine_fault(response, state, stream=stream)


def check_engine_fault(response: httpx.Response, state: LocalState, *, stream: bool) -> None:
    assert response.status_code >= 500 or (stream and "error" in response.text)
    assert "zip" not in response.text
    assert "invalid_request" not in response.text
    if response.status_code >= 500:
        assert "error" in json.loads(response.text)
    for entry in asyncio.run(state.snapshot()).entries:  # of what had come before
        assert entry.reply.finish_reason == "abort"


def test_outputs_that_align_are_recorded() -> None:
    response, state = ask("chat/completions", lambda n, output: None)
    assert response.status_code == 200
    (entry,) = asyncio.run(state.entries())
    assert entry.generation_token_ids.tolist() == SAID
    assert entry.generation_log_probs.tolist() == [-0.5] * 4


def test_CP_01_the_log_probability_is_that_of_the_sampled_id_not_of_the_first_alternative() -> None:
    positions = [
        {512: Logprob(-0.1, rank=1), 880: Logprob(-2.3, rank=2)},
        {7: Logprob(-0.5, rank=1)},
    ]
    found = sampled_log_probs([880, 7], positions)
    np.testing.assert_array_equal(found, np.float32([-2.3, -0.5]))


def test_nothing_is_cut_or_filled_up() -> None:
    one = {880: Logprob(-2.5)}
    np.testing.assert_array_equal(sampled_log_probs([880, 7], [one]), np.float32([-2.5]))
    np.testing.assert_array_equal(sampled_log_probs([880], [one, one]), np.float32([-2.5, np.nan]))
    np.testing.assert_array_equal(sampled_log_probs([7], [one]), np.float32([np.nan]))


def test_a_sampling_mask_is_rows_of_ids_of_one_width() -> None:
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[7, 8],
        cumulative_logprob=None,
        logprobs=[{7: Logprob(-0.1)}, {8: Logprob(-0.2)}],
        sampling_mask=SamplingMask([[3, 7, 9], [8]]),
    )
    output = RequestOutput("r", None, [1], None, [completion], finished=False)
    mask = chunk_of(output, completion, "", first=True, top_logprobs=None).sampling_mask
    assert mask is not None
    assert (mask.dtype, mask.tolist()) == (np.int32, [[3, 7, 9], [8, -1, -1]])
