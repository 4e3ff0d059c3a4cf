"""Conversations with tools: end-to-end time and prefix-cache hits of the graph against plain vLLM, in one run.

Claim: with the small real model the graph is at least as fast, end to end. It pays two durable commits a call; what it
has for them is that its prompts begin with the very ids that are in the cache, where plain vLLM renders what the model
said and tokenizes it again, often to other ids. Prints one JSON object for each model; exits non-zero if the claim does
not hold.

The load: 8 conversations at once, 10 calls each, temperature 1, two tools in every request and a tool call required
in every reply, so that history always grows by a call and its result. The client does what agents do: it sends back the
assistant's message as it got it, then the tool's result, whose text depends on nothing but the turn. The tools' schema
fixes how long the text in a call is, so the work hardly differs between servers; `generated_tokens_a_call` shows it.
Every conversation begins with a word of its own: what a cache can hit is its own history.

Run: python -m benchmarks.multi_turn [--model tiny|smollm2] [--rounds 3] [--rollouts 8] [--turns 10]

`wall_s` is the median round. `cached_of_prompt`: the share of all prompt tokens that came from the cache.
`cached_of_history`: of the tokens that a conversation's previous call ended with, the most that can be hit, less the
part block that caches never hold. Both from the servers' own usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp

from benchmarks.serving_pair import (
    MODEL,
    alternate,
    both_servers,
    chat_url,
    client_session,
    nonce,
    quantile,
    refuse_errors,
)

TARGETS: Final[Mapping[str, float | None]] = {"smollm2": 1.0, "tiny": None}
"""Seconds of plain vLLM over those of the graph. None is reported only: where the engine costs nothing, the two commits
of a call have nothing to be paid from."""
PLAIN, GRAPH = "vllm", "graph"
_CALL_CHARACTERS: Final = 160
_RESULT_SENTENCES: Final = 6
_MAX_TOKENS: Final = 192
"""The grammar leaves whitespace free, of which random weights may write any amount; ten cut calls fit the context."""


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    text = {"type": "string", "minLength": _CALL_CHARACTERS, "maxLength": _CALL_CHARACTERS}
    parameters = {
        "type": "object",
        "properties": {argument: text},
        "required": [argument],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: Final = (
    _tool("search_log", "Searches the log of the ship and gives what was written on the days found.", "query"),
    _tool("write_log", "Writes an entry into the log of the ship, under the day of today.", "entry"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """What one call took, and what the server said of it."""

    took_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    has_tool_call: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one server."""

    wall_s: float
    rollouts: Sequence[Sequence[Call]]

    def calls(self) -> list[Call]:
        return [call for rollout in self.rollouts for call in rollout]


async def load(server: str, *, tracked: bool, rollouts: int, turns: int) -> Round:
    """Plays `rollouts` conversations at the same time."""
    async with client_session() as session:
        started = time.perf_counter()
        played = await asyncio.gather(
            *(_converse(session, server, tracked=tracked, turns=turns) for _ in range(rollouts))
        )
        return Round(time.perf_counter() - started, played)


