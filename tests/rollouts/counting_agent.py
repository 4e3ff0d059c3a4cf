"""A remote agent with a mind of its own, as a process: `python -m tests.rollouts.counting_agent PORT`.

It talks with the policy in words, and decides by itself what to add to a counter: `number_in` what the policy said. Its
talk it keeps in a session, which it knows by a cookie, and it looks up each number in a table of its own on the way.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any, Final

import httpx
from aiohttp import web

TURNS: Final = 2

_sessions: dict[str, list[dict[str, Any]]] = {}
_names = map(str, itertools.count())


def number_in(text: str) -> int:
    return sum(text.encode()) % 10


async def respond(request: web.Request) -> web.Response:
    body = await request.json()
    name = request.cookies.get("session") or next(_names)
    talk = _sessions.setdefault(name, [])
    last = body["input"][-1]
    talk.append({"role": "user", "content": last.get("output") or last["content"]})
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        reply = await http.post(
            f"{request.headers['X-Gym-Capture-Base-Url']}/responses",
            headers={"Authorization": f"Bearer {request.headers['X-Gym-Capture-Api-Key']}"},
            json={"model": body["model"], "input": talk, "max_output_tokens": 16},
        )
    if reply.status_code != 200:
        return web.Response(status=reply.status_code, body=reply.content)
    said = reply.json()["output"]
    talk += said
    text = "".join(part["text"] for item in said for part in item["content"])
    turn = sum(item["type"] == "function_call" for item in body["input"])
    output = said
    if turn < 2 * TURNS:
        arguments = json.dumps({"number": number_in(text)})
        output = [
            {"type": "function_call", "call_id": f"own-{turn}", "name": "look_up", "arguments": arguments},
            {"type": "function_call_output", "call_id": f"own-{turn}", "output": "it is a number"},
            {"type": "function_call", "call_id": f"add-{turn}", "name": "add", "arguments": arguments},
        ]
    answer = web.json_response({"id": "r", "object": "response", "status": "completed", "output": output})
    answer.set_cookie("session", name)
    return answer


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/responses", respond)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
