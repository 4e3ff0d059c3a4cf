"""`gym-capture token` prints what the server will accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_capture.auth import Keyring
from gym_capture.cli import main


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["token", *arguments])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.mark.parametrize("what", ["r1", "--read", "--untracked", "--admin", "--weights"])
def test_a_token_alone_is_printed_bare(secret_file: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    keys = Keyring.from_file(secret_file)
    expected = {
        "r1": keys.rollout_token("r1"),
        "--read": keys.read_token(),
        "--untracked": keys.untracked_token(),
        "--admin": keys.admin_token(),
        "--weights": keys.weights_token(),
    }
    code, out, _ = run(capsys, what, "--secret-file", str(secret_file), "--json")
    assert (code, json.loads(out)) == (0, {"of": what, "token": expected[what]})
    assert run(capsys, what, "--secret-file", str(secret_file)) == (0, f"{expected[what]}\n", "")


def test_several_tokens_say_what_each_is_for(secret_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = Keyring.from_file(secret_file)
    code, out, _ = run(capsys, "r1", "r2", "--read", "--untracked", "--secret-file", str(secret_file))
    assert code == 0
    assert [line.split("\t") for line in out.splitlines()] == [
        ["r1", keys.rollout_token("r1")],
        ["r2", keys.rollout_token("r2")],
        ["--untracked", keys.untracked_token()],
        ["--read", keys.read_token()],
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["../r1"], "invalid rollout id"), ([], "name a rollout, or say --untracked, --read, --admin or --weights")],
)
def test_what_is_missing_or_wrong_is_said(
    secret_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    code, out, err = run(capsys, *arguments, "--secret-file", str(secret_file))
    assert (code, out) == (2, "")
    assert named in err
