"""JSON of what is seen, as the browser gets it.

Invariant: pure. Texts pass as they are, hostile ones too: whoever shows them shows text. What is not known is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
import orjson

from gym_capture import reasons
from gym_capture.capture.records import IdArray
from gym_capture.data.annotations import Annotation
from gym_capture.inspector.conversation import messages_of, reply_of
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.seen import (
    NOTHING,
    LinkKind,
    SeenCall,
    SeenRollout,
    SeenTrajectory,
    Side,
    Split,
    TokenKind,
)
from gym_capture.inspector.splits import SHOWN, common_length
from gym_capture.inspector.table import Row

_PREVIEW: Final = 160
_DIGITS: Final = 6
MOST_TOKENS: Final = 16_384
"""In one answer."""
_MOST_OVERLAYS: Final = 32
"""Names of annotations in one answer: those of the latest."""


def reason_words() -> dict[str, dict[str, str]]:
    """Every reason by its name."""
    return {
        str(reason): {"title": kind.title, "meaning": reason.means, "what_to_do": reason.what_to_do}
        for kind in reasons.KINDS
        for reason in kind.reasons
    }


_WORDS: Final = reason_words()


def words_of(reason: str | None) -> str | None:
    """What a reason means; of a name that others made up, the name."""
    if reason is None:
        return None
    name = reasons.reason_name(reason)
    return _WORDS[name]["meaning"] if name in _WORDS else name


# --- a rollout -------------------------------------------------------------------------------------------------------


def rollout_view(seen: SeenRollout, row: Row | None, *, cursor: str) -> dict[str, Any]:
    return {
        "rollout": seen.rollout_id,
        "group": None if row is None else row.group,
        "sample": None if row is None else row.sample,
        "attempt": None if row is None else row.attempt,
        "state": None if row is None else row.state,
        "reward": None if row is None else row.reward,
        "harness": None if row is None else row.harness,
        "put_ms": None if row is None else row.put_ms,
        "mask_reason": seen.mask_reasons[0] if seen.mask_reasons else None,
        "mask_reasons": list(seen.mask_reasons),
        "mask_details": {reason: list(details) for reason, details in seen.mask_details.items()},
        "generated_tokens": seen.generated_tokens,
        "trained_tokens": seen.trained_tokens,
        "trajectories": len(seen.trajectories),
        "cursor": cursor,
        "calls": [call_row(call) for call in seen.calls],
    }


def call_row(call: SeenCall) -> dict[str, Any]:
    return {
        "call": call.call_id,
        "number": call.number,
        "parent": call.parent,
        "role": call.role,
        "link": {"kind": call.link.kind, "reason": call.link.reason, "words": _link_words(call)},
        "dialect": call.dialect,
        "started_at": None if call.created_at is None else call.created_at - (call.seconds or 0.0),
        "seconds": call.seconds,
        "prompt_tokens": call.prompt_tokens,
        "supplied_tokens": call.supplied_tokens,
        "generated_tokens": call.generated_tokens,
        "finish": call.finish,
        "weight_versions": call.weight_versions,
        "excluded": call.excluded,
        "excluded_words": words_of(call.excluded),
        "preview": preview(call),
    }


def _link_words(call: SeenCall) -> str:
    match call.link.kind:
        case LinkKind.EXACT:
            return "Its prompt is its parent's exact ids, and what is new."
        case LinkKind.RENDERED:
            return "The conversation was rendered as a whole, and starts with its parent's ids all the same."
    if call.link.reason is not None:
        return words_of(call.link.reason) or ""
    return "It starts a conversation."


def preview(call: SeenCall) -> str:
    """The beginning of what a call said."""
    reply = reply_of(call)
    tools = " ".join(f"{each['name']}({each['arguments']})" for each in reply["tool_calls"])
    said = " ".join(f"{reply['text'] or ''} {tools}".split()) or " ".join((reply["reasoning"] or "").split())
    return said if len(said) <= _PREVIEW else said[: _PREVIEW - 3] + "..."


def call_view(seen: SeenRollout, call: SeenCall, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """A call as its agent saw it: what was sent, and what came."""
    return {
        "call": call.call_id,
        "messages": messages_of(seen, call, vocabulary),
        "reply": reply_of(call),
        "sampling": dict(call.sampling),
        "requested_model": call.requested_model,
        "model": call.model,
        "tokens": {"prompt": call.prompt_tokens, "generated": call.generated_tokens},
        "notes": [{"name": name, "words": words_of(name)} for name in call.notes],
        "row": call_row(call),
    }


# --- trajectories ----------------------------------------------------------------------------------------------------


def trajectories_view(seen: SeenRollout, row: Row | None, vocabulary: Vocabulary | None) -> list[dict[str, Any]]:
    return [
        {
            "trajectory": number,
            "id": each.trajectory_id,
            "calls": list(each.call_ids),
            "generated": {call: list(span) for call, span in each.generated.items()},
            "delivered": each.is_delivered,
            "tokens": int(each.token_ids.size),
            "trained_tokens": each.trained_tokens,
            "mask_reason": seen.mask_reasons[0] if seen.mask_reasons else None,
            "reward": None if row is None else row.reward,
            "advantage": each.advantage,
            "segments": _segments(each),
            "splits": [split_view(split, vocabulary) for split in seen.splits if split.call_id in each.call_ids],
        }
        for number, each in enumerate(seen.trajectories)
    ]


def _segments(trajectory: SeenTrajectory) -> list[list[int]]:
    """Runs of tokens of one call and kind: begin, end, call, kind."""
    kinds, calls = trajectory.kinds, trajectory.calls
    size = int(kinds.size)
    changes = np.flatnonzero((kinds[1:] != kinds[:-1]) | (calls[1:] != calls[:-1])) + 1
    bounds = [0, *changes.tolist(), size] if size else []
    return [[begin, end, int(calls[begin]), int(kinds[begin])] for begin, end in pairwise(bounds)]


def split_view(split: Split, vocabulary: Vocabulary | None) -> dict[str, Any]:
    return {
        "call": split.call_id,
        "parent": split.before,
        "reason": split.reason,
        "words": words_of(split.reason),
        "at": split.at,
        "a": _side(split.held, vocabulary),
        "b": _side(split.sent, vocabulary),
    }


def _side(side: Side, vocabulary: Vocabulary | None) -> dict[str, Any]:
    return {"ids": side.ids.tolist(), "texts": _texts(vocabulary, side.ids), "from": side.source}


def _texts(
    vocabulary: Vocabulary | None, ids: IdArray, begin: int = 0, end: int | None = None
) -> list[str] | list[None]:
    if vocabulary is None:
        return [None] * ((ids.size if end is None else end) - begin)
    return vocabulary.texts(ids, begin, end)


def tokens_view(
    trajectory: SeenTrajectory,
    begin: int,
    end: int,
    vocabulary: Vocabulary | None,
    annotations: Sequence[Annotation] = (),
) -> dict[str, Any]:
    """Tokens `[begin, end)`, as far as there are so many, and as one answer has."""
    total = int(trajectory.token_ids.size)
    begin = min(max(begin, 0), total)
    end = min(max(end, begin), begin + MOST_TOKENS, total)
    here = slice(begin, end)
    return {
        "from": begin,
        "to": end,
        "total": total,
        "ids": trajectory.token_ids[here].tolist(),
        "texts": _texts(vocabulary, trajectory.token_ids, begin, end),
        "kinds": trajectory.kinds[here].tolist(),
        "calls": trajectory.calls[here].tolist(),
        "logprobs": _numbers(trajectory.log_probs[here]),
        "versions": _named(trajectory.versions[here], trajectory.version_names),
        "why": trajectory.whys[here].tolist(),
        "whys": list(trajectory.why_names),
        "overlays": _overlays(trajectory, begin, end, annotations),
        "notes": _notes(trajectory, begin, end, annotations),
    }


def _numbers(values: np.ndarray[Any, np.dtype[np.floating[Any]]]) -> list[float | None]:
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):
        found = np.round(wide, _DIGITS)
    shown: list[float] = np.where(np.isfinite(found), found, wide).tolist()
    return [None if value != value else value for value in shown]


def _named(indices: np.ndarray[Any, Any], names: Sequence[str]) -> list[str | None]:
    return [None if index == NOTHING else names[index] for index in indices.tolist()]


def _overlays(
    trajectory: SeenTrajectory, begin: int, end: int, annotations: Sequence[Annotation]
) -> dict[str, list[float | None]]:
    overlays: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    size = end - begin
    if trajectory.advantage is not None:
        trained = trajectory.kinds[begin:end] == TokenKind.TRAINED
        overlays["advantage"] = np.where(trained, trajectory.advantage, np.nan)
    said = [each for each in annotations if each.note is None and each.call in trajectory.generated]
    names = dict.fromkeys(each.name for each in reversed(said))
    shown = set(islice(names, _MOST_OVERLAYS))
    for each in said:
        span = trajectory.generated[each.call]
        if each.name not in shown:
            continue
        values = overlays.setdefault(each.name, np.full(size, np.nan))
        if each.token is not None:
            given, first = [each.value], span[0] + each.token
        elif each.values is not None:
            given, first = list(each.values)[: span[1] - span[0]], span[0]
        else:
            given, first = [each.value] * (span[1] - span[0]), span[0]
        low, high = max(first, begin), min(first + len(given), end, span[1])
        if low < high:
            values[low - begin : high - begin] = [
                np.nan if value is None else value for value in given[low - first : high - first]
            ]
    return {name: _numbers(values) for name, values in overlays.items()}


def _notes(trajectory: SeenTrajectory, begin: int, end: int, annotations: Sequence[Annotation]) -> list[dict[str, Any]]:
    """Notes of tokens that are here."""
    found = []
    for each in annotations:
        span = trajectory.generated.get(each.call)
        if span is not None and each.note is not None and each.token is not None:
            place = span[0] + each.token
            if begin <= place < min(end, span[1]):
                found.append({"token": place, "name": each.name, "note": each.note, "by": each.by, "at": each.at})
    return found


# --- a group ---------------------------------------------------------------------------------------------------------


def group_view(
    group: str, rows: Sequence[Row], seen: Mapping[str, SeenRollout], vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """A group's rollouts, and where their first prompts part from the first of them."""
    prompts = {name: each.first_prompt for name, each in seen.items() if each.first_prompt is not None}
    differences = []
    reference = next(((name, prompts[name]) for name in (row.rollout for row in rows) if name in prompts), None)
    if reference is not None:
        first, ids = reference
        for name, other in prompts.items():
            at = common_length(ids, other)
            if at < max(ids.size, other.size):
                a, b = (Side(ids=each[at : at + SHOWN], source=whose) for each, whose in ((ids, first), (other, name)))
                differences.append({"rollout": name, "at": at, "a": _side(a, vocabulary), "b": _side(b, vocabulary)})
    return {
        "group": group,
        "rollouts": [_in_group(row, seen.get(row.rollout), vocabulary) for row in rows],
        "first_prompts_equal": not differences if reference is not None else None,
        "differences": differences,
    }


def _in_group(row: Row, seen: SeenRollout | None, vocabulary: Vocabulary | None) -> dict[str, Any]:
    prompt = None if seen is None else seen.first_prompt
    advantages = [] if seen is None else [each.advantage for each in seen.trajectories if each.advantage is not None]
    shown = None
    if prompt is not None:
        text = None if vocabulary is None else vocabulary.text(prompt[:MOST_TOKENS])
        shown = {"tokens": int(prompt.size), "text": text}
    return {
        "rollout": row.rollout,
        "sample": row.sample,
        "state": row.state,
        "reward": row.reward,
        "advantage": advantages[0] if advantages else None,
        "mask_reason": row.mask_reason,
        "trained_tokens": row.trained_tokens,
        "first_prompt": shown,
    }


def as_json(value: object) -> bytes:
    """Half an emoji, which old logs may hold, is U+FFFD; a number that JSON has not is null."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        from gym_capture.capture.record_rows import row_json

        return row_json(value)
