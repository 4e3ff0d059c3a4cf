"""What an import path names is loaded, or what is wrong with it is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_capture.errors import ConfigError
from gym_capture.imports import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        load(path)
    return str(refusal.value)


def test_a_name_and_a_name_within_it(folder: Path) -> None:
    (folder / "imports_whole.py").write_text("class A:\n    b = 3\n", encoding="utf-8")
    assert load("imports_whole:A.b") == 3
    assert refused("imports_whole:B") == "cannot load 'imports_whole:B': module 'imports_whole' has no attribute 'B'"
    assert refused("imports_whole") == "'imports_whole' is not an import path: write it as 'package.module:name'"


@pytest.mark.parametrize(
    ("path", "module"), [("imports_absent:a", "imports_absent"), ("imports_absent.b:a", "imports_absent")]
)
def test_a_module_that_is_not_found_asks_for_its_folder(path: str, module: str) -> None:
    said = f"cannot load {path!r}: No module named {module!r}: is the folder that holds it on PYTHONPATH?"
    assert refused(path) == said


def test_what_a_module_lacks_is_no_question_of_its_folder(folder: Path) -> None:
    (folder / "imports_lacking.py").write_text("import no_such_library\n", encoding="utf-8")
    assert refused("imports_lacking:a") == "cannot load 'imports_lacking:a': No module named 'no_such_library'"


def test_a_module_that_is_no_python_is_refused_with_the_line(folder: Path) -> None:
    (folder / "imports_broken.py").write_text("a = 1\nclass A(:\n", encoding="utf-8")
    assert refused("imports_broken:A") == "cannot load 'imports_broken:A': invalid syntax (imports_broken.py, line 2)"
