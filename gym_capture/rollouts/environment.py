"""The environment seam, and a small tool environment with session state.

Invariant: an environment is made fresh for each rollout, and everything about a task follows from the `Task` value:
the same task and the same tool calls give the same texts and the same reward. What a model does wrong - an unknown
tool, bad arguments - is answered with text, because the model is to learn from it; an exception means that the
environment itself broke, and fails the attempt.

Flow: `reset` gives the opening messages and the tools -> the harness calls `call_tool` for each tool call of the
model -> `score` judges the final answer -> `close`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

__all__ = ["Environment", "EnvironmentFactory", "Observation", "Register", "Score", "Task", "TaskMaker"]


@dataclass(frozen=True, slots=True)
class Task:
    """One task; its `task_id` is a part of rollout ids, so it keeps to their alphabet."""

    task_id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """The data that the environment makes the task from; JSON."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An agent's start, as Chat Completions `messages` and `tools`."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    work_folder: Path | None = None
    """Where an agent that is a program of its own has to work, because the environment looks there afterwards. Without
    one the harness makes an empty folder."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward is the sum of its named components."""

    components: Mapping[str, float]

    @property
    def reward(self) -> float:
        return float(sum(self.components.values()))


class Environment(Protocol):
    """One session of one task."""

    async def reset(self, task: Task) -> Observation:
        """The agent's start. Called once, first."""
        ...

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carries out one tool call; what is wrong with it is told in the returned text."""
        ...

    async def score(self, answer: str) -> Score:
        """The reward of what was done in this session, with the agent's last text."""
        ...

    async def close(self) -> None:
        """Lets go of what the session holds. Called however the attempt ended."""
        ...


class EnvironmentFactory(Protocol):
    """Makes an environment for each rollout; `--environment` names one, as `module:factory`."""

    def __call__(self) -> Environment: ...


class TaskMaker(Protocol):
    """Makes tasks up, where none are given: `tasks` of the factory that `--environment` names."""

    def __call__(self, count: int, *, seed: int) -> Sequence[Task]:
        """The same arguments give the same tasks."""
        ...


_STEP_SHARE: Final = 0.3
_ARGUMENT_SHARE: Final = 0.3
_ANSWER_SHARE: Final = 0.4
_LARGEST: Final = 9


class Register:
    """Arithmetic on a register that lives in the session: `add` and `multiply` change it, their order matters.

    Credit is partial, so that even a weak policy's rollouts differ in reward: for each step of the task, the right
    tool in its place and the right number with it; then the right final answer.
    """

    def __init__(self, *, strict: bool = True) -> None:
        """`strict`: of its tools. Calls of strict tools are sampled under a grammar, which a trainer does not have."""
        self._strict = strict
        self._steps: Sequence[tuple[str, int]] = ()
        self._expected = 0
        self._value = 0
        self._done: list[tuple[str, int]] = []

    @staticmethod
    def tasks(count: int, *, seed: int = 0, steps: int = 2) -> list[Task]:
        """`count` tasks of `steps` steps; a longer list with the same seed starts with the shorter one."""
        rng = random.Random(seed)
        return [
            Task(
                f"register-{seed}-{index}",
                {
                    "start": rng.randint(2, _LARGEST),
                    "steps": [[rng.choice(("add", "multiply")), rng.randint(2, _LARGEST)] for _ in range(steps)],
                },
            )
            for index in range(count)
        ]

    async def reset(self, task: Task) -> Observation:
        self._value = int(task.data["start"])
        self._steps = [(str(name), int(number)) for name, number in task.data["steps"]]
        self._done = []
        self._expected = self._value
        for name, number in self._steps:
            self._expected = _apply(name, self._expected, number)
        orders = ", then ".join(
            f"add {number}" if name == "add" else f"multiply by {number}" for name, number in self._steps
        )
        system = "You compute with tools. Call one tool for each step, then answer with the final number only."
        user = f"The register holds {self._value}. Please {orders}. What does it hold in the end?"
        return Observation(
            messages=({"role": "system", "content": system}, {"role": "user", "content": user}),
            tools=(
                _tool("add", "Adds a number to the register.", strict=self._strict),
                _tool("multiply", "Multiplies the register.", strict=self._strict),
            ),
        )

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name not in ("add", "multiply"):
            return f"Error: there is no tool {name!r}; the tools are add and multiply."
        number = arguments.get("number")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST:
            return f"Error: number must be an integer from 0 to {_LARGEST}."
        self._value = _apply(name, self._value, number)
        self._done.append((name, number))
        return f"The register now holds {self._value}."

    async def score(self, answer: str) -> Score:
        tried = list(zip(self._done, self._steps, strict=False))
        steps = len(self._steps)
        right_tools = sum(done[0] == step[0] for done, step in tried)
        right_arguments = sum(done == step for done, step in tried)
        numbers = re.findall(r"-?\d+", answer)
        right_answer = bool(numbers) and len(numbers[-1]) < 20 and int(numbers[-1]) == self._expected
        return Score(
            {
                "tools": _STEP_SHARE * right_tools / steps,
                "arguments": _ARGUMENT_SHARE * right_arguments / steps,
                "answer": _ANSWER_SHARE * right_answer,
            }
        )

    async def close(self) -> None:
        """Nothing is held."""


def _apply(name: str, value: int, number: int) -> int:
    return value + number if name == "add" else value * number


def _tool(name: str, description: str, *, strict: bool) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0, "maximum": _LARGEST}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "strict": strict,
            "parameters": {
                "type": "object",
                "properties": {"number": number},
                "required": ["number"],
                "additionalProperties": False,
            },
        },
    }
