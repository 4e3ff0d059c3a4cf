"""One attempt at a rollout: whatever happens in it becomes a value, in the time that it was given.

Invariant: `play` raises nothing but the cancellation of the job, and returns within `rollout_timeout_s` and two times
`close_timeout_s` - one for an agent that does not end when it is cancelled, one for an environment that does not close.
What was scored counts: a tear-down that fails afterwards is a note. An environment that was made is closed, however the
attempt ended. Each attempt has a rollout id of its own, and before it plays, those that it supersedes are closed: what
still runs of one of them is refused by the server, and has nowhere to write to. Those that it goes on from are refused
likewise, and keep their records until the rollout is over.

Flow: close what is superseded, or have it hand on its records; clear what is stale -> make and reset the environment ->
the harness plays -> score -> close the environment.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from gym_capture.errors import GymCaptureError, described
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.checked import checked_components, checked_observation, checked_outcome
from gym_capture.rollouts.environment import Environment, EnvironmentFactory, Observation, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Harness
from gym_capture.rollouts.patience import Late, Patience, Raised, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An attempt that came to its end."""

    answer: str
    n_calls: int
    reward: float
    components: Mapping[str, float]
    completed: Completed
    """The harness's own account."""


class Outcome(NamedTuple):
    """The outcome of an attempt."""

    result: Scored | Failed
    note: str | None
    """Trouble afterwards, in the tear-down."""
    observation: Observation | None = None
    """The agent's start; None if it did not come to that."""


class Before(NamedTuple):
    """Rollout ids of the earlier attempts at the same rollout."""

    superseded: Sequence[str] = ()
    """Those that are to be forgotten."""
    goes_on_from: Sequence[str] = ()
    """Those that were cut, and whose records answer the calls of this one that are equal to theirs."""


FIRST: Final = Before()
"""There are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How much of earlier attempts an attempt repeated. Fields as in `ledger.RolloutRow`."""

    calls: int
    diverged_at: int | None


class TurnResume(Protocol):
    """What the server does with attempts that others go on from. Each may be repeated."""

    async def hand_on(self, rollout_id: str) -> None:
        """Refuses the calls of an attempt that was cut, and keeps its records."""
        ...

    async def go_on(self, rollout_id: str, source: str) -> None:
        """Answers calls of `rollout_id` from the records of `source`, where they are equal."""
        ...

    async def over(self, rollout_id: str, sources: Sequence[str]) -> Replayed:
        """How much of `sources` an attempt that is over repeated. They are closed: nothing goes on from them now."""
        ...


class Play(Protocol):
    """Plays one attempt."""

    def __call__(self, rollout_id: str, task: Task, *, before: Before = FIRST) -> Awaitable[Outcome]:
        """`rollout_id` is the attempt's own."""
        ...


class AttemptRunner(Protocol):
    """The player of a job's attempts: this process (`Attempts`), or others on a cluster (`on_ray`)."""

    async def place(self) -> Play:
        """Returns once there is room for one more attempt; the attempt that is then played takes it.

        Raises `ConfigError` if there never will be.
        """
        ...

    @property
    def left_running(self) -> int:
        """Agents and environments that go on although they were cancelled."""
        ...


async def make_ready(
    rollout_id: str,
    *,
    before: Before,
    clear: Callable[[str], Awaitable[object]],
    close: Callable[[str], Awaitable[object]],
    resume: TurnResume | None,
) -> None:
    """Has the server refuse the attempts before, and forget what it may have of this one.

    It may end between any two of these: the next attempt does all of it for all attempts before it.
    """
    for superseded in before.superseded:
        await close(superseded)
    if resume is None:
        await clear(rollout_id)
        return
    for source in before.goes_on_from:
        await resume.hand_on(source)
    await clear(rollout_id)
    for source in before.goes_on_from:
        await resume.go_on(rollout_id, source)


class _Stage:
    """How far an attempt has come."""

    def __init__(self) -> None:
        self.blamed = AttemptFailure.NOT_CLEARED
        """The reason of what is raised now."""
        self.environment: Environment | None = None
        """To be closed."""
        self.note: str | None = None
        self.observation: Observation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The common parts of all attempts of a job."""

    harness: Harness
    make_environment: EnvironmentFactory
    endpoint: Callable[[str], Endpoint]
    clear: Callable[[str], Awaitable[object]]
    close: Callable[[str], Awaitable[object]]
    patience: Patience
    rollout_timeout_s: float
    close_timeout_s: float
    resume: TurnResume | None = None
    """None: no attempt goes on from another."""

    @property
    def left_running(self) -> int:
        return self.patience.left_running

    async def place(self) -> Play:
        return self.play

    async def play(self, rollout_id: str, task: Task, *, before: Before = FIRST) -> Outcome:
        stage = _Stage()
        try:
            ended = await self.patience.wait(
                lambda: self._play(rollout_id, task, before, stage), limit_s=self.rollout_timeout_s
            )
        finally:
            await self._close(stage)
        match ended:
            case Value(result):
                return Outcome(result, stage.note, stage.observation)
            case Raised(error):
                retryable = error.retryable if isinstance(error, GymCaptureError) else True
                failed = Failed(stage.blamed, described(error), retryable=retryable)
                return Outcome(failed, stage.note, stage.observation)
            case Late(still_runs):
                detail = f"not over after {self.rollout_timeout_s:g} s"
                if still_runs:
                    detail += "; the agent goes on although it was cancelled"
                return Outcome(Failed(AttemptFailure.ROLLOUT_TIMEOUT, detail), stage.note, stage.observation)

    async def _play(self, rollout_id: str, task: Task, before: Before, stage: _Stage) -> Scored | Failed:
        await make_ready(rollout_id, before=before, clear=self.clear, close=self.close, resume=self.resume)
        stage.blamed = AttemptFailure.ENVIRONMENT_START
        environment = stage.environment = self.make_environment()
        observation = stage.observation = checked_observation(await environment.reset(task))
        endpoint = self.endpoint(rollout_id)
        stage.blamed = AttemptFailure.EXCEPTION
        played = await self.harness.run(endpoint=endpoint, observation=observation, environment=environment)
        outcome = checked_outcome(played)
        if isinstance(outcome, Failed):
            return outcome
        answer, n_calls = outcome.answer, outcome.n_calls
        stage.blamed = AttemptFailure.ENVIRONMENT_SCORE
        score = await environment.score(answer)
        components = checked_components(score.components)
        reward = float(score.reward)
        if not math.isfinite(reward):
            return Failed(AttemptFailure.BAD_REWARD, f"the environment's reward is {reward}", n_calls)
        for call_id, given in outcome.call_rewards.items():
            if not math.isfinite(given):
                return Failed(AttemptFailure.BAD_REWARD, f"the agent's reward of call {call_id} is {given}", n_calls)
        return Scored(answer=answer, n_calls=n_calls, reward=reward, components=components, completed=outcome)

    async def _close(self, stage: _Stage) -> None:
        environment = stage.environment
        if environment is None:
            return
        match await self.patience.wait(environment.close, limit_s=self.close_timeout_s):
            case Raised(error):
                stage.note = f"closing the environment failed: {described(error)}"
            case Late():
                stage.note = f"the environment was not closed after {self.close_timeout_s:g} s"
