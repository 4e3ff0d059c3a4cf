"""What `docs/clients.md` tells to configure is what the harnesses configure."""

from __future__ import annotations

import tomllib
from pathlib import Path

from gym_capture.rollouts.harnesses.claude_code import SETTINGS
from gym_capture.rollouts.harnesses.codex import CONFIG

DOCS = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")


def test_codex_runs_with_the_documented_config() -> None:
    _, _, rest = DOCS.partition("```toml\n")
    documented, _, _ = rest.partition("```")
    base_url = '"http://HOST:8000/ng-rollout/my-rollout/v1"'
    config = CONFIG.format(model='"policy"', context=32_768, base_url=base_url, retries=4)
    assert tomllib.loads(documented) == tomllib.loads(config)


def test_claude_code_runs_with_the_documented_environment() -> None:
    for name, value in SETTINGS.items():
        assert f" {name}={value}" in DOCS
    for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "CLAUDE_CODE_MAX_CONTEXT_TOKENS"):
        assert f"export {name}=" in DOCS
