"""HTTP in front of a `CallService`: routes, streaming, disconnects, errors in the dialect's own shape.

Invariant: a client gets either a whole reply, whose record is durable by then, or an error that cannot be mistaken for
one. A client that goes away frees its engine slot.

The gateway runs inside the replica that holds the engine. A hop between the two costs a fifth of the throughput of a
small model (docs/performance.md), and what it would buy - one rollout on one replica - the request router gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gym_capture.dialects.base import ApiError, Dialect, ReplyIdentity
from gym_capture.dialects.chat import ChatDialect
from gym_capture.errors import GymCaptureError
from gym_capture.serving.call import CallInFlight, CallService
from gym_capture.serving.errors import classify

logger = logging.getLogger(__name__)

_CHAT: Final = ChatDialect()
_JSON: Final = "application/json"
_GONE: Final = 499


def build_gateway(service: CallService, *, model_name: str, max_model_len: int, stream_interval_s: float) -> FastAPI:
    """The HTTP application of one replica."""
    app = FastAPI(title="gym-capture", docs_url=None, redoc_url=None)
    edge = _Edge(service, stream_interval_s=stream_interval_s)
    started = int(time.time())

    async def chat(request: Request) -> Response:
        return await edge.answer(request, _CHAT, rollout_id=request.path_params.get("rollout_id"))

    async def models(request: Request) -> Response:
        entry = {
            "id": model_name,
            "object": "model",
            "created": started,
            "owned_by": "gym-capture",
            "max_model_len": max_model_len,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def healthz(request: Request) -> Response:
        error = await edge.health()
        return JSONResponse({"status": "ok" if error is None else error}, status_code=200 if error is None else 503)

    for prefix in ("", "/ng-rollout/{rollout_id}", "/ng-rollout/{rollout_id}/training-token-capture"):
        app.add_api_route(f"{prefix}/v1/chat/completions", chat, methods=["POST"], include_in_schema=prefix == "")
        app.add_api_route(f"{prefix}/v1/models", models, methods=["GET"], include_in_schema=prefix == "")
    app.add_api_route("/healthz", healthz, methods=["GET"])

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        kind = "not_found" if error.status_code == 404 else "invalid_request"
        message = f"no such route: {request.method} {request.url.path[:200]}"
        api_error = ApiError(status=error.status_code, kind=kind, message=message)
        return Response(_CHAT.error(api_error), status_code=error.status_code, media_type=_JSON)

    return app


class _Edge:
    """Runs calls for HTTP requests."""

    def __init__(self, service: CallService, *, stream_interval_s: float) -> None:
        self._service = service
        self._interval_s = stream_interval_s

    async def health(self) -> str | None:
        try:
            await self._service.check_health()
        except GymCaptureError as error:
            return error.message
        return None

    async def answer(self, http: Request, dialect: Dialect, *, rollout_id: str | None) -> Response:
        try:
            body = await http.body()
            request = dialect.parse(body)
            call = await self._service.begin(request, rollout_id=rollout_id, body=body)
            identity = ReplyIdentity(call_id=call.call_id, model=request.requested_model, created=int(time.time()))
            if request.stream:
                return await self._streamed(http, call, dialect, identity)
            return await self._whole(http, call, dialect, identity)
        except ClientDisconnect:  # while its body was still on the way
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - the boundary that classifies
            return _error_response(dialect, classify(error))

    async def _whole(self, http: Request, call: CallInFlight, dialect: Dialect, identity: ReplyIdentity) -> Response:
        async def generate() -> bytes:
            ended = False
            try:
                async for _ in call.events():
                    pass
                reply = await call.complete()
                ended = True
            finally:
                if not ended:
                    await asyncio.shield(call.fail())
            return dialect.reply(call.request, identity, reply)

        body = await _unless_gone(http, generate())
        return Response(status_code=_GONE) if body is None else Response(body, media_type=_JSON)

    async def _streamed(self, http: Request, call: CallInFlight, dialect: Dialect, identity: ReplyIdentity) -> Response:
        """The response, once the first text is there: what fails before it still gets its own status."""
        encoder = dialect.stream(call.request, identity)

        async def frames() -> AsyncGenerator[bytes]:
            ended = False
            pending = encoder.start(call.prompt_tokens)
            try:
                async for events, log_probs in call.events():
                    yield pending + encoder.events(events, log_probs)
                    pending = b""
                    # The engine's collector merges what it produces meanwhile: fewer, larger messages.
                    await asyncio.sleep(self._interval_s)
                reply = await call.complete()
                ended = True
                yield pending + encoder.finish(reply)
            except Exception as error:
                ended = True
                await call.fail()
                if pending:  # nothing has left yet
                    raise
                yield encoder.error(classify(error))
            finally:
                if not ended:  # the client went away
                    await asyncio.shield(call.fail())

        stream = frames()
        first = await _unless_gone(http, anext(stream))
        if first is None:
            return Response(status_code=_GONE)

        async def from_first() -> AsyncGenerator[bytes]:
            try:
                yield first
                async for frame in stream:
                    yield frame
            finally:
                await stream.aclose()

        return StreamingResponse(
            from_first(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )


async def _unless_gone(http: Request, work: Awaitable[bytes]) -> bytes | None:
    """What `work` gives; None if the client went away first, and then `work` has been cancelled and has ended."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


async def _disconnected(http: Request) -> None:
    """Returns when the client has gone. The body has been read, so nothing else can arrive."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _error_response(dialect: Dialect, error: ApiError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    return Response(dialect.error(error), status_code=error.status, media_type=_JSON, headers=headers)
