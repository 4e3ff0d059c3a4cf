"""The pure core loads none of the heavy packages: it can be tested, imported and reasoned about without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gym_capture

PACKAGE = Path(gym_capture.__file__).parent
NOT_PURE = {
    "gym_capture.cli",
    "gym_capture.engines.vllm",
    "gym_capture.engines.vllm_sampling",
    "gym_capture.engines.vllm_outputs",
    "gym_capture.engines.vllm_parsing",
    "gym_capture.engines.vllm_weights",
    "gym_capture.engines.vllm_worker",
    "gym_capture.engines.vllm_scoring",
    "gym_capture.engines.hf_template",
}
"""The command line, and the adapters whose whole purpose is one heavy package."""
PURE_PACKAGES = ("", "capture", "lineage", "splice", "build", "conformance", "dialects", "engines", "stores")
PURE_IN_SERVING = (
    *("call", "call_service", "capture", "state_messages", "stats"),
    *("weights_agent", "weights_members", "weights_messages", "weights_plane", "weights_record"),
)
"""The life of a call, on any state; what travels to a state actor; the weight plane, but for its actor and routes."""
HEAVY = ("ray", "vllm", "torch", "fastapi", "uvicorn", "aiohttp", "pyarrow", "transformers")


def pure_modules() -> list[str]:
    files = [file for package in PURE_PACKAGES for file in (PACKAGE / package).glob("*.py")]
    names = [".".join(("gym_capture", *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files]
    names += [f"gym_capture.serving.{name}" for name in PURE_IN_SERVING]
    return sorted({name.removesuffix(".__init__") for name in names} - NOT_PURE)


def test_the_walk_finds_the_core() -> None:
    assert {"gym_capture", "gym_capture.capture.records", "gym_capture.lineage.index", "gym_capture.dialects"} <= set(
        pure_modules()
    )


@pytest.mark.parametrize("module", pure_modules())
def test_a_module_of_the_core_loads_nothing_heavy(module: str) -> None:
    check = (
        f"import sys, {module}\n"
        f"loaded = {{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})\n"
        "sys.exit(f'loads {sorted(loaded)}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
