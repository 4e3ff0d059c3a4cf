"""Finding a text, ids or a reason in all rollouts of a source.

Invariant: what is said to be complete has every hit. A search ends at its limit of hits or of time, and then says
where to go on.

Flow: rollout by rollout, the latest first, each read as it is shown: texts in the bytes that its ids spell, ids among
its ids, reasons among those of its tokens, its calls and itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from gym_capture.capture.records import IdArray
from gym_capture.errors import GymCaptureError, InvalidRequestError
from gym_capture.inspector.library import Library
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.seen import SeenRollout, SeenTrajectory
from gym_capture.inspector.views import preview
from gym_capture.reasons import reason_name

Where: TypeAlias = Literal["text", "id", "reason"]
Hit: TypeAlias = dict[str, Any]

_AROUND: Final = 60
"""Bytes of an excerpt on each side."""
_PER_ROLLOUT: Final = 20
_MAX_IDS: Final = 256
_Find: TypeAlias = Callable[[SeenRollout], Iterator[Hit]]


def search(
    library: Library,
    query: str,
    where: Where,
    vocabulary: Vocabulary | None,
    *,
    limit: int,
    seconds: float,
    after: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Hits; raises `InvalidRequestError` for what is nothing to search for. `after`: the rollout to go on behind."""
    find = _finder(query, where, vocabulary)
    until = clock() + seconds
    rows = sorted(library.rows(), key=lambda row: (-(row.finished_at or 0.0), row.rollout))
    names = [row.rollout for row in rows]
    if after in names:
        names = names[names.index(after) + 1 :]
    hits: list[Hit] = []
    last: str | None = after
    for name in names:
        try:
            seen = library.source.read(name)
        except GymCaptureError:
            seen = None  # its row says so
        if seen is not None:
            for n, hit in enumerate(find(seen)):
                if n == _PER_ROLLOUT:
                    break
                hits.append({"rollout": name, **hit})
        last = name
        if len(hits) >= limit or clock() >= until:
            break
    is_complete = not names or last == names[-1]
    return {"hits": hits[: max(limit, 0)], "complete": is_complete, "after": None if is_complete else last}


def _finder(query: str, where: Where, vocabulary: Vocabulary | None) -> _Find:
    if not query.strip():
        raise InvalidRequestError("there is nothing to search for", param="q")
    if where == "reason":
        return lambda seen: _reasons(seen, query.strip())
    if where == "id":
        ids = _ids(query)
        return lambda seen: _in_tokens(seen, vocabulary, lambda each: _places(each.token_ids, ids))
    if vocabulary is None:
        return lambda seen: _in_replies(seen, query)
    wanted = query.encode()
    return lambda seen: _in_texts(seen, vocabulary, wanted)


def _ids(query: str) -> IdArray:
    words = query.replace(",", " ").replace("[", " ").replace("]", " ").split()
    if not words or len(words) > _MAX_IDS or not all(word.isdecimal() and len(word) < 10 for word in words):
        raise InvalidRequestError("ids are numbers, with spaces or commas between", param="q")
    return np.array([int(word) for word in words], dtype=np.int64).astype(np.int32)


def _places(ids: IdArray, wanted: IdArray) -> Sequence[int]:
    """Where a sequence stands in another one."""
    if wanted.size > ids.size:
        return ()
    found = np.flatnonzero(ids[: ids.size - wanted.size + 1] == wanted[0])
    for n in range(1, wanted.size):
        found = found[ids[found + n] == wanted[n]]
    places: list[int] = found.tolist()
    return places


def _in_tokens(
    seen: SeenRollout, vocabulary: Vocabulary | None, find: Callable[[SeenTrajectory], Sequence[int]]
) -> Iterator[Hit]:
    for number, each in enumerate(seen.trajectories):
        for place in find(each):
            yield _hit(number, each, place, _excerpt(each, place, vocabulary))


def _in_texts(seen: SeenRollout, vocabulary: Vocabulary, wanted: bytes) -> Iterator[Hit]:
    for number, each in enumerate(seen.trajectories):
        text, ends = vocabulary.joined(each.token_ids)
        at = text.find(wanted)
        while at >= 0:
            place = int(np.searchsorted(ends, at, side="right"))
            around = text[max(at - _AROUND, 0) : at + len(wanted) + _AROUND].decode("utf-8", "replace")
            yield _hit(number, each, place, around)
            at = text.find(wanted, at + len(wanted))


def _in_replies(seen: SeenRollout, query: str) -> Iterator[Hit]:
    """Without a vocabulary: in the texts that are on record."""
    for call in seen.calls:
        if query in preview(call) or any(query in str(item) for item in call.output_items):
            yield {"trajectory": None, "token": None, "call": call.call_id, "excerpt": preview(call)}


def _reasons(seen: SeenRollout, query: str) -> Iterator[Hit]:
    for reason in seen.mask_reasons:
        if query in (reason, reason_name(reason)):
            yield {"trajectory": None, "token": None, "call": None, "excerpt": reason}
    for call in seen.calls:
        for name in {call.excluded, call.link.reason, *call.notes}:
            if name is not None and query in (name, reason_name(name)):
                yield {"trajectory": None, "token": None, "call": call.call_id, "excerpt": preview(call)}
    for number, each in enumerate(seen.trajectories):
        if query in each.why_names:
            place = int(np.argmax(each.whys == each.why_names.index(query)))
            yield _hit(number, each, place, query)


def _hit(number: int, trajectory: SeenTrajectory, place: int, excerpt: str) -> Hit:
    index = int(trajectory.calls[place])
    call = trajectory.call_ids[index] if index >= 0 else None
    return {"trajectory": number, "token": place, "call": call, "excerpt": excerpt}


def _excerpt(trajectory: SeenTrajectory, place: int, vocabulary: Vocabulary | None) -> str:
    ids = trajectory.token_ids[max(place - 8, 0) : place + 9]
    return " ".join(map(str, ids.tolist())) if vocabulary is None else vocabulary.text(ids)
