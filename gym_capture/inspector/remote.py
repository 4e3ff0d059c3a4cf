"""The inspector of a graph elsewhere: the page is of here, its data of there.

Invariant: only `/inspect/api` of that one graph is asked, by reading, and the token stays on this machine's side.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

import httpx
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from gym_capture.errors import ConfigError
from gym_capture.inspector.app import as_page, error_response

_API: Final = "/inspect/api"
_TIMEOUT_S: Final = 120.0


class Remote:
    """A graph at a URL."""

    def __init__(self, url: str, *, token: str | None) -> None:
        """`url`: scheme, host and port."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.url = url.rstrip("/").removesuffix("/inspect")
        self._client = httpx.Client(timeout=_TIMEOUT_S, headers=headers, trust_env=False)

    def found(self) -> str:
        """What is there, in a line for a person. Raises `ConfigError` if it cannot be looked into."""
        try:
            answer = self._client.get(f"{self.url}{_API}/source")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"{self.url} cannot be reached: {error}") from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"{self.url} asks for its read token: name its --secret-file, or --token")
        try:
            return f"{answer.raise_for_status().json()['title']}, at {self.url}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self.url} is no graph with an inspector: {_API}/source answers {answer.status_code}"
            ) from None

    def ask(self, path: str, query: str) -> Response:
        """The graph's answer."""
        if not path.isascii() or not {"", ".", ".."}.isdisjoint(unquote(path).split("/")):
            return error_response(404, "there is no such path here")
        try:
            url = httpx.URL(f"{self.url}{_API}/").copy_with(
                raw_path=f"{_path_of(self.url)}{_API}/{path}?{query}".encode()
            )
            answer = self._client.get(url)
        except httpx.InvalidURL:
            return error_response(404, "there is no such path here")
        except httpx.HTTPError as error:
            return error_response(503, f"{self.url} cannot be reached: {error}")
        # Whatever it is, it is data here: a browser runs nothing of it.
        return Response(answer.content, status_code=answer.status_code, media_type="application/json")

    def close(self) -> None:
        self._client.close()


def _path_of(url: str) -> str:
    return httpx.URL(url).path.rstrip("/")


def build_remote(remote: Remote) -> FastAPI:
    """The application: the page, and what the graph answers to its questions."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def passed_on(request: Request) -> Response:
        raw = request.scope["raw_path"].decode("latin-1").partition("/api/")[2]
        return await run_in_threadpool(remote.ask, raw, request.url.query)

    app.add_api_route("/api/{path:path}", passed_on, methods=["GET"], response_class=Response)
    return as_page(app)
