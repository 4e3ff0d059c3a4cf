"""Answers of Ray actors, and their errors without the trace of another process around them."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayTaskError


def answer(replies: Any) -> Any:
    """Waits for one reply of an actor, or for a list of them. Raises what the actor raised."""
    try:
        return ray.get(replies)
    except RayTaskError as error:
        raise cause_of(error) from None


def cause_of(error: RayTaskError) -> BaseException:
    """The error that the actor raised, if Ray could carry it over; else `error` itself."""
    return error.cause if isinstance(error.cause, Exception) else error
