"""What holds of every build, on random rollouts, and agreement with a slow reference written from the rules alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions, BuiltRollout, build
from gym_capture.capture.records import Continues, EntrySuffix, RecordProblem, TokenEntry, digest_ids, suffix_of
from gym_capture.capture.suffixes import StoredRecord
from tests.rollout_strategies import Rollout, damaged_rollouts, honest_rollouts, snapshot_of

OPTIONS = [
    BuildOptions(strategy=strategy, delivery=delivery)
    for strategy in ("prefix_merging", "per_request")
    for delivery in ("main_chain", "all_chains")
]
options = st.sampled_from(OPTIONS)


def as_bytes(built: BuiltRollout) -> list[object]:
    """Everything that a build says, comparable."""
    return [
        built.rollout_id,
        built.masked,
        built.mask_reasons,
        built.counts,
        built.excluded,
        *(
            (
                t.trajectory_id,
                t.is_main,
                t.call_ids,
                t.token_ids.tobytes(),
                t.loss_mask.tobytes(),
                t.log_probs.tobytes(),
                t.spans,
                t.finish_reason,
            )
            for t in built.trajectories
        ),
    ]


@given(damaged_rollouts(), options, st.data())
def test_the_order_of_the_records_changes_nothing(
    entries: list[StoredRecord], options: BuildOptions, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(entries))
    assert as_bytes(build(snapshot_of(shuffled), options)) == as_bytes(build(snapshot_of(entries), options))


@given(damaged_rollouts(), options)
def test_building_twice_gives_the_same_bytes(entries: list[StoredRecord], options: BuildOptions) -> None:
    assert as_bytes(build(snapshot_of(entries), options)) == as_bytes(build(snapshot_of(entries), options))


@given(damaged_rollouts(), options)
def test_every_generated_id_is_trained_once_or_counted(entries: list[StoredRecord], options: BuildOptions) -> None:
    built = build(snapshot_of(entries), options)
    counts = built.counts
    trained: dict[str, int] = {}
    for trajectory in built.trajectories:
        assert int(trajectory.loss_mask.sum()) == trajectory.generated_tokens
        for span in trajectory.spans:
            assert trajectory.loss_mask[span.start : span.end].all()
            assert span.call_id not in trained, "a generation is trained in one trajectory only"
            trained[span.call_id] = span.end - span.start
    sizes = {e.model_call_id: int(e.generation_token_ids.size) for e in entries if e.rollout_id == "r1"}
    assert {call_id: sizes[call_id] for call_id in trained} == trained

    assert counts.generated_tokens_delivered == sum(trained.values())
    assert counts.generated_tokens_captured == counts.generated_tokens_delivered + sum(counts.excluded_tokens.values())
    out = [call.call_id for call in built.excluded if call.reason != "foreign_record"]
    assert sorted([*out, *trained]) == sorted(sizes), "each call is trained or excluded, never both"
    assert counts.n_calls == len(built.excluded) + len(trained)
    assert sum(t.is_main for t in built.trajectories if options.strategy == "prefix_merging") <= 1


@given(damaged_rollouts(), options)
def test_trajectories_are_aligned_and_log_probs_are_where_the_loss_is(
    entries: list[StoredRecord], options: BuildOptions
) -> None:
    for trajectory in build(snapshot_of(entries), options).trajectories:
        assert trajectory.token_ids.dtype == np.int32
        assert trajectory.log_probs.dtype == np.float32
        assert trajectory.token_ids.shape == trajectory.loss_mask.shape == trajectory.log_probs.shape
        assert ((trajectory.log_probs != 0) == trajectory.loss_mask).all()
        assert trajectory.trajectory_id == f"r1/{trajectory.call_ids[-1]}"


@given(honest_rollouts(), options)
def test_honest_records_give_what_the_engine_had(rollout: Rollout, options: BuildOptions) -> None:
    """A sequence is its last call's prompt and generation, and every call in it began with the calls before it."""
    by_id = {entry.model_call_id: entry for entry in rollout.entries}
    for trajectory in build(snapshot_of(rollout.entries), options).trajectories:
        sequence = trajectory.token_ids.tolist()
        for call_id in trajectory.call_ids:
            cumulative = rollout.cumulative(by_id[call_id])
            assert sequence[: len(cumulative)] == cumulative
        assert sequence == rollout.cumulative(by_id[trajectory.call_ids[-1]])
        for span in trajectory.spans:
            entry = by_id[span.call_id]
            assert sequence[span.start : span.end] == entry.generation_token_ids.tolist()
            assert trajectory.log_probs[span.start : span.end].tolist() == entry.generation_log_probs.tolist()
            assert span.start == entry.prompt_len


