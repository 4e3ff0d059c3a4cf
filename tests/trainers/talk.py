"""An agent that talks in two turns, and rewards that differ: groups to train on, from a model that knows nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from gym_capture.rollouts.environment import Observation, Score, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed

TURNS = 2


class Remarks:
    """The environment."""

    @staticmethod
    def tasks(count: int, *, seed: int = 0) -> Sequence[Task]:
        return [Task(f"talk-{seed}-{number}", {"number": number}) for number in range(count)]

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=({"role": "user", "content": f"Say something about {task.data['number']}."},))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise NotImplementedError

    async def score(self, answer: str) -> Score:
        return Score({"bytes": sum(answer.encode()) % 100 / 100})

    async def close(self) -> None: ...


class Talk:
    """The harness."""

    def __init__(self, *, max_tokens: int = 24) -> None:
        self._http = httpx.AsyncClient(trust_env=False, timeout=120)
        self._max_tokens = max_tokens

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: object) -> Completed | Failed:
        messages = [*observation.messages]
        for turn in range(TURNS):
            body = {"model": "policy", "messages": messages, "max_tokens": self._max_tokens}
            reply = await self._http.post(f"{endpoint.base_url}/chat/completions", json=body)
            if reply.status_code != 200:
                return Failed("refused", reply.text, n_calls=turn)
            said = reply.json()["choices"][0]["message"]
            messages += [said, {"role": "user", "content": "Go on."}]
        return Completed(said["content"] or "", n_calls=TURNS)

    async def close(self) -> None:
        await self._http.aclose()
