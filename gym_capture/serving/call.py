"""The life of one model call, from its first token to a durable record.

Invariant: what ends a reply (`finish` of the encoder, or the body of a reply that is not streamed) is handed out only
after the record of the call is durable and visible to lineage - or after the rollout was marked incomplete; if even
that fails, the call's open intent masks it. A capture failure never fails a call that has generated, unless its attempt
is over by then; a failure before generation costs no compute.

Flow: `CallService.begin` (`call_service`) has registered the intent, rendered the prompt and started the engine ->
`CallInFlight.events` streams -> `complete` commits, through the sink that its `Capture` holds -> `ModelReply`. `fail`
ends it otherwise. Token arrays stay between the engine and the state actors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gym_capture.calls import ModelReply, ModelRequest, ReplyEvent, TokenLogProb, TurnBuilder, Usage, sendable
from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.records import (
    CallReply,
    CallRequest,
    Continues,
    IdArray,
    Parent,
    PolicyTrace,
    PrefixSupply,
    TokenEntry,
    TurnKeys,
    Unresolved,
    digest_ids,
)
from gym_capture.capture.sampling_masks import joined
from gym_capture.conversation import AssistantTurn
from gym_capture.engines.base import Engine, Generation, GenerationChunk, reported_amiss
from gym_capture.errors import EngineError, EngineOverloadedError, RecordError, RetiredRolloutError
from gym_capture.lineage.echoes import echoes
from gym_capture.lineage.fingerprint import Fingerprint
from gym_capture.output_items import output_items
from gym_capture.reasons import NotSplicedReason
from gym_capture.serving.capture import Capture, Tracked
from gym_capture.serving.replay import options_key


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that the engine runs, and why those."""

    ids: IdArray
    resolution: Resolution
    not_spliced: NotSplicedReason | None = None
    """Why a resolved parent's ids were not supplied."""
    turn_start: int | None = None
    """Where in `ids` the generation prompt begins, where an engine wants to know."""