@given(honest_rollouts(decided=True), options, st.data())
def test_deltas_say_the_same_as_whole_prompts(rollout: Rollout, options: BuildOptions, data: st.DataObject) -> None:
    deltas = [suffix_of(entry) if data.draw(st.booleans()) else entry for entry in rollout.entries]
    assert as_bytes(build(snapshot_of(deltas), options)) == as_bytes(build(snapshot_of(rollout.entries), options))


@given(damaged_rollouts(), st.data())
def test_records_that_do_not_belong_only_mask(entries: list[StoredRecord], data: st.DataObject) -> None:
    """A foreign record, or one that could not be read, changes no trajectory: it masks."""
    mine = snapshot_of([entry for entry in entries if entry.rollout_id == "r1"])
    problem = RecordProblem(reason="malformed_record", call_id="x", field="prompt_token_ids", detail="negative id")
    foreign = [replace(entry, rollout_id="r2", model_call_id=f"f-{entry.model_call_id}") for entry in mine.entries[:2]]
    mixed = replace(mine, entries=tuple(data.draw(st.permutations([*mine.entries, *foreign]))), problems=(problem,))
    built, alone = build(mixed), build(mine)
    assert built.masked
    assert as_bytes(built)[5:] == as_bytes(alone)[5:]
    assert set(alone.mask_reasons) - {"no_calls"} <= set(built.mask_reasons)


# --- a slow reference ------------------------------------------------------------------------------------------


@dataclass
class Expected:
    trajectories: list[tuple[tuple[str, ...], list[int], list[int], list[float]]]
    masked: bool
    excluded: dict[str, str]


