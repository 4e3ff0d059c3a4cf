"""Random rollouts: what harnesses, networks and stores do to the records of one rollout, in any mixture.

Ids come from a tiny alphabet, so that prompts continue one another by chance too. Log probabilities are all different
and never 0, so that one that ends up in the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from gym_capture.capture.records import (
    Continues,
    EntrySuffix,
    Parent,
    RecordError,
    Root,
    Snapshot,
    TokenEntry,
    Unresolved,
    digest_ids,
    suffix_of,
)
from gym_capture.capture.suffixes import StoredRecord, complete, prompt_part
from tests.calls import entry_of

ids = st.lists(st.integers(1, 3), min_size=1, max_size=3)
few_ids = st.lists(st.integers(1, 3), max_size=2)


@dataclass
class Rollout:
    """The records so far; `prompts` keeps each call's whole prompt."""

    entries: list[TokenEntry]
    prompts: dict[str, list[int]]

    def cumulative(self, entry: TokenEntry) -> list[int]:
        return self.prompts[entry.model_call_id] + entry.generation_token_ids.tolist()


@st.composite
def honest_rollouts(draw: st.DrawFn, *, max_calls: int = 9, decided: bool | None = None) -> Rollout:
    """What a correct server records: whole prompts, true parents or none at all, digests or not."""
    rollout = Rollout([], {})
    if decided is None:
        decided = draw(st.booleans())
    with_digests = draw(st.booleans())
    for number in range(draw(st.integers(0, max_calls))):
        shape = draw(st.sampled_from(("continue", "continue", "continue", "root", "retry", "rewrite")))
        earlier = draw(st.sampled_from(rollout.entries)) if rollout.entries and shape != "root" else None
        parent: Parent = Root()
        if earlier is None:
            prompt = draw(ids)
        elif shape == "continue":
            prompt = rollout.cumulative(earlier) + draw(few_ids)
            parent = Continues(earlier.model_call_id, len(rollout.cumulative(earlier)))
        elif shape == "retry":
            prompt = rollout.prompts[earlier.model_call_id]
            parent = earlier.parent if earlier.parent is not None else Root()
        else:
            prompt = draw(ids) + rollout.cumulative(earlier)[-2:]
            parent = Unresolved("no_match")
        rollout_entry = _entry(
            draw, f"c{draw(st.integers(0, 9))}{number}", prompt, parent=parent if decided else None, number=number
        )
        if with_digests:
            whole = np.array(prompt + rollout_entry.generation_token_ids.tolist(), dtype=np.int32)
            rollout_entry = replace(rollout_entry, digest=digest_ids(whole))
        rollout.entries.append(rollout_entry)
        rollout.prompts[rollout_entry.model_call_id] = prompt
    return rollout


def _entry(draw: st.DrawFn, call_id: str, prompt: Sequence[int], *, parent: Parent | None, number: int) -> TokenEntry:
    odd = draw(
        st.sampled_from((*[None] * 10, "another model", "probe", "a probe by its sampling", "abort", "error", "empty"))
    )
    generation = [] if odd == "empty" else draw(ids)
    log_probs = [-1.0 - number - position / 8 for position in range(len(generation))]
    return entry_of(
        rollout_id="r1",
        model_call_id=call_id,
        model="served",
        requested_model="small" if odd == "another model" else "policy",
        has_tools=draw(st.booleans()),
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        generation_token_ids=np.array(generation, dtype=np.int32),
        generation_log_probs=np.array(log_probs, dtype=np.float32),
        parent=parent,
        finish_reason=odd if odd in ("abort", "error") else "stop",
        delivered=draw(st.sampled_from((None, True, False))),
        max_tokens=1 if odd == "probe" else None if odd == "a probe by its sampling" else 100,
        sampling={"max_tokens": 1} if odd == "a probe by its sampling" else {},
        prefix_requested=isinstance(parent, Continues),
    )


@st.composite
def damaged_rollouts(draw: st.DrawFn, *, max_calls: int = 9) -> list[StoredRecord]:
    """The records of an honest rollout after some of them were stored as suffixes, repeated, contradicted or lost."""
    rollout = draw(honest_rollouts(max_calls=max_calls))
    entries = [suffix_of(entry) if draw(st.booleans()) else entry for entry in rollout.entries]
    call_ids = [entry.model_call_id for entry in entries] + ["nobody"]
    for _ in range(draw(st.integers(0, 3))):
        if not entries:
            break
        at = draw(st.integers(0, len(entries) - 1))
        entry = entries[at]
        damage = draw(st.sampled_from(("repeat", "conflict", "lose", "foreign", "parent", "length", "ids", "digest")))
        try:
            if damage == "repeat":
                entries.append(replace(entry, created_at=entry.created_at + 1.0))
            elif damage == "conflict":
                other = np.append(entry.generation_token_ids, 2)
                log_probs = np.append(entry.generation_log_probs, np.float32(-0.5))
                entries.append(replace(entry, generation_token_ids=other, generation_log_probs=log_probs))
            elif damage == "lose":
                del entries[at]
            elif damage == "foreign":
                entries.append(replace(entry, rollout_id="r2"))
            elif damage == "parent":
                cum_len = entry.parent.cum_len if isinstance(entry.parent, Continues) else draw(st.integers(0, 3))
                entries[at] = replace(entry, parent=Continues(draw(st.sampled_from(call_ids)), cum_len))
            elif damage == "length" and isinstance(entry.parent, Continues):
                wrong = Continues(entry.parent.call_id, entry.parent.cum_len - 1)
                entries[at] = replace(entry, parent=wrong)
            elif damage == "ids":
                changed = prompt_part(entry)[1].copy()
                changed[:1] = 4 - changed[:1]
                if isinstance(entry, EntrySuffix):
                    entries[at] = replace(entry, new_prompt_ids=changed)
                else:
                    entries[at] = replace(entry, prompt_token_ids=changed)
            elif damage == "digest":
                entries[at] = replace(entry, digest="0" * 64)
        except RecordError:
            continue  # Such a record cannot exist: it would have been refused where it was made.
    return draw(st.permutations(entries))


def snapshot_of(records: Sequence[StoredRecord]) -> Snapshot:
    entries, orphans = complete(records)
    return Snapshot(rollout_id="r1", snapshot_id="s", version=1, entries=entries, orphans=orphans)
