"""A rollout as seen from outside of its calls: which one it is (`Registration`), and how it ended (`Outcome`).

Invariant: two that say the same are equal, and one text stands for each (`as_text`): that text is what is kept, hashed
and compared. A reward that is no finite number is none, so it is refused where it is said, not where it is trained on.

Flow: `Register` or `Complete` (`operations`) -> its text is a fact of the rollout (`rollout_state`) -> `Snapshot`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, Final, NamedTuple

from gym_capture.errors import RecordError

__all__ = ["Outcome", "Registration", "Standing"]

MAX_TASK_BYTES: Final = 16 * 2**10
"""Of a task as JSON: a state actor has it in memory as long as the rollout is live."""
MAX_TEXT_BYTES: Final = 16 * 2**10
"""Of any other text here, for the same reason."""

_to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Which rollout it is."""

    group_id: str
    """The rollouts of one task, which GRPO compares with each other."""
    sample: int | None = None
    """Which of its group's attempts."""
    task: str | None = None
    """The task that it is an attempt at, as JSON; None: nobody said."""
    agent_completes: bool = True
    """Whether its agent is trusted to say how it ended. Else that is for who registered it."""

    def __post_init__(self) -> None:
        _check_text("group_id", self.group_id)
        if self.sample is not None and (type(self.sample) is not int or not 0 <= self.sample < 2**53):
            raise RecordError(f"sample must be a number from 0 on: got {self.sample!r:.40}", field="sample")
        if not isinstance(self.agent_completes, bool):
            raise RecordError(
                f"agent_completes must be true or false: got {self.agent_completes!r:.40}", field="agent_completes"
            )
        if self.task is not None:
            _check_text("task", self.task, limit=MAX_TASK_BYTES)

    def as_text(self) -> str:
        return _to_json(astuple(self))

    @classmethod
    def from_text(cls, text: str) -> Registration:
        """Raises `RecordError` or `ValueError` for what `as_text` never wrote."""
        group_id, sample, task, agent_completes = json.loads(text)
        return cls(group_id=group_id, sample=sample, task=task, agent_completes=agent_completes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended, as its agent or whoever scored it says."""

    reward: float | None = None
    """None: none was earned, or nobody scored it."""
    reward_components: tuple[tuple[str, float], ...] = ()
    """Names and values, sorted."""
    failure: str | None = None
    """Why it did not come to its end; None: it did."""
    answer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", None if self.reward is None else _finite("reward", self.reward))
        components = dict(self.reward_components).items()
        checked = ((_check_text("reward_components", name), _finite(name, value)) for name, value in components)
        object.__setattr__(self, "reward_components", tuple(sorted(checked)))
        if self.failure is not None and not _check_text("failure", self.failure):
            raise RecordError("failure must say why, or be left out", field="failure")
        if self.answer is not None:
            _check_text("answer", self.answer)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "reward_components": dict(self.reward_components)}

    def as_text(self) -> str:
        return _to_json(astuple(self))

    @classmethod
    def from_text(cls, text: str) -> Outcome:
        """Raises `RecordError` or `ValueError` for what `as_text` never wrote."""
        reward, components, failure, answer = json.loads(text)
        pairs = tuple((name, value) for name, value in components)
        return cls(reward=reward, reward_components=pairs, failure=failure, answer=answer)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{name} must be a number: got {value!r:.40}", field=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RecordError(f"{name} must be a finite number: got {value!r:.40}", field=name)
    return number + 0.0  # -0.0 equals 0.0, and is to be written like it


def _check_text(name: str, value: object, *, limit: int = MAX_TEXT_BYTES) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{name} must be a string: got {value!r:.40}", field=name)
    if len(value.encode("utf-8", "surrogatepass")) > limit:
        raise RecordError(f"{name} is longer than {limit:,} bytes: keep it elsewhere, and say where", field=name)
    return value


# --- both, where only one of them may be known -------------------------------------------------------------------


class Standing(NamedTuple):
    """Registration and outcome of a live rollout."""

    rollout_id: str
    registration: Registration | None
    outcome: Outcome | None


SAID: Final = ("registration", "outcome")
"""The name of each in a snapshot, where it is."""


def said_texts(registration: Registration | None, outcome: Outcome | None) -> dict[str, str]:
    """The texts of what is known, by name."""
    both = zip(SAID, (registration, outcome), strict=True)
    return {name: said.as_text() for name, said in both if said is not None}


def said_in(texts: Mapping[str, Any]) -> tuple[Registration | None, Outcome | None]:
    """Both, read again. Raises as `from_text`."""
    registration, outcome = (texts.get(name) for name in SAID)
    return (
        None if registration is None else Registration.from_text(registration),
        None if outcome is None else Outcome.from_text(outcome),
    )
