"""One vLLM `RequestOutput` as a chunk of a generation.

Invariant: what the engine reports is passed on as it is, and nothing in it is cut, filled up or put right: log
probabilities are as many as the engine gave, and that of an id which is not among its alternatives is NaN. Such a chunk
can be served, but no record can be made of it. And it is never the request's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from gym_capture.calls import TokenLogProb
from gym_capture.capture.records import LogProbArray, WeightSpan, as_ids
from gym_capture.capture.sampling_masks import mask_of
from gym_capture.engines.base import GenerationChunk
from gym_capture.errors import EngineError


def only_completion(output: RequestOutput) -> CompletionOutput:
    """One was asked for. Raises `EngineError` if there are more, or none."""
    if len(output.outputs) != 1:
        raise EngineError(f"the engine gave {len(output.outputs)} completions, where one was asked for")
    return output.outputs[0]


def chunk_of(
    output: RequestOutput, completion: CompletionOutput, text: str, *, first: bool, top_logprobs: int | None
) -> GenerationChunk:
    """Raises `EngineError` for ids that are none, and for log probabilities that a client asked for and cannot get."""
    positions = completion.logprobs or []
    mask = completion.sampling_mask
    try:
        ids = as_ids(np.asarray(completion.token_ids))
        prompt = as_ids(np.asarray(output.prompt_token_ids)) if first and output.prompt_token_ids is not None else None
        log_probs = sampled_log_probs(completion.token_ids, positions)
        sampling_mask = None if mask is None else mask_of(mask.token_ids)
    except (ValueError, TypeError) as error:
        raise EngineError(f"the engine's output is malformed: {error}") from error
    return GenerationChunk(
        token_ids=ids,
        log_probs=log_probs,
        text=text,
        prompt_token_ids=prompt,
        cached_tokens=output.num_cached_tokens or 0,
        finish_reason=completion.finish_reason,
        stop_reason=None if completion.stop_reason is None else str(completion.stop_reason),
        weight_versions=tuple(
            WeightSpan(span.start, span.end, str(span.version)) for span in completion.weight_versions or ()
        ),
        shown_log_probs=None if top_logprobs is None else _shown(completion.token_ids, positions, top_logprobs),
        routed_experts=completion.routed_experts,
        sampling_mask=sampling_mask,
    )


def sampled_log_probs(token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]]) -> LogProbArray:
    """float32, one for each position that the engine gave: that of the id which was sampled, never simply the first.

    NaN where that id is not among the position's alternatives, or where there is no id.
    """
    missing = Logprob(float("nan"))
    values = [
        position.get(token, missing).logprob
        for token, position in zip_longest(token_ids, positions)
        if position is not None
    ]
    return np.asarray(values, dtype=np.float32)


def _shown(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]], top_logprobs: int
) -> tuple[TokenLogProb, ...]:
    if len(positions) != len(token_ids) or any(
        token not in position for token, position in zip(token_ids, positions, strict=True)
    ):
        raise EngineError("the engine's log probabilities do not belong to the tokens that it sampled")
    return tuple(
        TokenLogProb(
            position[token].decoded_token or "",
            position[token].logprob,
            tuple(
                (alternative.decoded_token or "", alternative.logprob)
                for alternative in sorted(position.values(), key=lambda item: item.rank or 0)[:top_logprobs]
            ),
        )
        for token, position in zip(token_ids, positions, strict=True)
    )