async def _converse(session: aiohttp.ClientSession, server: str, *, tracked: bool, turns: int) -> list[Call]:
    head = nonce()
    url = chat_url(server, rollout_id=f"bench-{head}" if tracked else None)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"{head}. You keep the log of a ship. Use one tool at a time."},
        {"role": "user", "content": "Find out on which days of the voyage there was a storm, and write it down."},
    ]
    calls: list[Call] = []
    for turn in range(turns):
        body = {
            "model": MODEL,
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": _MAX_TOKENS,
            "temperature": 1.0,
        }
        started = time.perf_counter()
        async with session.post(url, json=body) as response:
            await refuse_errors(response)
            reply = await response.json()
        took_s = time.perf_counter() - started
        usage = reply["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        message = reply["choices"][0]["message"]
        called = bool(message.get("tool_calls"))
        calls.append(Call(took_s, usage["prompt_tokens"], cached, usage["completion_tokens"], called))
        messages += continued(message, turn)
    return calls


def continued(message: Mapping[str, Any], turn: int) -> list[dict[str, Any]]:
    """What the next request carries on with: the assistant's message as it came, and the results of its tool calls.

    A call that was cut off is no call: the user asks for another.
    """
    echoed = {name: value for name, value in message.items() if value is not None}
    calls = echoed.get("tool_calls")
    if not calls:
        # A server may leave out the tool calls or send an empty list of them; requests may not have an empty one.
        echoed = {"role": "assistant", "content": echoed.get("content", "")}
        return [echoed, {"role": "user", "content": "That was not a tool call. " + _result_text(turn)}]
    return [echoed, *({"role": "tool", "tool_call_id": call["id"], "content": _result_text(turn)} for call in calls)]


def _result_text(turn: int) -> str:
    return "\n".join(
        f"Day {turn * _RESULT_SENTENCES + line}: wind from the west, {line} sails set, nothing to report."
        for line in range(_RESULT_SENTENCES)
    )


def summary(model: str, done: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """The figures of all rounds, and whether the claim holds."""
    wall_s = {name: statistics.median(item.wall_s for item in rounds) for name, rounds in done.items()}
    calls = {name: [call for item in rounds for call in item.calls()] for name, rounds in done.items()}
    ratio = wall_s[PLAIN] / wall_s[GRAPH]
    target = TARGETS.get(model, TARGETS["smollm2"])
    by_round = [plain.wall_s / graph.wall_s for plain, graph in zip(done[PLAIN], done[GRAPH], strict=True)]
    return {
        "benchmark": "multi_turn",
        "model": model,
        "rollouts": len(done[GRAPH][0].rollouts),
        "turns": len(done[GRAPH][0].rollouts[0]),
        "wall_s": {name: round(value, 2) for name, value in wall_s.items()},
        "vllm_over_graph": round(ratio, 3),
        "target": target,
        "vllm_over_graph_by_round": [round(value, 3) for value in by_round],
        "call_s p50 p99": {
            name: [round(quantile([call.took_s for call in items], share), 3) for share in (0.5, 0.99)]
            for name, items in calls.items()
        },
        "cached_of_prompt": {name: round(_cached_of_prompt(items), 3) for name, items in calls.items()},
        "cached_of_history": {name: round(_cached_of_history(rounds), 3) for name, rounds in done.items()},
        "prompt_tokens_a_call": {name: round(_mean_prompt(items), 1) for name, items in calls.items()},
        "generated_tokens_a_call": {name: round(_mean_generated(items), 1) for name, items in calls.items()},
        "without_tool_call": {name: sum(not call.has_tool_call for call in items) for name, items in calls.items()},
        "ok": target is None or ratio >= target,
    }


def _cached_of_prompt(calls: Sequence[Call]) -> float:
    return sum(call.cached_tokens for call in calls) / sum(call.prompt_tokens for call in calls)


def _cached_of_history(rounds: Sequence[Round]) -> float:
    cached = history = 0
    for item in rounds:
        for rollout in item.rollouts:
            cached += sum(call.cached_tokens for call in rollout[1:])
            history += sum(call.prompt_tokens + call.generated_tokens for call in rollout[:-1])
    return cached / history if history else 0.0


def _mean_prompt(calls: Sequence[Call]) -> float:
    return statistics.fmean(call.prompt_tokens for call in calls)


def _mean_generated(calls: Sequence[Call]) -> float:
    return statistics.fmean(call.generated_tokens for call in calls)


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description="Conversations with tools: the graph against plain vLLM.")
    parser.add_argument("--model", action="append", help="tiny, smollm2 or a model folder; repeatable; default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=8, help="conversations at the same time")
    parser.add_argument("--turns", type=int, default=10, help="calls of a conversation")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers end, too
    ok = True
    for model in options.model or ["tiny", "smollm2"]:
        with both_servers(model) as servers:
            play = {
                PLAIN: partial(_play, servers.vllm, tracked=False, rollouts=options.rollouts),
                GRAPH: partial(_play, servers.graph, tracked=True, rollouts=options.rollouts),
            }
            done = alternate(
                {name: partial(side, turns=options.turns) for name, side in play.items()},
                rounds=options.rounds,
                warm_ups={name: partial(side, turns=1) for name, side in play.items()},
            )
        row = summary(model, done)
        print(json.dumps(row), flush=True)
        ok = ok and row["ok"]
    return 0 if ok else 1


def _play(server: str, *, tracked: bool, rollouts: int, turns: int) -> Round:
    return asyncio.run(load(server, tracked=tracked, rollouts=rollouts, turns=turns))


if __name__ == "__main__":
    sys.exit(main())
