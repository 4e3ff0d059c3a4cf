"""What the replicas of the fault tests run: an engine whose every reply can be told beforehand, by anybody.

Invariant: a reply is a function of its question and of its call's id, so that whoever has both - a client, or an audit
of the log - can say which text, ids and log probabilities they must stand for, and no two calls say the same.

The ids are not those into which the text would be tokenized again: a graph that does so anyway shows.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from gym_capture.calls import ModelRequest
from gym_capture.capture.records import IdArray
from gym_capture.conversation import Message
from gym_capture.engines.base import Engine, Generation, GenerationChunk, ModelInfo
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, ScriptedEngine, Step
from gym_capture.engines.scripted_weights import ScriptedWeights
from gym_capture.splice.template import ChatTemplate

_STOP: Final = "<|im_end|>"
_WORDS: Final = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "jetty",
    "kelp",
    "loch",
)
_BETWEEN: Final = "\t"
_SILENT: Final = re.compile(r"\bwait (\d+) s\b")
_ASKED: Final = re.compile(r"\bin (\d+) words\b")


def running(directory: Path) -> list[str]:
    """What engines are asked that generate now. A replica that was killed generates nothing, whatever it has left."""
    files = [file.split(_BETWEEN) for file in os.listdir(directory)]
    alive = {process for process in {process for process, *_ in files} if psutil.pid_exists(int(process))}
    return [name for process, name, _ in files if process in alive]


def question(name: str, *, words: int, silent_s: int = 0) -> str:
    """A question that is answered in so many words, after so long a silence."""
    return f"{name}: {f'wait {silent_s} s and ' if silent_s else ''}answer in {words} words."


def answer(asked: str, call_id: str) -> str:
    """What the call with this id says to `asked`. No two calls say the same."""
    words = _ASKED.search(asked)
    assert words is not None, f"not a question of these tests: {asked!r}"
    rng = random.Random(f"{asked} {call_id}")
    return " ".join([call_id, *rng.choices(_WORDS, k=int(words[1]))])


class Voice:
    """What replies are as tokens."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._letters: dict[str, list[int]] = {}

    def steps(self, asked: str, call_id: str) -> list[Step]:
        """The ids, log probabilities and texts of a whole reply, the stop token included."""
        rng = random.Random(call_id)
        text = answer(asked, call_id)
        steps = []
        while text:
            size = rng.randint(1, 9)
            piece, text = text[:size], text[size:]
            steps.append(_step([number for letter in piece for number in self._spelled(letter)], piece))
        return [*steps, _step(self._template.encode(_STOP).tolist(), "")]

    def _spelled(self, letter: str) -> list[int]:
        """Letter by letter: shorter than a tokenizer would cut, and quick."""
        if letter not in self._letters:
            self._letters[letter] = self._template.encode_plain(letter).tolist()
        return self._letters[letter]


def _step(token_ids: list[int], text: str) -> Step:
    return Step(token_ids=token_ids, log_probs=[_log_prob(number) for number in token_ids], text=text)


def _log_prob(token_id: int) -> float:
    """With which an id is sampled: another one than the ids beside it."""
    return -(1 + token_id % 997) / 256


def start(
    *,
    model: str,
    name: str,
    tool_parser: str | None,
    reasoning_parser: str | None,
    engine_args: Mapping[str, Any],
) -> Engine:
    """The engine of a replica. `engine_args`: `token_s`; `running_dir` if it shall be known what it generates, and
    `weights_dir` if it shall be known, and held up, what it does with weights.
    """
    running_dir, weights_dir = engine_args.get("running_dir"), engine_args.get("weights_dir")
    template = HfChatTemplate.from_model_dir(Path(model))
    return PacedEngine(
        template,
        name=name,
        token_s=engine_args["token_s"],
        running_dir=None if running_dir is None else Path(running_dir),
        weights=ScriptedWeights(model=Path(model))
        if weights_dir is None
        else ScriptedWeights(model=Path(model), on_step=HeldSteps(Path(weights_dir))),
    )


