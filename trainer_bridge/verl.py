"""Rollouts as verl's agent loops give them: arguments of an `AgentLoopOutput`, with its key and tag in TransferQueue.

Invariant: the rows of a rollout are one session of verl's, `{uid}_{session}_{index}`, the main chain being the last of
them. verl compares sessions by the last row of each and gives its advantage to the others, so a rollout in several
rows counts once in the baseline; masked ones are no session at all.

Flow: a group -> `Delivery.samples` -> `project`, a row for each trajectory. A group's `prompt_tag` goes under its `uid`
when all of its rows are there. verl looks at how old a group is by the `global_steps` of that tag.

verl's estimators other than GRPO take each row as a rollout of its own, and its losses that average over rows weigh
rows: `Delivery.split_rollouts` says of how many rollouts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter
from trainer_bridge.samples import Delivery, Sample, session_numbers
from trainer_bridge.stream import TrainRollout

__all__ = ["EXPORTER", "FILE", "group_uid", "project", "prompt_tag"]

FILE: Final = "agent_loop_outputs.jsonl"
_UIDS: Final = uuid.UUID("6f6f3f4e-4b1c-4d0e-9a53-5d3f0a8f6d11")


def group_uid(group_id: str) -> str:
    """The group's `uid`: verl takes keys apart at underscores, which ours may have."""
    return str(uuid.uuid5(_UIDS, group_id))


def project(rollouts: Sequence[TrainRollout], delivery: Delivery) -> Iterator[JsonObject]:
    """The rows of one group: `uid`, `key`, `tag`, and `output`, the arguments of an `AgentLoopOutput`."""
    sessions = {id(each): number for each, number in zip(rollouts, session_numbers(rollouts), strict=True)}
    index = 0
    before: TrainRollout | None = None
    for sample in delivery.samples(rollouts):
        index = index + 1 if sample.rollout is before else 0
        before = sample.rollout
        uid = group_uid(sample.rollout.group_id)
        yield {
            "uid": uid,
            "key": f"{uid}_{sessions[id(sample.rollout)]}_{index}",
            "tag": _tag(sample),
            "output": _output(sample),
        }


def prompt_tag(rollouts: Sequence[TrainRollout], global_steps: int) -> JsonObject:
    """The tag of the group's prompt: how its sessions ended, as verl's replay buffer reads it.

    `global_steps`: the trainer's step for which it was played; a tag of a row may have it, too.
    """
    status = "finished" if any(not each.masked for each in rollouts) else "failure"
    return {"is_prompt": True, "status": status, "global_steps": global_steps}


def _output(sample: Sample) -> JsonObject:
    rollout, sequence = sample.rollout, sample.sequence
    output: JsonObject = {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.response_mask,
        "response_logprobs": sample.response_log_probs,
        "reward_score": rollout.reward,
        "num_turns": 2 * len({span.call_id for span in sequence.spans}),
        "metrics": {},
        "extra_fields": {
            **_steps(sample),
            "rollout_id": rollout.rollout_id,
            "trajectory_id": sequence.trajectory_id,
            "group_id": rollout.group_id,
            "advantage": rollout.advantage,
            "truncated": rollout.truncated,
            "reward_extra_info": {},
        },
    }
    if sequence.routed_experts is not None:
        output["routed_experts"] = sequence.routed_experts.tolist()
    return output


def _tag(sample: Sample) -> JsonObject:
    total = int(sample.token_ids.size)
    return {
        "status": "success",
        "prompt_len": sample.prompt_length,
        "response_len": total - sample.prompt_length,
        "seq_len": total,
        **_steps(sample),
    }


def _steps(sample: Sample) -> JsonObject:
    low, high = sample.versions or (None, None)
    return {"min_global_steps": low, "max_global_steps": high}


EXPORTER: Final = LinesExporter("verl", FILE, project)
