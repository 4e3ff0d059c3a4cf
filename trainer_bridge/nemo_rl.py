"""Rollout records as NeMo-RL reads them from NeMo Gym.

Invariant: a record passes NeMo-RL's own walk (`contiguity_walk`), which gives back the trajectory it was made of id by
id; exactly the calls that the trajectory trains carry token arrays; and a record says that it is masked in both places
that are read.

Flow: `NemoRlExporter` writes a line for each rollout of a build -> `project_group` takes the rollouts of one group ->
`project` makes the record of each: one trajectory, each call's output items with, on the item that the generation
belongs to, the *whole* prompt so far, the generated ids and their log probabilities -> the record is walked before it
is handed out.

NeMo-RL finds groups by equal first prompts. A prompt with a date or a session id in it puts each rollout into a group
of its own, where every advantage is 0: `project_group` warns, and each record carries its `group_id`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from gym_capture.build.trajectories import Trajectory
from gym_capture.capture.record_rows import row_json
from gym_capture.capture.records import IdArray
from gym_capture.data.advantages import reward_problems
from gym_capture.errors import RecordError
from gym_capture.reasons import MaskReason
from trainer_bridge.finished import FinishedRollout, JsonObject, Turn
from trainer_bridge.responses import empty_message, response_item, response_object, usage
from trainer_bridge.samples import Delivery

__all__ = ["MixedPromptsWarning", "NemoRlExporter", "contiguity_walk"]

_FILE: Final = "rollouts.jsonl"


class MixedPromptsWarning(UserWarning):
    """The rollouts of a group start from different prompts, so that NeMo-RL would not compare them."""


@dataclass(frozen=True, slots=True, eq=False)
class LogMessage:
    """A message of NeMo-RL's log."""

    role: str
    """user: ids that the policy was given; assistant: ids that it sampled."""
    token_ids: tuple[int, ...]
    generation_logprobs: tuple[float, ...] | None
    """Aligned with `token_ids`; None of a user message."""


@dataclass(frozen=True, slots=True)
class NemoRlExporter:
    """An `Exporter`: a record a line."""

    name: str = "nemo-rl"
    files: tuple[str, ...] = (_FILE,)

    def export(
        self,
        rollouts: Iterable[tuple[FinishedRollout, ...]],
        create: Callable[[str], AbstractContextManager[BinaryIO]],
    ) -> Delivery:
        """Raises what `project` raises; warns of groups that NeMo-RL would not compare."""
        delivery = Delivery()
        with create(_FILE) as file:
            for group in rollouts:
                for rollout, record in zip(group, project_group(group), strict=True):
                    file.write(row_json(record) + b"\n")
                    _count(delivery, rollout, masked=record["mask_sample"])
        return delivery


def _count(delivery: Delivery, rollout: FinishedRollout, *, masked: bool) -> None:
    """A masked record is a row that trains nothing: it stays in its group."""
    delivery.rows += 1
    if masked:
        return
    main, *others = rollout.trajectories
    delivery.trained_tokens += main.generated_tokens
    delivery.other_chains += len(others)
    delivery.tokens_of_other_chains += sum(other.generated_tokens for other in others)
    delivery.note_sampling(main.spans)


def project_group(rollouts: Sequence[FinishedRollout]) -> list[JsonObject]:
    """The records of the rollouts of one group, in their order.

    A masked rollout of which nothing could be built borrows the first prompt of the others, so that it stays in the
    group that the rewards are compared in. Raises what `project` raises; warns of prompts that differ.
    """
    prompts = {prompt.tobytes(): prompt for prompt in map(_first_prompt, rollouts) if prompt is not None}
    if len(prompts) > 1:
        groups = sorted({rollout.group_id for rollout in rollouts})
        warnings.warn(
            f"group {', '.join(groups)} has {len(prompts)} different first prompts in {len(rollouts)} rollouts; "
            "NeMo-RL groups by equal first prompts and would give those that stand alone an advantage of 0: take what "
            "changes (dates, session ids) out of the prompt",
            MixedPromptsWarning,
            stacklevel=2,
        )
    shared = next(iter(prompts.values())) if len(prompts) == 1 else None
    return [project(rollout, placeholder_prompt_ids=shared) for rollout in rollouts]


