"""An environment whose reward tells what was done in it: named in job files by import path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gym_capture.rollouts.environment import Observation, Score, Task

NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": 9}
ADD: Final = {
    "name": "add",
    "description": "Adds to the counter.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"number": NUMBER},
        "required": ["number"],
        "additionalProperties": False,
    },
}


class Counter:
    """Counts in its session: the reward is what it is at, and how often it was added to."""

    def __init__(self) -> None:
        self._value = 0
        self._calls = 0

    @staticmethod
    def tasks(count: int, *, seed: int) -> list[Task]:
        return [Task(f"count-{number}", {"start": 1000 * number}) for number in range(count)]

    async def reset(self, task: Task) -> Observation:
        self._value = int(task.data["start"])
        question = {"role": "user", "content": f"The counter is at {self._value}. Add to it, twice."}
        return Observation((question,), tools=({"type": "function", "function": ADD},))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "add" or not isinstance(arguments.get("number"), int):
            return "Error: call add with a number."
        self._value += arguments["number"]
        self._calls += 1
        return f"The counter is at {self._value}."

    async def score(self, answer: str) -> Score:
        return Score({"value": self._value, "calls": self._calls})

    async def close(self) -> None:
        """Nothing is held."""
