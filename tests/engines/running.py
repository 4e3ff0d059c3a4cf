"""A real engine of a tiny model, in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest

from gym_capture.calls import ModelRequest, TurnBuilder
from gym_capture.capture.records import as_ids
from gym_capture.conformance.engine import closing_twice_is_harmless
from gym_capture.conversation import AssistantTurn
from gym_capture.engines.base import GenerationChunk
from gym_capture.engines.vllm import VllmEngine
from gym_capture.models import tiny_dir

ENGINE_ARGS: Final = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8}
PROMPT: Final = [1, 2, 3]


@dataclass(frozen=True)
class Running:
    """An engine and the event loop that it belongs to."""

    engine: VllmEngine
    runner: asyncio.Runner

    def generate(
        self, request: ModelRequest, *, prompt: list[int] | None = None, max_tokens: int = 8, stream: bool = False
    ) -> tuple[list[GenerationChunk], AssistantTurn]:
        async def run() -> tuple[list[GenerationChunk], AssistantTurn]:
            ids = as_ids(np.array(PROMPT if prompt is None else prompt, np.int32))
            generation = self.engine.generate(
                call_id=os.urandom(8).hex(), prompt_ids=ids, request=request, max_tokens=max_tokens, stream=stream
            )
            builder, chunks = TurnBuilder(), []
            async for chunk in generation.chunks:
                chunks.append(chunk)
                for event in generation.parser.feed(chunk):
                    builder.add(event)
            return chunks, builder.turn()

        return self.runner.run(run())


@contextmanager
def running_engine() -> Iterator[Running]:
    with asyncio.Runner() as runner:

        async def start() -> VllmEngine:
            return VllmEngine.start(
                model=str(tiny_dir()),
                name="policy",
                tool_parser="hermes",
                reasoning_parser=None,
                engine_args=ENGINE_ARGS,
            )

        with pytest.MonkeyPatch.context() as environment:  # for this engine: commands bound theirs
            environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
            engine = runner.run(start())
        yield Running(engine, runner)
        runner.run(closing_twice_is_harmless(engine))
