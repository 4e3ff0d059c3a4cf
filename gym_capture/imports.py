"""Loading implementations of the seams by import path."""

from __future__ import annotations

import importlib
from typing import Any

from gym_capture.errors import ConfigError


def load(path: str) -> Any:
    """The object that `package.module:name` or `package.module:Class.method` names. Raises `ConfigError`."""
    module_name, separator, names = path.partition(":")
    if not separator or not names:
        raise ConfigError(f"{path!r} is not an import path: write it as 'package.module:name'")
    try:
        found: Any = importlib.import_module(module_name)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {path!r}: {error}") from error
    return found