class Reference:
    """The rules on plain lists, each look-up a search through all calls. Shares no code with the builder."""

    def __init__(self, entries: Sequence[StoredRecord]) -> None:
        self.masked = False
        self.excluded: dict[str, str] = {}
        self.calls: dict[str, StoredRecord] = {}
        self.elsewhere: set[str] = set()
        for entry in entries:
            if entry.rollout_id != "r1":
                self.masked = True
                self.elsewhere.add(entry.model_call_id)
                continue
            mine = [
                other for other in entries if other.rollout_id == "r1" and other.model_call_id == entry.model_call_id
            ]
            if any(self.differ(other, entry) for other in mine):
                self.masked = True
                self.excluded[entry.model_call_id] = "conflicting_call_id"
            else:
                known = {other.delivered for other in mine} - {None}
                whole = next((other for other in mine if isinstance(other, TokenEntry)), entry)
                self.calls[entry.model_call_id] = replace(whole, delivered=False not in known if known else None)
        self.no_loss = self.find_calls_without_loss()
        self.claims = {c: e.parent.call_id for c, e in self.calls.items() if isinstance(e.parent, Continues)}
        cyclic = {call_id for call_id in self.claims if self.reaches_itself(call_id)}
        self.parent: dict[str, str | None] = dict.fromkeys(self.calls)
        self.unplaced: set[str] = set()
        for call_id, entry in self.calls.items():
            if isinstance(entry.parent, Continues):
                named = entry.parent.call_id
                if call_id in cyclic or named not in self.calls or self.calls[named].cum_len != entry.parent.cum_len:
                    self.masked = True
                    if isinstance(entry, EntrySuffix):
                        self.unplaced.add(call_id)
                else:
                    self.parent[call_id] = named
        self.spread()
        for call_id in self.infer():
            self.masked = True
            self.unplaced.add(call_id)
        self.spread()
        for call_id, entry in self.calls.items():
            parent = self.parent[call_id]
            if call_id not in self.unplaced and parent is not None and isinstance(entry, TokenEntry):
                known_ids = self.cumulative(parent)
                if entry.prompt_token_ids.tolist()[: len(known_ids)] != known_ids:
                    self.masked = True
                    self.parent[call_id] = None
        for call_id in self.unplaced:
            self.excluded[call_id] = "unplaced"

    @staticmethod
    def differ(a: StoredRecord, b: StoredRecord) -> bool:
        if isinstance(a, TokenEntry) and isinstance(b, TokenEntry):
            prompts = a.prompt_token_ids.tolist(), b.prompt_token_ids.tolist()
        else:
            prompts = tuple(
                each.new_prompt_ids.tolist()
                if isinstance(each, EntrySuffix)
                else each.prompt_token_ids.tolist()[each.parent.cum_len if isinstance(each.parent, Continues) else 0 :]
                for each in (a, b)
            )
        return prompts[0] != prompts[1] or Reference.content(a) != Reference.content(b)

    @staticmethod
    def content(entry: StoredRecord) -> tuple[object, ...]:
        return (
            entry.generation_token_ids.tolist(),
            entry.generation_log_probs.tolist(),
            entry.parent,
            entry.digest,
            entry.reply.finish_reason,
            entry.request.requested_model,
            entry.request.max_tokens,
            entry.request.has_tools,
        )

    def find_calls_without_loss(self) -> set[str]:
        probes = {
            c for c, e in self.calls.items() if e.request.max_tokens == 1 or e.request.sampling.get("max_tokens") == 1
        }
        mass: dict[str, list[int]] = {}
        for call_id, entry in self.calls.items():
            if call_id not in probes:
                total = mass.setdefault(entry.request.requested_model, [0, 0, 0])
                total[0] += len(entry.generation_token_ids)
                total[1] += entry.request.has_tools
                total[2] += 1
        policy = min(mass, key=lambda model: ([-value for value in mass[model]], model)) if mass else None
        found: set[str] = set()
        for call_id, entry in self.calls.items():
            if call_id in probes or entry.request.requested_model != policy:
                self.excluded[call_id] = "side_call"
            elif entry.reply.finish_reason in ("abort", "error"):
                self.excluded[call_id] = {"abort": "aborted", "error": "failed"}[entry.reply.finish_reason]
            elif not entry.generation_token_ids.tolist():
                self.excluded[call_id] = "empty_generation"
            else:
                continue
            found.add(call_id)
        return found

    def reaches_itself(self, call_id: str) -> bool:
        at: str | None = call_id
        for _ in range(len(self.calls) + 1):
            at = self.claims.get(at) if at is not None else None
            if at == call_id:
                return True
        return False

    def cumulative(self, call_id: str) -> list[int]:
        entry = self.calls[call_id]
        assert isinstance(entry, TokenEntry)
        return [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]

    def prompt(self, call_id: str) -> list[int]:
        return self.cumulative(call_id)[: self.calls[call_id].prompt_len]

    def spread(self) -> None:
        for _ in self.calls:
            self.unplaced |= {call_id for call_id, parent in self.parent.items() if parent in self.unplaced}

    def infer(self) -> list[str]:
        candidates = [c for c in self.calls if c not in self.unplaced and c not in self.no_loss]
        whole = {call_id: self.cumulative(call_id) for call_id in candidates}
        ambiguous: list[str] = []
        found: dict[str, str] = {}
        for call_id, entry in self.calls.items():
            if entry.parent is None:
                prompt = entry.prompt_token_ids.tolist()
                prefixes = [c for c in candidates if prompt[: len(whole[c])] == whole[c]]
                longest = [c for c in prefixes if len(whole[c]) == max(len(whole[other]) for other in prefixes)]
                if len(longest) == 1:
                    found[call_id] = longest[0]
                elif longest:
                    ambiguous.append(call_id)
        self.parent |= found
        return ambiguous

    def settle(self) -> None:
        placed = [call_id for call_id in self.calls if call_id not in self.unplaced]
        for call_id in placed:
            tries = [
                other
                for other in placed
                if self.parent[other] == self.parent[call_id] and self.prompt(other) == self.prompt(call_id)
            ]
            with_loss = [other for other in tries if other not in self.no_loss]
            if call_id not in with_loss:
                continue
            used = [other for other in tries if any(self.parent[child] == other for child in placed)]
            if not used:
                of_task = [other for other in tries if self.excluded.get(other) != "side_call"]
                whole = [other for other in of_task if self.calls[other].reply.finish_reason not in ("abort", "error")]
                delivered = [other for other in of_task if self.calls[other].delivered]
                if len(delivered) == 1:
                    used = delivered
                elif not delivered and len(whole) == 1:
                    used = whole
                else:
                    self.masked = True
                    self.excluded[call_id] = "unresolved_retries"
                    continue
            if call_id not in used:
                self.excluded[call_id] = "retry_orphan"

    def path(self, call_id: str) -> list[str]:
        parent = self.parent[call_id]
        return [*(self.path(parent) if parent is not None else []), call_id]

    def build(self, delivery: Literal["main_chain", "all_chains"], *, per_request: bool) -> Expected:
        self.settle()
        loss = {call_id for call_id in self.calls if call_id not in self.excluded}
        leaves = [c for c in loss if not any(c != other and c in self.path(other) for other in loss)]
        mass = {
            leaf: sum(len(self.calls[c].generation_token_ids) for c in self.path(leaf) if c in loss) for leaf in leaves
        }
        leaves.sort(key=lambda leaf: (-mass[leaf], leaf))
        if delivery == "main_chain":
            leaves = leaves[:1]
        trajectories = []
        trained: set[str] = set()
        for leaf in leaves:
            mine = [c for c in self.path(leaf) if c in loss and c not in trained]
            trained |= set(mine)
            if per_request:
                trajectories += [self.sequence((c,), [c]) for c in mine]
            else:
                trajectories.append(self.sequence(tuple(self.path(leaf)), mine))
        for call_id in loss - trained:
            self.excluded[call_id] = "not_main_chain"
        wrong_digest = any(
            entry.digest is not None and entry.digest != digest_ids(np.array(self.cumulative(call_id), dtype=np.int32))
            for call_id, entry in self.calls.items()
            if call_id not in self.unplaced
        )
        return Expected(trajectories, self.masked or wrong_digest or not trajectories, self.excluded)

    def sequence(
        self, call_ids: tuple[str, ...], owned: list[str]
    ) -> tuple[tuple[str, ...], list[int], list[int], list[float]]:
        token_ids = self.cumulative(call_ids[-1])
        loss_mask, log_probs = [0] * len(token_ids), [0.0] * len(token_ids)
        for call_id in owned:
            entry = self.calls[call_id]
            for position, log_prob in enumerate(entry.generation_log_probs.tolist(), start=entry.prompt_len):
                loss_mask[position] = 1
                log_probs[position] = log_prob
        return call_ids, token_ids, loss_mask, log_probs


@given(damaged_rollouts(), options)
def test_agrees_with_the_slow_reference(entries: list[StoredRecord], options: BuildOptions) -> None:
    built = build(snapshot_of(entries), options)
    expected = Reference(snapshot_of(entries).records).build(
        options.delivery, per_request=options.strategy == "per_request"
    )
    assert [
        (t.call_ids, t.token_ids.tolist(), t.loss_mask.astype(int).tolist(), t.log_probs.tolist())
        for t in built.trajectories
    ] == expected.trajectories
    broken = ("ambiguous_parent", "absent_parent", "parent_mismatch", "parent_cycle", "unplaced_parent")
    broken += ("conflicting_parent", "foreign_parent")
    assert {
        call.call_id: "unplaced" if call.reason in broken else call.reason
        for call in built.excluded
        if call.reason != "foreign_record"
    } == expected.excluded
    assert built.masked == expected.masked, built.mask_reasons
