"""The router keys on the rollout id that stands in the path of what the proxy really hands over."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata, StreamingHTTPRequest
from ray.serve._private.request_router.common import PendingRequest

from gym_capture.serving.router import RolloutAffinityRouter


def routing_key(path: str, *, session_id: str = "", headers: tuple[tuple[bytes, bytes], ...] = ()) -> str | None:
    """The key for a request as the proxy sends it: an ASGI scope in a pickled `StreamingHTTPRequest`."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json"), *headers],
    }
    request = pickle.dumps(StreamingHTTPRequest(asgi_scope=scope, proxy_actor_name="SERVE_PROXY"))
    return key_of([request], session_id=session_id)


def made_router() -> RolloutAffinityRouter:
    return RolloutAffinityRouter(
        deployment_id=DeploymentID(name="Policy"), handle_source=DeploymentHandleSource.PROXY, self_actor_id="actor"
    )


def key_of(args: list[Any], *, session_id: str = "") -> str | None:
    router = made_router()
    metadata = RequestMetadata(request_id="client-made", internal_request_id="server-made", session_id=session_id)

    async def routed() -> str | None:  # a pending request holds a future, which wants a running loop
        key: str | None = router._routing_key(PendingRequest(args=args, kwargs={}, metadata=metadata))
        return key

    return asyncio.run(routed())


@pytest.mark.parametrize("rollout_id", ["r1", "A_b-1.2", "x" * 128])
@pytest.mark.parametrize("rest", ["v1/chat/completions", "training-token-capture/v1/chat/completions", "v1/messages"])
def test_a_rollout_is_its_own_key(rollout_id: str, rest: str) -> None:
    assert routing_key(f"/ng-rollout/{rollout_id}/{rest}") == rollout_id
    assert routing_key(f"/prefix/ng-rollout/{rollout_id}/{rest}") == rollout_id


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/", "/ng-rollout//v1/models", f"/ng-rollout/{'x' * 129}/v1/models"]
)
def test_other_requests_spread(path: str) -> None:
    assert routing_key(path) == "server-made"


def test_a_session_header_that_serve_read_goes_first() -> None:
    assert routing_key("/ng-rollout/r1/v1/models", session_id="s") == "s"


def test_calls_that_are_not_http_spread_and_none_has_no_key() -> None:
    assert key_of([]) == "server-made"
    assert key_of([{"not": "bytes"}]) == "server-made"
    router = made_router()
    assert router._routing_key(None) is None
