"""A service outside the cluster as a harness: it implements `POST /v1/responses`, and is asked until it has answered.

Invariant: what the service has begun is never asked for again. Only a connection that was not made is tried anew; a
time-out, a lost connection and an error end the attempt, since the agent may have acted. Each call that the service
asks for is carried out once, and the environment itself is never shown to the service. What the service keeps in
cookies stays in its rollout. Every wait, and every reply, has a limit.

Flow: the conversation so far is posted -> the items of the reply are appended as they came -> calls that no item of
the reply answers are carried out in the environment, one after the other, and their outputs appended -> posted again
... -> a message without such calls is the answer, and so is what was said when the conversation outgrew the context.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.environment import Environment, Observation
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome, carry_out, says_too_long
from gym_capture.rollouts.harnesses.responses_items import (
    AgentReply,
    CustomCall,
    FunctionCall,
    Item,
    ReplyError,
    offered_tools,
    opening_items,
    output_of,
    read_reply,
)
from gym_capture.rollouts.outgrown import OutgrownContext

BASE_URL_HEADER: Final = "X-Gym-Capture-Base-Url"
API_KEY_HEADER: Final = "X-Gym-Capture-Api-Key"
"""How the service is told where this rollout's model calls go, and with which token. Not in the body: services repeat
that, and log it."""

_PATH: Final = "/v1/responses"
_CONNECTION_ATTEMPTS: Final = 3
_RECONNECT_WAIT_S: Final = 0.5
_SHOWN_BYTES: Final = 500
_ERROR_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAgentOptions:
    """How the service is asked."""

    url: str
    """Scheme, host and port, and a path below which it has `/v1/responses`, if there is one."""
    model: str = "policy"
    """The model that the request names; it is the service that asks the graph for it."""
    graph_url: str | None = None
    """Scheme, host and port under which the service reaches the graph, if not those of the job's endpoint."""
    secret: str | None = None
    """The service's own bearer token."""
    max_turns: int = 50
    """Requests to the service: a rollout that reaches them ends with an empty answer."""
    call_timeout_s: float = 1800.0
    """Seconds that one request may take, from its connection to the last byte of its reply."""
    connect_timeout_s: float = 10.0
    """Seconds that one of the three attempts to connect may take."""
    max_reply_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        _check_url("url", self.url)
        if self.graph_url is not None:
            _check_url("graph_url", self.graph_url, path=False)
        for name in ("max_turns", "call_timeout_s", "connect_timeout_s", "max_reply_bytes"):
            if not 0 < (value := asdict(self)[name]) < float("inf"):
                raise ConfigError(f"{name} must be more than 0: got {value}")


class TooLong:
    """The service hands on that the graph refused its call: the conversation has outgrown the context."""


