"""The fake behind HTTP, with the headers of the real server: pages that break its Content-Security-Policy fail here.

python -m tests.inspector.fake_server          # by hand: http://127.0.0.1:8765/
"""

from __future__ import annotations

import gzip
import json
import mimetypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.inspector.fake import Fake, answer

STATIC: Final = Path(__file__).parents[2] / "gym_capture/inspector/static"


def _handler(fake: Fake) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = url.path.removeprefix("/")
            if not path.startswith("api/"):
                self._file(path or "index.html")
            elif fake.token is not None and self.headers["Authorization"] != f"Bearer {fake.token}":
                self._json(
                    {"error": {"status": 401, "message": "a token that may read is needed"}}, HTTPStatus.UNAUTHORIZED
                )
            else:
                fake.asked.append(self.path)
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                found = answer(fake, path.removeprefix("api/"), query)
                status = HTTPStatus.OK if found is not None else HTTPStatus.NOT_FOUND
                self._json(
                    {"error": {"status": 404, "message": f"there is no {path}"}} if found is None else found, status
                )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._json(fake.annotate(body), HTTPStatus.OK)

        def _file(self, name: str) -> None:
            file = STATIC / name
            if file.parent != STATIC or not file.is_file():
                self._json({"error": {"status": 404, "message": f"there is no {name}"}}, HTTPStatus.NOT_FOUND)
                return
            self._send(file.read_bytes(), mimetypes.guess_type(name)[0] or "text/plain", HTTPStatus.OK)

        def _json(self, value: Any, status: HTTPStatus) -> None:
            self._send(json.dumps(value).encode(), "application/json", status)

        def _send(self, body: bytes, kind: str, status: HTTPStatus) -> None:
            body = gzip.compress(body, 1)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", "default-src 'self'")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the page went on to something else
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test prints what it finds."""

    return Handler


@contextmanager
def serve(fake: Fake, port: int = 0) -> Iterator[str]:
    """The address at which it is served."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(fake))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serve(Fake(), port=8765) as address:
        print(f"{address}  Ctrl-C ends it", flush=True)
        threading.Event().wait()
