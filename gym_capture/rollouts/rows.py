"""The row of a rollout, as users of NeMo Gym expect it: what was asked, what came, what it is worth, whether it counts.

Invariant: `response.output` of a harness that did not ask to be left alone is what the records prove, and nothing else
of its response is changed; a harness's own output that carries exact ids is passed on as it is. A masked row says so in
both places that trainers read. A reward is the environment's; what an agent gave to single calls stands beside it.

Flow: `exchange_of` an attempt, when it is over -> kept (`exchanges`) until the group is built -> `row`, with the record
that the build gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gym_capture.reasons import AttemptFailure, MaskReason, join_reason
from gym_capture.rollouts.attempt import Outcome, Scored
from gym_capture.rollouts.ledger import RolloutRow

JsonObject: TypeAlias = dict[str, Any]

CAPTURE_KEY = "_ng_token_capture"
_ROLE = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The agent's input and its own response: a row has them beside the outcome. All JSON."""

    input: list[JsonObject]
    """`input` of a Responses request."""
    tools: list[JsonObject]
    response: Mapping[str, Any] | None = None
    """The agent's own, if it gave one."""
    output: Literal["merged", "native"] = "merged"
    """See `harness.Completed`."""


def exchange_of(outcome: Outcome) -> Exchange:
    """Of an attempt. One that failed before its agent started was asked nothing."""
    observation, result = outcome.observation, outcome.result
    asked = [] if observation is None else list(map(_input_item, observation.messages))
    tools = [] if observation is None else list(map(_tool, observation.tools))
    if not isinstance(result, Scored):
        return Exchange(input=asked, tools=tools)
    completed = result.completed
    return Exchange(input=asked, tools=tools, response=completed.response, output=completed.output)


def row(
    outcome: RolloutRow,
    exchange: Exchange,
    record: Mapping[str, Any],
    *,
    task_index: int,
    native_problem: str | None,
) -> JsonObject:
    """The row, ready for JSON. `record`: what the build gave, as `trainer_bridge.nemo_rl.project` makes it.

    `task_index`: which of the job's tasks it is, from 0: NeMo Gym's reports join rows by it, and by the sample.
    `native_problem`: what is wrong with the ids of the agent's own output, where that is left alone.
    """
    made: JsonObject = {
        "_ng_task_index": task_index,
        "_ng_rollout_index": outcome.sample,
        "rollout_id": outcome.rollout_id,
        "task_id": outcome.task_id,
        "group_id": outcome.group_id,
        "sample": outcome.sample,
        "attempt": outcome.attempt,
        "status": outcome.status,
        "error": outcome.error,
        "detail": outcome.detail,
        **record,
        "responses_create_params": {"input": exchange.input, **({"tools": exchange.tools} if exchange.tools else {})},
    }
    capture = {**record[CAPTURE_KEY], "output": exchange.output}
    if exchange.output == "native":
        made["response"] = exchange.response
        # The build speaks of the records, which this row is not made of.
        reasons = [*(_failure(outcome)), *([] if native_problem is None else [native_problem])]
        capture["mask_reasons"] = reasons
        made["mask_sample"] = bool(reasons)
        made["instance_config"] = {"mask_sample": bool(reasons)}
    elif exchange.response is not None:
        # What the agent's own leaves out is that of the records: a row's response is a whole one.
        made["response"] = {**_recorded(record, outcome), **exchange.response, "output": record["response"]["output"]}
    else:
        made["response"] = _recorded(record, outcome)
    made[CAPTURE_KEY] = capture
    return made


def _recorded(record: Mapping[str, Any], outcome: RolloutRow) -> JsonObject:
    """The response that the records make. They say nothing of time; the job knows when its rollout was over."""
    return {**record["response"], "created_at": int(outcome.started_at + outcome.wall_s)}


def _failure(outcome: RolloutRow) -> Iterable[str]:
    """As a build says it."""
    if outcome.status == "finished":
        return ()
    return (join_reason(MaskReason.INCOMPLETE, outcome.error or AttemptFailure.FAILED),)


def _input_item(message: Mapping[str, Any]) -> JsonObject:
    """A message of Chat Completions, as an environment gives it, as an item of a Responses request."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = list(map(_input_part, content))
    return {"role": message.get("role", _ROLE), "content": content, "type": "message"}


def _input_part(part: Mapping[str, Any]) -> JsonObject:
    match part:
        case {"type": "text", "text": text}:
            return {"type": "input_text", "text": text}
        case {"type": "image_url", "image_url": {"url": url, **others}}:
            return {"type": "input_image", "image_url": url, "detail": others.get("detail", "auto")}
        case _:
            return dict(part)


def _tool(tool: Mapping[str, Any]) -> JsonObject:
    """A tool of Chat Completions as one of a Responses request, which has no `function` inside."""
    match tool:
        case {"type": "function", "function": function}:
            return {"type": "function", "parameters": {}, "strict": False, **function}
        case _:
            return dict(tool)
