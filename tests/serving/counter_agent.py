"""An agent that nobody dispatches, in a process of its own: it counts, and the policy says when.

python -m tests.serving.counter_agent URL ROLLOUT GROUP TARGET TURNS [ENDING...]

Invariant: all that is known of the count is in this process; the reward is what the count has come to, over the target.

Flow: it registers its rollout, twice as one whose first answer got lost -> TURNS times, asks the policy for a call of
`count` and counts -> says `played` -> for each ENDING a line on its standard input, and an outcome: `count` is the
reward that was earned, `more` another one -> one more call -> a JSON line of what it was answered.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Adds one.",
        "parameters": {"type": "object", "properties": {"go": {"type": "boolean"}}, "required": ["go"]},
    },
}


CHOICE = {"type": "function", "function": {"name": "count"}}


class Counter:
    """The environment: its count is in no message but as what the last call came to."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.count = 0

    def step(self) -> str:
        self.count += 1
        return f"{self.count} of {self.target}"

    @property
    def reward(self) -> float:
        return self.count / self.target


def play(url: str, rollout_id: str, group_id: str, target: int, turns: int, endings: list[str]) -> dict[str, Any]:
    with httpx.Client(trust_env=False, timeout=120) as http:
        said = {"rollout_id": rollout_id, "group_id": group_id, "task": f"Count to {target}."}
        first, again = (http.post(f"{url}/rollouts", json=said) for _ in range(2))
        assert (first.status_code, first.json()) == (again.status_code, again.json()) == (200, first.json())
        calls = first.json()["base_urls"]["chat_completions"] + "/chat/completions"
        counter = Counter(target)
        messages: list[dict[str, Any]] = [{"role": "user", "content": said["task"]}]
        body = {"model": "policy", "max_tokens": 64, "tools": [TOOL], "tool_choice": CHOICE}
        for _ in range(turns):
            reply = http.post(calls, json={**body, "messages": messages})
            reply.raise_for_status()
            turn = reply.json()["choices"][0]["message"]
            messages.append(turn)
            (call,) = turn["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": counter.step()})
        print("played", flush=True)
        outcomes = {
            "count": {"reward": counter.reward, "reward_components": {"count": counter.count}},
            "more": {"reward": counter.reward + 1},
        }
        completed = []
        for ending in endings:
            sys.stdin.readline()
            completed.append(http.post(f"{url}/rollouts/{rollout_id}/complete", json=outcomes[ending]).status_code)
        late = http.post(calls, json={**body, "messages": messages}).status_code if completed else None
        return {"count": counter.count, "completed": completed, "late_call": late}


if __name__ == "__main__":
    url, rollout_id, group_id, target, turns, *endings = sys.argv[1:]
    print(json.dumps(play(url, rollout_id, group_id, int(target), int(turns), endings)), flush=True)
