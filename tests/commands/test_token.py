"""`gym-capture token` prints what the server will accept."""

from __future__ import annotations

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


def test_one_line_for_each_token(secret_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = Keyring.from_file(secret_file)
    code, out, _ = run(capsys, "r1", "r2", "--read", "--untracked", "--secret-file", str(secret_file))
    assert code == 0
    assert out.split() == [
        keys.rollout_token("r1"),
        keys.rollout_token("r2"),
        keys.untracked_token(),
        keys.read_token(),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"), [(["../r1"], "invalid rollout id"), ([], "name a rollout, or say --untracked or --read")]
)
def test_what_is_missing_or_wrong_is_said(
    secret_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    code, out, err = run(capsys, *arguments, "--secret-file", str(secret_file))
    assert (code, out) == (2, "")
    assert named in err
