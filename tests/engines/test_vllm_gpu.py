"""What only vLLM's newer model runner gives: routed experts, sampling masks, replay of recorded ids.

They run where there is a GPU. Elsewhere `serving/test_arrays_beside_ids.py` and `contract/test_engines.py` hold what is
made of it, with an engine that says what a script says, and `test_vllm_start.py` that it is refused.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from gym_capture.calls import ModelRequest
from gym_capture.capture.records import as_ids
from gym_capture.conversation import Conversation
from gym_capture.engines.vllm import VllmEngine
from gym_capture.engines.vllm_scoring import Drawn, VllmScorer
from gym_capture.models import tiny_dir

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's newer model runner wants a GPU"),
]

ARGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "gpu_memory_utilization": 0.2}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts under the tiny model's tokenizer."""
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("moe")
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir())
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_experts_and_masks_align_also_behind_a_cached_prompt(moe: Path) -> None:
    async def run() -> None:
        asked = {"enable_return_routed_experts": True, "return_sampling_mask": True}
        engine = VllmEngine.start(
            model=str(moe), name="policy", tool_parser=None, reasoning_parser=None, engine_args={**ARGS, **asked}
        )
        request = ModelRequest(
            requested_model="policy",
            conversation=Conversation(()),
            sampling={"temperature": 1.0, "top_k": 8, "ignore_eos": True},
        )
        try:
            prompt = list(range(5, 105))
            for call in range(3):
                generation = engine.generate(
                    call_id=f"c{call}",
                    prompt_ids=as_ids(np.array(prompt, np.int32)),
                    request=request,
                    max_tokens=20,
                    stream=call == 1,
                )
                chunks = [chunk async for chunk in generation.chunks]
                ids = [int(n) for chunk in chunks for n in chunk.token_ids]
                experts = chunks[-1].routed_experts
                assert experts is not None
                assert experts.shape[1:] == (2, 2)
                assert len(experts) >= len(prompt) + len(ids) - 1
                for chunk in chunks:
                    if chunk.token_ids.size:
                        assert chunk.sampling_mask is not None
                        assert (chunk.sampling_mask == chunk.token_ids[:, None]).any(axis=1).all()
                prompt = [*prompt, *ids, 7, 8]
        finally:
            await engine.close()

    asyncio.run(run())


def test_recorded_ids_are_replayed(tmp_path: Path) -> None:
    async def run() -> None:
        scorer = VllmScorer.start(model=str(tiny_dir()), engine_args=ARGS)
        try:
            assert scorer.replays
            ids = as_ids(np.arange(5, 45, dtype=np.int32))
            drawn = [Drawn(10, 20, 1.0, 0, 1.0, 0.0), Drawn(25, 40, 1.0, 0, 1.0, 0.0)]
            replayed = await scorer.score(ids, drawn)
            scorer.replays = False
            for one, other in zip(replayed, await scorer.score(ids, drawn), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-2)
        finally:
            await scorer.close()

    asyncio.run(run())