def project(
    rollout: FinishedRollout, *, rank: int = 0, placeholder_prompt_ids: IdArray | None = None, created_at: float = 0.0
) -> JsonObject:
    """The record of one rollout, ready for JSON.

    `rank`: which of its trajectories, the main chain unless said otherwise. `placeholder_prompt_ids`: the prompt of
    the one token-bearing item that even a rollout with nothing to train on must have; it is always masked.
    `created_at`: when its last call was, in Unix seconds, where that is known.

    Where nobody said what the agent was given, `input` is empty: NeMo-RL trains on the ids of the first prompt, which
    are those that the policy was conditioned on, whatever the text. Reward components that do not add up to the reward
    are left out, with a warning: NeMo-RL takes none such, and trains on the reward. Raises `RecordError` if nobody said
    which agent it was.
    """
    if rollout.agent_name is None:
        raise RecordError(
            "nobody said which agent played it, and NeMo-RL wants to know: name it (--agent), or give each rollout an "
            "agent_name before it is built",
            field="agent_name",
            rollout_id=rollout.rollout_id,
        )
    reasons = list(dict.fromkeys((*rollout.mask_reasons, *reward_problems(rollout.reward))))
    nothing_built = rank >= len(rollout.trajectories)
    if not nothing_built:
        trajectory = rollout.trajectories[rank]
        output = _output(trajectory, rollout.turns)
        cut_off = trajectory.finish_reason == "length"
    else:
        prompt = placeholder_prompt_ids if placeholder_prompt_ids is not None else np.zeros(1, dtype=np.int32)
        output, cut_off = [_placeholder(rollout.rollout_id, prompt)], False
        reasons = reasons or [MaskReason.NO_TRAINABLE_TOKENS]
    contiguity_walk(output)
    carriers = [item for item in output if "generation_token_ids" in item]
    masked = bool(reasons)
    record: JsonObject = {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "agent_ref": {"type": "responses_api_agents", "name": rollout.agent_name},
        "responses_create_params": {"input": [] if rollout.input is None else rollout.input},
        "response": response_object(
            output,
            response_id=f"resp_{rollout.rollout_id}",
            model=rollout.model or "",
            created_at=created_at,
            cut_off=cut_off,
            usage=usage(
                len(carriers[0]["prompt_token_ids"]), sum(len(item["generation_token_ids"]) for item in carriers)
            ),
        ),
        "reward": 0.0 if reward_problems(rollout.reward) else rollout.reward,
        "mask_sample": masked,
        "instance_config": {"mask_sample": masked},
        "_ng_token_capture": {**asdict(rollout.counts), "mask_reasons": reasons, "placeholder": nothing_built},
    }
    if components := _components(rollout):
        record["reward_components"] = components
    if rollout.call_rewards:
        record["call_rewards"] = dict(rollout.call_rewards)
    return record


def contiguity_walk(output: Iterable[Mapping[str, Any]]) -> list[LogMessage]:
    """The message log that NeMo-RL makes of `response.output`, by its rules.

    An item counts if it has generated ids. The ids seen so far must be a prefix of its prompt; the rest of the prompt
    becomes a user message, its generated ids an assistant message. Raises `RecordError` where NeMo-RL would stop: a
    prompt that does not go on from what came before, log probabilities that are NaN or do not align, too few rows of
    routed experts, no generated ids at all.
    """
    seen: list[int] = []
    log: list[LogMessage] = []
    for position, item in enumerate(output):
        generation = item.get("generation_token_ids")
        if not generation:
            continue
        prompt, log_probs = item["prompt_token_ids"], item["generation_log_probs"]
        if prompt[: len(seen)] != seen:
            raise _walk_error("prompt_token_ids", position, "must start with the ids of all items before it")
        if len(log_probs) != len(generation):
            raise _walk_error(
                "generation_log_probs", position, f"must align: got {len(log_probs)}, expected {len(generation)}"
            )
        if any(math.isnan(value) for value in log_probs):
            raise _walk_error("generation_log_probs", position, "must not be NaN")
        experts = item.get("routed_experts")
        if experts is not None and len(experts) < len(prompt) + len(generation):
            raise _walk_error("routed_experts", position, "must have a row for each id of prompt and generation")
        log.append(LogMessage("user", tuple(prompt[len(seen) :]), None))
        log.append(LogMessage("assistant", tuple(generation), tuple(log_probs)))
        seen = [*prompt, *generation]
    if not log:
        raise _walk_error("generation_token_ids", 0, "must be there on one item at least, masked or not")
    return log


