"""The glossary names things of the code that there are."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.pages import ROOT

LINES = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")][1:]
WHERE = [pytest.param(code, id=f"{row[0]}-{code}") for row in ROWS for code in re.findall(r"`([^`]+)`", row[2])]


@pytest.mark.parametrize("code", WHERE)
def test_where_a_word_is_in_code(code: str) -> None:
    if re.fullmatch(r"[\w/]+\.py", code):
        assert any((ROOT / package / code).exists() for package in (".", "gym_capture", "trainer_bridge"))
    elif found := re.fullmatch(r"((?:[a-z]\w*\.)+)([A-Za-z]\w*)(?:\.(\w+))?(?:\(\))?", code):
        module, name, member = found.groups()
        if module.startswith("state."):
            return  # a part of the configuration
        if (ROOT / "gym_capture" / module.replace(".", "/") / f"{name}.py").exists():
            return
        holder = getattr(importlib.import_module(f"gym_capture.{module[:-1]}"), name)
        assert member is None or hasattr(holder, member)


def test_no_word_is_there_twice_and_each_has_its_meaning() -> None:
    words = [word for row in ROWS for word in row[0].split(", ")]
    assert len(set(words)) == len(words)
    assert all(len(row) == 3 and all(row) for row in ROWS)
