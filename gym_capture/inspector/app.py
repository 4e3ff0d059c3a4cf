"""The inspector over HTTP: the files of the page, and `/api`.

Invariant: nothing is changed but by `POST /api/annotations`, which only adds. What recorded text says is data: it
leaves as JSON, and the page may run nothing but its own files. No path comes from a URL. An error is JSON with one line
that says what to do.

Flow: a question -> `Library` or `search` -> `views`. The functions are plain ones, so each runs in a thread of the
server's pool, and one that reads a large rollout holds up nobody.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import orjson
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_capture.data.annotations import Annotation, AnnotationFile, Annotator
from gym_capture.errors import (
    AuthenticationError,
    ConfigError,
    GymCaptureError,
    InvalidRequestError,
    InvalidRolloutIdError,
    RecordError,
    RequestTooLargeError,
    StoreUnavailableError,
    UnknownRolloutError,
)
from gym_capture.inspector import views
from gym_capture.inspector.library import Library
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.search import Where, search
from gym_capture.inspector.seen import KIND_NAMES, SeenRollout, SeenTrajectory
from gym_capture.rollout_ids import check_rollout_id

STATIC: Final = Path(__file__).parent / "static"
_JSON: Final = "application/json"
_GZIP_FROM: Final = 1_000
_LARGEST_BODY: Final = 64 * 2**10
_MOST_HITS: Final = 1_000
_MOST_IN_GROUP: Final = 256
"""Rollouts of a group that are read; of others the table tells."""
_SEARCH_S: Final = 3.0
_MOST_SEARCHES: Final = 4
"""That wait for another one; each holds a thread."""
_MOST_INTEGER: Final = 1 << 53
_OTHER_HOST: Final = 421
"""Not 403: no token helps."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_NOT_BUILT: Final = (
    "The page of the inspector is not in this installation. Its data is under api/, e.g. api/source and api/rollouts.\n"
)
_STATUS: Final[tuple[tuple[type[GymCaptureError], int], ...]] = (
    (UnknownRolloutError, 404),
    (InvalidRolloutIdError, 404),
    (RequestTooLargeError, 413),
    (InvalidRequestError, 400),
    (RecordError, 400),
    (StoreUnavailableError, 503),
    (ConfigError, 500),
)
Admit = Callable[[Mapping[str, str]], None]


