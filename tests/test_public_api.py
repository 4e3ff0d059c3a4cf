"""The public API is what docs/public-api.txt says, is there, is what the docs use, and is listed for whom it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import blocks
from tests.reference.public_api import definitions, document, public_modules, public_names

ROOT = Path(__file__).parents[1]
INSIDE = {
    "gym_capture.dialects.anthropic": "the recipe of a dialect adds to the package itself",
    "trainer_bridge": "its modules",
    "gym_capture.dialects": "its modules",
}


def test_it_is_what_was_reviewed() -> None:
    assert (ROOT / "docs" / "public-api.txt").read_text() == document(), "run `make reference`, and look at the diff"


def test_every_public_name_is_defined() -> None:
    for module, file in public_modules().items():
        tree = ast.parse(file.read_text())
        assert set(public_names(tree)) <= set(definitions(tree)), module


def test_every_public_module_says_for_whom() -> None:
    page = (ROOT / "docs" / "api-stability.md").read_text()
    named = re.findall(r"`((?:gym_capture|trainer_bridge)[\w.]*)`", page.partition("## Public modules")[2])
    assert sorted(named) == sorted(public_modules())


def test_the_docs_use_what_is_public() -> None:
    public = {module: public_names(ast.parse(file.read_text())) for module, file in public_modules().items()}
    made = {each.file.removesuffix(".py").replace("/", ".") for each in blocks("python") if each.file}
    assert made
    inside = [
        f"{block.where}: {node.module}.{alias.name}"
        for block in blocks("python")
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("gym_capture", "trainer_bridge")
        if node.module not in made and node.module not in INSIDE
        for alias in node.names
        if alias.name not in public.get(node.module or "", ())
    ]
    assert inside == []
