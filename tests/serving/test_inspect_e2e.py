"""The inspector on a graph as a user serves it: the route, and `gym-capture ui` in front of it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx

from tests.commands.test_ui import running
from tests.serving.graph import Graph


async def test_a_served_graph_is_looked_into(graph: Graph) -> None:
    said: list[Any] = [{"role": "user", "content": "hi"}]
    async with graph.client("looked-into") as client:
        first = await client.chat.completions.create(model="policy", messages=said, max_tokens=8)
        reply = first.choices[0].message.content
        said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="policy", messages=said, max_tokens=8)
    snapshot = await graph.snapshot("looked-into")

    def look() -> None:
        with running(graph.url) as (_, url, (found_line, *_)):
            assert re.match(r"the graph that serves policy, at http", found_line)
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
                rows = http.get("/api/rollouts").json()["columns"]
                assert "looked-into" in rows["rollout"]
                found = http.get("/api/rollouts/looked-into").json()
                assert len(found["calls"]) == len(snapshot.entries) == 2
                tokens = http.get("/api/rollouts/looked-into/trajectories/0/tokens").json()
                (longest,) = sorted(snapshot.entries, key=lambda entry: entry.prompt_len)[-1:]
                assert tokens["ids"] == longest.cumulative_ids().tolist()
                assert "".join(tokens["texts"]).startswith("<|im_start|>")

    await asyncio.to_thread(look)
