"""Codex as a harness: one `codex exec` for each rollout.

Invariant: it talks to the rollout's URL alone and finds nothing of its user's settings. An error that it met at the
server is the failure that it would be for any other harness; that the context is full is an end. It has no limit of
turns: bound it by time.

Tried with 0.171.0. It says what went wrong in the last `error` of its JSON lines, and its last message in a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gym_capture.rollouts.harness import Completed, Failed, Outcome, failed_by_http_status, says_too_long
from gym_capture.rollouts.harnesses.command import CommandHarness, Invocation, Play, failed_by_status, installed, words
from gym_capture.rollouts.supervised import Bounds, Ended

HINT: Final = "npm install -g @openai/codex"
_LONGEST_ANSWER: Final = 1 << 20
_UNLIMITED: Final = 1_000_000_000
"""Tokens of a context that no conversation fills before the policy's."""
CONFIG: Final = """\
model = {model}
model_provider = "graph"
model_context_window = {context}
check_for_update_on_startup = false

[model_providers.graph]
name = "gym-capture"
base_url = {base_url}
env_key = "ROLLOUT_TOKEN"
wire_api = "responses"
request_max_retries = {retries}
stream_max_retries = {retries}
stream_idle_timeout_ms = {idle_ms}

[analytics]
enabled = false
"""


def codex(
    *,
    program: str | list[str] = "codex",
    model: str = "policy",
    max_context_tokens: int | None = None,
    max_retries: int = 4,
    call_timeout_s: float = 3600.0,
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> CommandHarness:
    """Codex with its own prompt and tools, some 9,000 tokens.

    With `max_context_tokens` it compacts its conversation when it nears so many, again and again if need be; without,
    one that outgrows the context ends there.

    `max_retries` is what it does about a server that is busy, or a stream that breaks, `call_timeout_s` how long it
    waits for a server that is silent. `arguments` go to its command line, `environment` to its environment.
    """
    command = installed(words(program), hint=HINT)
    return CommandHarness(
        _Codex(
            command=command,
            max_context_tokens=_UNLIMITED if max_context_tokens is None else max_context_tokens,
            max_retries=max_retries,
            call_timeout_s=call_timeout_s,
            arguments=tuple(arguments or ()),
        ),
        model=model,
        bounds=Bounds(timeout_s=timeout_s, stdout_bytes=64 << 20),
        environment=environment or {},
    )


@dataclass(frozen=True)
class _Codex:
    command: Sequence[str]
    max_context_tokens: int
    max_retries: int
    call_timeout_s: float
    arguments: Sequence[str]

    def invocation(self, play: Play) -> Invocation:
        config = CONFIG.format(
            model=json.dumps(play.model),  # JSON's strings are strings of TOML too
            context=self.max_context_tokens,
            base_url=json.dumps(play.endpoint.base_url),
            retries=self.max_retries,
            idle_ms=round(self.call_timeout_s * 1000),
        )
        return Invocation(
            command=[
                *self.command,
                "exec",
                *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
                *("--output-last-message", str(play.answer_file)),
                *self.arguments,
                "-",  # the task comes by standard input
            ],
            environment={"ROLLOUT_TOKEN": play.endpoint.api_key},
            home_files={".codex/config.toml": config},
            stdin=play.whole_task,
        )

    def outcome(self, ended: Ended, play: Play) -> Outcome:
        if ended.status != 0:
            said = _last_error(ended.stdout)
            if says_too_long(said):
                return Completed("", n_calls=0, truncated=True)
            status = re.search(r"unexpected status (\d{3})\b", said)
            if status is not None:
                return failed_by_http_status(int(status[1]), said, n_calls=0)
            return failed_by_status(ended, said=said)
        answer = play.answer(limit=_LONGEST_ANSWER)
        return answer if isinstance(answer, Failed) else Completed(answer, n_calls=0)


def _last_error(output: bytes) -> str:
    """The text of the last error among its JSON lines; empty if there is none."""
    said = ""
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and event.get("type") == "error":
            said = str(event.get("message"))[:500]
    return said
