"""The public API as text: every name in an `__all__`, with its signature, as the sources say it.

Invariant: nothing is imported, so it reads the same whatever is installed.

    python -m tests.reference.public_api > docs/public-api.txt      `make reference`
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("gym_capture", "trainer_bridge")

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_SHOWN_DECORATORS: Final = ("property", "classmethod", "staticmethod")


def public_modules() -> dict[str, Path]:
    """The modules that have an `__all__`, by name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if public_names(ast.parse(file.read_text())):
                name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                found[name] = file
    return dict(sorted(found.items()))


def public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert names == sorted(set(names), key=names.index)
            return list(names)
    return []


def document() -> str:
    """docs/public-api.txt."""
    parts = []
    for module, file in public_modules().items():
        tree = ast.parse(file.read_text())
        said = definitions(tree)
        parts.append("\n".join([f"# {module}", *(line for name in public_names(tree) for line in said[name])]))
    return "\n\n".join(parts) + "\n"


def definitions(tree: ast.Module) -> Mapping[str, list[str]]:
    """What a module defines, or takes from another, by name: lines that say how it is used."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = list(_class(node))
        elif isinstance(node, _Function):
            found[node.name] = [_signature(node)]
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = [_constant(node)]
        elif isinstance(node, ast.Assign):
            found.update({ast.unparse(target): [ast.unparse(target)] for target in node.targets})
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = [f"{alias.asname or alias.name} = {node.module}.{alias.name}"]
    return found


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and not _hidden(ast.unparse(member.target)):
            yield f"    {_constant(member)}"
        elif isinstance(member, ast.Assign):
            yield from (f"    {name}" for name in map(ast.unparse, member.targets) if not _hidden(name))
        elif isinstance(member, _Function) and (member.name == "__init__" or not _hidden(member.name)):
            yield f"    {_signature(member)}"


def _hidden(name: str) -> bool:
    return name.startswith("_")


def _signature(node: _Function) -> str:
    decorators = {ast.unparse(each) for each in node.decorator_list}
    before = "".join(f"@{each} " for each in _SHOWN_DECORATORS if each in decorators)
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{before}{kind} {node.name}({ast.unparse(node.args)}){returns}"


def _constant(node: ast.AnnAssign) -> str:
    """With its value, where that is short: a default, a version, what an alias stands for."""
    text = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    value = "" if node.value is None else " ".join(ast.unparse(node.value).split())
    return f"{text} = {value}" if value and len(value) <= 80 else text


if __name__ == "__main__":
    print(document(), end="")
