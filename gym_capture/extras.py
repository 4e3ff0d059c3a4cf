"""What a base installation goes without, and which extra of the package brings it.

Invariant: every third-party module that is imported anywhere is a dependency of the base installation or stands here
(`tests/test_extras.py` reads all imports). That one is missing is never a traceback: `cli.main` says what to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXTRA_OF: Final[Mapping[str, str]] = {
    "ray": "serve",
    "openai": "serve",
    "aiohttp": "serve",
    "transformers": "serve",
    "jinja2": "serve",
    "requests": "serve",
    "safetensors": "train",
    "torch": "train",
    "vllm": "gpu",
    "msgspec": "gpu",
    "gguf": "demo",
    "psutil": "demo",
    "reasoning_gym": "reasoning-gym",
    "matplotlib": "plots",
    "trl": "dev",
}
"""The extra that brings a module, by the name that it is imported by."""


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """One line for a person, if what is missing belongs to an extra; None if it does not."""
    missing = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(missing)
    if extra is None:
        return None
    without_gpu = " ([cpu] where there is no GPU)" if extra == "gpu" else ""
    return f"this needs {missing}, which is not installed: pip install 'gym-capture[{extra}]'{without_gpu}"