def build_inspector(
    library: Library,
    *,
    vocabulary: Vocabulary | None = None,
    admit: Admit = lambda headers: None,
    search_s: float = _SEARCH_S,
) -> FastAPI:
    """The application. `admit` raises `AuthenticationError` for a request that may not read."""
    app = FastAPI(title="gym-capture inspector", docs_url=None, redoc_url=None, openapi_url=None)
    api = _Api(library, vocabulary, search_s=search_s)

    def get(path: str, answer: Callable[..., Any]) -> None:
        app.add_api_route(f"/api{path}", answer, methods=["GET"], response_class=Response)

    get("/source", api.source)
    get("/rollouts", api.rollouts)
    get("/series", api.series)
    get("/groups/{group:path}", api.group)
    get("/rollouts/{rollout}", api.rollout)
    get("/rollouts/{rollout}/calls/{call:path}", api.call)
    get("/rollouts/{rollout}/trajectories", api.trajectories)
    get("/rollouts/{rollout}/trajectories/{number}/tokens", api.tokens)
    get("/search", api.search)
    get("/annotations", api.annotations)
    app.add_api_route("/api/annotations", api.annotate, methods=["POST"], response_class=Response)

    @app.exception_handler(GymCaptureError)
    async def failed(request: Request, error: GymCaptureError) -> Response:
        if isinstance(error, AuthenticationError):
            return error_response(403 if error.forbidden else 401, error.message)
        return error_response(next((code for kind, code in _STATUS if isinstance(error, kind)), 500), str(error))

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_response(400, f"{first['loc'][-1]}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    return as_page(app, admit=admit)


def as_page(app: FastAPI, *, admit: Admit = lambda headers: None) -> FastAPI:
    """The application with the files of the page, and guarded."""
    if (STATIC / "index.html").is_file():
        app.mount("/", StaticFiles(directory=STATIC, html=True))
    else:

        @app.get("/")
        def not_built() -> Response:
            return Response(_NOT_BUILT, media_type="text/plain")

    app.add_middleware(GZipMiddleware, minimum_size=_GZIP_FROM, compresslevel=3)
    app.add_middleware(_Guard, admit=admit)
    return app


class _Guard:
    """Says on every answer what the page may do, and admits to what is recorded."""

    def __init__(self, app: ASGIApp, admit: Admit) -> None:
        self._app = app
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if path.startswith("/api"):
                    headers["cache-control"] = "no-store"
            await send(message)

        if path.startswith("/api"):
            try:
                _check_not_elsewhere(Headers(scope=scope))
                self._admit(Headers(scope=scope))
            except AuthenticationError as error:
                await error_response(403 if error.forbidden else 401, error.message)(scope, receive, guarded)
                return
        await self._app(scope, receive, guarded)


class OnlyThisHost:
    """Refuses requests for other host names than those that the server is reached by: a page of elsewhere whose name
    leads here, by DNS, reads nothing."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked = Headers(scope=scope).get("host", "")
            try:
                name = urlsplit(f"//{asked}").hostname
            except ValueError:
                name = None
            if name not in self._hosts:
                message = f"this server is not {asked[:200]!r}: ask for it as it was started, or name that with --host"
                await error_response(_OTHER_HOST, message)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Api:
    """The answers."""

    def __init__(self, library: Library, vocabulary: Vocabulary | None, *, search_s: float) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._search_s = search_s
        self._searching = threading.Lock()
        self._searches = threading.BoundedSemaphore(_MOST_SEARCHES)
        directory = library.source.directory
        self._files: dict[Path, AnnotationFile] = {}
        self._annotator = None if directory is None else Annotator(directory)

    def source(self) -> Response:
        source = self._library.source
        return _json(
            {
                "title": source.title,
                "kind": source.kind,
                "live": source.is_live,
                "shows": {
                    "records": source.shows.records,
                    "trajectories": source.shows.trajectories,
                    "job": source.shows.job,
                    "annotations": self._annotator is not None,
                    "texts": self._vocabulary is not None,
                },
                "reasons": views.reason_words(),
                "kinds": list(KIND_NAMES),
                "version": version("gym-capture"),
            }
        )

    def rollouts(self, since: str | None = None) -> Response:
        problem = self._measure()
        found = self._library.rollouts(since)
        return _json(found if found["problem"] is not None else found | {"problem": problem})

    def _measure(self) -> str | None:
        """Takes over what a trainer measured; why it cannot. The table is shown all the same."""
        problem: str | None = None
        for file in self._notes():
            try:
                for rollout_id, difference in file.news().items():
                    self._library.measured(rollout_id, difference)
            except ConfigError as error:
                problem = problem or str(error)
        return problem

    def series(self) -> Response:
        steps = [step for step in self._library.source.steps() if _is_number(step["step"])]
        names = dict.fromkeys(name for step in steps for name, value in step.items() if _is_number(value))
        return _json(
            {
                "series": {
                    f"trainer/{name}": {
                        "x": [step["step"] for step in steps if _is_number(step.get(name))],
                        "y": [step[name] for step in steps if _is_number(step.get(name))],
                        "unit": None,
                        "title": name,
                        "axis": "step",
                    }
                    for name in names
                    if name != "step"
                }
            }
        )

    def group(self, group: str) -> Response:
        rows = self._library.group(group)
        if not rows:
            raise UnknownRolloutError(f"there is no group {group[:200]!r} here")
        seen: dict[str, SeenRollout] = {}
        for row in rows[:_MOST_IN_GROUP]:
            found = self._library.rollout(row.rollout)
            if found is not None:
                seen[row.rollout] = found
        return _json(views.group_view(group, rows, seen, self._vocabulary))

    def rollout(self, rollout: str, since: str | None = None) -> Response:
        self._library.wake()
        cursor = self._library.cursor_of(rollout)
        row = self._library.row(rollout)
        if since is not None and since == cursor and row is not None:
            return _json({"rollout": rollout, "cursor": cursor, "state": row.state, "unchanged": True})
        seen = self._seen(rollout)
        return _json(views.rollout_view(seen, self._library.row(rollout), cursor=cursor))

    def call(self, rollout: str, call: str) -> Response:
        seen = self._seen(rollout)
        found = next((each for each in seen.calls if each.call_id == call), None)
        if found is None:
            raise UnknownRolloutError(f"there is no call {call[:200]!r} in it", rollout_id=rollout)
        said = [each for each in self._annotations(rollout) if each.call == call]
        return _json(views.call_view(seen, found, self._vocabulary) | {"annotations": _dicts(said)})

    def trajectories(self, rollout: str) -> Response:
        seen = self._seen(rollout)
        return _json(views.trajectories_view(seen, self._library.row(rollout), self._vocabulary))

    def tokens(
        self,
        rollout: str,
        number: int,
        begin: Annotated[int, Query(alias="from")] = 0,
        end: Annotated[int, Query(alias="to")] = views.MOST_TOKENS,
    ) -> Response:
        trajectory = self._trajectory(rollout, number)
        said = self._annotations(rollout)
        return _json(views.tokens_view(trajectory, begin, end, self._vocabulary, said))

    def search(self, q: str, where: Where = "text", limit: int = 50, after: str | None = None) -> Response:
        if not self._searches.acquire(blocking=False):
            raise StoreUnavailableError("others search here already: try again in some seconds")
        try:
            with self._searching:  # one at a time: each reads as much as it can
                found = search(
                    self._library,
                    q,
                    where,
                    self._vocabulary,
                    limit=min(max(limit, 1), _MOST_HITS),
                    seconds=self._search_s,
                    after=after,
                )
        finally:
            self._searches.release()
        return _json(found)

    def annotations(self, rollout: str) -> Response:
        check_rollout_id(rollout)
        return _json({"annotations": _dicts([each for file in self._notes() for each in file.of(rollout)])})

    async def annotate(self, request: Request) -> Response:
        _check_own_page(request.headers)
        body = await _body(request)
        if self._annotator is None:
            raise InvalidRequestError("there is no place to keep annotations of this source")
        try:
            found = orjson.loads(body)
        except ValueError:
            raise InvalidRequestError("an annotation is a JSON object") from None
        known = {"rollout", "call", "token", "name", "value", "note", "by"}
        if not isinstance(found, dict) or found.keys() - known:
            raise InvalidRequestError(f"an annotation is a JSON object of {', '.join(sorted(known))}")
        try:
            annotation = Annotation(**found)
        except TypeError:
            raise InvalidRequestError("an annotation names rollout, call and name") from None
        await run_in_threadpool(self._add, annotation)
        return _json({"added": 1}, status=201)

    def _add(self, annotation: Annotation) -> None:
        seen = self._seen(annotation.rollout)
        call = next((each for each in seen.calls if each.call_id == annotation.call), None)
        if call is None:
            raise UnknownRolloutError("there is no such call in it", rollout_id=annotation.rollout)
        if annotation.token is not None and annotation.token >= (call.generated_tokens or 0):
            raise InvalidRequestError("token is beyond what the call generated", param="token")
        assert self._annotator is not None
        self._annotator.add([annotation])

    def _annotations(self, rollout: str) -> list[Annotation]:
        """None of a file that cannot be read: the table says so, and what is on record is shown."""
        found: list[Annotation] = []
        for file in self._notes():
            with suppress(ConfigError):
                found += file.of(rollout)
        return found

    def _notes(self) -> list[AnnotationFile]:
        """Of directories that are there by now: a job may build while it is looked at."""
        paths = self._library.source.annotated()
        return [self._files.setdefault(path, AnnotationFile(path)) for path in paths]

    def _seen(self, rollout: str) -> SeenRollout:
        check_rollout_id(rollout)
        seen = self._library.rollout(rollout)
        if seen is None:
            raise UnknownRolloutError("there is no such rollout here", rollout_id=rollout)
        return seen

    def _trajectory(self, rollout: str, number: int) -> SeenTrajectory:
        trajectories = self._seen(rollout).trajectories
        if not 0 <= number < len(trajectories):
            raise UnknownRolloutError(f"it has {len(trajectories)} trajectories, from 0 on", rollout_id=rollout)
        return trajectories[number]


def _dicts(annotations: list[Annotation]) -> list[dict[str, Any]]:
    return [each.as_dict() for each in annotations]


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) < _MOST_INTEGER
    return isinstance(value, float) and math.isfinite(value)


def _check_own_page(headers: Headers) -> None:
    """Raises unless the request is one that a page of elsewhere cannot have sent."""
    if headers.get("content-type", "").partition(";")[0].strip() != _JSON:
        raise InvalidRequestError(f"send it as {_JSON}")
    origin = headers.get("origin")
    here = headers.get("host", "")
    if origin is not None and origin not in (f"http://{here}", f"https://{here}"):
        raise AuthenticationError("annotations are taken from this server's own page", forbidden=True)


def _check_not_elsewhere(headers: Headers) -> None:
    """Raises if a browser says that a page of elsewhere asks: it could not read the answer, but have it made."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise AuthenticationError("this is answered to this server's own page", forbidden=True)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_BODY:
            raise RequestTooLargeError(f"an annotation has at most {_LARGEST_BODY:,} bytes")
    return body


def _json(value: object, *, status: int = 200) -> Response:
    return Response(views.as_json(value), status_code=status, media_type=_JSON)


def error_response(status: int, message: str) -> Response:
    """An error as the page gets it."""
    return _json({"error": {"status": status, "message": message}}, status=status)
