"""Whether a rollout ended because its conversation outgrew the context: the graph is asked, not the agent's words.

Invariant: an attempt whose last model call the graph refused as too long is truncated, however its agent took that -
an exit with an error, an answer all the same, no end at all. Where no call was recorded there is nothing to score: the
task itself does not fit, whoever says so. What the graph does not say changes nothing: then the agent's account stands.

Flow: an agent has ended -> `GET .../outgrown` with the rollout's own token -> its outcome, or a truncated one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome

_ANSWER_WITHIN_S: Final = 10.0


class _Account(BaseModel):
    model_config = ConfigDict(strict=True)

    outgrown: bool
    """The rollout's last call was refused as too long."""
    calls: int
    """Those that were recorded."""


class OutgrownContext:
    """Asks the graph. One object for all rollouts of a harness."""

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context()  # which takes time to make

    async def settle(self, outcome: Outcome, endpoint: Endpoint) -> Outcome:
        """The outcome of an agent that has ended, once the graph has had its say."""
        account = await self._account(endpoint)
        completed = outcome if isinstance(outcome, Completed) else Completed("", outcome.n_calls)
        if account is None or not (account.outgrown or completed.truncated):
            return outcome
        if account.calls == 0:
            detail = "its first call does not fit the model's context: the task is too long"
            return Failed(AttemptFailure.REFUSED, detail, retryable=False, failed_call=1)
        if not account.outgrown:
            return outcome
        return replace(completed, truncated=True, failed_call=account.calls + 1)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=self._tls, timeout=None, trust_env=False)

    async def _account(self, endpoint: Endpoint) -> _Account | None:
        url = f"{endpoint.base_url.removesuffix('/v1')}/outgrown"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S), self._client() as client:
                return _Account.model_validate_json((await client.get(url, headers=headers)).content)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValidationError):  # no graph, or an older one
            return None
