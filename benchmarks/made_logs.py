"""Logs of many rollouts, and the same rollouts as NeMo Gym's token files, for benchmarks that read them.

Invariant: a log is what state actors leave - an intent and a record for each call, those of rollouts that play at the
same time interleaved - written through the store's own `SegmentWriter`; only its encoding is short-cut. A few
conversations are encoded as a producer encodes them, and each rollout is a copy of one with ids of its own: the ids of
rollout and calls have the same length everywhere, so they are put in the place of the others, and the digest is made
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.files import write_rollout
from gym_capture.capture.codec import encode_intent, encode_suffix
from gym_capture.capture.records import (
    CallIntent,
    CallReply,
    CallRequest,
    Continues,
    Parent,
    PolicyTrace,
    PrefixSupply,
    Root,
    TokenEntry,
    TurnKeys,
    WeightSpan,
    digest_ids,
)
from gym_capture.stores.frames import Draft, RecordType, pack_key
from gym_capture.stores.segments import Disk, SegmentWriter, make_directory

CONVERSATIONS: Final = 64
"""Different ones, so that files do not compress better than real ones."""
GROUP: Final = 8
AT_A_TIME: Final = 64
"""Rollouts that play at the same time."""
_SEGMENT_BYTES: Final = 64 << 20


class Shape(NamedTuple):
    """What the rollouts of a log are like."""

    turns: int
    root: int
    """Ids of the first prompt."""
    new: int
    """Ids that each further prompt adds."""
    generated: int

    @property
    def ids(self) -> int:
        return self.root + self.turns * self.generated + (self.turns - 1) * self.new


def rollout_name(number: int) -> str:
    return f"job-0.task-{number // GROUP:08}.{number % GROUP}"


def group_name(number: int) -> str:
    return f"job-0.task-{number // GROUP:08}"


def write_log(directory: Path, shape: Shape, *, rollouts: int, shards: int = 1) -> int:
    """The logs of `shards` state actors in directories below `directory`; returns their bytes."""
    patterns = [_pattern(shape, seed) for seed in range(min(CONVERSATIONS, rollouts))]
    for shard in range(shards):
        writer = SegmentWriter(
            make_directory(directory / f"shard-{shard}"), segment_bytes=_SEGMENT_BYTES, fsync=False, disk=Disk()
        )
        of_shard = range(shard, rollouts, shards)
        for begin in range(0, len(of_shard), AT_A_TIME):
            playing = of_shard[begin : begin + AT_A_TIME]
            for turn in range(shape.turns):
                writer.append(list(_turn(patterns, playing, turn, begin)), epoch_floor=begin + 1)
        writer.close()
    return sum(path.stat().st_size for path in directory.rglob("*.log"))


def write_token_files(directory: Path, shape: Shape, *, rollouts: int) -> int:
    """Whole prompts, as NeMo Gym's writer leaves them; returns their bytes."""
    turns, root, new, generated = shape
    return sum(
        write_rollout(
            directory, rollout_name(number), turns=turns, root=root, new=new, generated=generated, seed=number
        )
        for number in range(rollouts)
    )


# --- one conversation, and its copies --------------------------------------------------------------------------------


class _Call(NamedTuple):
    intent: bytes
    record: bytes


_NAME: Final = rollout_name(0)
_DIGEST: Final = slice(24, 40)
_SIZES: Final = slice(0, 16)


def _call_id(rollout_id: str, turn: int) -> str:
    """As long as the gateway's."""
    return f"chatcmpl-{rollout_id:_<28}{turn:04}"


def _turn(patterns: list[list[_Call]], playing: range, turn: int, begin: int) -> Iterator[Draft]:
    for place, number in enumerate(playing):
        name = rollout_name(number).encode()
        intent, record = patterns[number % len(patterns)][turn]
        key, epoch = pack_key(name.decode(), _call_id(name.decode(), turn)), begin + place + 1
        yield Draft(RecordType.BEGUN, epoch, key, intent.replace(_NAME.encode(), name))
        yield Draft(RecordType.COMMITTED, epoch, key, _renamed(record, name))


def _renamed(record: bytes, name: bytes) -> bytes:
    renamed = bytearray(record.replace(_NAME.encode(), name))
    body = memoryview(renamed)[_DIGEST.stop :]
    renamed[_DIGEST] = sha256(bytes(renamed[_SIZES]) + body).digest()[:16]
    return bytes(renamed)


def _pattern(shape: Shape, seed: int) -> list[_Call]:
    rng = np.random.default_rng(seed)
    sequence = rng.integers(0, 150_000, shape.ids, dtype=np.int32)
    calls: list[_Call] = []
    parent: Parent = Root()
    end = 0
    for turn in range(shape.turns):
        begin, end = end + (shape.new if turn else shape.root), end
        end = begin + shape.generated
        call_id = _call_id(_NAME, turn)
        entry = TokenEntry(
            rollout_id=_NAME,
            model_call_id=call_id,
            prompt_token_ids=sequence[:begin],
            generation_token_ids=sequence[begin:end],
            generation_log_probs=-rng.random(shape.generated, dtype=np.float32),
            parent=parent,
            digest=digest_ids(sequence[:end]),
            created_at=1_795_000_000.5 + turn,
            policy=PolicyTrace(model="policy", weight_versions=(WeightSpan(0, shape.generated, "17"),)),
            request=CallRequest(
                requested_model="policy",
                has_tools=True,
                sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
                max_tokens=4_096,
            ),
            reply=CallReply(
                output_items=(
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "What was said. " * 8}],
                    },
                ),
                token_item_index=0,
                finish_reason="stop",
            ),
            keys=TurnKeys(turn_key="e" * 64),
            prefix=PrefixSupply(requested=turn > 0, supplied=turn > 0),
        )
        intent = CallIntent(
            rollout_id=_NAME,
            model_call_id=call_id,
            created_at=1_795_000_000.0 + turn,
            request_digest="f" * 64,
            request_key="a" * 32,
            asked_key="b" * 32,
            answer_key="c" * 32,
        )
        calls.append(_Call(encode_intent(intent), encode_suffix(entry)))
        parent = Continues(call_id, end)
    return calls
