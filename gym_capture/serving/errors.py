"""The one boundary where errors are classified for clients.

Invariant: every exception that can leave a call becomes an `ApiError` here, and nowhere else; what is not known to this
package is a 500 whose details go to the log, not to the client.
"""

from __future__ import annotations

import logging

from gym_capture.dialects.base import ApiError
from gym_capture.errors import (
    AuthenticationError,
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


def classify(error: Exception) -> ApiError:
    """What a client is told of `error`; server-side faults are logged, once, here."""
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
            kind = "permission" if error.forbidden else "authentication"
            return ApiError(status=403 if error.forbidden else 401, kind=kind, message=error.message)
        case InvalidRequestError():
            return ApiError(status=400, kind="invalid_request", message=error.message, param=error.param)
        case RequestError():
            return ApiError(status=400, kind="invalid_request", message=error.message)
        case RetiredRolloutError():
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
