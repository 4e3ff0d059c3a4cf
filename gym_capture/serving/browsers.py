"""What browsers send to a graph for pages of elsewhere is refused.

Invariant: a page that somebody has open does nothing to a graph that the browser's machine reaches: it could not read
an answer, but a request that is only sent would call the model, pause the engines or give them other weights, where no
token is asked for. Browsers say of each request for whose page it is, and pages cannot change that. Links to the
inspector lead there all the same.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_OF_ELSEWHERE: Final = ("cross-site", "same-site")
_ONLY_READ: Final = ("GET", "HEAD", "OPTIONS")
_REFUSED: Final = {
    "error": {"message": "a page of another site sent this, in a browser", "type": "permission_error", "code": None}
}


class NotFromElsewhere:
    """Lets through what programs send, and pages of this server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_act = scope["type"] == "http" and scope["method"] not in _ONLY_READ
        if is_act and Headers(scope=scope).get("sec-fetch-site") in _OF_ELSEWHERE:
            await JSONResponse(_REFUSED, status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)
