"""Calls that were begun and then lost, as other calls show them.

Invariant: nothing is said unless it is known of every call what it was for, since any could be the one that goes on
from a lost reply. Found in time linear in the calls, however many ask the same.

Flow: what a call is for is packed when it begins (`purpose`) -> `lost_calls` looks which others ask the same, and what
later ones echo as the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from gym_capture.capture.records import CallIntent, LostCall

_KEY_BYTES: Final = 16
_NO_KEY: Final = bytes(_KEY_BYTES)


class Purpose(NamedTuple):
    """A call's purpose, in fewer bytes than its intent has: it is in memory for every call of every live rollout."""

    body: bytes
    request: bytes
    asked: bytes
    answer: bytes

    @classmethod
    def unpack(cls, packed: bytes) -> Purpose:
        return cls(*(packed[start : start + _KEY_BYTES] for start in range(0, len(packed), _KEY_BYTES)))


def purpose(intent: CallIntent) -> bytes:
    """Packed; empty if it is not known, as of intents that were written before it was."""
    if not intent.request_key and not intent.answer_key:
        return b""
    try:
        keys = [bytes.fromhex(key) or _NO_KEY for key in (intent.request_key, intent.asked_key, intent.answer_key)]
    except ValueError:
        return b""
    if any(len(key) != _KEY_BYTES for key in keys):
        return b""
    body = hashlib.blake2b(intent.request_digest.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
    return b"".join((body, *keys))


def lost_calls(dangling: Set[str], begun: Mapping[str, bytes], recorded: Set[str]) -> tuple[LostCall, ...]:
    """The `dangling` ones of the `begun` calls, each of which has its `purpose` beside it."""
    if not dangling or not all(begun.values()) or not recorded <= begun.keys():
        return ()
    purposes = {call_id: Purpose.unpack(packed) for call_id, packed in begun.items()}
    same_body: dict[tuple[bytes, bytes], list[str]] = {}
    answering: dict[bytes, list[str]] = {}
    for call_id, each in purposes.items():
        same_body.setdefault((each.body, each.request), []).append(call_id)
        answering.setdefault(each.asked, []).append(call_id)
    lost: list[LostCall] = []
    for call_id in sorted(dangling):
        mine = purposes[call_id]
        if mine.request != _NO_KEY:
            retries = {other for other in same_body[mine.body, mine.request] if other != call_id}
            after = answering.get(mine.request, ())
            answers = {purposes[other].answer.hex() for other in after if other != call_id}
            lost.append(LostCall(model_call_id=call_id, retries=tuple(sorted(retries)), answers=tuple(sorted(answers))))
    return tuple(lost)
