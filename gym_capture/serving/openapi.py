"""How `/openapi.json` describes the routes of the dialects."""

from __future__ import annotations

from typing import Any, Final

from gym_capture.dialects.base import Route
from gym_capture.rollout_ids import ROLLOUT_ID_PATTERN

_FAILURES: Final = {
    "400": "The request is at fault: the message names the field.",
    "401": "A token is missing.",
    "403": "The token is one for something else.",
    "404": "No such model.",
    "409": "The rollout is over: its records have been consumed.",
    "413": "The body is too large.",
    "500": "The server is at fault; its log has the details.",
    "503": "No capacity now: `Retry-After` says when to ask again. 529 in Anthropic's API.",
    "529": "No capacity now: `Retry-After` says when to ask again.",
}


def describe(route: Route, *, in_rollout: bool) -> dict[str, Any]:
    """Additions to FastAPI's own description of the route."""
    content: dict[str, Any] = {"application/json": {"schema": route.reply}}
    if route.streams:
        content["text/event-stream"] = {"schema": {}}
    failures = {
        status: {"description": description, "content": {"application/json": {"schema": route.error}}}
        for status, description in _FAILURES.items()
    }
    found: dict[str, Any] = {
        "summary": route.summary + (", recorded as a call of a rollout" if in_rollout else ""),
        "requestBody": {"required": True, "content": {"application/json": {"schema": route.body}}},
        "responses": {"200": {"description": "The reply.", "content": content}, **failures},
    }
    if in_rollout:
        found["parameters"] = [
            {
                "name": "rollout_id",
                "in": "path",
                "required": True,
                "schema": {
                    "type": "string",
                    "pattern": f"^{ROLLOUT_ID_PATTERN}$",
                    "not": {"enum": [".", ".."]},
                },
            }
        ]
    return found
