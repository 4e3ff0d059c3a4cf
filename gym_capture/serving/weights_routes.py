"""The weight plane over HTTP: vLLM's own routes, for all replicas of the graph at once.

Invariant: paths, bodies and answers are those of vLLM's server, so that a trainer which speaks to one drives the graph
unchanged. Whatever fails has a status that says whether to try again, and one line that says why.

Where a route means more for a graph than for one engine: docs/weights.md.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gym_capture.auth import Keyring
from gym_capture.errors import (
    AuthenticationError,
    EngineError,
    GymCaptureError,
    InvalidRequestError,
    StoreUnavailableError,
    WeightsBusyError,
    WeightsFailedError,
    WeightsRefusedError,
)
from gym_capture.weights import PAUSE_MODES, check_version

_RETRY_AFTER_S: Final = "1"
_LARGEST_BODY: Final = 64 << 20
"""A transfer names every tensor."""
_LONGEST_NUMBER: Final = 19
_LONGEST_OWNER: Final = 200


class Operate(Protocol):
    """Asks the coordinator: a name of `WeightPlane`'s operations, and its arguments."""

    async def __call__(self, operation: Any, **arguments: Any) -> Any: ...


class Coordinator(Protocol):
    @property
    def operate(self) -> Operate: ...


_Answering: TypeAlias = Callable[["_Asked"], Awaitable[Mapping[str, Any]]]


class _Asked:
    """One request, and whom to ask."""

    def __init__(self, http: Request, body: Mapping[str, Any], operate: Operate) -> None:
        self.http = http
        self.body = body
        self.operate = operate

    def flag(self, name: str, default: bool) -> bool:
        value = self.http.query_params.get(name, str(default)).lower()
        if value not in ("true", "false", "1", "0"):
            raise InvalidRequestError(f"{name} must be true or false: got {value[:50]!r}", param=name)
        return value in ("true", "1")

    def given(self, name: str, kinds: tuple[type, ...]) -> Any:
        value = self.body.get(name)
        if not isinstance(value, kinds):
            raise InvalidRequestError(f"{name} must be in the body, as an object", param=name)
        return value

    @property
    def owner(self) -> str | None:
        value = self.body.get("owner")
        if value is not None and (not isinstance(value, str) or len(value) > _LONGEST_OWNER):
            raise InvalidRequestError(f"owner must be a text of at most {_LONGEST_OWNER} characters", param="owner")
        return value


def add_weight_routes(
    app: FastAPI,
    coordinator: Coordinator,
    *,
    check_health: Callable[[], Awaitable[None]],
    keyring: Keyring | None,
) -> None:
    """Without a `keyring` they are open."""

    def route(method: str, path: str, answering: _Answering, *, is_open: bool = False) -> None:
        async def answer(http: Request) -> Response:
            try:
                if keyring is not None and not is_open:
                    keyring.admit_trainer(http.headers)
                body = await _body(http) if method == "POST" else {}
                return JSONResponse(await answering(_Asked(http, body, coordinator.operate)))
            except GymCaptureError as error:
                return _refused(error)

        app.add_api_route(path, answer, methods=[method], include_in_schema=False)

    async def health(asked: _Asked) -> Mapping[str, Any]:
        await check_health()
        return {}

    route("GET", "/health", health, is_open=True)
    for method, path, answering in _ROUTES:
        route(method, path, answering)


async def _pause(asked: _Asked) -> Mapping[str, Any]:
    mode = asked.http.query_params.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise InvalidRequestError(f"mode must be one of {', '.join(PAUSE_MODES)}: got {mode[:50]!r}", param="mode")
    await asked.operate("pause", mode=mode, clear_cache=asked.flag("clear_cache", True))
    return {"status": "paused"}


async def _resume(asked: _Asked) -> Mapping[str, Any]:
    await asked.operate("resume")
    return {"status": "resumed"}


async def _is_paused(asked: _Asked) -> Mapping[str, Any]:
    return {"is_paused": await asked.operate("is_paused")}


async def _world_size(asked: _Asked) -> Mapping[str, Any]:
    return {"world_size": await asked.operate("world_size")}


