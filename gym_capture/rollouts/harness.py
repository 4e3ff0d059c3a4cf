"""The harness seam, and a plain tool-calling loop over Chat Completions.

Invariant: a harness is a client like any other. It sees text and tool calls, never token ids; it echoes each
assistant message as it received it and keeps the tools the same for the whole conversation, which is all that the
server needs to prove that one call continues another. What goes wrong with the model's side of a rollout comes back
as a `Failed` value.

Flow: opening messages -> model call -> the message is appended -> each of its tool calls is carried out, its text
appended -> next model call ... -> an answer without tool calls ends it, and so does a conversation that outgrows the
context.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, TypeAlias

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.environment import Environment, Observation

__all__ = [
    "Completed",
    "Endpoint",
    "Failed",
    "Harness",
    "Outcome",
    "RepeatableHarness",
    "ToolLoop",
    "ToolLoopOptions",
    "carry_out",
    "check_repeats",
    "failed_by_http_status",
    "says_too_long",
    "tool_loop",
]

_LONGEST_WAIT_S: Final = 60.0
_LONGEST_DETAIL: Final = 500
_CONTEXT_LENGTH: Final = "context_length_exceeded"
"""OpenAI's code of the error, which the server gives."""
_TOO_LONG: Final = (
    *(_CONTEXT_LENGTH, "maximum context length", "prompt is too long"),
    "ran out of room in the model's context",
    # Of replies that were cut: Claude Code gives up after four in a row, Codex after one.
    *("output token maximum", "incomplete response returned, reason: max_output_tokens"),
)
"""The server's words, in OpenAI's way and in Anthropic's, and those that Claude Code and Codex make of them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one rollout's model calls go: its own base URL, its own token."""

    base_url: str
    """As clients of OpenAI's APIs want it, with `/v1` at its end."""
    api_key: str = "unused"

    @property
    def anthropic_base_url(self) -> str:
        """The same place, as clients of Anthropic's API want it."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Completed:
    """The agent came to an end: by itself, by its limit of calls, or by that of the context."""

    answer: str
    n_calls: int
    """Model calls that the harness made. A program makes its own, which only the records count: then it is 0."""
    truncated: bool = False
    """The conversation outgrew the model's context: the server refused to go on with it, or cut what came last."""
    failed_call: int | None = None
    """Of a truncated one: which model call did not fit, from 1; None if that is not known."""
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the agent itself gives to single calls, by the `id` of their replies. They are kept beside the
    reward of the rollout, which the environment gives, and never stand for it."""
    response: Mapping[str, Any] | None = None
    """The agent's own Responses object, if it gives one."""
    output: Literal["merged", "native"] = "merged"
    """The kind of `response.output` in the rollout's row. `merged`: the items of its calls, with their ids, from the
    records. `native`: what `response` says, left alone, because the agent's own items have exact ids."""

    def __post_init__(self) -> None:
        if self.output == "native" and self.response is None:
            raise ConfigError("a harness whose own output is to be left alone has to give its response")


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that gave nothing to score."""

    reason: str
    """An `AttemptFailure`, or a name of the harness's own."""
    detail: str
    n_calls: int = 0
    retryable: bool = True
    ends_job: bool = False
    """The fault is none of this rollout: every other call of the job would meet it too."""
    failed_call: int | None = None
    """Which model call of the attempt failed, from 1; None if none did, or if that is not known."""


Outcome: TypeAlias = Completed | Failed


class Harness(Protocol):
    """An agent. One harness object runs many rollouts at the same time."""

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        """Plays one attempt from `observation` on, with all of its model calls at `endpoint` and all of its tool calls
        in `environment`.

        What goes wrong with a model call is a `Failed`; what the environment raises is raised. Cancelled when the
        attempt has taken too long: then nothing of the agent runs on when this returns.
        """
        ...

    async def close(self) -> None:
        """Lets go of what all rollouts share. Called once, after the last one."""
        ...


class RepeatableHarness:
    """The base of harnesses whose agents do the same again when they get the same replies and the same of their tools:
    to the character in what they send, as far as the policy is shown it. `--resume-turns` plays no others.

    Times, random numbers, names of temporary folders in a prompt speak against it. What differs all the same is
    generated anew: nothing wrong comes of it, and nothing is saved.
    """

    @property
    def repeats(self) -> bool:
        """Whether it is so of this one, as its options have it."""
        return True


def check_repeats(harness: Harness, name: str) -> None:
    """Raises `ConfigError` if a harness does not say that its agents do the same again."""
    if not isinstance(harness, RepeatableHarness) or not harness.repeats:
        raise ConfigError(
            f"resume_turns: the harness {name!r} does not say that its agents ask the same again, so it cannot "
            "continue what was cut: leave resume_turns out, and that is played anew (docs/jobs.md, Resuming)"
        )


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
        tools = {"tools": observation.tools, "tool_choice": tool_choice, "parallel_tool_calls": False}
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
    http_client = openai.DefaultAsyncHttpxClient(limits=unbounded)
    return ToolLoop(openai.AsyncOpenAI(base_url="http://localhost", api_key="unused", http_client=http_client), options)


async def carry_out(name: str, arguments: str, environment: Environment) -> str:
    """The text that answers a tool call, whatever the model wrote."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        return f"Error: the arguments are not valid JSON: {error}"
    if not isinstance(parsed, Mapping):
        return "Error: the arguments must be a JSON object."
    text = await environment.call_tool(name, parsed)
    if not isinstance(text, str):  # else the server would refuse the next call, and be blamed for it
        raise TypeError(f"call_tool must return a text: got {type(text).__name__}")
    return text


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


def failed_by_http_status(status: int, detail: str, *, n_calls: int) -> Failed:
    """An attempt's end by an answer of the server that is no reply."""
    if status >= 500 or status in (408, 409, 429):
        return Failed(AttemptFailure.SERVER_ERROR, detail, n_calls)
    if status in (401, 403):
        return Failed(AttemptFailure.UNAUTHORIZED, detail, n_calls, retryable=False, ends_job=True)
    # 404 is also what a proxy says while its routes change.
    return Failed(AttemptFailure.REFUSED, detail, n_calls, retryable=status == 404)


def says_too_long(said: str) -> bool:
    """Whether what an agent says of its end means that the conversation outgrew the context, or its replies did."""
    return any(words in said.lower() for words in _TOO_LONG)


def _outgrown(reply: ChatCompletion | openai.OpenAIError) -> bool:
    """A first call that does not fit is none: the task is too long, and there is nothing to score."""
    return isinstance(reply, openai.APIStatusError) and reply.code == _CONTEXT_LENGTH


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
