"""A storm of kills over a graph under load, and the question whether anything was lost in it.

Invariant: what is reported is what agents were told, compared with what the logs hold once it is quiet again.

Flow: agents play, the impatient among them leave in the middle and ask again -> the killer kills -> it is quiet: no
engine works for anybody, and the logs are audited -> the last echo of rollouts is sent once
before and once after a restart of the state, and both times it must continue the same call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from gym_capture.capture.records import Continues
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from tests.faults.agents import Agent, Ledger, Played, Turn
from tests.faults.audit import Findings, audit, read
from tests.faults.cluster import Cluster
from tests.faults.engine import Voice, question, running
from tests.faults.killer import Killer, Victim

_IMPATIENT: Final = 3
"""One agent of so many."""
_PROBED: Final = 100
_QUIET_WITHIN_S: Final = 10.0


@dataclass(slots=True)
class Report:
    """What became of a storm."""

    kills: Counter[Victim]
    ledger: Ledger
    findings: Findings
    probed: int
    wrong: list[str] = field(default_factory=list)
    """What else is wrong."""

    @property
    def is_clean(self) -> bool:
        return self.findings.is_clean and not (self.wrong or self.ledger.hung)

    def line(self) -> str:
        found = self.findings
        return (
            f"kills={self.kills.total()} acknowledged={self.ledger.acknowledged} lost={len(found.lost)} "
            f"duplicated={len(found.duplicated)} hung={self.ledger.hung}"
        )


async def storm(
    cluster: Cluster,
    victims: Sequence[Victim],
    *,
    running_dir: Path,
    seed: int,
    clients: int,
    seconds: float,
    deadline_s: float,
    on_kill: Callable[[Victim, int, Ledger], None],
) -> Report:
    """Runs one over a cluster that serves, and leaves it serving. `running_dir`: that of its engines."""
    ledger = Ledger()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as http:
        agents = [
            Agent(
                f"s{seed}-a{n}",
                ledger,
                url=lambda: cluster.url,
                http=http,
                seed=seed,
                deadline_s=deadline_s,
                is_impatient=n % _IMPATIENT == 1,
            )
            for n in range(clients)
        ]
        killer = Killer(cluster, http, seed=seed)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as playing:
            for agent in agents:
                playing.create_task(agent.play_until(stop))
            try:
                await killer.run(victims, seconds=seconds, on_kill=lambda victim, kills: on_kill(victim, kills, ledger))
            finally:
                stop.set()
        left_running = await _quiet(running_dir)
        voice = Voice(HfChatTemplate.from_model_dir(tiny_dir()))
        findings = await asyncio.to_thread(lambda: audit(read(cluster.records), ledger, voice))
        report = Report(killer.kills.copy(), ledger, findings, probed=0)
        report.wrong += [f"{asked} is generated for nobody" for asked in left_running]
        probed = [played for played in ledger.rollouts.values() if played.is_over][-_PROBED:]
        before = await _probe(agents, probed)
        for _ in cluster.records:
            await killer.kill(Victim.STATE)
        await killer.recovered()
        after = await _probe(agents, probed)
    report.probed = len(probed)
    report.wrong += _not_the_same(cluster, probed, before, after)
    return report


async def _quiet(running_dir: Path) -> list[str]:
    """What engines still generate when everybody has gone."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_QUIET_WITHIN_S):
            while True:
                if not running(running_dir):
                    break
                await asyncio.sleep(0.1)
    return running(running_dir)


async def _probe(agents: Sequence[Agent], probed: Sequence[Played]) -> list[Turn | None]:
    """Goes on from the end of each rollout; what is asked is the same every time."""
    waiting = iter(list(enumerate(probed)))
    turns: list[Turn | None] = [None] * len(probed)

    async def ask(agent: Agent) -> None:
        for number, played in waiting:
            turns[number] = await agent.ask(played, question(f"{played.rollout_id}, once more", words=4))

    await asyncio.gather(*(ask(agent) for agent in agents))
    return turns


def _not_the_same(
    cluster: Cluster, probed: Sequence[Played], before: Sequence[Turn | None], after: Sequence[Turn | None]
) -> list[str]:
    snapshots = read(cluster.records).snapshots
    wrong = []
    for played, *turns in zip(probed, before, after, strict=True):
        entries = {entry.model_call_id: entry for entry in snapshots[played.rollout_id].entries}
        last = entries.get(played.turns[-1].call_id)
        expected = None if last is None else Continues(last.model_call_id, last.cum_len)
        parents = [
            None if turn is None or turn.call_id not in entries else entries[turn.call_id].parent for turn in turns
        ]
        if parents != [expected, expected]:
            wrong.append(f"{played.rollout_id} continues {parents} before and after a restart, not {expected}")
    return wrong
