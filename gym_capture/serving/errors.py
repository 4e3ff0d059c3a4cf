"""The one boundary where errors are classified for clients.

Invariant: whatever a client is told has gone wrong becomes an `ApiError` here, and nowhere else: what leaves a call,
and a path that leads nowhere. What is not known to this package is a 500 whose details go to the log, not to the
client.
"""

from __future__ import annotations

import logging
from typing import Final

from gym_capture.dialects.base import ApiError
from gym_capture.errors import (
    AuthenticationError,
    CompletedRolloutError,
    ConflictingRegistrationError,
    ContextLengthError,
    EngineDeadError,
    EngineOverloadedError,
    GymCaptureError,
    InvalidRequestError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    RetiredRolloutError,
    StoreError,
    UnknownModelError,
    UnknownRolloutError,
)

logger = logging.getLogger(__name__)

_LONGEST_PATH: Final = 200


def classify(error: Exception) -> ApiError:
    """The answer to a client for `error`; server-side faults are logged, once, here."""
    match error:
        case ContextLengthError():
            return ApiError(
                status=400, kind="context_length", message=error.message, param="messages", overflow=error.overflow
            )
        case RequestTooLargeError():
            return ApiError(status=413, kind="too_large", message=error.message)
        case RequestTimeoutError():
            return ApiError(status=408, kind="timeout", message=error.message)
        case UnknownRolloutError():
            return ApiError(status=404, kind="not_found", message=str(error))
        case UnknownModelError():
            return ApiError(status=404, kind="unknown_model", message=error.message, param="model")
        case AuthenticationError():
            if error.forbidden:
                return ApiError(status=403, kind="permission", message=error.message)
            return ApiError(status=401, kind="authentication", message=error.message)
        case InvalidRequestError():
            return ApiError(status=400, kind="invalid_request", message=error.message, param=error.param)
        case RequestError():
            return ApiError(status=400, kind="invalid_request", message=error.message)
        case RetiredRolloutError() | CompletedRolloutError() | ConflictingRegistrationError():
            return ApiError(status=409, kind="conflict", message=str(error))
        case EngineOverloadedError():
            return ApiError(status=503, kind="overloaded", message=error.message, retry_after_s=error.retry_after_s)
        case EngineDeadError():
            logger.error("engine dead: %s", error)
            return ApiError(status=503, kind="overloaded", message="the engine is restarting", retry_after_s=5.0)
        case StoreError():
            logger.error("state unavailable: %s", error)
            return ApiError(
                status=503, kind="overloaded", message="the call could not be registered", retry_after_s=1.0
            )
        case GymCaptureError():
            logger.error("call failed: %s", error)
            return ApiError(status=500, kind="internal", message=error.message)
        case _:
            logger.exception("unexpected error", exc_info=error)
            return ApiError(status=500, kind="internal", message="internal error; the server's log has the details")


def no_route(status: int, method: str, path: str) -> ApiError:
    """The answer to a client whose request fits no route: `status` is 405 if the path takes another method."""
    route = f"{method} {path[:_LONGEST_PATH]}"
    if status == 404:
        return ApiError(status=status, kind="not_found", message=f"no such route: {route}")
    what = "this route takes another method" if status == 405 else "this server does not take such a request"
    return ApiError(status=status, kind="invalid_request", message=f"{route}: {what}")
