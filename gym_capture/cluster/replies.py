"""Answers of Ray actors, and their errors without the trace of another process around them."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from gym_capture.errors import StoreUnavailableError


def answer(replies: Any, *, within_s: float | None = None) -> Any:
    """Waits for one reply of an actor, or for a list of them.

    Raises what the actor raised, `StoreUnavailableError` if it is gone or has not answered after `within_s`.
    """
    try:
        return ray.get(replies, timeout=within_s)
    except RayTaskError as error:
        raise cause_of(error) from None
    except RayActorError as error:
        raise StoreUnavailableError(f"an actor that keeps records is gone: {error}") from error
    except GetTimeoutError as error:
        raise StoreUnavailableError(f"an actor that keeps records did not answer within {within_s:.0f} s") from error


def cause_of(error: RayTaskError) -> BaseException:
    """The error that the actor raised, if Ray could carry it over; else `error` itself."""
    return error.cause if isinstance(error.cause, Exception) else error
