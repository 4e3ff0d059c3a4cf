"""What the graph uses of Ray without a public name, and what breaks if another version has moved it.

A new version of Ray is tried like this: change the pin in pyproject.toml and requirements/cpu.txt, and run this file
first. What fails says by its name what to look for.
"""

from __future__ import annotations

import ast
import importlib
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import gym_capture

_PRIVATE = {
    ("ray.serve._private.request_router.common", "PendingRequest"): "rollout affinity behind Serve's own proxy",
    ("ray.serve._private.constants", "RAY_SERVE_ENABLE_HA_PROXY"): "knowing that HAProxy stands in front",
    (
        "ray.serve._private.constants",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM",
    ): "warning of an HAProxy that misses who leaves",
    ("ray._private.services", "canonicalize_bootstrap_address"): "knowing at once that a cluster is not there",
    ("ray._private.worker", "global_worker"): "draining: knowing that Serve wants this replica to end",
}
_PACKAGE = Path(gym_capture.__file__).parent


@pytest.mark.parametrize(("module", "name"), _PRIVATE)
def test_each_private_name_is_where_it_was(module: str, name: str) -> None:
    broken = f"ray {version('ray')} lacks {module}.{name}: without it there is no {_PRIVATE[module, name]}"
    assert hasattr(importlib.import_module(module), name), broken


def test_nothing_else_private_is_imported() -> None:
    found = {
        (node.module, alias.name)
        for path in sorted(_PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ray.") and "._" in node.module
        for alias in node.names
    }
    assert found == _PRIVATE.keys()


def test_the_router_overrides_a_method_that_serve_calls() -> None:
    router = importlib.import_module("ray.serve.experimental.consistent_hash_router").ConsistentHashRouter
    assert "_routing_key" in vars(router), f"ray {version('ray')}: its consistent-hash router asks for keys otherwise"


def test_the_pin_is_of_the_version_that_is_installed() -> None:
    project = tomllib.loads((_PACKAGE.parent / "pyproject.toml").read_text())["project"]
    (pin,) = [line for line in project["optional-dependencies"]["serve"] if line.startswith("ray[")]
    assert pin == f"ray[serve,data]=={version('ray').rsplit('.', 1)[0]}.*"
