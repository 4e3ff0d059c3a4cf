"""A replica with a real engine is killed in the middle of a call. Its file comes last of those that share the graph."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest

from gym_capture.build.builder import build
from gym_capture.capture.records import Root
from gym_capture.serving.state import connect
from tests.serving.graph import Graph, running_below, whole
from tests.serving.replica import chat_body, until

pytestmark = pytest.mark.engine


ENDLESS = {"stream": True, "max_tokens": 4000, "ignore_eos": True}


async def to_the_end(lines: AsyncIterator[str]) -> None:
    seen = [line async for line in lines]
    pytest.fail(f"the reply came to its end: {seen[-3:]}")


@contextmanager
def standing_still(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """What these are at takes no end meanwhile: an engine that has two cores to itself may let nobody else run before
    it is done, and no reply is long enough to be still under way once this process has seen its beginning.
    """
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


async def answered(http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> httpx.Response:
    """The first reply that is none of a proxy that knows no replica."""
    async with asyncio.timeout(240):
        while True:
            reply = await http.post(url, json={**body, "max_tokens": 8})
            if reply.status_code == 200:
                return reply
            await asyncio.sleep(0.5)


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


async def test_no_engine_outlives_its_replica_and_the_rollout_goes_on(graph: Graph) -> None:
    (replica,) = graph.processes("ray::ServeReplica:")
    engines = running_below(replica, "VLLM::")
    assert engines

    url = f"{graph.url}/ng-rollout/killed-replica/v1/chat/completions"
    body = chat_body()
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        await answered(http, f"{graph.url}/ng-rollout/before/v1/chat/completions", body)
        with standing_still(engines):
            async with http.stream("POST", url, json={**body, **ENDLESS}) as response:
                assert response.status_code == 200
                replica.kill()
                with pytest.raises(httpx.TransportError):
                    await to_the_end(response.aiter_lines())
        await until(lambda: all(map(has_ended, engines)))
        reply = await answered(http, url, body)
    (after,) = graph.processes("ray::ServeReplica:")
    assert len(running_below(after, "VLLM::")) == len(engines)
    snapshot = await connect(namespace=graph.namespace).freeze("killed-replica")
    (entry,) = whole(snapshot)
    assert (entry.model_call_id, entry.parent) == (reply.json()["id"], Root())
    assert snapshot.incomplete == (f"dangling_intent:{response.headers['request-id']}",)
    assert build(snapshot).masked
