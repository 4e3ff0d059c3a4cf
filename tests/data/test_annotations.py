"""Annotations are added whole or not at all, by anybody at any time, and none is lost or takes another with it."""

from __future__ import annotations

import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gym_capture.data import annotations
from gym_capture.data.annotations import FILE, Annotation, AnnotationFile, Annotator
from gym_capture.errors import ConfigError, RecordError


def note(rollout: str, text: str = "odd", **fields: object) -> Annotation:
    return Annotation(**{"rollout": rollout, "call": "c", "name": "note", "note": text, **fields})  # type: ignore[arg-type]


def test_what_is_added_is_read_back(tmp_path: Path) -> None:
    added = [note("a", token=3, by="ada"), note("b"), Annotation(rollout="a", call="c", name="v", values=[0.5, None])]
    file = AnnotationFile(tmp_path)
    assert file.of("a") == []
    assert Annotator(tmp_path, clock=lambda: 7.0).add(added) == 3
    first, second = file.of("a")
    assert (first.token, first.note, first.by, first.at) == (3, "odd", "ada", 7.0)
    assert (second.values, second.at) == ([0.5, None], 7.0)
    Annotator(tmp_path).add([note("a", "later")])
    assert [each.note for each in file.of("a")] == ["odd", None, "later"]
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_lines_that_nobody_understands_and_a_cut_one_are_passed_over(tmp_path: Path) -> None:
    Annotator(tmp_path).add([note("a", "first")])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'[]\nnull\n{"rollout": "a"}\n{"rollout": "../x", "call": "c", "name": "n", "value": 1}\n\xff\n')
        file.write(b'{"rollout": "a", "call": "c", "name": "n", "value": 1e999}\n{"rollout": "a", "ca')
    reader = AnnotationFile(tmp_path)
    assert [each.note for each in reader.of("a")] == ["first"]
    Annotator(tmp_path).add([note("a", "second")])
    assert [each.note for each in reader.of("a")] == ["first", "second"]


def test_many_may_add_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: Annotator(tmp_path).add([note(f"r{n % 3}", str(n))]), range(60)))
    file = AnnotationFile(tmp_path)
    assert sorted(int(each.note or 0) for r in range(3) for each in file.of(f"r{r}")) == list(range(60))


def test_another_file_in_its_place_is_read_anew(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path)
    Annotator(tmp_path).add([note("a", "a long one"), note("a", "another")])
    assert len(file.of("a")) == 2
    (tmp_path / FILE).unlink()
    Annotator(tmp_path).add([note("a", "new")])
    assert [each.note for each in file.of("a")] == ["new"]


def test_a_file_that_was_moved_away_is_not_mixed_with_the_one_that_was_begun(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path)
    Annotator(tmp_path).add([note("a", "old")])
    assert len(file.of("a")) == 1
    (tmp_path / FILE).rename(tmp_path / "away")
    Annotator(tmp_path).add([note("a", "new", at=1.0), note("a", "and longer than the old one was")])
    assert [each.note for each in file.of("a")] == ["new", "and longer than the old one was"]


def test_a_file_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "MAX_FILE_BYTES", 300)
    Annotator(tmp_path).add([note("a")])
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match="would have more than 300 bytes"):
        Annotator(tmp_path).add([note("a", "x" * 300)])
    assert (tmp_path / FILE).read_bytes() == before


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Annotator(tmp_path).add([note("a")])
    before = (tmp_path / FILE).read_bytes()
    write = os.write

    def half(fd: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(ConfigError, match="No space left"):
        Annotator(tmp_path).add([note("a", "more")])
    monkeypatch.undo()
    assert (tmp_path / FILE).read_bytes() == before
    with pytest.raises(ConfigError, match="No such file"):
        Annotator(tmp_path / "nowhere").add([note("a")])


def test_a_fifo_in_its_place_is_named_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(ConfigError, match="is a FIFO"):
        AnnotationFile(tmp_path).of("a")
    with pytest.raises(ConfigError, match="cannot be written"):
        Annotator(tmp_path).add([note("a")])


@pytest.mark.parametrize(
    "fields",
    [
        {"call": ""},
        {"name": ""},
        {"name": "n" * 401},
        {"note": None},
        {"value": 1.0},
        {"note": None, "value": float("nan")},
        {"note": None, "value": True},
        {"note": None, "values": ["1"]},
        {"note": None, "values": [1.0], "token": 0},
        {"token": -1},
        {"token": 1.5},
        {"by": 3},
    ],
)
def test_what_is_none_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        note("a", **fields)


def test_the_mean_difference_of_each_rollout(tmp_path: Path) -> None:
    Annotator(tmp_path).add(
        [
            Annotation(rollout="a", call="c", name="difference", values=[-1.0, None, 0.5]),
            Annotation(rollout="a", call="d", name="difference", value=0.0),
            Annotation(rollout="b", call="c", name="entropy", values=[2.0]),
        ]
    )
    assert AnnotationFile(tmp_path).news() == {"a": 0.5}


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / FILE).symlink_to("precious")
    with pytest.raises(ConfigError, match="cannot be written"):
        Annotator(tmp_path).add([note("a")])
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(ConfigError, match="is not a regular file"):
        Annotator(tmp_path).add([note("a")])
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_a_line_without_an_end_takes_no_memory_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotations, "_LONGEST_LINE", 1 << 20)
    file = AnnotationFile(tmp_path)
    Annotator(tmp_path).add([note("a", "before")])
    with (tmp_path / FILE).open("ab") as end:
        end.truncate(end.tell() + (32 << 20))
    tracemalloc.start()
    assert [each.note for each in file.of("a")] == ["before"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
    Annotator(tmp_path).add([note("a", "after")])
    assert [each.note for each in file.of("a")] == ["before", "after"]


def test_of_a_rollout_that_very_much_is_said_of_the_latest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Annotator(tmp_path).add(note(each, str(n)) for n in range(100) for each in ("a", "b"))
    monkeypatch.setattr(annotations, "_MOST_LINES", 3)
    assert [each.note for each in AnnotationFile(tmp_path).of("a")] == ["97", "98", "99"]
    monkeypatch.setattr(annotations, "_MOST_BYTES", 1)
    assert [each.note for each in AnnotationFile(tmp_path).of("a")] == ["99"]


def test_a_file_that_vanishes_or_changes_under_the_reader_is_no_error(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path)
    Annotator(tmp_path).add([note("a")])
    assert len(file.of("a")) == 1
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"a"', '"b"'))
    assert file.of("a") == []
    assert len(file.of("b")) == 1
    (tmp_path / FILE).unlink()
    assert file.of("b") == []


@pytest.mark.parametrize(
    "fields",
    [{"call": "\ud800"}, {"text": "\udfff"}, {"at": "now"}, {"text": None, "value": 10**400}, {"at": float("nan")}],
)
def test_what_no_line_can_hold_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        note("a", **fields)  # type: ignore[arg-type]
