"""What the pages say to type is there: code compiles, and what it imports, commands, options and links exist."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from gym_capture.cli import COMMANDS, build_app
from tests.docs.pages import PAGES, ROOT, Block, applied, blocks, inline, tokens

OURS = ("gym_capture", "trainer_bridge")


def ids(block: Block) -> str:
    return block.where


# --- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=ids)
def test_python_compiles_and_imports_what_there_is(block: Block) -> None:
    tree = ast.parse(block.text, filename=block.where)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            if (ROOT / f"{node.module.replace('.', '/')}.py").exists() or is_package(node.module):
                module = importlib.import_module(node.module)
                missing = [name.name for name in node.names if not has(module, name.name)]
                assert missing == [], f"{node.module} has no {', '.join(missing)}"
            else:
                assert node.module in {module_of(file) for file in files()}, f"there is no {node.module}"


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").exists()


def has(module: Any, name: str) -> bool:
    return hasattr(module, name) or (ROOT / module.__name__.replace(".", "/") / f"{name}.py").exists()


def files() -> list[str]:
    return [block.file for block in blocks("python") if block.file is not None]


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize("block", blocks("yaml", "json", "diff", "toml", ""), ids=ids)
def test_other_code_can_be_read(block: Block) -> None:
    match block.language:
        case "yaml":
            assert yaml.safe_load(block.text)
        case "json":
            assert json.loads(block.text)
        case "diff":
            changed = [ROOT / path for path in re.findall(r"^--- a/(\S+)$", block.text, re.MULTILINE)]
            assert [path.exists() for path in changed] == [True]
            assert applied(block.text, changed[0].read_text(encoding="utf-8"))


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Every command that a page says to type, in blocks and in the midst of text, with its place."""
    for block in blocks("bash", "sh", "console", ""):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield from ((block.where, command) for command in in_line(line))
    for page in PAGES:
        for token in inline(page, "code_inline"):
            yield from ((page.name, command) for command in in_line(token.content))


def in_line(line: str) -> Iterator[str]:
    inner = re.findall(r"\$\(([^()]*)\)", line)
    outer = re.sub(r"\$\([^()]*\)", "VALUE", line)
    for text in (*inner, outer):
        for part in re.split(r"\||&&|;|#\s", text):
            words = re.sub(r"^(\w+=\S* )*", "", part.strip())
            if words.startswith(("gym-capture ", "make ", "python -m ")):
                yield words


def spelled(program: str) -> list[Any]:
    found = sorted({(command, where) for where, command in commands() if command.startswith(program + " ")})
    assert found
    return [pytest.param(command, id=f"{where}-{command[:60]}") for command, where in found]


@functools.cache
def command_line(name: str) -> Any:
    return typer.main.get_command(build_app([name]))


@pytest.mark.parametrize("command", spelled("gym-capture"))
def test_a_command_and_its_options_exist(command: str) -> None:
    _, *words = shlex.split(command.replace("…", "..."))
    if words[0].startswith("--"):
        known = {option for parameter in command_line("").params for option in parameter.opts}
        assert set(words) <= known | {"--help"}
        return
    parse(command_line(words[0]), words)


def parse(command: Any, words: list[str]) -> None:
    """Raises what the command line would raise, up to where it would look at values."""
    context = command.make_context("gym-capture", list(words), resilient_parsing=True)
    if hasattr(command, "get_command") and words:
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        parse(found, words[1:])
        return
    _, left, _ = command.make_parser(context).parse_args(list(words))
    assert left == [], f"more than the command takes: {left}"


def test_every_command_is_in_some_page() -> None:
    named = {command.split()[1] for _, command in commands() if command.startswith("gym-capture ")}
    assert {command.name for command in COMMANDS} <= named


@pytest.mark.parametrize("command", spelled("make"))
def test_a_target_exists(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    wanted = [word for word in command.partition("ARGS=")[0].split()[1:] if re.fullmatch(r"[a-z-]+", word)]
    assert set(wanted) <= targets, command


@pytest.mark.parametrize("command", spelled("python -m"))
def test_a_module_exists(command: str) -> None:
    module = command.split()[2]
    path = ROOT / module.replace(".", "/")
    assert (
        module.startswith("benchmarks.NAME")
        or module in ("pytest", "venv")
        or path.is_dir()
        or path.with_suffix(".py").exists()
    ), command


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for token in [*inline(page, "link_open"), *inline(page, "image")]:
        link = str(token.attrs.get("href") or token.attrs.get("src"))
        parts = urlsplit(link)
        if parts.scheme:
            continue
        file = (page.parent / parts.path).resolve() if parts.path else page
        if not file.exists() or (parts.fragment and file.suffix == ".md" and parts.fragment not in anchors(file)):
            lost.append(link)
    assert lost == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found = set()
    every = tokens(page)
    for place, token in enumerate(every):
        if token.type == "heading_open":
            text = re.sub(r"[`*]", "", every[place + 1].content).lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found
