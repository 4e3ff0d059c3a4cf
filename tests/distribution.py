"""Builds the sdist and the wheel, and tries the wheel as its user does: `make package`.

Claims, each of which ends it with exit code 1 if it does not hold:

- the wheel is built from the sdist alone; its metadata is what an index takes; it has every file of the two packages -
  templates, the inspector's pages, `py.typed` - and nothing else
- requirements/base.txt is all that it needs: no ray, no vllm, no torch
- in an empty environment, away from the sources, every command explains itself; `build` makes trajectories of captures;
  `explain` explains; the inspector answers; a command that needs more says what to install
"""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from packaging.metadata import Metadata

from gym_capture.demo.processes import free_port

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("gym_capture", "trainer_bridge")
EXTRAS: Final = {"serve", "cpu", "gpu", "train", "demo", "reasoning-gym", "plots", "dev"}
PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
ANSWERS_WITHIN_S: Final = 60.0


def main() -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gym-capture-package-") as name:
        work = Path(name)
        with step("sdist"):
            sdist = sdist_in(dist)
        with step("wheel, of the sdist"):
            wheel = built_from(sdist, work, dist)
        with step("what is in them"):
            check_metadata(wheel)
            check_files(sdist, wheel)
        with step("an environment with requirements/base.txt"):
            python = environment(work / "venv", wheel)
        with step("the wheel, as its user has it"):
            (work / "home").mkdir()
            try_commands(python, work / "home")


@contextmanager
def step(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"{what} ...", flush=True)
    yield
    print(f"    {time.monotonic() - began:.0f} s", flush=True)


def sdist_in(dist: Path) -> Path:
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, dist)
    (sdist,) = dist.glob("*.tar.gz")
    return sdist


def built_from(sdist: Path, work: Path, dist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    (source,) = work.iterdir()
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, source)
    (wheel,) = dist.glob("*.whl")
    return wheel


def check_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        text = archive.read(name)
    said = Metadata.from_email(text, validate=True)  # as PyPI does
    assert {str(extra) for extra in said.provides_extra or ()} == EXTRAS, said.provides_extra
    assert said.description_content_type == "text/markdown"
    assert email.message_from_bytes(text).get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def check_files(sdist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert held == sources, f"differs from the sources: {sorted(held ^ sources)}"
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources <= names
    assert {
        "LICENSE",
        "Makefile",
        "README.md",
        "docs/api.md",
        "serve_configs/cpu_demo.yaml",
        "tests/conftest.py",
    } <= names
    junk = {name for name in names if "__pycache__" in name or "node_modules" in name or "/." in name}
    assert junk == set(), sorted(junk)[:5]


def environment(folder: Path, wheel: Path) -> Path:
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, *PIP, "install", "--no-deps", "-r", ROOT / "requirements" / "base.txt", wheel)
    run(python, *PIP, "check")
    return python


def try_commands(python: Path, home: Path) -> None:
    listed = "from gym_capture.cli import COMMANDS; print(*(command.name for command in COMMANDS))"
    names = run(python, "-c", listed, cwd=home).split()
    tool = python.with_name("gym-capture")
    shown = run(tool, "--help", cwd=home)
    assert all(name in shown for name in names)
    for name in names:
        assert f"gym-capture {name}" in run(tool, name, "--help", cwd=home)
    assert "What to do:" in run(tool, "explain", "dangling_intent", cwd=home)
    captures(home / "captures")
    report = json.loads(run(tool, "build", "captures", "--out", "built", "--json", cwd=home))
    assert (report["requested"], report["complete"], report["generated_tokens_delivered"]) == (2, 2, 4), report
    assert sorted(file.suffix for file in (home / "built").iterdir()) == [".json", ".parquet"]
    needs = "error: this needs {}, which is not installed: pip install 'gym-capture[{}]'\n"
    assert run(tool, "state", "stop", cwd=home, code=2) == needs.format("ray", "serve")
    demo = run(tool, "demo", "--model", "tiny", cwd=home, code=2)  # its graph's configuration came along
    assert demo.splitlines()[-1].endswith("pip install 'gym-capture[demo]'"), demo
    if "ui" in names:
        look(tool, home)


def captures(folder: Path) -> None:
    """Two rollouts of two calls, as NeMo Gym's capture writes them."""
    folder.mkdir()
    for rollout_id in ("r1", "r2"):
        first = {"model_call_id": "a", "prompt_token_ids": [1, 2], "generation_token_ids": [3]}
        second = {"model_call_id": "b", "prompt_token_ids": [1, 2, 3, 4], "generation_token_ids": [5]}
        calls = (
            {**first, "parent_resolution": "root"},
            {**second, "parent_resolution": "resolved", "parent_call_id": "a"},
        )
        common = {"schema_version": 3, "rollout_id": rollout_id, "model": "policy", "generation_log_probs": [-0.25]}
        lines = "".join(json.dumps({**common, **call}) + "\n" for call in calls)
        (folder / f"{rollout_id}.tokens.jsonl").write_text(lines, encoding="utf-8")


def look(tool: Path, home: Path) -> None:
    """The inspector's page, and what it asks for, over the captures."""
    port = free_port()
    command = [tool, "ui", "captures", "--port", str(port), "--no-open"]
    process = subprocess.Popen(command, cwd=home, env=clean(), stdout=subprocess.DEVNULL)
    try:
        page = fetched(f"http://127.0.0.1:{port}/", process)
        assert b"<script" in page, page[:200]
        rollouts = json.loads(fetched(f"http://127.0.0.1:{port}/api/rollouts", process))
        assert "r1" in json.dumps(rollouts), rollouts
    finally:
        process.terminate()
        process.wait(timeout=60)


def fetched(url: str, process: subprocess.Popen[bytes]) -> bytes:
    until = time.monotonic() + ANSWERS_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                body: bytes = reply.read()
                return body
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{url}: {error}; exit code {process.poll()}") from error
            time.sleep(0.2)


def run(*command: object, cwd: Path = ROOT, code: int = 0) -> str:
    """What a command wrote, or of one that is to fail, its errors."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if code else done.stdout


def clean() -> dict[str, str]:
    """The environment without what would let the sources in."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


if __name__ == "__main__":
    main()
