"""What the list of dialects has, the gateway serves and describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gym_capture.dialects.base import ApiError
from gym_capture.dialects.chat import ChatDialect
from gym_capture.dialects.registry import DIALECTS
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.serving import gateway
from tests.serving.replica import PLAIN, USER, Replica, always


class ShoutingDialect(ChatDialect):
    """One more API: Chat Completions elsewhere, with errors of its own."""

    route = replace(ChatDialect.route, path="/v9/shout", summary="Shouting")

    def error(self, error: ApiError) -> bytes:
        return b'{"shouted": true}'


def test_routes_of_dialects_are_distinct_and_described() -> None:
    routes = [dialect.route for dialect in DIALECTS]
    routes += [dialect.counting.route for dialect in DIALECTS if dialect.counting is not None]
    assert len({route.path for route in routes}) == len(routes)
    assert len({dialect.id_prefix for dialect in DIALECTS}) == len(DIALECTS)
    for route in routes:
        assert route.path.startswith("/v1/")
        assert {schema["type"] for schema in (route.body, route.reply, route.error)} == {"object"}


async def test_a_dialect_that_is_listed_is_served_and_described(
    monkeypatch: pytest.MonkeyPatch, template: HfChatTemplate
) -> None:
    monkeypatch.setattr(gateway, "DIALECTS", (*DIALECTS, ShoutingDialect()))

    replica = Replica(template, always(PLAIN))
    for prefix in ("", "/ng-rollout/r1"):
        answered = await replica.http.post(f"{prefix}/v9/shout", json={"model": "policy", "messages": [USER]})
        assert answered.json()["choices"][0]["message"]["role"] == "assistant"
    refused: Any = await replica.http.post("/v9/shout", json={"model": "policy"})
    assert (refused.status_code, refused.json()) == (400, {"shouted": True})
    nowhere = await replica.http.get("/v9/shout")
    assert (nowhere.status_code, nowhere.json()) == (405, {"shouted": True})
    paths = replica.app.openapi()["paths"]
    assert paths["/v9/shout"]["post"]["summary"] == "Shouting"
    assert "recorded" in paths["/ng-rollout/{rollout_id}/v9/shout"]["post"]["summary"]
