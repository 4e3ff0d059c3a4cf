"""The harness seam: an agent, as a job plays it.

Invariant: a harness is a client like any other. It sees text and tool calls, never token ids. What goes wrong with the
model's side of a rollout comes back as a `Failed` value.

Flow: `Harness.run` plays one attempt -> `Completed` or `Failed`. `harnesses/` has those that come along; what they have
in common is at the end of this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

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
    "carry_out",
    "check_repeats",
    "failed_by_http_status",
    "says_too_long",
]

CONTEXT_LENGTH: Final = "context_length_exceeded"
"""OpenAI's code of the error, which the server gives."""
_TOO_LONG: Final = (
    *(CONTEXT_LENGTH, "maximum context length", "prompt is too long"),
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
