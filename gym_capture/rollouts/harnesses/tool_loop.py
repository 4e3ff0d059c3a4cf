"""A plain tool-calling loop over Chat Completions.

Invariant: it echoes each assistant message as it received it and keeps the tools the same for the whole conversation,
which is all that the server needs to prove that one call continues another.

Flow: opening messages -> model call -> the message is appended -> each of its tool calls is carried out, its text
appended -> next model call ... -> an answer without tool calls ends it, and so does a conversation that outgrows the
context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.environment import Environment, Observation
from gym_capture.rollouts.harness import (
    CONTEXT_LENGTH,
    Completed,
    Endpoint,
    Failed,
    Outcome,
    RepeatableHarness,
    carry_out,
    failed_by_http_status,
)

__all__ = ["ToolLoop", "ToolLoopOptions", "tool_loop"]

_LONGEST_WAIT_S: Final = 60.0
_LONGEST_DETAIL: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopOptions:
    """How the loop asks."""

    model: str = "policy"
    max_calls: int = 3
    forced_calls: int = 2
    """For this many calls a tool call is required: a small model does not call tools by itself. The last call that
    `max_calls` allows is asked for an answer instead."""
    max_tokens: int = 48
    temperature: float = 1.0
    call_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.forced_calls < self.max_calls:
            raise ConfigError(
                f"forced_calls must be less than max_calls, which ends with an answer: "
                f"got {self.forced_calls} of {self.max_calls}"
            )


class ToolLoop(RepeatableHarness):
    """The loop. `client` is shared by all rollouts; its own base URL is not used."""

    def __init__(self, client: openai.AsyncOpenAI, options: ToolLoopOptions = ToolLoopOptions()) -> None:
        self._client = client
        self._options = options

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        options = self._options
        client = self._client.with_options(
            base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=options.call_timeout_s
        )
        messages = [dict(message) for message in observation.messages]
        answer = ""
        for call in range(options.max_calls):
            forced = call < options.forced_calls
            reply = await self._complete(client, messages, observation, self._tool_choice(call))
            if _outgrown(reply) and call:
                return Completed(answer, n_calls=call, truncated=True, failed_call=call + 1)
            if isinstance(reply, openai.OpenAIError):
                return replace(_failed(reply, n_calls=call), failed_call=call + 1)
            if not reply.choices:
                detail = "a completion without choices"
                return Failed(AttemptFailure.MALFORMED_REPLY, detail, n_calls=call, failed_call=call + 1)
            message = reply.choices[0].message
            messages.append(_echo(message))
            answer = message.content or ""
            tool_calls = message.tool_calls or []
            if not tool_calls and not forced:
                return Completed(answer, n_calls=call + 1)
            if not tool_calls:
                messages.append({"role": "user", "content": "That was not a tool call. Call one of the tools."})
            for tool_call in tool_calls:
                if tool_call.type == "function":
                    text = await carry_out(tool_call.function.name, tool_call.function.arguments, environment)
                else:
                    text = f"Error: a tool call of type {tool_call.type!r} cannot be carried out."
                messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": text})
        return Completed(answer, n_calls=options.max_calls)

    async def close(self) -> None:
        await self._client.close()

    def _tool_choice(self, call: int) -> Literal["required", "none", "auto"]:
        if call < self._options.forced_calls:
            return "required"
        return "none" if call == self._options.max_calls - 1 else "auto"

    async def _complete(
        self, client: openai.AsyncOpenAI, messages: list[dict[str, Any]], observation: Observation, tool_choice: str
    ) -> ChatCompletion | openai.OpenAIError:
        tools: dict[str, Any] = {"tools": observation.tools, "tool_choice": tool_choice}
        if tool_choice == "required":  # elsewhere it would bring a grammar that a trainer does not apply
            tools["parallel_tool_calls"] = False
        request: dict[str, Any] = {
            "model": self._options.model,
            "messages": messages,
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
            **(tools if observation.tools else {}),
        }
        while True:
            try:
                completion: ChatCompletion = await client.chat.completions.create(**request)
            except openai.OpenAIError as error:
                wait_s = _busy_for_s(error)
                if wait_s is None:
                    return error
                await asyncio.sleep(wait_s)  # the rollout's own clock goes on
            else:
                return completion


def tool_loop(
    *,
    model: str = "policy",
    max_calls: int = 3,
    forced_calls: int = 2,
    max_tokens: int = 48,
    temperature: float = 1.0,
    call_timeout_s: float = 120.0,
) -> ToolLoop:
    """The loop as the harness of a job, with a client of its own; `ToolLoopOptions` says what the options mean."""
    options = ToolLoopOptions(
        model=model,
        max_calls=max_calls,
        forced_calls=forced_calls,
        max_tokens=max_tokens,
        temperature=temperature,
        call_timeout_s=call_timeout_s,
    )
    # The job bounds how many calls are in flight; a second bound in the client would only make calls wait unseen.
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    http_client = openai.DefaultAsyncHttpxClient(limits=unbounded, trust_env=False)
    return ToolLoop(openai.AsyncOpenAI(base_url="http://localhost", api_key="unused", http_client=http_client), options)


def _echo(message: ChatCompletionMessage) -> dict[str, Any]:
    """The assistant's message as the next request carries it: unchanged, without the fields that were not sent."""
    echoed: dict[str, Any] = message.model_dump(exclude_unset=True, exclude_none=True)
    if "tool_calls" not in echoed:
        echoed.setdefault("content", "")
    return echoed


def _failed(error: openai.OpenAIError, *, n_calls: int) -> Failed:
    detail = str(error)[:_LONGEST_DETAIL]
    if isinstance(error, openai.APITimeoutError):
        return Failed(AttemptFailure.CALL_TIMEOUT, detail, n_calls)
    if isinstance(error, openai.APIConnectionError):
        return Failed(AttemptFailure.CONNECTION, detail, n_calls)
    if isinstance(error, openai.APIStatusError):
        status = error.status_code
        return failed_by_http_status(status, f"HTTP {status}: {_said(error)}", n_calls=n_calls)
    return Failed(AttemptFailure.MALFORMED_REPLY, detail, n_calls)


def _outgrown(reply: ChatCompletion | openai.OpenAIError) -> bool:
    """A first call that does not fit is none: the task is too long, and there is nothing to score."""
    return isinstance(reply, openai.APIStatusError) and reply.code == CONTEXT_LENGTH


def _busy_for_s(error: openai.OpenAIError) -> float | None:
    """How long a server that has too many calls asks to be left alone; None: it says nothing of the kind."""
    if not isinstance(error, openai.APIStatusError) or error.status_code not in (429, 503, 529):
        return None
    try:
        wait_s = float(error.response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(max(wait_s, 0.1), _LONGEST_WAIT_S) if wait_s == wait_s else None


def _said(error: openai.APIStatusError) -> str:
    """The server's own message, where the body has one."""
    message = error.body.get("message") if isinstance(error.body, Mapping) else None
    return (message if isinstance(message, str) and message else str(error))[:_LONGEST_DETAIL]
