"""The routes keep to their own description, whatever is sent to them: schemathesis plays the client."""

from __future__ import annotations

import asyncio
import re
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
from tests.docs.pages import ROOT
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
    keep_to_it(described, url, prefix + route, "POST", mode)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/rollouts"), ("POST", "/rollouts/{rollout_id}/complete"), ("GET", "/rollouts/{rollout_id}")],
)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_the_registry_keeps_to_its_description(
    described: Mapping[GenerationMode, BaseSchema], url: str, method: str, path: str, mode: GenerationMode
) -> None:
    keep_to_it(described, url, path, method, mode)


def keep_to_it(
    described: Mapping[GenerationMode, BaseSchema], url: str, path: str, method: str, mode: GenerationMode
) -> None:
    @given(case=described[mode][path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def keeps(case: Case) -> None:
        case.call_and_validate(base_url=url)

    keeps()


@pytest.mark.parametrize("route", ROUTES)
def test_null_means_what_leaving_out_means(url: str, route: str) -> None:
    """Of every member that the description calls optional, in tools and parts of messages too."""
    description = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    schema = description["paths"][f"/v1/{route}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    bodies = list(_with_a_null(schema))
    assert len(bodies) > 1
    for body in bodies:
        response = httpx.post(f"{url}/ng-rollout/null/v1/{route}", json=body, trust_env=False)
        assert response.status_code == 200, (body, response.text)


def _least(schema: Any) -> Any:
    """The least value that fits, with one item in every array, so that what is in it is there."""
    if "anyOf" in schema:
        return _least(schema["anyOf"][-1 if schema["anyOf"][-1].get("type") == "array" else 0])
    if "enum" in schema:
        return schema["enum"][0]
    match schema["type"]:
        case "object":
            return {name: _least(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [_least(schema["items"])]
        case "string":
            return "policy"
        case kind:
            return {"integer": 1, "number": 1.0, "boolean": False}[kind]


def _with_a_null(schema: Any) -> Iterator[Any]:
    """The least values, each with one optional member, at any depth, that is null."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _with_a_null(one)
    elif schema.get("type") == "array":
        yield from ([value] for value in _with_a_null(schema["items"]))
    elif schema.get("type") == "object":
        least = _least(schema)
        for name, member in schema.get("properties", {}).items():
            if name not in least:
                yield {**least, name: None}
            yield from ({**least, name: value} for value in _with_a_null(member))


def test_every_api_is_described(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json", trust_env=False).json()["paths"]
    for path in ROUTES:
        for prefix in ("/v1/", "/ng-rollout/{rollout_id}/v1/"):
            assert "requestBody" in paths[prefix + path]["post"]


def test_the_page_names_every_route(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json", trust_env=False).json()["paths"]
    assert len(paths) > 10
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "weights.md"))
    said = set(re.findall(r"/[\w/{}.-]*", pages))
    short = {path.replace("/training-token-capture", "") for path in paths}
    short = {re.sub(r"^/(ng-rollout|rollouts)/\{rollout_id\}", r"/\1/R", path) for path in short}
    below = {path.removeprefix("/ng-rollout/R") or "/" for path in short}  # "the same below /ng-rollout/R"
    assert {path for path in below if path not in said and f"/ng-rollout/R{path}" not in said} == set()