async def _init(asked: _Asked) -> Mapping[str, Any]:
    await asked.operate("init", info=asked.given("init_info", (dict,)))
    return {"message": "Weight transfer initialized"}


async def _shut_down(asked: _Asked) -> Mapping[str, Any]:
    await asked.operate("shut_down")
    return {"message": "Weight transfer shut down"}


async def _start(asked: _Asked) -> Mapping[str, Any]:
    await asked.operate("start", owner=asked.owner)
    return {"message": "Weight update started"}


async def _update(asked: _Asked) -> Mapping[str, Any]:
    payload = await asked.operate("update", info=asked.given("update_info", (dict, list)))
    checked = {} if payload is None else {"weight_version": str(payload.version), "digest": payload.digest}
    return {"message": "Weights updated", **checked}


async def _finish(asked: _Asked) -> Mapping[str, Any]:
    version = asked.body.get("weight_version")
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) <= _LONGEST_NUMBER:
        version = int(version)
    if version is not None:
        try:
            check_version(version)
        except WeightsRefusedError as error:
            raise InvalidRequestError(f"weight_version: {error.message}", param="weight_version") from None
    return {"message": "Weight update finished", **await asked.operate("finish", version=version)}


async def _abort(asked: _Asked) -> Mapping[str, Any]:
    return {"was_under_way": await asked.operate("abort", owner=asked.owner)}


async def _info(asked: _Asked) -> Mapping[str, Any]:
    found: Mapping[str, Any] = await asked.operate("info")
    return found


async def _server_info(asked: _Asked) -> Mapping[str, Any]:
    """Of vLLM's, what trainers look for: in which type the weights are held."""
    info = await asked.operate("info")
    return {"vllm_config": {"model_config": {"dtype": f"torch.{info['dtype']}"}}}


async def _checker(asked: _Asked) -> Mapping[str, Any]:
    action = asked.body.get("action")
    if action not in ("checksum", "compare"):
        raise InvalidRequestError(f"action must be checksum or compare: got {str(action)[:50]!r}", param="action")
    baseline = asked.given("baseline", (dict,)) if action == "compare" else {}
    checksums: Mapping[str, str] = await asked.operate("checksums")
    if action == "checksum":
        return {"checksums": checksums}
    differ = sorted(name for name in checksums.keys() | baseline.keys() if checksums.get(name) != baseline.get(name))
    return {"match": not differ, "mismatches": differ}


_ROUTES: Final[tuple[tuple[str, str, _Answering], ...]] = (
    ("POST", "/pause", _pause),
    ("POST", "/resume", _resume),
    ("GET", "/is_paused", _is_paused),
    ("GET", "/get_world_size", _world_size),
    ("POST", "/init_weight_transfer_engine", _init),
    ("POST", "/shutdown_weight_transfer_engine", _shut_down),
    ("POST", "/start_weight_update", _start),
    ("POST", "/update_weights", _update),
    ("POST", "/finish_weight_update", _finish),
    ("POST", "/abort_weight_update", _abort),
    ("GET", "/weight_info", _info),
    ("GET", "/server_info", _server_info),
    ("POST", "/weight_checker", _checker),
)


async def _body(http: Request) -> Mapping[str, Any]:
    """The JSON object in the body; nothing at all is an empty one."""
    parts, size = [], 0
    async for part in http.stream():
        parts.append(part)
        size += len(part)
        if size > _LARGEST_BODY:
            raise InvalidRequestError(f"the body is larger than {_LARGEST_BODY:,} bytes")
    raw = b"".join(parts)
    try:
        body = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return body


def _refused(error: GymCaptureError) -> Response:
    status, headers = 500, {}
    match error:
        case AuthenticationError():
            status = 403 if error.forbidden else 401
        case InvalidRequestError() | WeightsRefusedError():
            status = 400
        case WeightsBusyError():
            status = 409
        case StoreUnavailableError() | EngineError():
            status = 503
        case WeightsFailedError():
            status = 503 if error.retryable else 500
    if status == 503:
        headers["retry-after"] = _RETRY_AFTER_S
    return JSONResponse({"error": error.message}, status_code=status, headers=headers)
