"""Loading implementations of the seams by import path.

Invariant: a path that leads nowhere, and a module that is no Python, is a `ConfigError` that says what to do. What goes
wrong while a module runs is its own, and raised as it is.
"""

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
    except ModuleNotFoundError as error:
        missing = error.name or ""
        known = f"{module_name}.".startswith(f"{missing}.")  # not something else that the module imports
        where = ": is the folder that holds it on PYTHONPATH?" if known else ""
        raise ConfigError(f"cannot load {path!r}: {error}{where}") from error
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"cannot load {path!r}: {error}") from error
    return found
