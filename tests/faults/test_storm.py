"""A served graph whose clients leave, whose rollouts move, and whose processes are killed under load.

`make test-faults` is the long form of the storm.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from gym_capture.capture.records import Continues
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from tests.faults.agents import LEFT, Agent, Ledger, Played
from tests.faults.apis import APIS
from tests.faults.audit import audit, read
from tests.faults.cluster import REPLICAS, Cluster, replica_urls
from tests.faults.engine import Voice, question, running
from tests.faults.killer import Victim
from tests.faults.leaving import Leaving, ways
from tests.faults.storm import storm
from tests.serving.replica import until

LEAVING = 200


async def test_SF_06_a_rollout_that_moves_to_another_replica_goes_on_from_its_exact_ids(cluster: Cluster) -> None:
    urls = replica_urls(cluster)
    assert len(urls) == REPLICAS
    played = Played("moves")

    async def run() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            for number in range(4):
                url = iter(urls[number % REPLICAS] for _ in range(1))  # once: nothing is asked again
                agent = Agent("moves", Ledger(), url=url.__next__, http=http, seed=number, deadline_s=60)
                turn = await agent.ask(played, question(f"moves, turn {number}", words=8))
                assert turn is not None
                assert turn.attempts == 1
                played.turns.append(turn)

    await run()
    entries = {entry.model_call_id: entry for entry in read(cluster.records).snapshots["moves"].entries}
    calls = [entries[turn.call_id] for turn in played.turns]
    for call, before in zip(calls[1:], calls, strict=False):
        assert call.parent == Continues(before.model_call_id, before.cum_len)
        assert call.prefix.supplied


async def test_SF_01_clients_that_leave_at_once_free_their_engines(cluster: Cluster, running_dir: Path) -> None:
    async def leave(http: httpx.AsyncClient, number: int) -> None:
        body = APIS[0].body((), question(f"leaves {number}", words=2000)) | {"stream": True}
        url = f"{cluster.url}/ng-rollout/leaves-{number}/v1/chat/completions"
        async with http.stream("POST", url, json=body, timeout=120) as response:
            assert response.status_code == 200
            await anext(response.aiter_raw())
            arrived.release()
            await may_leave.wait()

    arrived, may_leave = asyncio.Semaphore(0), asyncio.Event()

    async def run() -> None:
        async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None)) as http:
            async with asyncio.TaskGroup() as leaving:
                for number in range(LEAVING):
                    leaving.create_task(leave(http, number))
                for _ in range(LEAVING):
                    await arrived.acquire()
                assert running(running_dir)
                may_leave.set()
            async with asyncio.timeout(10):
                await until(lambda: not running(running_dir))
            await until(all_are_on_record)

    def all_are_on_record() -> bool:
        snapshots = read(cluster.records).snapshots
        return all(snapshots[f"leaves-{number}"].entries for number in range(LEAVING))

    await run()
    snapshots = read(cluster.records).snapshots
    for number in range(LEAVING):
        (entry,) = snapshots[f"leaves-{number}"].entries
        assert entry.reply.finish_reason == "abort"


async def test_SF_01_clients_that_leave_are_noticed_in_every_way_of_asking(cluster: Cluster, running_dir: Path) -> None:
    leaving = Leaving(cluster, running_dir)
    seen = await leaving.all_leave(cluster.url, list(ways()))
    await leaving.watch_idle(seen, idle_s=1.0)
    seen = seen
    assert seen.missed == []
    assert len(seen.noticed_s) == len(list(ways()))


async def test_SF_01_agents_that_leave_and_ask_again_lose_no_rollout(cluster: Cluster, running_dir: Path) -> None:
    """Nothing is killed, so what became of each reply is known; hardly of one on its way to an agent that leaves."""
    ledger = Ledger()

    async def play(http: httpx.AsyncClient, number: int) -> None:
        agent = Agent(
            f"leaver-{number}",
            ledger,
            url=lambda: cluster.url,
            http=http,
            seed=number,
            deadline_s=60,
            is_impatient=True,
        )
        await agent.play(f"impatient-{number}")

    async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
        await asyncio.gather(*(play(http, number) for number in range(12)))
    await until(lambda: not running(running_dir))
    assert ledger.failures[LEFT] > 6
    voice = Voice(HfChatTemplate.from_model_dir(tiny_dir()))
    findings = audit(read(cluster.records), ledger, voice)
    assert findings.all() == []
    assert (ledger.hung, set(ledger.failures)) == (0, {LEFT})
    assert findings.masked.total() <= findings.masked["unresolved_retries"] <= 1


async def test_nothing_acknowledged_is_lost_whatever_is_killed(cluster: Cluster, running_dir: Path) -> None:
    victims = [Victim.STATE, Victim.REPLICA, Victim.STATE, Victim.PROXY, Victim.CLUSTER, Victim.STATE]
    report = await storm(
        cluster,
        victims,
        running_dir=running_dir,
        seed=3,
        clients=4,
        seconds=300,
        deadline_s=240,
        on_kill=lambda *_: None,
    )
    assert [*report.findings.all(), *report.wrong] == []
    assert (report.ledger.hung, report.kills.total()) == (0, len(victims))
    assert report.ledger.acknowledged > report.probed > 0
    assert report.is_clean


def test_an_interrupt_leaves_nothing_running() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.faults", "--kills", "100", "--seed", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    lines = iter(run.stderr.readline, "")
    home = Path(next(line for line in lines if line.startswith("below ")).removeprefix("below ").strip())
    try:
        below = family_with(run, "raylet")
        os.kill(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130, said
    assert [process for process in below if process.is_running()] == []
    assert not home.exists()


def family_with(run: subprocess.Popen[str], title: str) -> list[psutil.Process]:
    """The processes below `run`, once one of that title is among them."""
    while run.poll() is None:
        below: list[psutil.Process] = psutil.Process(run.pid).children(recursive=True)
        for process in below:
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith(title):
                    return below
        time.sleep(0.1)
    raise AssertionError("it ended by itself")
