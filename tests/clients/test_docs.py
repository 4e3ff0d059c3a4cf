"""What `docs/clients.md` tells to configure is what the real clients are run with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.clients.clis import CODEX_CONFIG, claude_code_environment

DOCS = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")


def test_codex_runs_with_the_documented_config() -> None:
    _, _, rest = DOCS.partition("```toml\n")
    documented, _, _ = rest.partition("```")
    base_url = "http://HOST:8000/ng-rollout/my-rollout/v1"
    assert tomllib.loads(documented) == tomllib.loads(CODEX_CONFIG.format(base_url=base_url))


def test_claude_code_runs_with_the_documented_environment() -> None:
    environment = claude_code_environment(url="http://HOST:8000", rollout_id="my-rollout", token="$TOKEN")
    for name, value in environment.items():
        assert f" {name}={value}" in DOCS