class HeldSteps:
    """Notes what is done with weights in files of a folder, and waits while there is one that says so.

    `hold(folder, step)` makes that one; `doing(folder, step)` are the processes that have come to the step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __call__(self, step: str, version: str) -> None:
        name = f"{step} {version}"
        (self._folder / f"{name}{_BETWEEN}{os.getpid()}").touch()
        while True:
            if not _hold(self._folder, name).exists():
                return
            await asyncio.sleep(0.02)


def _hold(folder: Path, step: str) -> Path:
    return folder / f"hold {step}"


def hold(folder: Path, step: str) -> Path:
    """From now on the step, e.g. `apply 2`, waits until the file that is returned is gone."""
    held = _hold(folder, step)
    held.touch()
    return held


def doing(folder: Path, step: str) -> list[int]:
    """Processes that have come to the step."""
    return [int(file.name.partition(_BETWEEN)[2]) for file in folder.glob(f"{step}{_BETWEEN}*")]


class PacedEngine:
    """A scripted engine that takes its time, so that faults hit it in the middle of a reply.

    A reply that is not streamed takes as long as one that is, and is as far as that one when it is aborted.

    running_dir: holds a file for each generation that is under way, in all replicas; `running` reads it.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        name: str,
        token_s: float,
        running_dir: Path | None,
        weights: ScriptedWeights | None = None,
    ) -> None:
        self._voice = Voice(template)
        self._scripted = ScriptedEngine(template, self._script, name=name, max_model_len=8192, weights=weights)
        self._token_s = token_s
        self._running_dir = running_dir

    @property
    def model(self) -> ModelInfo:
        return self._scripted.model

    @property
    def template(self) -> ChatTemplate:
        return self._scripted.template

    @property
    def weights(self) -> ScriptedWeights:
        return self._scripted.weights

    def generate(
        self,
        *,
        call_id: str,
        prompt_ids: IdArray,
        request: ModelRequest,
        max_tokens: int,
        stream: bool,
        turn_start: int | None = None,
    ) -> Generation:
        generation = self._scripted.generate(
            call_id=call_id, prompt_ids=prompt_ids, request=request, max_tokens=max_tokens, stream=stream
        )
        aborted = asyncio.Event()

        async def abort() -> None:
            aborted.set()

        return replace(generation, chunks=self._paced(generation.chunks, _asked(request), aborted), abort=abort)

    async def check_health(self) -> None:
        await self._scripted.check_health()

    async def close(self) -> None:
        await self._scripted.close()

    def _script(self, call: EngineCall) -> Script:
        return Script(steps=self._voice.steps(_asked(call.request), call.call_id))

    async def _paced(
        self, chunks: AsyncGenerator[GenerationChunk], asked: str, aborted: asyncio.Event
    ) -> AsyncGenerator[GenerationChunk]:
        silent = _SILENT.search(asked)
        silent_s = 0 if silent is None else int(silent[1])
        with self._running(asked):
            async with aclosing(chunks):
                async for chunk in chunks:
                    began = time.monotonic()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(silent_s + self._token_s * chunk.token_ids.size):
                            await aborted.wait()
                        generating_s = max(0.0, time.monotonic() - began - silent_s)
                        yield _cut(chunk, int(generating_s / self._token_s) if self._token_s else None)
                        return
                    silent_s = 0
                    yield chunk

    @contextmanager
    def _running(self, asked: str) -> Iterator[None]:
        if self._running_dir is None:
            yield
            return
        name = asked.partition(":")[0]
        file = self._running_dir / _BETWEEN.join((str(os.getpid()), name, uuid.uuid4().hex))
        file.touch()
        try:
            yield
        finally:
            file.unlink()


def _asked(request: ModelRequest) -> str:
    if request.raw_prompt is not None:
        return request.raw_prompt
    last = request.conversation.items[-1]
    assert isinstance(last, Message)
    return last.text


def _cut(chunk: GenerationChunk, size: int | None) -> GenerationChunk:
    """As much of it as there is when its generation is aborted."""
    kept = chunk.token_ids[:size]
    versions = chunk.weight_versions  # of the last chunk: over all ids
    end = versions[-1].end - (chunk.token_ids.size - kept.size) if versions else 0
    return replace(
        chunk,
        weight_versions=tuple(replace(span, end=min(span.end, end)) for span in versions if span.start < end),
        token_ids=kept,
        log_probs=chunk.log_probs[:size],
        text="",
        finish_reason="abort",
    )
