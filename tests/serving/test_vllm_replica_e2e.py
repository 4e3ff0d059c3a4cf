"""A replica with a real engine is killed in the middle of a call."""

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
from tests.faults.apis import APIS
from tests.faults.audit import read
from tests.faults.cluster import Cluster
from tests.serving.replica import until

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


async def test_no_engine_outlives_its_replica_and_the_rollout_goes_on(vllm_cluster: Cluster) -> None:
    cluster = vllm_cluster
    engines = set(cluster.processes("VLLM::"))
    assert engines

    url = f"{cluster.url}/ng-rollout/r/v1/chat/completions"
    body = APIS[0].body((), "Talk.")
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        await answered(http, f"{cluster.url}/ng-rollout/before/v1/chat/completions", body)
        (replica,) = cluster.processes("ray::ServeReplica:")  # found first: looking for it takes a while
        with standing_still(engines):
            async with http.stream("POST", url, json={**body, **ENDLESS}) as response:
                assert response.status_code == 200
                replica.kill()
                with pytest.raises(httpx.TransportError):
                    await to_the_end(response.aiter_lines())
        await until(lambda: engines.isdisjoint(cluster.processes("VLLM::")))
        reply = await answered(http, url, body)
    assert len(cluster.processes("VLLM::")) == len(engines)
    snapshot = read(cluster.records).snapshots["r"]
    (entry,) = snapshot.entries
    assert (entry.model_call_id, entry.parent) == (reply.json()["id"], Root())
    assert snapshot.incomplete == (f"dangling_intent:{response.headers['request-id']}",)
    assert build(snapshot).masked
