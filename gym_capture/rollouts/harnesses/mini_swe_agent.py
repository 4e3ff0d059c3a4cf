"""mini-swe-agent as a harness: one `mini` for each rollout, with its bash tool in the work folder.

Invariant: it talks to the rollout's URL alone - LiteLLM's list of prices, which it would fetch at each start, is off -
and asks nobody anything. An error that it met at the server is the failure that it would be for any other harness; an
end by its limit of steps or that of the context, or because the policy called no tool three times in a row, is an end.

Tried with 2.4.6. It writes its trajectory to a file: `info` has `exit_status`, `submission` and the number of calls. It
asks for other versions of libraries than this project does, so it has an environment of its own: `pipx` makes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.harness import Completed, Failed, Outcome
from gym_capture.rollouts.harnesses.command import CommandHarness, Invocation, Play, failed_by_status, installed, words
from gym_capture.rollouts.supervised import Bounds, Ended

HINT: Final = "pipx install mini-swe-agent"
_LONGEST_TRAJECTORY: Final = 256 << 20
_LIMITS: Final = ("LimitsExceeded", "TimeExceeded", "RepeatedFormatError")
_UNAUTHORIZED: Final = ("AuthenticationError", "PermissionDeniedError")
_FAILURES: Final[Mapping[str, tuple[AttemptFailure, bool]]] = {
    "BadRequestError": (AttemptFailure.REFUSED, False),
    "UnprocessableEntityError": (AttemptFailure.REFUSED, False),
    "NotFoundError": (AttemptFailure.REFUSED, True),
    "RateLimitError": (AttemptFailure.SERVER_ERROR, True),
    "InternalServerError": (AttemptFailure.SERVER_ERROR, True),
    "BadGatewayError": (AttemptFailure.SERVER_ERROR, True),
    "ServiceUnavailableError": (AttemptFailure.SERVER_ERROR, True),
    "Timeout": (AttemptFailure.CALL_TIMEOUT, True),
    "APIConnectionError": (AttemptFailure.CONNECTION, True),
}
"""LiteLLM's errors by name, and whether another attempt could end differently."""


def mini_swe_agent(
    *,
    program: str | list[str] = "mini",
    model: str = "policy",
    max_steps: int = 50,
    max_tries: int = 3,
    call_timeout_s: float = 3600.0,
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> CommandHarness:
    """mini-swe-agent with its own prompt, some 1,000 tokens.

    `max_steps` bounds the model calls of a rollout, `max_tries` how often it sends one that fails, `call_timeout_s` how
    long it waits for one. `arguments` go to its command line, such as `-c model.model_kwargs.max_tokens=512`,
    `environment` to its environment.
    """
    command = installed(words(program), hint=HINT)
    return CommandHarness(
        _MiniSweAgent(
            command=command, max_steps=max_steps, call_timeout_s=call_timeout_s, arguments=tuple(arguments or ())
        ),
        model=model,
        bounds=Bounds(timeout_s=timeout_s, stdout_bytes=16 << 20),
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(max_tries),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "_TYPER_STANDARD_TRACEBACK": "1",  # the other kind takes half a minute to draw
            **(environment or {}),
        },
    )


@dataclass(frozen=True)
class _MiniSweAgent:
    command: Sequence[str]
    max_steps: int
    call_timeout_s: float
    arguments: Sequence[str]

    def invocation(self, play: Play) -> Invocation:
        return Invocation(
            command=[
                *self.command,
                f"--model=openai/{play.model}",
                f"--task={play.whole_task}",
                *("--agent-class", "default", "--cost-limit", "0", "--output", str(play.answer_file)),
                *("-c", "mini.yaml", "-c", f"agent.step_limit={self.max_steps}"),
                *("-c", f"model.model_kwargs.timeout={self.call_timeout_s}"),
                *self.arguments,
            ]
        )

    def outcome(self, ended: Ended, play: Play) -> Outcome:
        found = play.answer(limit=_LONGEST_TRAJECTORY)
        info = _info(found) if isinstance(found, str) else None
        if info is None:
            if ended.status != 0:
                return failed_by_status(ended)
            return Failed(AttemptFailure.NO_ANSWER, "its trajectory is not the one that this harness knows")
        status, n_calls = str(info["exit_status"]), int(info["model_stats"]["api_calls"])
        if status == "Submitted":
            return Completed(str(info["submission"]).strip(), n_calls)
        if status in _LIMITS:
            return Completed("", n_calls)
        if status == "ContextWindowExceededError":
            return Completed("", n_calls, truncated=True)
        detail = f"{status}: {_last_line(ended.stderr)}"
        if status in _UNAUTHORIZED:
            return Failed(AttemptFailure.UNAUTHORIZED, detail, n_calls, retryable=False, ends_job=True)
        reason, retryable = _FAILURES.get(status, (AttemptFailure.COMMAND_FAILED, True))
        return Failed(reason, detail, n_calls, retryable=retryable)


def _info(trajectory: str) -> Mapping[str, Any] | None:
    try:
        info = json.loads(trajectory)["info"]
        known = {"exit_status", "submission"} <= info.keys() and isinstance(info["model_stats"]["api_calls"], int)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return info if known else None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