class RemoteAgent:
    """The service. One object for all rollouts; each has connections and cookies of its own."""

    def __init__(self, options: RemoteAgentOptions) -> None:
        self._options = options
        self._url = f"{options.url.rstrip('/')}{_PATH}"
        self._tls = httpx.create_ssl_context()  # which takes time to make, and is the same for all
        self._context = OutgrownContext()

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        outcome = await self._play(endpoint, observation, environment)
        return await self._context.settle(outcome, endpoint)

    async def _play(self, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        """By the service's own account."""
        if observation.work_folder is not None:
            raise ConfigError("the environment has a work folder, which a remote agent cannot reach")
        request: dict[str, Any] = {"model": self._options.model, "input": []}
        if observation.tools:
            request["tools"] = offered_tools(observation)
        conversation: list[Item] = opening_items(observation)
        call_ids = frozenset(item["call_id"] for item in conversation if item["type"] == "function_call")
        reply: AgentReply | None = None
        async with self._client(endpoint) as client:
            for turn in range(1, self._options.max_turns + 1):
                where = f"turn {turn}, POST {self._url}"
                body = json.dumps({**request, "input": conversation}, separators=(",", ":")).encode()
                found = await self._ask(client, body, where)
                if isinstance(found, Failed):
                    return found
                if isinstance(found, TooLong):
                    return _completed(reply, truncated=True)
                try:
                    reply = read_reply(found, earlier=call_ids)
                except ReplyError as error:
                    return Failed(
                        AttemptFailure.AGENT_MALFORMED_REPLY, f"{where}: {error}", retryable=not error.is_json
                    )
                ended = _ended(reply, where)
                if ended is not None:
                    return ended
                conversation += reply.output
                call_ids |= reply.call_ids
                if turn < self._options.max_turns:
                    for call in reply.pending:
                        conversation.append(output_of(call, await _answer_to(call, environment)))
        return replace(_completed(reply), answer="")

    async def close(self) -> None:
        """Nothing is shared."""

    def _client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        """That of one rollout: its cookies are seen by no other one.

        It keeps no connection between requests: one that the service closes at that moment is lost, and nobody could
        say whether it had begun.
        """
        options = self._options
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # else a small reply could be a large one
            BASE_URL_HEADER: _as_seen_by_service(endpoint.base_url, options.graph_url),
            API_KEY_HEADER: endpoint.api_key,
        }
        if options.secret is not None:
            headers["Authorization"] = f"Bearer {options.secret}"
        return httpx.AsyncClient(
            headers=headers,
            verify=self._tls,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s),  # `_ask` has the clock of the whole
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def _ask(self, client: httpx.AsyncClient, body: bytes, where: str) -> bytes | TooLong | Failed:
        """The bytes of one reply."""
        limit_s = self._options.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._connected(client, body)
                try:
                    return await self._read(response, where)
                finally:
                    await response.aclose()
        except TimeoutError:
            return Failed(AttemptFailure.AGENT_TIMEOUT, f"{where}: no whole reply within {limit_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            detail = f"{where}: no connection in {_CONNECTION_ATTEMPTS} attempts: {_said(error)}"
            return Failed(AttemptFailure.AGENT_UNREACHABLE, detail)
        except httpx.TransportError as error:
            detail = f"{where}: the connection was lost, and the agent may have acted: {_said(error)}"
            return Failed(AttemptFailure.AGENT_CONNECTION_LOST, detail)

    async def _connected(self, client: httpx.AsyncClient, body: bytes) -> httpx.Response:
        """The head of a reply. As long as there is no connection nothing was sent: then it may be tried again."""
        for _ in range(_CONNECTION_ATTEMPTS - 1):
            try:
                return await client.send(client.build_request("POST", self._url, content=body), stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                await asyncio.sleep(_RECONNECT_WAIT_S)
        return await client.send(client.build_request("POST", self._url, content=body), stream=True)

    async def _read(self, response: httpx.Response, where: str) -> bytes | TooLong | Failed:
        body, limit = bytearray(), self._options.max_reply_bytes
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > (limit if response.status_code == 200 else _ERROR_BYTES):
                break
        status = response.status_code
        if status == 400 and says_too_long(body.decode(errors="replace")):
            return TooLong()
        if status != 200:
            said = f"{where}: HTTP {status}{_redirected(response)}: {body[:_SHOWN_BYTES].decode(errors='replace')}"
            if status >= 500 or status in (408, 409, 429):
                return Failed(AttemptFailure.AGENT_UNAVAILABLE, said)
            # 404 is also what a proxy says while its routes change.
            return Failed(AttemptFailure.AGENT_REFUSED, said, retryable=status == 404)
        if len(body) > limit:
            detail = f"{where}: the reply has more than {limit} bytes (max_reply_bytes)"
            return Failed(AttemptFailure.AGENT_MALFORMED_REPLY, detail, retryable=False)
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            detail = f"{where}: the reply is encoded ({encoding[:40]}), although it was asked for as it is"
            return Failed(AttemptFailure.AGENT_MALFORMED_REPLY, detail, retryable=False)
        return bytes(body)


def remote_agent(
    *,
    url: str,
    model: str = "policy",
    graph_url: str | None = None,
    secret_file: Path | None = None,
    max_turns: int = 50,
    call_timeout_s: float = 1800.0,
    connect_timeout_s: float = 10.0,
    max_reply_bytes: int = 16 << 20,
) -> RemoteAgent:
    """The service as the harness of a job; `RemoteAgentOptions` says what the options mean.

    `secret_file` holds the service's own bearer token.
    """
    options = RemoteAgentOptions(
        url=url,
        model=model,
        graph_url=graph_url,
        secret=None if secret_file is None else _secret(secret_file),
        max_turns=max_turns,
        call_timeout_s=call_timeout_s,
        connect_timeout_s=connect_timeout_s,
        max_reply_bytes=max_reply_bytes,
    )
    return RemoteAgent(options)


def _ended(reply: AgentReply, where: str) -> Outcome | None:
    """The end that a reply makes of the attempt; None: it goes on."""
    if reply.failure is not None and says_too_long(reply.failure):
        return _completed(reply, truncated=True)
    if reply.failure is not None:
        return Failed(AttemptFailure.AGENT_FAILED, f"{where}: {reply.failure}")
    if reply.is_cut:  # the policy's own limit, as with any agent: what it has said by then is its answer
        return _completed(reply)
    if not reply.output:
        return Failed(AttemptFailure.NO_ANSWER, f"{where}: the output is empty")
    if reply.answer is not None and not reply.pending:
        return _completed(reply)
    return None


def _completed(reply: AgentReply | None, *, truncated: bool = False) -> Completed:
    """The end of an agent that has replied this last, if it did; its row has that in place of a response of ours."""
    if reply is None:
        return Completed("", n_calls=0, truncated=truncated)
    return Completed(reply.answer or "", n_calls=0, truncated=truncated, response=reply.response)


async def _answer_to(call: FunctionCall | CustomCall, environment: Environment) -> str:
    if isinstance(call, CustomCall):
        return f"Error: {call.name!r} is a custom tool, and the environment has functions alone."
    if call.is_cut:
        return "Error: the call was cut off, and was not carried out."
    return await carry_out(call.name, call.arguments, environment)


def _as_seen_by_service(base_url: str, graph_url: str | None) -> str:
    if graph_url is None:
        return base_url
    return graph_url.rstrip("/") + httpx.URL(base_url).path


def _redirected(response: httpx.Response) -> str:
    location = response.headers.get("location")
    return f" to {location[:_SHOWN_BYTES]}, which is not followed" if location and response.is_redirect else ""


def _said(error: httpx.TransportError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _secret(file: Path) -> str:
    try:
        secret = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"secret_file {file} cannot be read: {error}") from None
    if not secret or not secret.isprintable():
        raise ConfigError(f"secret_file {file} must hold one line")
    return secret


def _check_url(name: str, url: str, *, path: bool = True) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{name} is no URL: {error}") from None
    if parsed.userinfo or ("@" in url and not parsed.host):  # it would stand in the job's files
        raise ConfigError(f"{name} must have no user and password in it: secret_file is the place for a token")
    if parsed.scheme not in ("http", "https") or not parsed.host or "?" in url or "#" in url:
        raise ConfigError(f"{name} must be a URL such as http://agent:8080: got {url!r}")
    if not path and parsed.path != "/":
        raise ConfigError(f"{name} must be scheme, host and port alone: got {url!r}")
    if parsed.path.rstrip("/").endswith(("/v1", _PATH)):
        raise ConfigError(f"{name}: {_PATH} is added to it, so leave it out: got {url!r}")
