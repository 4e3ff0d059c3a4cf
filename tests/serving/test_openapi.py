"""The routes keep to their own description, whatever is sent to them: schemathesis plays the client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import BaseSchema, Case, GenerationMode

from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import saying
from tests.serving.replica import Replica

ROUTES = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")


@pytest.fixture(scope="module")
def url(template: HfChatTemplate) -> Iterator[str]:
    """A replica behind a real HTTP server, in a thread with an event loop of its own."""
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        replica = Replica(template, lambda _: saying(template, "Yes.", stop_token="<|im_end|>"), max_model_len=2**20)
        server = uvicorn.Server(uvicorn.Config(replica.app, host="127.0.0.1", port=0, log_level="error"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        servers.append(server)
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    port = servers[0].servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    servers[0].should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def described(url: str) -> Mapping[GenerationMode, BaseSchema]:
    """Bodies that fit are made of described fields only: one that is not described may be refused for its type."""
    description = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    schemas = {GenerationMode.NEGATIVE: description, GenerationMode.POSITIVE: _closed(description)}
    return {mode: schemathesis.openapi.from_dict(schema) for mode, schema in schemas.items()}


def _closed(value: Any, *, is_body: bool = False) -> Any:
    """A description whose request bodies have no fields but those that it names."""
    if isinstance(value, dict):
        return {
            key: not is_body and item
            if key == "additionalProperties"
            else _closed(item, is_body=is_body or key == "requestBody")
            for key, item in value.items()
        }
    return [_closed(item, is_body=is_body) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("prefix", ["/v1/", "/ng-rollout/{rollout_id}/v1/"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_route_keeps_to_its_description(
    described: Mapping[GenerationMode, BaseSchema], url: str, route: str, prefix: str, mode: GenerationMode
) -> None:
    """No 500, no undocumented status or content type, no body outside the schema; what does not fit is refused."""

    @given(case=described[mode][prefix + route]["POST"].as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def keeps(case: Case) -> None:
        case.call_and_validate(base_url=url)

    keeps()


def test_every_api_is_described(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json", trust_env=False).json()["paths"]
    for path in ROUTES:
        for prefix in ("/v1/", "/ng-rollout/{rollout_id}/v1/"):
            assert "requestBody" in paths[prefix + path]["post"]
