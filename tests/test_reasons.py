"""Reasons: closed sets of names, each with its text, that stand in no other place; as text, they are plain text."""

from __future__ import annotations

import ast
import functools
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import gym_capture
from gym_capture.capture.facts import ProblemFound
from gym_capture.capture.records import RecordProblem
from gym_capture.capture.rollout_state import RolloutState
from gym_capture.commands.explain import reasons_document
from gym_capture.reasons import (
    KINDS,
    CaptureMark,
    MaskReason,
    ProblemReason,
    Reason,
    join_reason,
    lineage_mark,
    reason_name,
    split_reason,
)

ROOT = Path(gym_capture.__file__).parent.parent
DOCUMENT = ROOT / "docs" / "reasons.md"
HOME = "gym_capture/reasons.py"
ALL = [reason for kind in KINDS for reason in kind.reasons]
NAMES = frozenset(map(str, ALL))

OTHER_WORDS = {
    # What is no reason there, though it is spelled like one.
    ("failed", "gym_capture/data/requests.py"): "a rollout's status",
    ("failed", "gym_capture/rollouts/job.py"): "a rollout's status",
    ("failed", "gym_capture/rollouts/ledger.py"): "a rollout's status",
    ("failed", "gym_capture/rollouts/metrics.py"): "a rollout's status",
    ("failed", "gym_capture/commands/rollouts.py"): "a rollout's status",
    ("masked", "gym_capture/commands/export.py"): "a count",
    ("failed", "gym_capture/inspector/source.py"): "a rollout's state",
    ("aborted", "gym_capture/inspector/seen.py"): "a call's role",
    ("refused", "gym_capture/serving/weights_update.py"): "what became of an update",
    ("failed", "gym_capture/serving/weights_update.py"): "what became of an update",
    ("aborted", "gym_capture/serving/weights_update.py"): "what became of an update",
    ("masked", "gym_capture/inspector/from_rows.py"): "a column",
    ("masked", "gym_capture/inspector/parquet_source.py"): "a column",
    ("failed", "gym_capture/dialects/responses_output.py"): "a response's status",
    ("failed", "gym_capture/dialects/responses_stream.py"): "a response's status",
    ("incomplete", "gym_capture/dialects/responses_output.py"): "a response's status",
    ("failed", "gym_capture/rollouts/harnesses/responses_items.py"): "a response's status",
    ("incomplete", "gym_capture/rollouts/harnesses/responses_items.py"): "a response's status",
    ("masked", "trainer_bridge/finished.py"): "a column",
    ("masked", "gym_capture/data/prefixes.py"): "a column",
    ("incomplete", "gym_capture/capture/snapshot_codec.py"): "a field of a snapshot",
    ("incomplete", "gym_capture/data/record_files.py"): "a column",
    ("incomplete", "gym_capture/capture/record_rows.py"): "a column",
    ("incomplete", "gym_capture/commands/records.py"): "a column",
    ("incomplete", "gym_capture/serving/metrics.py"): "a field of the counts",
    ("incomplete", "gym_capture/serving/registry.py"): "a field of a reply",
    ("incomplete", "gym_capture/conformance/checks.py"): "a field of a snapshot",
    ("incomplete", "gym_capture/conformance/restarts.py"): "a field of a snapshot",
    ("truncated", "gym_capture/data/schema.py"): "a column",
    ("truncated", "gym_capture/data/requests.py"): "a column",
    ("truncated", "trainer_bridge/stream.py"): "a column",
    ("truncated", "trainer_bridge/finished.py"): "a column",
    ("truncated", "trainer_bridge/verl.py"): "a field of a row",
    ("refused", "gym_capture/splice/audit.py"): "a verdict",
    ("refused", "gym_capture/commands/audit_template.py"): "a verdict",
    ("connection", "gym_capture/serving/gateway.py"): "a header",
    ("server_error", "gym_capture/dialects/chat.py"): "a code of the API",
    ("server_error", "gym_capture/dialects/responses_stream.py"): "a code of the API",
    ("masked", "gym_capture/data/schema.py"): "a column",
    ("masked", "gym_capture/commands/records.py"): "a count",
    ("masked", "gym_capture/demo/report.py"): "a column",
    ("masked", "trainer_bridge/stream.py"): "a column",
    ("masked", "trainer_bridge/collate.py"): "a column",
    ("masked", "trainer_bridge/groups.py"): "a column",
    ("incomplete", "trainer_bridge/responses.py"): "a response's status",
}
TAKES_COLONS_APART = {"gym_capture/imports.py", "gym_capture/auth.py"}  # `module:name`, `user:password`


@functools.cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """All modules but the one at hand."""
    files = [file for package in ("gym_capture", "trainer_bridge") for file in sorted((ROOT / package).rglob("*.py"))]
    parsed = ((file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))) for file in files)
    return tuple((name, module) for name, module in parsed if name != HOME)


def literals(module: ast.Module) -> Iterator[ast.Constant]:
    """Texts that are values: not those that stand alone, which describe what is before them."""
    described = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            yield node


def is_colon(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ":"


# --- the closed sets -------------------------------------------------------------------------------------------------


def test_every_set_is_of_some_kind_and_no_kind_is_there_twice() -> None:
    assert Counter(kind.reasons for kind in KINDS) == Counter(Reason.__subclasses__())
    assert max(Counter(kind.key for kind in KINDS).values()) == 1
    assert NAMES.isdisjoint(kind.key for kind in KINDS)


@pytest.mark.parametrize("reason", ALL, ids=lambda reason: f"{type(reason).__name__}-{reason}")
def test_a_reason_is_its_member_in_small_letters_and_has_its_sentences(reason: Reason) -> None:
    assert str(reason) == reason.name.lower()
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason)
    for sentence in (reason.means, reason.what_to_do):
        assert sentence.endswith(".")
        assert "|" not in sentence, "it would end the cell of the docs' table"
        assert "  " not in sentence, "two pieces that do not fit together"
    assert not reason.means.startswith("Nothing.")


