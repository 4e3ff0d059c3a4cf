"""Files below a folder that an agent wrote to: nothing outside is touched, nothing waits, nothing is too large."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gym_capture.rollouts.folders import is_larger, read_below, remove, write_below


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (inside / "link").symlink_to(outside)
    (inside / "file-link").symlink_to(outside / "secret")
    os.mkfifo(inside / "fifo")
    return inside


def test_what_is_written_is_read(folder: Path) -> None:
    write_below(folder, "a/b/c.txt", b"123")
    assert read_below(folder, "a/b/c.txt", limit=3) == b"123"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_below(folder, "a/b/c.txt", limit=2)
    with pytest.raises(FileNotFoundError):
        read_below(folder, "a/b/d.txt", limit=2)


@pytest.mark.parametrize("name", ["link/secret", "file-link", "fifo", "link"])
def test_nothing_is_read_through_a_link_or_from_what_is_no_file(folder: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|Not a directory|symbolic links"):
        read_below(folder, name, limit=100)


def test_a_link_is_replaced_and_not_written_through(folder: Path) -> None:
    secret = folder.parent / "outside" / "secret"
    write_below(folder, "file-link", b"new")
    assert (secret.read_text(), read_below(folder, "file-link", limit=9)) == ("secret", b"new")
    write_below(folder, "fifo", b"file")
    assert read_below(folder, "fifo", limit=9) == b"file"
    with pytest.raises(OSError, match="Not a directory"):
        write_below(folder, "link/new", b"new")
    assert [file.name for file in secret.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a/", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="does not name a file"):
        read_below(folder, name, limit=1)
    with pytest.raises(ValueError, match="does not name a file"):
        write_below(folder, name, b"")


def test_size_counts_files_names_and_no_links(folder: Path) -> None:
    assert not is_larger(folder, limit=5000)
    write_below(folder, "a/large", b"x" * 6000)
    assert is_larger(folder, limit=5000)
    (folder / "a" / "large").unlink()
    for number in range(1000):
        (folder / f"{number:08}").touch()
    assert is_larger(folder, limit=5000)


def test_removing_follows_no_link(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.chmod(0o750)
    remove(folder)
    assert not folder.exists()
    assert (outside / "secret").exists()
    assert outside.stat().st_mode & 0o777 == 0o750


def test_a_tree_that_is_too_deep_to_walk_through_is_too_large_and_removed(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        for _ in range(3000):
            Path("in").mkdir()
            Path("beside").mkdir()
            Path("file").touch()
            Path("beside").chmod(0)
            os.chdir("in")
    finally:
        os.chdir(before)
    assert is_larger(folder, limit=1 << 30)
    remove(folder)
    assert not folder.exists()
    assert (folder.parent / "outside" / "secret").exists()


def test_what_is_gone_need_not_be_removed(folder: Path) -> None:
    remove(folder / "never-made")
