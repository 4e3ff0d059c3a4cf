"""The trainers' own packages, if `make test-trainers` has installed them: last on the path, our names come first."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import pytest
import typing_extensions

PACKAGES = Path(__file__).parent / ".packages"


def pytest_configure(config: pytest.Config) -> None:
    if PACKAGES.is_dir():
        sys.path.append(str(PACKAGES))
        # SkyRL wants Python 3.12 for this one name.
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
