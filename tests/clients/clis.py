"""The agent CLIs, as the harnesses of rollout jobs run them, pointed at one rollout each."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gym_capture.rollouts.environment import Observation, Register
from gym_capture.rollouts.harness import Completed, Endpoint, Harness
from gym_capture.rollouts.harnesses.claude_code import claude_code as claude_code_harness
from gym_capture.rollouts.harnesses.codex import codex as codex_harness

PACKAGES: Final = Path(__file__).parent / "node_modules"

CLAUDE_CODE: Final = ["node", str(PACKAGES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")]
CODEX: Final = ["node", str(PACKAGES / "@openai" / "codex" / "bin" / "codex.js")]
_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True)
class CliRun:
    """How a CLI ended."""

    answer: str
    """The last thing that the agent said."""
    work: Path
    """Where it worked."""
    took_s: float


def claude_code(*, url: str, rollout_id: str, token: str, task: str, folder: Path) -> CliRun:
    """Claude Code with its default prompt and tools, 20,000 tokens."""
    harness = claude_code_harness(program=CLAUDE_CODE, tools=["default"], max_turns=8, timeout_s=_TIMEOUT_S)
    return _run(harness, url, rollout_id, token, task, folder)


def lean_claude_code(*, url: str, rollout_id: str, token: str, task: str, folder: Path) -> CliRun:
    """Claude Code with its Bash tool alone and a short system prompt, which keep its prompt at 1,000 tokens."""
    harness = claude_code_harness(
        program=CLAUDE_CODE, system_prompt="You are terse.", max_turns=8, timeout_s=_TIMEOUT_S
    )
    return _run(harness, url, rollout_id, token, task, folder)


def codex(*, url: str, rollout_id: str, token: str, task: str, folder: Path) -> CliRun:
    """`codex exec` with its default prompt and tools, 9,000 tokens."""
    return _run(codex_harness(program=CODEX, timeout_s=_TIMEOUT_S), url, rollout_id, token, task, folder)


def version(package: str) -> str:
    """The installed version of an npm package."""
    return str(json.loads((PACKAGES / package / "package.json").read_text(encoding="utf-8"))["version"])


def _run(harness: Harness, url: str, rollout_id: str, token: str, task: str, folder: Path) -> CliRun:
    """Raises `AssertionError` if the CLI failed."""
    work = folder / "work"
    work.mkdir()
    started = time.monotonic()
    outcome = asyncio.run(
        harness.run(
            endpoint=Endpoint(f"{url}/ng-rollout/{rollout_id}/v1", token),
            observation=Observation(({"role": "user", "content": task},), work_folder=work),
            environment=Register(),
        )
    )
    assert isinstance(outcome, Completed), outcome
    return CliRun(outcome.answer, work, time.monotonic() - started)
