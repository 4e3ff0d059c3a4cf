"""The agent CLIs, pointed at one rollout each, as `docs/clients.md` says.

Invariant: a CLI sees nothing of who runs it - its home, work folder and environment are made for this run - and
nothing of it runs on when `run` returns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = Path(__file__).parent / "node_modules"

_CLAUDE_CODE: Final = PACKAGES / "@anthropic-ai" / "claude-code"
_CODEX: Final = PACKAGES / "@openai" / "codex"

CODEX_CONFIG: Final = """\
model = "policy"
model_provider = "graph"
model_context_window = 32768
check_for_update_on_startup = false

[model_providers.graph]
name = "gym-capture"
base_url = "{base_url}"
env_key = "ROLLOUT_TOKEN"
wire_api = "responses"

[analytics]
enabled = false
"""


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
    return _claude_code(url, rollout_id, token, task, folder, options=())


def lean_claude_code(*, url: str, rollout_id: str, token: str, task: str, folder: Path) -> CliRun:
    """Claude Code with its Bash tool alone and a short system prompt, which keep its prompt at 1,000 tokens."""
    options = ("--tools", "Bash", "--system-prompt", "You are terse.")
    return _claude_code(url, rollout_id, token, task, folder, options=options)


def claude_code_environment(*, url: str, rollout_id: str, token: str) -> dict[str, str]:
    """What Claude Code is told besides its command line."""
    return {
        "ANTHROPIC_BASE_URL": f"{url}/ng-rollout/{rollout_id}",
        "ANTHROPIC_API_KEY": token,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "3600000",
        "API_TIMEOUT_MS": "3600000",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
    }


def _claude_code(url: str, rollout_id: str, token: str, task: str, folder: Path, *, options: Sequence[str]) -> CliRun:
    environment = claude_code_environment(url=url, rollout_id=rollout_id, token=token)
    usual = ["--dangerously-skip-permissions", "--max-turns", "8", "--output-format", "json"]
    command = ["node", str(_CLAUDE_CODE / "cli-wrapper.cjs"), "-p", task, *usual, *options]
    output, work, took_s = _run(command, environment, folder)
    return CliRun(str(json.loads(output)["result"]), work, took_s)


def codex(*, url: str, rollout_id: str, token: str, task: str, folder: Path) -> CliRun:
    """`codex exec` with its default prompt and tools, 9,000 tokens."""
    home = folder / "home" / ".codex"
    home.mkdir(parents=True)
    base_url = f"{url}/ng-rollout/{rollout_id}/v1"
    (home / "config.toml").write_text(CODEX_CONFIG.format(base_url=base_url), encoding="utf-8")
    answer = folder / "answer.txt"
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = ["node", str(_CODEX / "bin" / "codex.js"), "exec", *options, "--output-last-message", str(answer), task]
    _, work, took_s = _run(command, {"ROLLOUT_TOKEN": token}, folder)
    return CliRun(answer.read_text(encoding="utf-8"), work, took_s)


def version(package: str) -> str:
    """The installed version of an npm package."""
    return str(json.loads((PACKAGES / package / "package.json").read_text(encoding="utf-8"))["version"])


def _run(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[str, Path, float]:
    """What the CLI wrote, the folder it worked in, and how long it took. Raises `AssertionError` if it failed."""
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True, exist_ok=True)
    work.mkdir()
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, f"{output}\n{errors}"
    return output, work, time.monotonic() - started
