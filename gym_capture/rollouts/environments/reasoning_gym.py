"""Tasks of the package `reasoning_gym`: any of its data sets, with its own scorers.

Invariant: a task is made again from its data - data set, configuration, seed, place - and must come out as the question
that the data holds: a package of another version, which would score another question, is refused. Nothing is guessed of
an answer: it is what `extracted` finds, and a reply in which it finds none has no answer.

Flow: `tasks` makes questions -> one user message -> the last text of the agent -> `extracted` -> the data set's scorer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final

from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Observation, Score, Task

SYSTEM_PROMPT: Final = "Answer the question. End with the answer alone, between <answer> and </answer>."

_BOXED: Final = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_QUOTED: Final = re.compile(r"\"([^\"\n]+)\"|“([^“”\n]+)”|(?<!\w)'([^'\n]+)'(?!\w)")


class ReasoningGym:
    """One question. `system_prompt` says how to answer; empty: nothing does."""

    def __init__(self, *, system_prompt: str = SYSTEM_PROMPT) -> None:
        self._system_prompt = system_prompt
        self._scored_by: tuple[Any, Mapping[str, Any]] | None = None

    @staticmethod
    def tasks(count: int, *, seed: int = 0, dataset: str, config: dict[str, Any] | None = None) -> list[Task]:
        """The first `count` questions of a data set. Raises `ConfigError` if there is none of that name, or if `config`
        has what the data set does not take."""
        made = _dataset(dataset, json.dumps(config or {}, sort_keys=True), seed, count)
        return [
            Task(
                f"{dataset}-{seed}-{index}",
                {
                    "dataset": dataset,
                    "config": config or {},
                    "seed": seed,
                    "size": count,
                    "index": index,
                    "question": made[index]["question"],
                },
            )
            for index in range(count)
        ]

    async def reset(self, task: Task) -> Observation:
        question, dataset, entry = await asyncio.to_thread(_entry, task)
        self._scored_by = dataset, entry
        system = ({"role": "system", "content": self._system_prompt},) if self._system_prompt else ()
        return Observation((*system, {"role": "user", "content": question}))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"Error: there is no tool {name!r}; answer the question."

    async def score(self, answer: str) -> Score:
        if self._scored_by is None:
            raise ConfigError("a question is scored after it was asked")
        dataset, entry = self._scored_by
        # In a thread: some scorers compute.
        return Score({"score": float(await asyncio.to_thread(dataset.score_answer, extracted(answer), entry))})

    async def close(self) -> None:
        """Nothing is held."""


def extracted(reply: str) -> str | None:
    r"""The answer in a reply: in the last `<answer>`, else in the last `\boxed{}`, else the last quoted text."""
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return reply[start + len("<answer>") : end].strip()
    boxed = _last_boxed(reply)
    if boxed is not None:
        return boxed.strip()
    quoted = deque(_QUOTED.finditer(reply), maxlen=1)
    return str(quoted[0][quoted[0].lastindex or 0]).strip() if quoted else None


def _last_boxed(reply: str) -> str | None:
    r"""The content of the `\boxed{}` that begins last, of those that end."""
    opened: list[int | None] = []
    """Where the text of an open brace begins, if the brace is that of a box."""
    last: tuple[int, int] | None = None
    for found in _BOXED.finditer(reply):
        if found[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]):
                last = start, found.start()
        elif found[0] not in (r"\{", r"\}"):
            opened.append(None if found[0] == "{" else found.end())
    return None if last is None else reply[last[0] : last[1]]


def _entry(task: Task) -> tuple[str, Any, Mapping[str, Any]]:
    """The question of a task, its data set, and what that set knows of it. Raises `ConfigError`."""
    data = task.data
    try:
        dataset = _dataset(data["dataset"], json.dumps(data["config"], sort_keys=True), data["seed"], data["size"])
        entry: Mapping[str, Any] = dataset[data["index"]]
        question = data["question"]
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"task {task.task_id} is none of reasoning_gym: {type(error).__name__}: {error}") from None
    if entry["question"] != question:
        raise ConfigError(
            f"task {task.task_id}: this version of reasoning_gym makes another question of it: make the tasks again"
        )
    return question, dataset, entry


@lru_cache(maxsize=64)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    """A data set, which follows from its arguments alone. Kept, because some are slow to make."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"pip install gym-capture[reasoning-gym]: {error}") from None
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=3)
        meant = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"reasoning_gym has no data set {name!r}: {meant}")
    options = json.loads(config)
    known = sorted({field.name for field in fields(DATASETS[name][1])} - {"seed", "size"})
    for option in options:
        if option not in known:
            raise ConfigError(f"the data set {name!r} has no option {option!r}; its options are {', '.join(known)}")
    try:
        return create_dataset(name, **options, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"the data set {name!r} cannot be made with {config}: {error}") from None
