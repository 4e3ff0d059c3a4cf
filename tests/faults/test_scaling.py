"""Replicas come and go, and calls are limited, in a served graph behind its real proxy."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.faults.apis import APIS
from tests.faults.audit import read
from tests.faults.cluster import Cluster, scripted
from tests.faults.conftest import serving
from tests.faults.engine import question
from tests.faults.scaling import TOKEN_S, recorded_otherwise, replicas, scale, settled, streaming


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving({**scripted(token_s=TOKEN_S), "body_timeout_s": 1}) as cluster:
        yield cluster


async def test_streams_are_whole_while_replicas_come_and_go(cluster: Cluster) -> None:
    """The long version: python -m tests.faults.scaling"""
    assert await scale(cluster, seconds=4, count=6) == []


async def test_a_stalled_body_is_told_so_through_the_proxy(cluster: Cluster) -> None:
    where = urlsplit(cluster.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = "POST /ng-rollout/stalled/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    writer.write(head.encode())
    await writer.drain()
    async with asyncio.timeout(20):
        told = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"}}")  # the proxy leaves the connection to the client
    writer.close()
    assert told.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["type"] == "timeout_error"


async def crowds(cluster: Cluster, name: str, *, until_refused: bool) -> tuple[list[httpx.Response], int]:
    """Short calls, 24 at a time, until some are refused, or none is: when new limits have arrived. Returns the last
    refusals, and how many calls were taken in all.
    """
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def ask(number: int) -> httpx.Response:
            api = APIS[number % len(APIS)]
            body = api.body((), question(f"{name}-{number}", words=20))
            return await http.post(f"{cluster.url}/ng-rollout/{name}-{number}/v1/{api.path}", json=body)

        taken = 0
        async with asyncio.timeout(60):
            for first in itertools.count(0, 24):
                responses = await asyncio.gather(*(ask(first + number) for number in range(24)))
                refused = [response for response in responses if response.status_code != 200]
                taken += 24 - len(refused)
                if bool(refused) == until_refused:
                    break
    return refused, taken


async def test_limits_change_without_new_engines_and_those_beyond_are_told_when_to_ask_again(cluster: Cluster) -> None:
    before = replicas(cluster)
    async with streaming(cluster.url, "kept", count=4, seconds=4) as kept:
        await cluster.redeploy(options={"user_config": {"running_calls": 1, "waiting_calls": 0, "drain_s": 1}})
    assert recorded_otherwise(cluster, kept, "stop") == []
    refused, taken = await crowds(cluster, "crowd", until_refused=True)
    assert replicas(cluster) == before
    for response in refused:
        is_messages = response.url.path.endswith("/messages")
        assert response.status_code == (529 if is_messages else 503)
        assert response.json()["error"]["type"] == "overloaded_error"
        assert int(response.headers["retry-after"]) >= 1
    found = read(cluster.records).snapshots
    assert len([name for name in found if name.startswith("crowd-")]) == taken


async def test_what_still_runs_when_its_time_is_up_is_ended_in_order(cluster: Cluster) -> None:
    before = replicas(cluster)
    await cluster.redeploy(options={"user_config": {"drain_s": 1}})
    await crowds(cluster, "all-taken", until_refused=False)
    async with streaming(cluster.url, "long", count=6, seconds=45) as streams:
        await cluster.redeploy(args={"session_cache": 77})
    told = ("ask again", '"type":"response.failed"')
    assert all(any(text in str(stream.error) for text in told) for stream in streams), streams
    assert recorded_otherwise(cluster, streams, "abort") == []
    await settled(cluster, count=2, without=before)


async def test_SF_03_replicas_go_when_streams_have_gone_refused_ones_too(cluster: Cluster) -> None:
    def autoscaled(fewest: int) -> dict[str, Any]:
        config = {
            "min_replicas": fewest,
            "max_replicas": 2,
            "target_ongoing_requests": 2,
            "metrics_interval_s": 0.2,
            "look_back_period_s": 1,
            "downscale_delay_s": 2,
        }
        return {"num_replicas": "auto", "autoscaling_config": config}

    before = replicas(cluster)
    limits = {"user_config": {"running_calls": 4, "waiting_calls": 2, "drain_s": 20}}
    await cluster.redeploy(options={**limits, **autoscaled(2)})  # to Serve, the first of its kind is a new version
    both = await settled(cluster, count=2, without=before)
    await crowds(cluster, "before-20", until_refused=True)
    async with streaming(cluster.url, "of-20", count=20, seconds=8) as streams:
        await cluster.redeploy(options=autoscaled(1))
    refused = [stream for stream in streams if stream.error is not None]
    assert refused
    assert all(str(stream.error).startswith(("503 ", "529 ")) for stream in refused), "none is cut: nobody has gone"
    assert recorded_otherwise(cluster, [stream for stream in streams if stream not in refused], "stop") == []
    async with asyncio.timeout(60):
        assert await settled(cluster, count=1) < both
