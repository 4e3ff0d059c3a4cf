"""`gym-capture conformance` over stores of this package, and over some that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gym_capture import cli
from gym_capture.conformance import CHECKS, DURABILITY_CHECKS
from gym_capture.conformance.lineage import LINEAGE_CHECKS, LINEAGE_DURABILITY_CHECKS
from gym_capture.stores.memory import MemoryStore


def conformance(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["conformance", *arguments])
    return int(stop.value.code or 0)


def open_in_this_process(*, directory: Path) -> MemoryStore:
    """Forgot that a state actor awaits it."""
    return MemoryStore()


async def open_nowhere(*, directory: Path, bucket: str) -> MemoryStore:
    raise ConnectionRefusedError(f"no such bucket: {bucket}")


async def open_nothing(*, directory: Path) -> None:
    """What forgets to return its store."""


def test_every_check_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance("gym_capture.stores.log:open_log", "--durability", "--kwargs", '{"fsync": false}') == 0
    shown = capsys.readouterr().out
    assert f"all {len(CHECKS) + len(DURABILITY_CHECKS)} checks passed" in shown
    assert all(name in shown for name in [*CHECKS, *DURABILITY_CHECKS])


def test_a_check_that_fails_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    store = "gym_capture.stores.memory:MemoryStore.open"
    arguments = ("--check", "put_repeats", "--check", "snapshot_survives_a_restart")
    assert conformance(store, *arguments) == 1
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "1 of 2 checks failed" in shown
    assert "snapshot_survives_a_restart fail After a restart a rollout has the same snapshot" in shown
    assert conformance(store, *arguments, "--json") == 1
    passed, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert passed["passed"]
    assert failed["failure"].startswith("snapshot: got ")


def test_lineage_is_checked_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    store = "tests.contract.test_lineage_stores:open_recorded"
    assert conformance(store, "--lineage", "--json") == 0
    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    assert names == [*CHECKS, *LINEAGE_CHECKS]
    (restart,) = LINEAGE_DURABILITY_CHECKS
    assert conformance(store, "--check", restart, "--json") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:x"], "cannot load 'no_such_module:x'"),
        (["json"], "is not an import path"),
        ([f"{__name__}:open_in_this_process"], "must be a coroutine function"),
        ([f"{__name__}:open_nowhere"], "TypeError: open_nowhere() missing"),
        ([f"{__name__}:open_nowhere", "--kwargs", '{"bucket": "b"}'], "ConnectionRefusedError: no such bucket: b (at "),
        ([f"{__name__}:open_nowhere", "--kwargs", "{"], "--kwargs is not JSON"),
        ([f"{__name__}:open_nowhere", "--kwargs", "[1]"], "--kwargs must be a JSON object"),
        (["gym_capture.stores.memory:MemoryStore.open", "--check", "put_repeat"], "near it are put_repeats"),
        (["gym_capture.stores.memory:MemoryStore.open", "--lineage"], "a MemoryStore, has no resolve"),
        ([f"{__name__}:open_nothing"], "a NoneType, has no close, freeze, rollout_ids, write"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conformance(*arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert message in line


def test_modules_are_found_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_store_of_mine.py").write_text(
        "from gym_capture.stores.memory import MemoryStore\nopen_store = MemoryStore.open\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry != str(tmp_path)])
    assert conformance("a_store_of_mine:open_store", "--check", "put_repeats") == 0
    assert "all 1 checks passed" in capsys.readouterr().out
