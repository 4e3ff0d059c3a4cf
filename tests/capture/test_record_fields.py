"""One list of a record's fields, by which everything that writes and reads records goes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gym_capture.build.builder import build
from gym_capture.capture import record_fields, records
from gym_capture.capture.codec import decode_entry, encode_entry
from gym_capture.capture.record_fields import FIELDS, Kind, RecordField, parts, with_values
from gym_capture.capture.record_rows import call_row
from gym_capture.capture.records import Root, TokenEntry, Unresolved, WeightSpan
from gym_capture.data.nemo_gym import read_rollout
from gym_capture.data.record_files import CALL_SCHEMA, open_files
from tests.calls import call, snapshot

SAMPLES: Final[dict[Kind, tuple[Any, Any]]] = {
    Kind.TEXT: ("one", "other"),
    Kind.OPTIONAL_TEXT: ("one", "other"),
    Kind.FLAG: (True, False),
    Kind.OPTIONAL_FLAG: (True, False),
    Kind.OPTIONAL_COUNT: (0, 7),
    Kind.TIME: (1.5, 2.5),
    Kind.PARENT: (Root(), Unresolved("ambiguous")),
    Kind.PROMPT: (np.array([1, 2], np.int32), np.array([1, 3], np.int32)),
    Kind.IDS: (np.array([4, 5], np.int32), np.array([4, 6], np.int32)),
    Kind.LOG_PROBS: (np.array([-0.5, -1], np.float32), np.array([-0.5, -2], np.float32)),
    Kind.TENSOR: (np.array([[1], [2]]), np.array([[1], [3]])),
    Kind.OBJECT: ({"seed": 1}, {"seed": 2}),
    Kind.ITEMS: (({"type": "message"},), ({"type": "reasoning"},)),
    Kind.NAMES: (("one", "two"), ("one",)),
    Kind.RULES_BY_KEY: ({"key": "rule"}, {"key": "other"}),
    Kind.SPANS: ((WeightSpan(0, 2, "1"),), (WeightSpan(0, 2, "2"),)),
}
"""Two values of each kind, none of them a default."""


def full_entry() -> TokenEntry:
    made = TokenEntry(**parts({field.name: SAMPLES[field.kind][0] for field in FIELDS}))
    return replace(made, rollout_id="r1", model_call_id="c")


def leaves(kind: type[Any], before: str = "") -> set[str]:
    """The attributes of a record, and instead of its parts theirs."""
    found: set[str] = set()
    for field in fields(kind):
        part = next((each for each in vars(records).values() if getattr(each, "__name__", "") == field.type), None)
        if is_dataclass(part) and field.name != "parent":
            found |= leaves(part, f"{before}{field.name}.")
        else:
            found.add(f"{before}{field.name}")
    return found


def test_each_attribute_of_a_record_is_a_field() -> None:
    assert leaves(TokenEntry) == {field.path for field in FIELDS}
    assert len({field.name for field in FIELDS}) == len(FIELDS)


def same(a: object, b: object) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_is_wherever_records_are_written(field: RecordField, tmp_path: Path) -> None:
    entry = full_entry()
    value = attrgetter(field.path)
    assert same(value(decode_entry(encode_entry(entry))), value(entry))
    columns = {column.name for column in CALL_SCHEMA}
    assert call_row(entry).keys() == columns
    assert field.name in columns
    if field.in_nemo_gym:
        with open_files("nemo-gym", tmp_path) as files:
            files.add(snapshot(entry))
        (read,) = read_rollout(tmp_path, "r1").entries
        assert same(value(read), value(entry))


@pytest.mark.parametrize("field", [field for field in FIELDS if field.name not in ("rollout_id", "model_call_id")])
def test_two_records_of_a_call_contradict_each_other_in_what_is_content(field: RecordField) -> None:
    one = call("c", [1, 2], [4, 5])
    one = with_values(one, **{field.name: SAMPLES[field.kind][0]})
    other = with_values(one, **{field.name: SAMPLES[field.kind][1]})
    conflicting = "conflicting_call_id:c" in build(snapshot(one, other)).mask_reasons
    # What was asked for may stand in two places: both are looked at together.
    assert conflicting is (field.is_content or field.name == "max_tokens")


ONE_MORE_FIELD = """
import importlib.util, sys
from pathlib import Path

def load(name, path, old, new):
    source = Path(path).read_text()
    assert source.count(old) == 1
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    module.__file__, sys.modules[name] = path, module
    exec(compile(source.replace(old, new), path, "exec"), vars(module))

load("gym_capture.capture.records", {records!r}, "    stop_reason: str | None = None\\n", '''
    stop_reason: str | None = None
    mood: str | None = None
''')
load("gym_capture.capture.record_fields", {fields!r}, '"created_at", Kind.TIME, is_content=False),\\n', '''
    "created_at", Kind.TIME, is_content=False),
    RecordField("mood", "reply.mood", Kind.OPTIONAL_TEXT, is_content=True),
''')
from tests.capture.test_record_fields import *

assert {{field.name for field in FIELDS}} >= {{"mood", "model"}}
mood = FIELDS[-1]
test_each_attribute_of_a_record_is_a_field()
test_a_field_is_wherever_records_are_written(mood, Path({out!r}))
test_two_records_of_a_call_contradict_each_other_in_what_is_content(mood)
assert b"mood" in encode_entry(full_entry())
assert b"mood" not in encode_entry(with_values(full_entry(), mood=None))
"""


def test_a_new_field_is_an_attribute_and_a_line(tmp_path: Path) -> None:
    """Codec, rows, Parquet, NeMo Gym's files both ways, and merging have it; bytes without it are as they were."""
    script = ONE_MORE_FIELD.format(records=records.__file__, fields=record_fields.__file__, out=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
