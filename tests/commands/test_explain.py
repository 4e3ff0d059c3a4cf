"""`gym-capture explain` says of a reason, as it stands in a report, what it means and what to do."""

from __future__ import annotations

import json

import pytest

from gym_capture.cli import main
from gym_capture.reasons import (
    KINDS,
    AttemptFailure,
    CaptureMark,
    ExcludedReason,
    MaskReason,
    ProblemReason,
    Reason,
    RequestRule,
    UnresolvedReason,
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["explain", *arguments])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("dangling_intent", [CaptureMark.DANGLING_INTENT]),
        ("dangling_intent:call_12", [CaptureMark.DANGLING_INTENT]),
        ("parent_mismatch:call_12:parent.cum_len", [MaskReason.PARENT_MISMATCH]),
        ("no_match", [UnresolvedReason.NO_MATCH]),
        ("unresolved:no_match", [UnresolvedReason.NO_MATCH]),
        ("unresolved", list(UnresolvedReason)),
        ("incomplete:call_timeout", [MaskReason.INCOMPLETE, AttemptFailure.CALL_TIMEOUT]),
        ("incomplete:agent_crashed", [MaskReason.INCOMPLETE]),
        ("failed", [ExcludedReason.FAILED, AttemptFailure.FAILED]),
        ("tool_left_out:web_search", [RequestRule.TOOL_LEFT_OUT]),
        # Token files have no place for reasons: what is no lost call stands where their ids stand.
        ("capture_failed:corrupt_log:call_12", [CaptureMark.CAPTURE_FAILED, ProblemReason.CORRUPT_LOG]),
    ],
)
def test_a_reason_is_explained_as_it_is_written(
    capsys: pytest.CaptureFixture[str], written: str, meant: list[Reason]
) -> None:
    code, out, err = run(capsys, written, "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["reason"], row["means"], row["what_to_do"]) for row in rows] == [
        (str(reason), reason.means, reason.what_to_do) for reason in meant
    ]


def test_a_person_reads_what_it_means_where_it_is_seen_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "worker_died")
    assert code == 0
    assert out.splitlines() == [
        "worker_died (Records; seen in `mask_reasons`, `records list` (`problems`))",
        f"  {ProblemReason.WORKER_DIED.means}",
        f"  What to do: {ProblemReason.WORKER_DIED.what_to_do}",
    ]


def test_without_a_reason_all_are_listed_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert [line.split("\t") for line in out.splitlines()] == [
        [kind.key, str(reason), reason.means] for kind in KINDS for reason in kind.reasons
    ]


def test_on_a_terminal_the_list_has_a_head_for_each_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    code, out, _ = run(capsys)
    assert code == 0
    assert all(kind.title in out and f"({kind.key})" in out for kind in KINDS)
    assert all(f" {reason} " in out for kind in KINDS for reason in kind.reasons)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("dangling_intend:call_12", "no such reason: 'dangling_intend'; did you mean 'dangling_intent'?"),
        ("unresolved:nomatch", "no such reason: 'nomatch'; did you mean 'no_match'?"),
        ("their_own_word", "no such reason: 'their_own_word'; it may be a name of what wrote the files."),
        ("[/]", "no such reason: '[/]';"),
        ("", "no such reason: '';"),
    ],
)
def test_an_unknown_one_is_one_line_with_the_nearest(
    capsys: pytest.CaptureFixture[str], written: str, said: str
) -> None:
    code, out, err = run(capsys, written)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
