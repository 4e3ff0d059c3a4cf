"""Which package may know which: what stands below knows nothing of what stands above it, and nothing goes in a circle.

Every import counts, wherever in a file it stands: those inside functions and those for type checkers too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

import gym_capture

ROOT: Final = Path(gym_capture.__file__).parents[1]
DISTRIBUTED: Final = ("gym_capture", "trainer_bridge")
CORE: Final = "gym_capture"
"""The modules directly in `gym_capture/`: words that all rooms share."""

MAY_IMPORT: Final[Mapping[str, Set[str]]] = {
    CORE: set(),
    "capture": {CORE},
    "lineage": {CORE, "capture"},
    "splice": {CORE, "capture"},
    "build": {CORE, "capture"},
    "cluster": {CORE},
    "dialects": {CORE, "lineage"},
    "engines": {CORE, "capture", "splice"},
    "stores": {CORE, "capture"},
    "conformance": {CORE, "capture", "engines"},
    "rollouts": {CORE, "cluster"},
    "data": {CORE, "capture", "lineage", "build", "cluster", "stores"},
    "inspector": {CORE, "capture", "build", "stores", "rollouts", "data"},
    "serving": {CORE, "capture", "lineage", "splice", "cluster", "dialects", "engines", "stores", "inspector"},
    "trainer_bridge": {CORE, "capture", "build", "data"},
    "demo": {CORE, "capture", "cluster", "data", "rollouts", "serving", "trainer_bridge"},
    "commands": {
        *(CORE, "capture", "splice", "build", "cluster", "conformance", "data", "demo", "engines", "inspector"),
        *("rollouts", "serving", "stores", "trainer_bridge"),
        "cli",  # its page in the docs
    },
    # It finds the commands by their names, so that one command loads one module.
    "cli": {CORE},
}
"""The allowed direction: for each package, all packages that it may import."""


def modules(root: Path) -> dict[str, Path]:
    """The modules of what is distributed, by their dotted names."""
    files = [file for name in DISTRIBUTED for file in (root / name).rglob("*.py")]
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in sorted(files)
    }


def imports(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module those of `known` that it imports."""
    return {module: set(_imported(ast.parse(file.read_text()), known)) - {module} for module, file in known.items()}


def _imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in known:
                    yield module
                elif node.module in known:
                    yield node.module


def package_of(module: str) -> str:
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if top != "gym_capture":
        return top
    return name if name == "cli" or (name and (ROOT / top / name).is_dir()) else CORE


def circle(graph: Mapping[str, Set[str]]) -> str | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def test_packages_import_only_what_they_may() -> None:
    found = imports(modules(ROOT))
    forbidden = [
        f"{module} imports {other}"
        for module, others in found.items()
        for other in sorted(others)
        if package_of(other) != (package := package_of(module)) and package_of(other) not in MAY_IMPORT[package]
    ]
    assert forbidden == []


def test_the_allowed_direction_is_one() -> None:
    assert circle(MAY_IMPORT) is None
    assert set(MAY_IMPORT) == {package_of(module) for module in modules(ROOT)}


def test_modules_import_each_other_in_no_circle() -> None:
    assert circle(imports(modules(ROOT))) is None


@pytest.mark.parametrize(
    "text",
    [
        "import gym_capture.b",
        "from gym_capture import b",
        "from gym_capture.b import c",
        "def f():\n import gym_capture.b",
    ],
)
def test_a_circle_is_seen_however_it_is_written(text: str, tmp_path: Path) -> None:
    package = tmp_path / "gym_capture"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(text)
    (package / "b.py").write_text("from gym_capture.a import d")
    assert circle(imports(modules(tmp_path))) in {
        "gym_capture.a -> gym_capture.b -> gym_capture.a",
        "gym_capture.b -> gym_capture.a -> gym_capture.b",
    }
