"""Agents that play rollouts against a graph that keeps breaking, and write down what they were told.

Invariant: the ledger holds a call as acknowledged only if its reply came whole, and every id of a call that an agent
has ever seen. Nothing is forgotten because it failed.

Flow: `Agent.play_until` asks turn after turn, echoing what it got, in an API and in a way (streamed or whole) that it
draws anew for each turn -> what fails is asked again, as client libraries do -> a request that gets no answer within
its deadline, repetitions included, has hung. An impatient agent leaves some requests in the middle, and asks again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx

from tests.faults.apis import APIS, Api, Exchange, NotWholeError
from tests.faults.engine import question

RETRIED: Final = frozenset((408, 409, 429, 500, 502, 503, 504, 529))
"""Statuses after which client libraries ask again."""
LEFT: Final = "left in the middle"
"""How the ledger counts attempts that their agents did not wait for."""
_LEFT: Final = 0.4
"""Share of an impatient agent's attempts."""
_PATIENCE_S: Final = (0.01, 1.0)
"""Before the first byte, in the middle, and sometimes too late."""
_BACKOFF_S: Final = (0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply that an agent got whole."""

    asked: str
    call_id: str
    text: str
    attempts: int


@dataclass(slots=True)
class Played:
    """What an agent knows of one rollout."""

    rollout_id: str
    turns: list[Turn] = field(default_factory=list)
    """Acknowledged, in order; each echoes the texts of those before."""
    cut_off: list[str] = field(default_factory=list)
    """Ids of calls of whose replies something came, but not all."""
    is_over: bool = False

    @property
    def is_calm(self) -> bool:
        """No request had to be repeated, and none was given up."""
        return self.is_over and all(turn.attempts == 1 for turn in self.turns)

    @property
    def got_all(self) -> bool:
        """Every request was answered in the end, the last one at once: that every reply was used is on record."""
        return self.is_over and self.turns[-1].attempts == 1

    def history(self) -> list[Exchange]:
        return [Exchange(turn.asked, turn.text) for turn in self.turns]


@dataclass(slots=True)
class Ledger:
    """What all agents were told."""

    rollouts: dict[str, Played] = field(default_factory=dict)
    hung: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Attempts that failed, by what the client saw."""

    @property
    def acknowledged(self) -> int:
        return sum(len(played.turns) for played in self.rollouts.values())

    @property
    def refusals(self) -> int:
        """Answers after which a client library would have given up."""
        statuses = ((kind.partition(" ")[0], count) for kind, count in self.failures.items())
        return sum(count for status, count in statuses if status.isdecimal() and int(status) not in RETRIED)


class Agent:
    """Plays rollouts, one after another."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        *,
        url: Callable[[], str],
        http: httpx.AsyncClient,
        seed: int,
        deadline_s: float,
        is_impatient: bool = False,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._url = url
        self._http = http
        self._rng = random.Random(f"{seed} {name}")
        self._deadline_s = deadline_s
        self._is_impatient = is_impatient

    async def play_until(self, stop: asyncio.Event) -> None:
        """Plays until told to stop; the rollout that is under way then is played to its end."""
        for number in itertools.count():
            if stop.is_set():
                return
            await self.play(f"{self._name}-{number}")

    async def play(self, rollout_id: str) -> None:
        """One rollout."""
        played = self._ledger.rollouts.setdefault(rollout_id, Played(rollout_id))
        for number in range(self._rng.randint(2, 6)):
            asked = question(f"{rollout_id}, turn {number}", words=self._rng.randint(4, 40))
            turn = await self.ask(played, asked)
            if turn is None:
                return
            played.turns.append(turn)
        played.is_over = True

    async def ask(self, played: Played, asked: str) -> Turn | None:
        """One request and its repetitions. None: it has hung."""
        api, stream = self._rng.choice(APIS), self._rng.random() < 0.5
        body = api.body(played.history(), asked) | ({"stream": True} if stream else {})
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in itertools.count():
                    if attempt:
                        wait_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S)) - 1]
                        await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))
                    try:
                        call_id, text = await self._for_a_while(self._attempt(played, api, body, attempt))
                    except NotWholeError as failure:
                        self._ledger.failures[str(failure)] += 1
                    except httpx.TransportError as error:
                        self._ledger.failures[type(error).__name__] += 1
                    else:
                        return Turn(asked, call_id, text, attempt + 1)
        except TimeoutError:
            self._ledger.hung += 1
        return None

    async def _for_a_while(self, attempt: Awaitable[tuple[str, str]]) -> tuple[str, str]:
        """The attempt's outcome, unless patience ends first."""
        leaves = self._is_impatient and self._rng.random() < _LEFT
        try:
            async with asyncio.timeout(self._rng.uniform(*_PATIENCE_S) if leaves else None):
                return await attempt
        except TimeoutError:
            raise NotWholeError(LEFT) from None

    async def _attempt(self, played: Played, api: Api, body: Mapping[str, object], attempt: int) -> tuple[str, str]:
        request = self._http.stream(
            "POST",
            f"{self._url()}/ng-rollout/{played.rollout_id}/v1/{api.path}",
            json=body,
            headers={"x-stainless-retry-count": str(attempt)},
        )
        async with request as response:
            if response.status_code != 200:
                is_ours = response.headers.get("content-type", "").startswith("application/json")
                raise NotWholeError(f"{response.status_code}{'' if is_ours else ' of HAProxy'}")
            call_id = response.headers["request-id"]
            if not body.get("stream"):
                played.cut_off.append(call_id)
                await response.aread()
                text = api.text(response.json())
            else:
                text = ""
                async for delta in api.deltas(response.aiter_lines()):
                    if not text:
                        played.cut_off.append(call_id)
                    text += delta
            played.cut_off.remove(call_id)
            return call_id, text
