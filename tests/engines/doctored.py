"""The real adapter over an `AsyncLLM` that is none: what vLLM's outputs say can be written by hand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.vllm import VllmEngine

Doctor = Callable[[int, RequestOutput], None]
"""Does something to the n-th output."""


class DoctoredLlm:
    """Generates `ids`, one output for each or one for all, as it is asked. They can be set anew between calls."""

    def __init__(self, tokenizer: Any, ids: list[int], doctor: Doctor = lambda n, output: None) -> None:
        self.renderer = SimpleNamespace(tokenizer=tokenizer)
        self.model_config = SimpleNamespace(
            model="",
            max_model_len=4096,
            get_vocab_size=lambda: len(tokenizer),
            get_diff_sampling_param=dict,
            hf_config=SimpleNamespace(model_type="llama"),
            hf_text_config=SimpleNamespace(model_type="llama"),
        )
        self.ids = ids
        self._doctor = doctor
        self.asked: list[dict[str, Any]] = []
        """The keyword arguments of every call, with its `prompt_token_ids` and `params`."""

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **keywords: Any
    ) -> AsyncGenerator[RequestOutput]:
        self.asked.append({**keywords, "prompt_token_ids": prompt["prompt_token_ids"], "params": params})
        tokenizer = self.renderer.tokenizer
        steps = [[n] for n in self.ids] if params.output_kind.name == "DELTA" else [self.ids]
        for number, ids in enumerate(steps):
            completion = CompletionOutput(
                index=0,
                text=tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens),
                token_ids=list(ids),
                cumulative_logprob=None,
                logprobs=[{n: Logprob(-0.5, rank=1, decoded_token=tokenizer.decode([n]))} for n in ids],
                finish_reason="stop" if number == len(steps) - 1 else None,
            )
            output = RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=list(prompt["prompt_token_ids"]),
                prompt_logprobs=None,
                outputs=[completion],
                finished=completion.finish_reason is not None,
            )
            self._doctor(number, output)
            yield output


@cache
def template_of(tokenizer: Any) -> HfChatTemplate:
    return HfChatTemplate.from_tokenizer(tokenizer, stop_token_ids=())


def engine_over(llm: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None) -> VllmEngine:
    template = template_of(llm.renderer.tokenizer)
    return VllmEngine(llm, name="policy", template=template, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