# --- output items --------------------------------------------------------------------------------------------------


def _output(trajectory: Trajectory, turns: Mapping[str, Turn]) -> list[JsonObject]:
    segments: dict[str, tuple[int, int]] = {}
    for span in trajectory.spans:
        begin, _ = segments.get(span.call_id, (span.start, span.end))
        segments[span.call_id] = (begin, span.end)
    output: list[JsonObject] = []
    last = trajectory.call_ids[-1]
    for call_id in trajectory.call_ids:
        turn = turns[call_id]
        cut_off = call_id == last and trajectory.finish_reason == "length"
        items = [
            response_item(item, call_id=call_id, position=position, cut_off=cut_off)
            for position, item in enumerate(turn.output_items)
        ]
        if call_id in segments:
            if not items:
                items.append(empty_message(call_id=call_id, position=0))
            items[_carrier(turn, items)] |= _token_fields(trajectory, *segments[call_id])
        output += items
    return output


def _carrier(turn: Turn, items: Sequence[JsonObject]) -> int:
    """The item that the generation belongs to; the last where it was not noted."""
    index = turn.token_item_index
    return index if index is not None and 0 <= index < len(items) else len(items) - 1


def _token_fields(trajectory: Trajectory, begin: int, end: int) -> JsonObject:
    fields: JsonObject = {
        "prompt_token_ids": trajectory.token_ids[:begin].tolist(),
        "generation_token_ids": trajectory.token_ids[begin:end].tolist(),
        "generation_log_probs": trajectory.log_probs[begin:end].tolist(),
    }
    if trajectory.routed_experts is not None:
        fields["routed_experts"] = _rows(trajectory.routed_experts, end)
    return fields


def _rows(experts: npt.NDArray[Any], count: int) -> list[Any]:
    """A row for each of `count` ids.

    The id that was sampled last of all has not been run, so it has none; the reader wants one nevertheless. It gets
    zeros: what an id is routed to bears on the ids after it, and after the last there are none.
    """
    rows: list[Any] = experts[:count].tolist()
    if len(rows) < count:
        rows.append(np.zeros_like(experts[0]).tolist())
    return rows


def _placeholder(rollout_id: str, prompt_ids: IdArray) -> JsonObject:
    """The output of a masked record for a rollout with nothing to show."""
    return empty_message(call_id=rollout_id, position=0) | {
        "prompt_token_ids": prompt_ids.tolist(),
        "generation_token_ids": [0],
        "generation_log_probs": [0.0],
    }


# --- the rest of a record ------------------------------------------------------------------------------------------


def _first_prompt(rollout: FinishedRollout) -> IdArray | None:
    """The ids before the first sampled one of the main chain: what NeMo-RL compares."""
    if not rollout.trajectories:
        return None
    main = rollout.trajectories[0]
    return main.token_ids[: main.spans[0].start]


def _components(rollout: FinishedRollout) -> dict[str, float]:
    components = dict(rollout.reward_components or {})
    if not components:  # a rollout that failed has none
        return {}
    total = math.fsum(components.values())
    if rollout.reward is None or not math.isclose(total, rollout.reward, rel_tol=1e-6, abs_tol=1e-9):
        # Whoever scored it cannot say it again (an outcome stands), and the rollouts beside it are well.
        warnings.warn(
            f"the reward_components of {rollout.rollout_id!r} do not add up to its reward ({total} and "
            f"{rollout.reward}), which NeMo-RL asks of them: they are left out, the reward is not",
            stacklevel=3,
        )
        return {}
    return components


def _walk_error(field: str, position: int, message: str) -> RecordError:
    return RecordError(f"output item {position}: {field} {message}", field=field)
