"""docs/cases.md has every number of a case that is in a test's name, with the files of those tests, and no other."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from tests.docs.pages import ROOT

CATALOGUE = ROOT / "docs" / "cases.md"
NUMBER = re.compile(r"test_([A-Z]{2})_(\d{2})_")


@functools.cache
def held_by() -> Mapping[str, Collection[str]]:
    """For each number the files with tests of it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (number := NUMBER.match(node.name)):
                found["-".join(number.groups())].add(file.relative_to(ROOT / "tests").as_posix())
    return found


def row(number: str, said: str, files: Collection[str]) -> str:
    links = ", ".join(f"[{file.removesuffix('.py')}](../tests/{file})" for file in sorted(files))
    return f"| {number} | {said} | {links} |"


def test_the_catalogue_is_of_today() -> None:
    rows = [
        line for line in CATALOGUE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-Z]{2}-\d{2} ", line)
    ]
    said = {number: words for _, number, words, *_ in (re.split(r" ?\| ?", line) for line in rows)}
    assert sorted(said) == sorted(held_by()), "a number in a test's name has no row, or a row has no test"
    assert rows == [row(number, words, held_by()[number]) for number, words in said.items()]
    assert all(words.endswith((".", "?")) for words in said.values())


def test_names_of_tests_carry_numbers_in_one_form() -> None:
    """`pytest -k BD_04` finds all of them."""
    spelled = re.compile(r"def (test_\w*[A-Z]{2}_?\d{1,2}(?!\d)\w*)")
    names = [
        name for file in (ROOT / "tests").rglob("*.py") for name in spelled.findall(file.read_text(encoding="utf-8"))
    ]
    assert [name for name in names if not NUMBER.match(name)] == []
