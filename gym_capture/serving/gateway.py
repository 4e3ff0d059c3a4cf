"""HTTP in front of a `CallService`: routes, tokens, streaming, disconnects, errors in the dialect's own shape.

Invariant: a client gets either a whole reply, or an error that cannot be mistaken for one. By the time that a reply is
whole its record is durable, or its rollout is incomplete for the want of it. A client that goes away frees its engine
slot.

The gateway runs inside the replica that holds the engine. A hop between the two costs a fifth of the throughput of a
small model (docs/performance.md), and what it would buy - one rollout on one replica - the request router gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gym_capture.auth import Keyring
from gym_capture.calls import ModelRequest
from gym_capture.capture.record_rows import row_json, snapshot_json
from gym_capture.dialects.base import ApiError, Dialect, ReplyIdentity, Route, StreamEncoder, TokenCounting
from gym_capture.dialects.registry import DIALECTS
from gym_capture.errors import (
    GymCaptureError,
    InvalidRequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    RetiredRolloutError,
)
from gym_capture.serving.browsers import NotFromElsewhere
from gym_capture.serving.call import CallInFlight
from gym_capture.serving.call_service import CallService, unknown_model
from gym_capture.serving.errors import classify, no_route
from gym_capture.serving.live import LiveCall, LiveCalls
from gym_capture.serving.openapi import describe
from gym_capture.serving.registry import Answer, Registry

logger = logging.getLogger(__name__)

_DEFAULT: Final = DIALECTS[0]
_ROLLOUT: Final = "/ng-rollout/{rollout_id}"
_GREETINGS: Final = ("", "/", "/api/hello")
"""Below a base URL: what clients ask to see whether a server is there, or to warm a connection."""
_PREFIXES: Final = ("", _ROLLOUT, f"{_ROLLOUT}/training-token-capture")
_JSON: Final = "application/json"
_DIGITS: Final = 18
_LARGE_BODY: Final = 256 * 2**10
"""Bytes beyond which a body is parsed beside the event loop."""
_GONE: Final = 499
_ANSWER_WITHIN_S: Final = 5.0
"""A part that needs longer to say that it is well is not."""
_FIRST_BYTE_S: Final = 1.5
"""A stream whose call has begun says so after this long, even if nothing has been generated yet."""
_NOT_BEGUN_S: Final = 10.0
"""...and after this long whatever happens; until then a failure has its own HTTP status."""


def build_gateway(
    service: CallService,
    *,
    model_name: str,
    max_model_len: int,
    calls: LiveCalls,
    keep_alive_s: float = 10.0,
    max_body_bytes: int = 32 * 2**20,
    body_timeout_s: float = 60.0,
    keyring: Keyring | None = None,
) -> FastAPI:
    """The HTTP application of one replica. Without a `keyring` every route is open."""
    if keyring is None:
        logger.warning(
            "no secret_file is configured: anybody who reaches this server may call the model as any rollout"
        )
    app = FastAPI(title="gym-capture", docs_url=None, redoc_url=None)
    app.add_middleware(NotFromElsewhere)
    edge = _Edge(
        service,
        calls=calls,
        keep_alive_s=keep_alive_s,
        max_body_bytes=max_body_bytes,
        body_timeout_s=body_timeout_s,
        keyring=keyring,
    )
    model = _model(model_name, max_model_len)

    async def models(request: Request) -> Response:
        ids = {"first_id": model_name, "last_id": model_name, "has_more": False}
        return JSONResponse({"object": "list", "data": [model], **ids})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        if name == model_name:
            return JSONResponse(model)
        return _error_response(_DEFAULT, classify(unknown_model(name, model_name)))

    async def index(request: Request) -> Response:
        return JSONResponse({"name": "gym-capture", "model": model_name})

    async def healthz(request: Request) -> Response:
        parts = await edge.health()
        is_well = all(state == "ok" for state in parts.values())
        return JSONResponse({"status": "ok" if is_well else "failing", **parts}, status_code=200 if is_well else 503)

    async def stats(request: Request) -> Response:
        return await _classified(_DEFAULT, edge.stats())

    async def records(request: Request) -> Response:
        return await _classified(_DEFAULT, edge.records(request))

    async def outgrown(request: Request) -> Response:
        return await _classified(_DEFAULT, edge.outgrown(request))

    def of_rollouts(look: Answer) -> _Handler:
        async def answer(request: Request) -> Response:
            return await _classified(_DEFAULT, _registered(look, request))

        return answer

    for method, path, look_at, description in edge.registry.routes():
        app.add_api_route(
            path,
            of_rollouts(look_at),
            methods=[method],
            openapi_extra=dict(description),
            operation_id=f"{method} {path}",
        )
    for prefix in _PREFIXES:
        for spoken, answer in _answers(edge):
            app.add_api_route(
                prefix + spoken.path,
                answer,
                methods=["POST"],
                include_in_schema=prefix in ("", _ROLLOUT),
                openapi_extra=describe(spoken, in_rollout=prefix == _ROLLOUT),
                operation_id=f"POST {prefix + spoken.path}",
            )
        looks: list[tuple[str, _Handler]] = [
            ("/v1/models", models),
            ("/v1/models/{model:path}", one_model),
            # Clients look whether anybody is there before they send anything.
            *((path, index) for path in _GREETINGS if prefix + path),
        ]
        for path, look in looks:
            app.add_api_route(
                prefix + path,
                look,
                methods=["GET"],
                include_in_schema=prefix == "",
                operation_id=f"GET {prefix + path}",
            )
    app.add_api_route(f"{_ROLLOUT}/token-records", records, methods=["GET"], include_in_schema=False)
    app.add_api_route(f"{_ROLLOUT}/outgrown", outgrown, methods=["GET"], include_in_schema=False)
    app.add_api_route("/healthz", healthz, methods=["GET"])
    app.add_api_route("/stats", stats, methods=["GET"])
    for route in tuple(app.routes):
        if isinstance(route, APIRoute) and "GET" in route.methods:
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)

    @app.exception_handler(HTTPException)
    async def to_no_route(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        response = _error_response(_dialect_of(path), no_route(error.status_code, request.method, path))
        response.headers.update(error.headers or {})
        return response

    return app


_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def _model(name: str, max_model_len: int) -> dict[str, Any]:
    """The model as OpenAI's clients and Anthropic's look it up: each finds its own fields."""
    started = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "gym-capture",
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
    }


def _answers(edge: _Edge) -> Iterator[tuple[Route, _Handler]]:
    """The routes of all dialects, and what answers them."""
    for dialect in DIALECTS:
        yield dialect.route, _answering(dialect, partial(edge.call, dialect=dialect))
        if dialect.counting is not None:
            yield dialect.counting.route, _answering(dialect, partial(edge.count, counting=dialect.counting))


def _answering(dialect: Dialect, handler: _Handler) -> _Handler:
    async def answer(request: Request) -> Response:
        return await _classified(dialect, handler(request))

    return answer


def _dialect_of(path: str) -> Dialect:
    """The dialect in which a client of `path` expects errors."""
    return next((dialect for dialect in DIALECTS if dialect.route.path in path), _DEFAULT)


class _Edge:
    """Runs calls for HTTP requests."""

    def __init__(
        self,
        service: CallService,
        *,
        calls: LiveCalls,
        keep_alive_s: float,
        max_body_bytes: int,
        body_timeout_s: float,
        keyring: Keyring | None,
    ) -> None:
        self._service = service
        self._calls = calls
        self._keep_alive_s = keep_alive_s
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._keyring = keyring
        self.registry = Registry(service, keyring=keyring, body=self._whole_body)

    async def health(self) -> dict[str, str]:
        """Of each part that calls need: `ok`, or what is wrong."""
        return {
            "engine": await _well(self._service.check_health()),
            # Answering takes an open log: an actor that is restarting or reading its log back does not.
            "state": await _well(self._service.stats()),
        }

    async def stats(self) -> Response:
        """Counts of the state actors, over all replicas."""
        found = await self._service.stats()
        if found is None:
            return JSONResponse({"capture": False})
        eligible = found.prefix_requested
        ratio = None if eligible == 0 else found.prefix_supplied / eligible
        return JSONResponse({"capture": True, "prefix_supplied_ratio": ratio, **asdict(found)})

    async def records(self, http: Request) -> Response:
        """Everything that is recorded of a rollout, token ids included."""
        if self._keyring is not None:
            self._keyring.admit_reader(http.headers)
        snapshot = await self._service.snapshot(http.path_params["rollout_id"])
        return Response(await asyncio.to_thread(snapshot_json, snapshot), media_type=_JSON)

    async def outgrown(self, http: Request) -> Response:
        """Whether the rollout's last call was refused because its conversation has outgrown the context."""
        rollout_id = http.path_params["rollout_id"]
        if self._keyring is not None:
            self._keyring.admit_call(http.headers, rollout_id)
        is_outgrown, calls = await self._service.outgrown(rollout_id)
        return JSONResponse({"rollout_id": rollout_id, "outgrown": is_outgrown, "calls": calls})

    async def count(self, http: Request, counting: TokenCounting) -> Response:
        """How long the prompt of a request would be."""
        rollout_id = http.path_params.get("rollout_id")
        request = await _parsed(counting.parse, await self._admitted(http, rollout_id))
        tokens = await self._service.count(request, rollout_id=rollout_id)
        return Response(counting.reply(tokens), media_type=_JSON)

    async def call(self, http: Request, dialect: Dialect) -> Response:
        """One model call."""
        rollout_id = http.path_params.get("rollout_id")
        body = await self._admitted(http, rollout_id)
        request = await _parsed(dialect.parse, body)
        live = self._joined(http, dialect, request, body, rollout_id=rollout_id)
        answer = self._streamed if request.stream else self._whole
        return await answer(http, live, request, dialect)

    async def _admitted(self, http: Request, rollout_id: str | None) -> bytes:
        """The body of a request that may call the model as this rollout."""
        if self._keyring is not None:
            self._keyring.admit_call(http.headers, rollout_id)
        return await self._whole_body(http)

    async def _whole_body(self, http: Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await _body(http, self._max_body_bytes)
        except TimeoutError:
            raise RequestTimeoutError(f"the request body was not here whole after {self._body_timeout_s:g} s") from None

    def _joined(
        self, http: Request, dialect: Dialect, request: ModelRequest, body: bytes, *, rollout_id: str | None
    ) -> LiveCall:
        call_id = dialect.id_prefix + uuid.uuid4().hex
        digest = hashlib.sha256(body).hexdigest()

        async def begin() -> CallInFlight:
            return await self._service.begin(request, rollout_id=rollout_id, call_id=call_id, request_digest=digest)

        return self._calls.join(
            call_id,
            begin,
            asked=None if rollout_id is None else (rollout_id, dialect.id_prefix, digest),
            is_repetition=_is_repetition(http),
        )

    async def _whole(self, http: Request, live: LiveCall, request: ModelRequest, dialect: Dialect) -> Response:
        async def reply() -> bytes:
            return dialect.reply(request, _identity(live, request), await live.reply())

        body = await _or_leave(http, live, reply())
        return Response(status_code=_GONE) if body is None else _WholeReply(body, live)

    async def _streamed(self, http: Request, live: LiveCall, request: ModelRequest, dialect: Dialect) -> Response:
        """The response, once there is something to say: what fails before it still gets its own status."""
        encoder = dialect.stream(request, _identity(live, request))
        frames = _frames(live, encoder, keep_alive_s=self._keep_alive_s)
        first = await _or_leave(http, live, anext(frames))
        return Response(status_code=_GONE) if first is None else _StreamedReply(first, frames, encoder, live)


async def _frames(live: LiveCall, encoder: StreamEncoder, *, keep_alive_s: float) -> AsyncGenerator[bytes]:
    """The bytes of the stream. Raises what ends the call without a reply."""
    await live.wait_begun(_NOT_BEGUN_S)
    has_started = False
    position, patience_s = 0, _FIRST_BYTE_S
    while True:
        pieces = await live.hear(position, patience_s)
        if not pieces and live.running.done():
            break
        position += len(pieces)
        out = [] if pieces else [encoder.keep_alive()]
        if live.begun is not None and not has_started:
            out.insert(0, encoder.start(live.begun.prompt_tokens))
            has_started = True
        out += [encoder.events(piece.events, piece.log_probs) for piece in pieces]
        yield b"".join(out)
        patience_s = keep_alive_s
    reply = await live.reply()
    assert live.begun is not None
    yield (b"" if has_started else encoder.start(live.begun.prompt_tokens)) + encoder.finish(reply)


async def _classified(dialect: Dialect, answer: Awaitable[Response]) -> Response:
    """The answer, or what its failure is to a client of this dialect: what fails before a reply begins ends here."""
    try:
        return await answer
    except ClientDisconnect:  # while its body was still on the way
        return Response(status_code=_GONE)
    except Exception as error:  # noqa: BLE001 - the boundary that classifies
        return _error_response(dialect, classify(error))


async def _registered(answer: Answer, http: Request) -> Response:
    """The answer of the registry. Of a rollout that is gone for good, a call has another status."""
    try:
        return Response(row_json(await answer(http)), media_type=_JSON)
    except RetiredRolloutError as error:
        return _error_response(_DEFAULT, replace(classify(error), status=410))


async def _well(check: Awaitable[object]) -> str:
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            await check
    except GymCaptureError as error:
        return error.message
    except TimeoutError:
        return f"no answer within {_ANSWER_WITHIN_S:g} s"
    return "ok"


class _WholeReply(Response):
    """A reply in one piece. Its call learns whether it left whole."""

    def __init__(self, body: bytes, live: LiveCall) -> None:
        super().__init__(body, media_type=_JSON, headers=_call_headers(live))
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivered = False
        try:
            # Asked before: once it has been sent, a server calls every client gone.
            is_gone = await Request(scope, receive).is_disconnected()
            await super().__call__(scope, receive, send)
            delivered = not is_gone
        finally:
            await asyncio.shield(self._live.leave(delivered=delivered))


class _StreamedReply(StreamingResponse):
    """A reply as server-sent events. Its call learns whether it left whole."""

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes], encoder: StreamEncoder, live: LiveCall) -> None:
        super().__init__(
            self._all(first, frames, encoder),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **_call_headers(live)},
        )
        self._live = live
        self._is_delivered = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._live.leave(delivered=self._is_delivered))

    async def _all(self, first: bytes, frames: AsyncGenerator[bytes], encoder: StreamEncoder) -> AsyncGenerator[bytes]:
        yield first
        try:
            async for frame in frames:
                yield frame
            # Whoever listens for a disconnect has its say first: a send to a broken connection raises nothing.
            await asyncio.sleep(0)
            self._is_delivered = True
        except Exception as error:  # noqa: BLE001 - the boundary that classifies
            yield encoder.error(classify(error))


