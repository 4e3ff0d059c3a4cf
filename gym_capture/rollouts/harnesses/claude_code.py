"""Claude Code as a harness: one `claude -p` for each rollout.

Invariant: it talks to the rollout's URL alone - telemetry, updates and what else it fetches are off - and finds nothing
of its user's settings. An error that it met at the server is the failure that it would be for any other harness; an end
by its limit of turns, or by that of the context, is an end. It rewrites its conversation to make room only if it is
told the policy's context. `docs/clients.md` says what the variables are for.

Tried with 2.1.197. Its result is one JSON object: `subtype` and `result`, or `is_error` with `api_error_status`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.harness import Completed, Failed, Outcome, failed_by_http_status, says_too_long
from gym_capture.rollouts.harnesses.command import CommandHarness, Invocation, Play, failed_by_status, installed, words
from gym_capture.rollouts.supervised import Bounds, Ended

HINT: Final = "npm install -g @anthropic-ai/claude-code"
_UNLIMITED: Final = 1_000_000
"""Tokens of a context that no conversation fills before the policy's."""
SETTINGS: Final[Mapping[str, str]] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "IS_SANDBOX": "1",
}


def claude_code(
    *,
    program: str | list[str] = "claude",
    model: str = "policy",
    tools: list[str] | None = None,
    system_prompt: str | None = None,
    skip_permissions: bool = True,
    max_turns: int = 50,
    max_context_tokens: int | None = None,
    max_retries: int = 10,
    call_timeout_s: float = 3600.0,
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> CommandHarness:
    """Claude Code with the `tools` that are named, Bash alone by default.

    `system_prompt` stands in place of its own, which has some 20,000 tokens with all tools. Without `skip_permissions`
    it refuses what it would ask a person about. With `max_context_tokens` it compacts its conversation before it has so
    many; without, one that outgrows the context ends there. `max_turns` bounds the model calls of a rollout,
    `max_retries` what it does about a server that is busy, `call_timeout_s` how long it waits for a server that is
    silent (300 s at least).
    `arguments` go to its command line, `environment` to its environment.
    """
    command = installed(words(program), hint=HINT)
    return CommandHarness(
        _ClaudeCode(
            command=command,
            tools=tuple(["Bash"] if tools is None else tools),
            system_prompt=system_prompt,
            skip_permissions=skip_permissions,
            max_turns=max_turns,
            arguments=tuple(arguments or ()),
        ),
        model=model,
        bounds=Bounds(timeout_s=timeout_s, stdout_bytes=16 << 20),
        environment={
            **SETTINGS,
            **_context(max_context_tokens),
            "CLAUDE_CODE_MAX_RETRIES": str(max_retries),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(round(call_timeout_s * 1000)),
            "API_TIMEOUT_MS": str(round(call_timeout_s * 1000)),
            **(environment or {}),
        },
    )


def _context(tokens: int | None) -> dict[str, str]:
    if tokens is not None:
        return {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(tokens)}
    # It would not even send what it thinks is too long: that is for the graph to say.
    return {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(_UNLIMITED), "DISABLE_COMPACT": "1"}


@dataclass(frozen=True)
class _ClaudeCode:
    command: Sequence[str]
    tools: Sequence[str]
    system_prompt: str | None
    skip_permissions: bool
    max_turns: int
    arguments: Sequence[str]

    def invocation(self, play: Play) -> Invocation:
        system = [part for part in (self.system_prompt, play.system) if part]
        how = "--append-system-prompt" if self.system_prompt is None else "--system-prompt"
        return Invocation(
            command=[
                *self.command,
                "-p",
                *("--model", play.model, "--max-turns", str(self.max_turns), "--output-format", "json"),
                *(["--dangerously-skip-permissions"] if self.skip_permissions else []),
                *("--tools", ",".join(self.tools)),
                *([how, "\n\n".join(system)] if system else []),
                *self.arguments,
            ],
            stdin=play.task,
        )

    def outcome(self, ended: Ended, play: Play) -> Outcome:
        result = _result(ended.stdout)
        if result is None:
            if ended.status != 0:
                return failed_by_status(ended)
            return Failed(AttemptFailure.NO_ANSWER, "its output is not the JSON object that this harness knows")
        if result["subtype"] == "error_max_turns":
            return Completed("", n_calls=0)
        said = str(result.get("result") or result.get("errors") or result["subtype"])
        if not result["is_error"]:
            return Completed(said, n_calls=0)
        status = result.get("api_error_status")
        if status in (None, 400) and says_too_long(said):
            return Completed("", n_calls=0, truncated=True)
        if isinstance(status, int):
            return failed_by_http_status(status, said[-500:], n_calls=0)
        return Failed(AttemptFailure.COMMAND_FAILED, said[-500:])


def _result(output: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        return None
    known = isinstance(found, dict) and isinstance(found.get("subtype"), str) and "is_error" in found
    return found if known else None
