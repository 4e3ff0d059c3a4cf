"""A process that holds a real engine, says "streaming" once it generates, and goes on until it is killed."""

from __future__ import annotations

import asyncio

import numpy as np

from gym_capture.calls import ModelRequest
from gym_capture.capture.records import as_ids
from gym_capture.conversation import Conversation
from gym_capture.engines.vllm import VllmEngine
from gym_capture.models import tiny_dir

ENGINE_ARGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8}


def start() -> VllmEngine:
    return VllmEngine.start(
        model=str(tiny_dir()), name="policy", tool_parser="hermes", reasoning_parser=None, engine_args=ENGINE_ARGS
    )


async def main() -> None:
    engine = start()
    request = ModelRequest(requested_model="policy", conversation=Conversation(()), sampling={"min_tokens": 4000})
    while True:
        ids = as_ids(np.array([1, 2, 3], np.int32))
        generation = engine.generate(call_id="c", prompt_ids=ids, request=request, max_tokens=4000, stream=True)
        async for _ in generation.chunks:
            print("streaming", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
