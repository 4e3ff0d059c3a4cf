"""Engines on two nodes, one of which is lost under a rollout job. The long version: python -m tests.faults.nodes

The second site keeps two copies of its logs, and loses a node with its disk, its engine and its workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.audit import read
from tests.faults.nodes import Site, judged, served_nodes

pytestmark = pytest.mark.engine

AT_A_TIME = 3
"""As many as HAProxy sends to one of two engines before it takes the other to spread them."""


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with served_nodes(options={"num_replicas": 2}, **request.param) as site:
        yield site


@pytest.mark.parametrize("site", [{}], indirect=True)
async def test_a_node_is_lost_in_the_middle_of_calls_and_nothing_else(site: Site) -> None:
    both = await site.up(2)
    job = site.play("lost", tasks={"count": 6}, samples=4, limits={"concurrency": AT_A_TIME, "max_attempts": 1})
    await job.has(rows=AT_A_TIME)
    lost = await site.lose_one_in_the_middle(job)
    assert await job.over() == 0, job.child.log_tail()
    found = judged(site, job, rollouts=24)
    assert found.wrong == []
    assert (found.finished, found.links) == (24, 24 * 2)
    assert found.cut
    assert found.moved
    (left,) = both - {lost}
    assert {server for servers in found.servers.values() for server in servers} == both
    for servers in found.servers.values():
        before = servers.count(lost)
        assert servers == [lost] * before + [left] * (len(servers) - before), "each rollout has one engine at a time"


@pytest.mark.parametrize("site", [{"cpus": 2, "state_replicas": 2}], indirect=True)
async def test_rollouts_whose_node_is_lost_go_on_from_the_second_copy_of_their_records(site: Site) -> None:
    await site.up(2)
    limits = {"concurrency": 2 * AT_A_TIME, "max_attempts": 3}
    job = site.play(
        "resumed", on="ray", tasks={"count": 6}, samples=4, limits=limits, ray={"num_cpus": 0.5}, resume_turns=True
    )
    await job.has(rows=AT_A_TIME)
    await site.lose_one_in_the_middle(job)
    assert await job.over() == 0, job.child.log_tail()
    found = judged(site, job, rollouts=24)
    assert found.wrong == []
    assert (found.finished, found.links) == (24, 24 * 2)
    assert job.failures(), "no worker was on the node"
    log = read(site.records)
    went_on = [log.snapshots[row["rollout_id"]].went_on for row in job.rows()]
    assert any(went_on), "no rollout went on from what was recorded of it"
