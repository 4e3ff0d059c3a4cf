"""An update of the weights that is under way, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gym_capture.errors import WeightsBusyError, WeightsRefusedError
from gym_capture.weights import Payload


class Outcome(StrEnum):
    """What became of an update."""

    APPLIED = "applied"
    REFUSED = "refused"
    FAILED = "failed"
    ABORTED = "aborted"
    GIVEN_UP = "given_up"


@dataclass(slots=True)
class Update:
    """An update under way."""

    owner: str | None = None
    """Who has begun it, if that was said."""
    payload: Payload | None = None
    """A folder that every replica has checked."""
    checked: set[str] = field(default_factory=set)
    """The replicas that see it."""
    read_on: set[str] = field(default_factory=set)
    """The nodes on which it was read from end to end."""
    has_transfer: bool = False
    """Weights come by a transfer: replicas are paused, and what they hold is no version."""
    may_go_back: bool = False
    allow_non_finite: bool = False


def outcome_of(error: BaseException) -> Outcome:
    """Of an update that this error ended."""
    return Outcome.REFUSED if isinstance(error, WeightsRefusedError | WeightsBusyError) else Outcome.FAILED


def check_folder_info(info: Mapping[str, Any]) -> None:
    """Raises `WeightsRefusedError` for what is said beside a folder and is not understood."""
    unknown = info.keys() - {"folder", "force", "allow_non_finite"}
    if unknown:
        raise WeightsRefusedError(f"update_info: there is no {sorted(unknown)[0]!r} beside `folder`")
    for name in ("force", "allow_non_finite"):
        if not isinstance(info.get(name, False), bool):
            raise WeightsRefusedError(f"update_info: {name} must be true or false: got {str(info[name])[:50]!r}")