async def _or_leave(http: Request, live: LiveCall, work: Awaitable[bytes]) -> bytes | None:
    """The result of `work`; None if the client went away first. Without an answer, the call loses this listener."""
    answer = None
    try:
        answer = await _unless_gone(http, work)
    finally:
        if answer is None:
            await asyncio.shield(live.leave(delivered=False))
    return answer


async def _unless_gone(http: Request, work: Awaitable[bytes]) -> bytes | None:
    """The result of `work`; None if the client went away first, and then `work` has been cancelled and has ended."""
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


async def _body(http: Request, limit: int) -> bytes:
    """The request's body. Raises `RequestTooLargeError` before more than `limit` bytes are in memory."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequestError(f"a body with content-encoding {encoding[:40]!r} is not supported: send it as it is")
    announced = http.headers.get("content-length", "")
    parts: list[bytes] = []
    # What has more digits than this is too large, and `int` would refuse to say how much.
    size = int(announced[:_DIGITS]) if announced.isdecimal() else 0
    if size <= limit:
        size = 0
        async for part in http.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                break
    if size > limit:
        raise RequestTooLargeError(f"the request body is larger than the {limit:,} bytes that this server takes")
    return b"".join(parts)


async def _parsed(parse: Callable[[bytes], ModelRequest], body: bytes) -> ModelRequest:
    """The request. A large one takes a thread: other clients' streams go on meanwhile."""
    return parse(body) if len(body) <= _LARGE_BODY else await asyncio.to_thread(parse, body)


def _is_repetition(http: Request) -> bool:
    """Whether the client library says that it sends this request again."""
    count = http.headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


def _call_headers(live: LiveCall) -> dict[str, str]:
    """The call's id, where Anthropic's library looks for the id of a request; `x-request-id` is Serve's own."""
    return {"request-id": live.call_id}


def _identity(live: LiveCall, request: ModelRequest) -> ReplyIdentity:
    return ReplyIdentity(call_id=live.call_id, model=request.requested_model, created=live.created)


def _error_response(dialect: Dialect, error: ApiError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    if error.kind == "timeout":
        headers["connection"] = "close"  # what is left of the body is not read
    return Response(dialect.error(error), status_code=dialect.status(error), media_type=_JSON, headers=headers)
