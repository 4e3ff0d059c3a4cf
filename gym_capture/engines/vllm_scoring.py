"""Recorded generations scored again by vLLM: what its weights say of ids that are given, and not sampled.

Invariant: a value is the log probability that this engine would have reported for that id at that place, under those
sampling parameters; NaN where there is no room for it in the engine's context.

Three ways, the same in what comes out:

    replay   the ids are forced, step by step as when they were sampled (`trace_decode_token_ids`): where vLLM's newer
             model runner runs, which wants a GPU
    prompt   log probabilities of a prompt, one pass: at temperature 1, with nothing cut off. vLLM's prompt log
             probabilities know no other
    step     otherwise: one id is asked of each place, behind the ids before it, which the prefix cache has
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from gym_capture.capture.records import IdArray, LogProbArray
from gym_capture.engines.vllm import VllmEngine
from gym_capture.engines.vllm_outputs import sampled_log_probs

_AT_ONCE: Final = 64
_CPU_CACHE: Final = {"kv_cache_memory_bytes": 1 << 30}
"""By itself vLLM takes nearly all memory of a machine without a GPU, and refuses one where something else runs."""


class Drawn(NamedTuple):
    """Ids `[start, end)` of a sequence, and how they were sampled."""

    start: int
    end: int
    temperature: float
    top_k: int
    """0: all."""
    top_p: float
    min_p: float

    @property
    def is_plain(self) -> bool:
        return (self.temperature, self.top_k, self.top_p, self.min_p) == (1.0, 0, 1.0, 0.0)

    def params(self, **others: Any) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **others,
        )


class VllmScorer:
    """An engine that is only asked for log probabilities."""

    def __init__(self, llm: AsyncLLM, *, max_model_len: int, replays: bool, engine: VllmEngine | None = None) -> None:
        """`engine`: ends with this."""
        self._llm = llm
        self._max_model_len = max_model_len
        self.replays = replays
        self._engine = engine
        self._numbers = count()
        self._room = asyncio.Semaphore(_AT_ONCE)

    @classmethod
    def start(cls, *, model: str, engine_args: Mapping[str, Any]) -> VllmScorer:
        """Tens of seconds. Raises `ConfigError`, and what vLLM raises of arguments that cannot work."""
        sized = engine_args.keys() & {*_CPU_CACHE, "gpu_memory_utilization"}
        asked = {**(_CPU_CACHE if current_platform.is_cpu() and not sized else {}), **engine_args}
        replays = bool(AsyncEngineArgs(model=model, **asked).create_engine_config().use_v2_model_runner)
        extra = {"enable_trace_replay": True} if replays else {}
        engine = VllmEngine.start(
            model=model, name="policy", tool_parser=None, reasoning_parser=None, engine_args={**asked, **extra}
        )
        return cls(engine.llm, max_model_len=engine.model.max_model_len, replays=replays, engine=engine)

    async def score(self, token_ids: IdArray, drawn: Sequence[Drawn]) -> list[LogProbArray]:
        """float32, of the ids of each of `drawn`."""
        ids = token_ids.tolist()
        in_prompt = [each for each in drawn if each.is_plain and each.end < self._max_model_len and not self.replays]
        prompt = await self._prompt(ids[: max(each.end for each in in_prompt)]) if in_prompt else None
        scored = []
        for each in drawn:
            if each.end > self._max_model_len:
                scored.append(np.full(each.end - each.start, np.nan, dtype=np.float32))
            elif self.replays:
                scored.append(await self._replay(ids, each))
            elif prompt is not None and each in in_prompt:
                scored.append(prompt[each.start : each.end])
            else:
                scored.append(await self._steps(ids, each))
        return scored

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def _replay(self, ids: list[int], drawn: Drawn) -> LogProbArray:
        trace = ids[drawn.start : drawn.end]
        params = drawn.params(trace_decode_token_ids=trace, max_tokens=len(trace), logprobs=0)
        output = await self._asked(ids[: drawn.start], params)
        return sampled_log_probs(trace, output.outputs[0].logprobs or [])

    async def _prompt(self, ids: list[int]) -> LogProbArray:
        """float32, of all ids; NaN of the first, which nothing predicts."""
        whole = Drawn(0, len(ids), 1.0, 0, 1.0, 0.0)
        output = await self._asked(ids, whole.params(max_tokens=1, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        return sampled_log_probs(ids, [each or {} for each in output.prompt_logprobs])

    async def _steps(self, ids: list[int], drawn: Drawn) -> LogProbArray:
        return np.array(
            await asyncio.gather(*(self._step(ids, drawn, at) for at in range(drawn.start, drawn.end))), np.float32
        )

    async def _step(self, ids: list[int], drawn: Drawn, at: int) -> float:
        output = await self._asked(ids[:at], drawn.params(max_tokens=1, logprob_token_ids=[ids[at]]))
        (found,) = output.outputs[0].logprobs or [{}]
        return float(found[ids[at]].logprob)

    async def _asked(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        async with self._room:
            outputs = self._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, f"score-{next(self._numbers)}")
            *_, last = [output async for output in outputs]
        return last