def test_names_on_disk_are_what_they_were() -> None:
    """Logs, token files and Parquet files hold these: one that is renamed is one that readers do not know."""
    assert set(CaptureMark) == {
        *("dangling_intent", "capture_failed", "lineage_conflicting_call_id", "lineage_digest_mismatch"),
        *("lineage_parent_missing", "lineage_parent_length", "handed_on"),
    }
    assert {"corrupt_log", "malformed_record", "worker_died", "unreadable", "build_failed"} < set(ProblemReason)
    assert {"no_calls", "unresolved_retries", "absent_parent", "incomplete", "missing_reward"} < set(MaskReason)


def test_each_problem_of_the_lineage_index_has_its_mark() -> None:
    found = {
        ProblemReason.CONFLICTING_CALL_ID,
        ProblemReason.DIGEST_MISMATCH,
        ProblemReason.PARENT_MISSING,
        ProblemReason.PARENT_LENGTH,
    }
    marks = {lineage_mark(problem, "c1") for problem in found}
    assert marks == {f"{mark}:c1" for mark in CaptureMark if mark.startswith("lineage_")}


# --- nowhere else ----------------------------------------------------------------------------------------------------


def test_no_reason_is_spelled_out_elsewhere() -> None:
    found, words = [], set()
    for file, module in sources():
        for node in literals(module):
            name = reason_name(node.value)
            if name not in NAMES or " " in node.value:
                continue
            if name == node.value and (name, file) in OTHER_WORDS:
                words.add((name, file))
            else:
                found.append(f"{file}:{node.lineno}: {node.value!r}")
    assert found == []
    assert words == OTHER_WORDS.keys(), "an exception that nothing needs any more"


def test_no_reason_is_put_together_elsewhere() -> None:
    """An f-string that begins with a name and a colon, or has a colon alone between two values."""
    found = []
    for file, module in sources():
        for node in ast.walk(module):
            if not isinstance(node, ast.JoinedStr):
                continue
            parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            named = isinstance(parts[0], str) and re.fullmatch(r"[a-z]+(_[a-z]+)+:", parts[0])
            if named or parts == [None, ":", None] or parts == [None, ":", None, ":", None]:
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_no_reason_is_taken_apart_elsewhere() -> None:
    apart = {"partition", "rpartition", "split", "rsplit"}
    found = [
        f"{file}:{node.lineno}"
        for file, module in sources()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in apart
        if file not in TAKES_COLONS_APART and any(map(is_colon, node.args))
    ]
    assert found == []


def test_whatever_makes_a_reason_is_given_one_of_the_sets() -> None:
    """Where something gets its reason, no text stands: a name that has no text here cannot come up."""
    makers = {"RecordProblem": ("reason", 0), "Unresolved": ("reason", 0), "NotSpliced": ("reason", 0)}
    makers |= {"Failed": ("reason", 0), "ExcludedCall": ("reason", 1), "unusable": ("reason", 1)}
    makers |= {"problem": ("reason", 0), "join_reason": ("name", 0)}
    found, seen = [], set()
    for file, module in sources():
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in makers:
                continue
            keyword, position = makers[node.func.id]
            given = [each.value for each in node.keywords if each.arg == keyword] + node.args[position : position + 1]
            seen.add(node.func.id)
            found += [
                f"{file}:{node.lineno}: {ast.unparse(node)}"
                for value in given
                if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(value))
            ]
    assert found == []
    assert seen == makers.keys()


# --- as text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "written"),
    [
        ((), "parent_mismatch"),
        (("c1",), "parent_mismatch:c1"),
        (("c1", "digest"), "parent_mismatch:c1:digest"),
        ((None, "digest"), "parent_mismatch:digest"),
        (("", None), "parent_mismatch"),
        (("a:b",), "parent_mismatch:a:b"),
    ],
)
def test_what_is_written_is_taken_apart_again(about: tuple[str | None, ...], written: str) -> None:
    text = join_reason(MaskReason.PARENT_MISMATCH, *about)
    assert text == written
    assert type(text) is str
    assert reason_name(text) == MaskReason.PARENT_MISMATCH
    assert split_reason(text) == ("parent_mismatch", written.removeprefix("parent_mismatch").removeprefix(":"))


def test_as_text_a_reason_is_plain_text() -> None:
    """Records hold members before they are written and text when they are read back: nobody may see a difference."""
    reason = ProblemReason.CORRUPT_LOG
    assert (repr(reason), str(reason), f"{reason:>12}") == ("'corrupt_log'", "corrupt_log", " corrupt_log")
    assert json.loads(json.dumps({reason: reason})) == {"corrupt_log": "corrupt_log"}
    assert type(pickle.loads(pickle.dumps(reason))) is str
    assert {reason: 1}["corrupt_log"] == 1


def test_the_id_of_a_snapshot_is_the_same_once_its_problem_was_read_back() -> None:
    ids = set()
    for reason in (ProblemReason.CONFLICTING_CALL_ID, "conflicting_call_id"):
        state = RolloutState("r", 1)
        state.apply(ProblemFound(1, RecordProblem(reason=reason, call_id="c", field=None, detail="twice")))
        ids.add(state.snapshot_id())
    assert ids == {"db1794e8a9e755412d8a32751b7364c3"}


# --- the docs --------------------------------------------------------------------------------------------------------


def test_the_table_in_the_docs_is_of_today() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reasons_document(), "run: make reasons-table"


def test_the_docs_name_every_reason() -> None:
    named = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert Counter(named) == Counter(map(str, ALL))