class CallInFlight:
    """One call between its first and its last token. `complete` or `fail` ends it: what begins to commit first counts,
    so a client that goes away while the record of its whole reply is being written leaves that record, and no other.
    """

    def __init__(
        self,
        *,
        call_id: str,
        request: ModelRequest,
        prompt: Prompt,
        generation: Generation,
        engine: Engine,
        capture: Capture,
        clock: Callable[[], float],
        replayed_from: str | None = None,
    ) -> None:
        """`replayed_from`: the call of an earlier attempt whose generation it is, if it is not the engine's."""
        self.call_id = call_id
        self.request = request
        self._prompt = prompt
        self._generation = generation
        self._engine = engine
        self._capture = capture
        self._clock = clock
        self._replayed_from = replayed_from
        self._chunks: list[GenerationChunk] = []
        self._turn = TurnBuilder()
        self._committing: asyncio.Task[None] | None = None

    @property
    def prompt_tokens(self) -> int:
        return int(self._prompt.ids.size)

    @property
    def is_generated(self) -> bool:
        """Whether the engine has said its last word."""
        return bool(self._chunks) and self._chunks[-1].finish_reason is not None

    async def events(self) -> AsyncIterator[tuple[Sequence[ReplyEvent], tuple[TokenLogProb, ...] | None]]:
        """Events to stream, as they are generated. Raises an `EngineError`; a generation that just ends is one, too."""
        async for chunk in self._generation.chunks:
            self._chunks.append(chunk)
            events = [sendable(event) for event in self._generation.parser.feed(chunk)]
            for event in events:
                self._turn.add(event)
            if events or chunk.shown_log_probs:
                yield events, chunk.shown_log_probs
        if not self._chunks or self._chunks[-1].finish_reason is None:
            raise EngineError("the engine stopped without saying why", call_id=self.call_id)
        if self._chunks[-1].finish_reason == "abort":
            # Its weights are being replaced, or it is asked to: the same call may well succeed a moment later.
            raise EngineOverloadedError("the engine gave this call up; ask again", call_id=self.call_id)
        if self._chunks[-1].finish_reason not in ("stop", "length"):
            raise EngineError(f"the engine ended the call: {self._chunks[-1].finish_reason}", call_id=self.call_id)

    async def abort(self) -> None:
        """Has the engine end the call at once: `events` then raises, with all that was generated at hand for `fail`."""
        await self._generation.abort()

    async def complete(self) -> ModelReply:
        """Commits the record, then says how the call ended. Raises `RetiredRolloutError` if its attempt is over."""
        last, turn = self._chunks[-1], self._turn.turn()
        assert last.finish_reason is not None
        await self._commit(last.finish_reason, turn)
        shown = None
        if self.request.top_logprobs is not None:
            shown = tuple(item for chunk in self._chunks for item in chunk.shown_log_probs or ())
        stopped_to_call = last.finish_reason == "stop" and turn.tool_calls
        return ModelReply(
            turn=turn,
            finish_reason="tool_calls" if stopped_to_call else last.finish_reason,
            stop_reason=last.stop_reason,
            usage=Usage(
                prompt_tokens=int(self._prompt.ids.size),
                completion_tokens=sum(int(chunk.token_ids.size) for chunk in self._chunks),
                cached_tokens=last.cached_tokens,
                reasoning_tokens=self._generation.parser.reasoning_tokens,
            ),
            log_probs=shown,
        )

    async def fail(self) -> None:
        """Ends a call that was cut off: by its client, or by the engine. What was generated is recorded as aborted."""
        await self._generation.chunks.aclose()
        if self._chunks:
            with contextlib.suppress(RetiredRolloutError):  # who waits for a reply has heard it from `complete`
                await self._commit("abort", self._turn.turn())
        else:
            await self._capture.abandon()

    async def settle(self, *, delivered: bool) -> None:
        """Says whether a client got the whole reply."""
        await self._capture.settle(delivered=delivered)

    async def _commit(self, finish_reason: str, turn: AssistantTurn) -> None:
        if self._committing is None:
            # A task of its own: cancelling whoever waits for it must not leave a record half written.
            recording = self._capture.record(partial(self._entry, finish_reason, turn))
            self._committing = asyncio.ensure_future(recording)
        await asyncio.shield(self._committing)

    def _sampling(self) -> Mapping[str, Any]:
        """The parameters in force. A limit that nobody asked for is only the room that was left in the context."""
        used = dict(self._generation.sampling)
        if self.request.max_tokens is None:
            used.pop("max_tokens", None)
        return used

    def _entry(self, finish_reason: str, turn: AssistantTurn, tracked: Tracked) -> TokenEntry:
        """The record. Raises `RecordError` for what the engine reported amiss."""
        amiss = reported_amiss(self._chunks)
        if amiss is not None:
            field, why = amiss
            raise RecordError(f"{field} {why}", field=field, rollout_id=tracked.rollout_id, call_id=self.call_id)
        prompt_ids = self._chunks[0].prompt_token_ids
        assert prompt_ids is not None
        generated: IdArray = np.concatenate([chunk.token_ids for chunk in self._chunks])
        resolution = self._prompt.resolution
        supplied = isinstance(resolution, Resolved) and _starts_with(prompt_ids, resolution.cumulative_ids)
        items, token_item_index = output_items(turn)
        last = self._chunks[-1]
        return TokenEntry(
            rollout_id=tracked.rollout_id,
            model_call_id=self.call_id,
            prompt_token_ids=prompt_ids,
            generation_token_ids=generated,
            generation_log_probs=np.concatenate([chunk.log_probs for chunk in self._chunks]),
            parent=_parent(resolution, supplied=supplied, not_spliced=self._prompt.not_spliced),
            digest=digest_ids(prompt_ids, generated),
            created_at=self._clock(),
            request=CallRequest(
                requested_model=self.request.requested_model,
                has_tools=bool(self.request.conversation.tools),
                sampling=self._sampling(),
                max_tokens=self.request.max_tokens,
                normalized=(*tracked.rules, *self.request.left_out),
                options_key=options_key(self.request, tools_key=tracked.fingerprint.tools_key),
            ),
            reply=CallReply(
                output_items=items,
                token_item_index=token_item_index,
                finish_reason=finish_reason,
                stop_reason=last.stop_reason,
            ),
            keys=self._keys(finish_reason, turn, tracked.fingerprint),
            prefix=PrefixSupply(requested=isinstance(resolution, Resolved), supplied=supplied),
            policy=PolicyTrace(
                model=self._engine.model.name,
                weight_versions=last.weight_versions,
                routed_experts=last.routed_experts,
                replayed_from=self._replayed_from,
                sampling_mask=joined(chunk.sampling_mask for chunk in self._chunks if chunk.token_ids.size),
            ),
        )

    def _keys(self, finish_reason: str, turn: AssistantTurn, fingerprint: Fingerprint) -> TurnKeys:
        if self.request.raw_prompt is not None:
            return TurnKeys()  # nothing continues raw text: no conversation like it was rendered
        echoed = echoes(
            turn,
            finish_reason=finish_reason,
            stop_reason=self._chunks[-1].stop_reason,
            stop_strings=self._generation.sampling.get("stop", ()),
        )
        return TurnKeys(
            turn_key=fingerprint.key_with(turn),
            asked_key=fingerprint.asked_key,
            other_turn_keys={fingerprint.key_with(echo): str(rule) for rule, echo in echoed},
        )


def _starts_with(ids: IdArray, prefix: IdArray) -> bool:
    return ids.size >= prefix.size and bool(np.array_equal(ids[: prefix.size], prefix))


def _parent(resolution: Resolution, *, supplied: bool, not_spliced: NotSplicedReason | None) -> Parent:
    """The parent to record: one only if the engine's own prompt starts with its ids."""
    if isinstance(resolution, Resolved):
        if supplied:
            return Continues(resolution.call_id, int(resolution.cumulative_ids.size))
        return Unresolved(not_spliced or NotSplicedReason.PREFIX_NOT_KEPT_BY_ENGINE)
    return resolution
