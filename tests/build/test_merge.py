"""Folding the records of one call: what it costs."""

from __future__ import annotations

import pytest

from gym_capture.build import merge
from gym_capture.build.builder import build
from gym_capture.capture.records import TokenEntry
from tests.calls import call, snapshot


def test_a_call_that_came_in_very_many_contents_is_not_compared_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    same_content = merge._same_content

    def counted(a: TokenEntry, b: TokenEntry) -> bool:
        nonlocal compared
        compared += 1
        return same_content(a, b)

    monkeypatch.setattr(merge, "_same_content", counted)
    contents = [call("a", [1], [number], created_at=float(number)) for number in range(200)]
    built = build(snapshot(*contents, *contents))
    assert built.mask_reasons == ("conflicting_call_id:a", "no_trainable_tokens")
    assert built.counts.excluded_tokens == {"conflicting_call_id": 200}
    assert compared <= 400
