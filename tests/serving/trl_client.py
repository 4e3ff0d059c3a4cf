"""TRL's own client of a vLLM server, without the trainer around it, whose package needs more than is installed here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PACKAGE = "trl.experimental.async_grpo"


def load(module: str) -> Any:
    """A module of the package, without running the package's own `__init__`, unless that has run already."""
    if _PACKAGE in sys.modules:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    package = ModuleType(_PACKAGE)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[_PACKAGE] = package
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    finally:
        for name in [name for name in sys.modules if name.partition(f"{_PACKAGE}.")[0] == "" or name == _PACKAGE]:
            del sys.modules[name]
