"""An agent as a service of its own, for the harness `remote-agent`: it has the policy act, then answer.

    python docs/examples/remote_agent.py --port 8080

Each request has the whole conversation, so the service keeps nothing. It passes the policy's items on as they are: the
calls among them stay open, and are carried out in the environment.
"""

import argparse

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

ACTIONS = 2  # a small model calls no tools by itself
app = FastAPI()


@app.post("/v1/responses")
async def responses(request: Request) -> Response:
    body = await request.json()
    done = sum(item["type"] == "function_call_output" for item in body["input"])
    if "tools" in body:
        body |= {"tool_choice": "required" if done < ACTIONS else "none", "parallel_tool_calls": False}
    async with httpx.AsyncClient(timeout=120) as policy:
        answer = await policy.post(
            f"{request.headers['x-gym-capture-base-url']}/responses",  # of this rollout
            headers={"Authorization": f"Bearer {request.headers['x-gym-capture-api-key']}"},
            json={**body, "max_output_tokens": 256},
        )
    return Response(answer.content, answer.status_code, media_type="application/json")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8080)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
