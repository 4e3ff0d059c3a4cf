"""Calls of an attempt that goes on from earlier ones, answered from their records instead of by the engine.

Invariant: a call is answered from a record only if its prompt is the recorded one id for id, its model is the same, and
so is all that it asks for beside (`options_key`). No record answers two calls of an attempt: the state says which one
it answers before anything of it is sent (`operations.Replay`). What a client gets, and what is recorded, is the
recorded generation: its ids, log probabilities, finish and weight versions, and the turn that was read from it then.

Flow: a call has begun, and its attempt goes on from others -> their records are read, once for an attempt (`Replays`)
-> the first that matches and is not used is claimed -> `replayed`: a `Generation` of one chunk, for which no engine
runs. A call that no record matches is generated, like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np

from gym_capture.calls import ModelRequest, ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.records import IdArray, Snapshot, TokenEntry, digest_ids
from gym_capture.capture.replay import replayable
from gym_capture.capture.sinks import BegunCall
from gym_capture.conversation import AssistantTurn
from gym_capture.engines.base import Generation, GenerationChunk
from gym_capture.errors import ReplayedCallError
from gym_capture.output_items import turn_of

_ATTEMPTS: Final = 256
"""So many attempts have their records in memory; those of another one are read again."""
_KEY_BYTES: Final = 16

_Attempt: TypeAlias = tuple[str, int, tuple[str, ...]]
"""Rollout id, epoch, and what it goes on from."""
_Asked: TypeAlias = tuple[str, str, str]
"""Digest of the prompt, options, model."""


def options_key(request: ModelRequest, *, tools_key: str) -> str:
    """`CallRequest.options_key` of a request whose sampling parameters are pinned. `tools_key`: its fingerprint's."""
    asked = [
        sorted(request.sampling.items()),
        request.max_tokens,
        tools_key,
        request.tool_choice,
        request.parallel_tool_calls,
        request.response_format,
        request.raw_prompt is not None,
    ]
    text = json.dumps(asked, default=dict)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).hexdigest()


class Replays:
    """The records from which calls of this replica may be answered. `freeze` reads those of a rollout."""

    def __init__(self, freeze: Callable[[str], Awaitable[Snapshot]]) -> None:
        self._freeze = freeze
        self._recordings: OrderedDict[_Attempt, asyncio.Task[_Recording]] = OrderedDict()

    async def claim(
        self, begun: BegunCall, call_id: str, *, prompt_ids: IdArray, options: str, model: str, room: int
    ) -> TokenEntry | None:
        """A record to answer this call from, as no other call is; None: there is none. `room`: ids that its generation
        may have. Raises a `StoreError`."""
        recording = await self._recording(begun)
        for entry in recording.matching(prompt_ids, options=options, model=model, room=room):
            recording.used.add(entry.model_call_id)  # first: nobody else is to ask meanwhile
            try:
                await begun.sink.replay(call_id, recorded=entry.model_call_id)
            except ReplayedCallError:
                continue  # by a call of another replica, or before this one started
            except BaseException:
                recording.used.discard(entry.model_call_id)
                raise
            return entry
        return None

    async def _recording(self, begun: BegunCall) -> _Recording:
        attempt = (begun.sink.rollout_id, begun.sink.epoch, begun.went_on)
        reading = self._recordings.get(attempt)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = self._recordings[attempt] = asyncio.ensure_future(self._read(begun.went_on))
            while len(self._recordings) > _ATTEMPTS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(attempt)
        return await asyncio.shield(reading)  # others wait for it, too

    async def _read(self, sources: Sequence[str]) -> _Recording:
        snapshots = await asyncio.gather(*map(self._freeze, sources))
        return await asyncio.to_thread(lambda: _Recording(filter(_has_turn, replayable(snapshots))))


class _Recording:
    """Records of the earlier attempts at one rollout."""

    def __init__(self, entries: Iterable[TokenEntry]) -> None:
        self.used: set[str] = set()
        self._by_asked: defaultdict[_Asked, list[TokenEntry]] = defaultdict(list)
        for entry in entries:
            asked = (digest_ids(entry.prompt_token_ids), entry.request.options_key, entry.policy.model)
            self._by_asked[asked].append(entry)

    def matching(self, prompt_ids: IdArray, *, options: str, model: str, room: int) -> Iterable[TokenEntry]:
        """Those that are not used, in order."""
        for entry in self._by_asked.get((digest_ids(prompt_ids), options, model), ()):
            if (
                entry.model_call_id not in self.used
                and np.array_equal(entry.prompt_token_ids, prompt_ids)
                and _fits(entry, room)
            ):
                yield entry


def _has_turn(entry: TokenEntry) -> bool:
    try:
        turn_of(entry.reply.output_items)
    except ValueError:
        return False
    return True


def _fits(entry: TokenEntry, room: int) -> bool:
    """Whether the engine would have let the generation end where it did, with so much room."""
    size = entry.generation_token_ids.size
    return size == room if entry.reply.finish_reason == "length" else size <= room


def replayed(entry: TokenEntry) -> Generation:
    """A recorded generation, once more."""
    turn = turn_of(entry.reply.output_items)
    chunk = GenerationChunk(
        token_ids=entry.generation_token_ids,
        log_probs=entry.generation_log_probs,
        text=turn.text,
        prompt_token_ids=entry.prompt_token_ids,
        finish_reason=entry.reply.finish_reason,
        stop_reason=entry.reply.stop_reason,
        weight_versions=entry.policy.weight_versions,
        routed_experts=entry.policy.routed_experts,
        sampling_mask=entry.policy.sampling_mask,
    )

    async def chunks() -> AsyncGenerator[GenerationChunk]:
        yield chunk

    return Generation(
        chunks=chunks(), parser=_RecordedTurn(turn), abort=_over_already, sampling=dict(entry.request.sampling)
    )


async def _over_already() -> None:
    """There is nothing to abort."""


class _RecordedTurn:
    """Reads the turn that was read from the generation when it was recorded."""

    reasoning_tokens = 0
    """A record does not say."""

    def __init__(self, turn: AssistantTurn) -> None:
        self._turn = turn

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        return list(_events(self._turn))


def _events(turn: AssistantTurn) -> Iterable[ReplyEvent]:
    if turn.reasoning:
        yield ReasoningDelta(turn.reasoning)
    if turn.text:
        yield TextDelta(turn.text)
    for position, call in enumerate(turn.tool_calls):
        yield ToolCallStart(position, call.id, call.name)
        yield ToolCallDelta(position, call.arguments)
