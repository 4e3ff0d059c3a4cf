"""Keeps one rollout on one replica, by its URL.

Invariant: affinity is a performance matter only (the replica has the rollout's KV cache); lineage and records live in
the state actors, so a rollout that moves stays correct.

Serve's consistent-hash router keys on a session header, which agents do not send; their rollout id stands in the path.
"""

from __future__ import annotations

import re
from typing import Final

from ray.serve._private.request_router.common import PendingRequest
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from gym_capture.rollout_ids import ROLLOUT_ID_PATTERN

_ROLLOUT: Final = re.compile(f"/ng-rollout/({ROLLOUT_ID_PATTERN})/".encode())


class RolloutAffinityRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray ships no types
    """Consistent hashing over the rollout id in the request path; other requests spread evenly."""

    def _routing_key(self, pending_request: PendingRequest | None) -> str | None:
        if pending_request is not None and not pending_request.metadata.session_id and pending_request.args:
            request = pending_request.args[0]
            # The proxy hands over the pickled ASGI scope; the path stands in it as plain bytes, so finding it costs
            # a scan of a few hundred bytes instead of unpickling every request a second time.
            if isinstance(request, bytes):
                match = _ROLLOUT.search(request)
                if match is not None:
                    return match[1].decode()
        key: str | None = super()._routing_key(pending_request)
        return key
