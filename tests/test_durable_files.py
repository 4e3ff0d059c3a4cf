from __future__ import annotations

import os
from pathlib import Path

import pytest

from gym_capture.durable_files import replace_file


def test_a_file_is_synced_before_it_has_its_name_and_its_name_is_synced_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine that crashes sees it: what had its name when something was synced, and what was."""
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    seen: list[tuple[str, bytes]] = []
    sync = os.fsync

    def watched(fd: int) -> None:
        sync(fd)
        seen.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", watched)
    replace_file(path, b"new")
    assert seen == [("state.json.new", b"old"), (tmp_path.name, b"new")]
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
