"""Playwright, if `make test-ui` has installed it, last on the path; and whether the docs' pictures are made again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / ".packages"

if PACKAGES.is_dir():
    sys.path.append(str(PACKAGES))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", action="store_true", help="write docs/images/inspector-*.png again")


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--screenshots"))
