"""What vLLM is asked for when recorded ids are scored again, by an `AsyncLLM` that is none.

`commands/test_verify_logprobs.py` does it with a real one; replay wants a GPU (`test_vllm_gpu.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from gym_capture.capture.records import as_ids
from gym_capture.engines.vllm_scoring import Drawn, VllmScorer


class Llm:
    """Says -id / 100 of an id in a prompt, -id of one that is asked for or forced."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncGenerator[RequestOutput]:
        ids = prompt["prompt_token_ids"]
        self.asked.append((ids, params))
        forced = params.trace_decode_token_ids or params.logprob_token_ids or [0]
        completion = CompletionOutput(
            index=0, text="", token_ids=forced, cumulative_logprob=None, logprobs=[{n: Logprob(-n)} for n in forced]
        )
        of_prompt = None if params.prompt_logprobs is None else [None, *({n: Logprob(-n / 100)} for n in ids[1:])]
        yield RequestOutput(request_id, None, ids, of_prompt, [completion], finished=True)


IDS = as_ids(np.arange(1, 11, dtype=np.int32))
PLAIN = Drawn(2, 4, 1.0, 0, 1.0, 0.0)
WARM = Drawn(6, 8, 1.3, 5, 0.9, 0.1)


async def scored(*drawn: Drawn, replays: bool, max_model_len: int = 100) -> tuple[Llm, list[list[float]]]:
    llm: Any = Llm()
    scorer = VllmScorer(llm, max_model_len=max_model_len, replays=replays)
    return llm, [each.tolist() for each in await scorer.score(IDS, drawn)]


async def test_one_prompt_for_what_is_plain_and_a_step_an_id_for_the_rest() -> None:
    llm, found = await scored(PLAIN, WARM, replays=False)
    assert found == [pytest.approx([-0.03, -0.04]), [-7, -8]]
    (prompt, params), *steps = llm.asked
    assert (prompt, params.prompt_logprobs, params.max_tokens) == ([1, 2, 3, 4], 0, 1)
    assert [(ids, step.logprob_token_ids) for ids, step in steps] == [
        ([1, 2, 3, 4, 5, 6], [7]),
        ([1, 2, 3, 4, 5, 6, 7], [8]),
    ]
    assert {(step.temperature, step.top_k, step.top_p, step.min_p) for _, step in steps} == {(1.3, 5, 0.9, 0.1)}


async def test_an_engine_that_replays_is_given_the_ids() -> None:
    llm, found = await scored(PLAIN, WARM, replays=True)
    assert found == [[-3, -4], [-7, -8]]
    assert [(ids, params.trace_decode_token_ids, params.max_tokens) for ids, params in llm.asked] == [
        ([1, 2], [3, 4], 2),
        ([1, 2, 3, 4, 5, 6], [7, 8], 2),
    ]
    assert llm.asked[1][1].top_k == 5


async def test_what_the_context_has_no_room_for_has_no_value() -> None:
    _, found = await scored(PLAIN, WARM, replays=False, max_model_len=7)
    assert found[0] == pytest.approx([-0.03, -0.04])
    assert np.isnan(found[1]).all()
    # A prompt needs room for an id behind it: what ends with the context is asked for step by step.
    llm, found = await scored(PLAIN, replays=False, max_model_len=4)
    assert found == [[-3, -4]]
    assert all(params.prompt_logprobs is None for _, params in llm.asked)
