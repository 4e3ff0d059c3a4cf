"""The life of one model call, from a parsed request to a durable record.

Invariant: what ends a reply (`finish` of the encoder, or the body of a reply that is not streamed) is handed out only
after the record of the call is durable and visible to lineage - or after the rollout was marked incomplete. A capture
failure never fails a call that has generated; a failure before generation costs no compute.

Flow: `CallService.begin` registers the intent and resolves the parent (one round trip), renders or splices the prompt,
and starts the engine -> `CallInFlight.events` streams -> `complete` commits -> `ModelReply`. `fail` ends it otherwise.
Token arrays stay between the engine and the state actors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from gym_capture.calls import ModelReply, ModelRequest, ReplyEvent, TokenLogProb, TurnBuilder, Usage, sendable
from gym_capture.conversation import AssistantTurn
from gym_capture.dialects import fields
from gym_capture.engines.base import Engine, Generation, GenerationChunk, reported_amiss
from gym_capture.errors import (
    ContextLengthError,
    EngineError,
    EngineOverloadedError,
    GymCaptureError,
    InvalidRequestError,
    Overflow,
    RecordError,
    StoreError,
    UnknownModelError,
    UnknownRolloutError,
)
from gym_capture.fingerprint import Fingerprint, Fingerprinter
from gym_capture.output_items import output_items
from gym_capture.protocols import Resolution, Resolved
from gym_capture.records import (
    CallIntent,
    Continues,
    IdArray,
    Parent,
    Root,
    Snapshot,
    TokenEntry,
    Unresolved,
    check_rollout_id,
    digest_ids,
)
from gym_capture.serving.state import Begun
from gym_capture.serving.stats import ShardStats
from gym_capture.splice import Spliced, full_prompt, splice
from gym_capture.turn_start import turn_start

logger = logging.getLogger(__name__)


_SESSION_CHARACTERS: Final = 256 * 2**20
"""Text of conversations whose fingerprints are kept."""
_LONGEST_MODEL_NAME: Final = 256


class CallState(Protocol):
    """What a call needs of the state actors."""

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str]) -> Begun: ...
    async def put(self, entry: TokenEntry, *, epoch: int) -> None: ...
    async def abandon_call(self, rollout_id: str, call_id: str, *, epoch: int) -> None: ...
    async def mark_incomplete(self, rollout_id: str, reason: str, *, epoch: int) -> None: ...
    async def mark_delivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None: ...
    async def mark_undelivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None: ...
    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution: ...
    async def freeze(self, rollout_id: str) -> Snapshot: ...
    async def stats(self) -> ShardStats: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine runs, and why it is that."""

    ids: IdArray
    resolution: Resolution
    not_spliced: str | None = None
    """Why a resolved parent's ids were not supplied."""
    turn_start: int | None = None
    """Where in `ids` the generation prompt begins, where an engine wants to know."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """What a call of a rollout carries besides its request."""

    rollout_id: str
    epoch: int
    fingerprint: Fingerprint
    may_be_retry: bool
    rules: tuple[str, ...]
    """Names of the rules that fired on the request."""


class _Sessions:
    """The last fingerprint of each of the rollouts that called lately, within bounds of number and of text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, tuple[Fingerprint, int]] = OrderedDict()
        self._size = 0

    def get(self, rollout_id: str) -> Fingerprint | None:
        kept = self._kept.get(rollout_id)
        return None if kept is None else kept[0]

    def keep(self, rollout_id: str, fingerprint: Fingerprint, *, size: int) -> None:
        """`size`: characters of the conversation, which a fingerprint holds."""
        self._size += size - self._kept.pop(rollout_id, (fingerprint, 0))[1]
        self._kept[rollout_id] = (fingerprint, size)
        while len(self._kept) > self._limit or (self._size > _SESSION_CHARACTERS and len(self._kept) > 1):
            _, (_, forgotten) = self._kept.popitem(last=False)
            self._size -= forgotten


class CallService:
    """Runs model calls on one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        state: CallState | None,
        fingerprinter: Fingerprinter,
        prefix_supply: bool,
        sampling_pin: Mapping[str, Any],
        session_cache: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._state = state
        self._fingerprinter = fingerprinter
        self._prefix_supply = prefix_supply
        self._pin = fields.whole_pin(sampling_pin)
        self._sessions = _Sessions(session_cache)
        self._clock = clock
        # One thread: rendering is Python, so more would not help, but the event loop must go on streaming meanwhile.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="render")

    async def begin(
        self, request: ModelRequest, *, rollout_id: str | None, call_id: str, request_digest: str
    ) -> CallInFlight:
        """Everything up to the first token. Raises a `RequestError`, `StoreError` or `EngineError`."""
        self._check(request, rollout_id)
        self._check_length(request)
        adapted = self._engine.template.adapt(request.conversation)
        sampling = {**request.sampling, **self._pin}
        request = replace(request, conversation=adapted.conversation, sampling=sampling)
        tracked: Tracked | None = None
        resolution: Resolution = Root()
        if rollout_id is not None and self._state is not None:
            fingerprint = self._fingerprint(rollout_id, request)
            asked_key, answer_key = fingerprint.latest_answer or ("", "")
            intent = CallIntent(
                rollout_id=rollout_id,
                model_call_id=call_id,
                created_at=self._clock(),
                request_digest=request_digest,
                request_key=fingerprint.request_key,
                asked_key=asked_key,
                answer_key=answer_key,
            )
            begun = await self._register(self._state, intent, fingerprint)
            resolution = begun.resolution
            found_by = (resolution.rule,) if isinstance(resolution, Resolved) and resolution.rule else ()
            rules = (*fingerprint.normalized, *adapted.rules, *found_by)
            tracked = Tracked(rollout_id, begun.epoch, fingerprint, begun.may_be_retry, rules)
        try:
            prompt = await self._rendered(request, resolution)
            generation, max_tokens = self._generate(request, prompt, call_id)
        except BaseException:
            if tracked is not None and self._state is not None:
                await _abandon(self._state, tracked.rollout_id, call_id, epoch=tracked.epoch)
            raise
        if tracked is not None:
            self._sessions.keep(tracked.rollout_id, tracked.fingerprint, size=_text_size(request))
        return CallInFlight(
            call_id=call_id,
            request=request,
            prompt=prompt,
            generation=generation,
            max_tokens=max_tokens,
            engine=self._engine,
            tracked=tracked,
            state=self._state,
            clock=self._clock,
        )

    async def count(self, request: ModelRequest, *, rollout_id: str | None) -> int:
        """How many ids the prompt of this request would have if it were a call now. Raises as `begin` does."""
        self._check(request, rollout_id)
        request = replace(request, conversation=self._engine.template.adapt(request.conversation).conversation)
        resolution: Resolution = Root()
        if rollout_id is not None and self._state is not None:
            keys = self._fingerprint(rollout_id, request).turn_keys
            resolution = await self._state.resolve(rollout_id, keys)
        return int((await self._rendered(request, resolution)).ids.size)

    def _check(self, request: ModelRequest, rollout_id: str | None) -> None:
        if len(request.requested_model) > _LONGEST_MODEL_NAME:  # it is in every chunk and in every record
            raise InvalidRequestError(f"model has more than {_LONGEST_MODEL_NAME} characters", param="model")
        if rollout_id is not None:
            check_rollout_id(rollout_id)
        elif request.requested_model != self._engine.model.name:
            raise unknown_model(request.requested_model, self._engine.model.name)

    def _check_length(self, request: ModelRequest) -> None:
        """Raises `ContextLengthError` for what is far too long: rendering it would hold up everybody else's calls."""
        limit, longest = self._engine.model.max_model_len, self._engine.model.longest_token
        # A template writes a token or more for each.
        parts = len(request.conversation.items) + len(request.conversation.tools)
        if parts > limit:
            raise ContextLengthError(Overflow(parts, limit, is_at_least=True))
        size = _text_size(request)
        # Twice: a tokenizer may normalize characters away.
        if longest is not None and size > 2 * longest * limit:
            raise ContextLengthError(Overflow(-(-size // (2 * longest)), limit, is_at_least=True))

    async def _rendered(self, request: ModelRequest, resolution: Resolution) -> Prompt:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, self._opened, request, resolution)

    async def _register(self, state: CallState, intent: CallIntent, fingerprint: Fingerprint) -> Begun:
        """Begins the call; a client that leaves meanwhile leaves no open intent, which would mask its rollout."""
        registering = asyncio.ensure_future(state.begin(intent, fingerprint.turn_keys, fingerprint.asked_keys))
        try:
            return await asyncio.shield(registering)
        except asyncio.CancelledError:
            begun = await registering
            await _abandon(state, intent.rollout_id, intent.model_call_id, epoch=begun.epoch)
            raise

    def _fingerprint(self, rollout_id: str, request: ModelRequest) -> Fingerprint:
        """The conversation's fingerprint; the rollout's last one saves hashing what has not changed."""
        return self._fingerprinter.fingerprint(request.conversation, self._sessions.get(rollout_id))

    def _opened(self, request: ModelRequest, resolution: Resolution) -> Prompt:
        prompt = self._prompt(request, resolution)
        if request.raw_prompt is not None or not self._engine.model.reads_reasoning:
            return prompt
        return replace(prompt, turn_start=turn_start(self._engine.template, request.conversation, prompt.ids))

    def _prompt(self, request: ModelRequest, resolution: Resolution) -> Prompt:
        """The spliced prompt where a parent is proven, else the whole conversation through the template."""
        template, conversation = self._engine.template, request.conversation
        if request.raw_prompt is not None:
            return Prompt(template.encode_plain(request.raw_prompt), Root())
        not_spliced = None
        if isinstance(resolution, Resolved):
            if not self._prefix_supply:
                not_spliced = "prefix_supply_off"
            else:
                spliced = splice(template, conversation, turn=resolution.turn, parent_ids=resolution.cumulative_ids)
                if isinstance(spliced, Spliced):
                    return Prompt(spliced.ids, resolution)
                not_spliced = spliced.reason
        return Prompt(full_prompt(template, conversation), resolution, not_spliced)

    def _generate(self, request: ModelRequest, prompt: Prompt, call_id: str) -> tuple[Generation, int]:
        limit = self._engine.model.max_model_len
        room = limit - int(prompt.ids.size)
        if room < 1:
            raise ContextLengthError(Overflow(int(prompt.ids.size), limit), call_id=call_id)
        max_tokens = min(request.max_tokens or room, room)
        generation = self._engine.generate(
            call_id=call_id,
            prompt_ids=prompt.ids,
            request=request,
            max_tokens=max_tokens,
            stream=request.stream,
            turn_start=prompt.turn_start,
        )
        return generation, max_tokens

    async def snapshot(self, rollout_id: str) -> Snapshot:
        """What is recorded of a rollout. Raises `UnknownRolloutError` if nothing is, or a `StoreError`."""
        check_rollout_id(rollout_id)
        snapshot = None if self._state is None else await self._state.freeze(rollout_id)
        if snapshot is None or snapshot.version == 0:
            raise UnknownRolloutError("nothing is recorded of this rollout", rollout_id=rollout_id)
        return snapshot

    async def stats(self) -> ShardStats | None:
        """What the state actors count; None if nothing is captured. Raises a `StoreError` if they do not answer."""
        return None if self._state is None else await self._state.stats()

    async def check_health(self) -> None:
        """Raises `EngineDeadError`."""
        await self._engine.check_health()

    async def close(self) -> None:
        self._renderer.shutdown(wait=False)
        await self._engine.close()


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
        max_tokens: int,
        engine: Engine,
        tracked: Tracked | None,
        state: CallState | None,
        clock: Callable[[], float],
    ) -> None:
        self.call_id = call_id
        self.request = request
        self._prompt = prompt
        self._generation = generation
        self._max_tokens = max_tokens
        self._engine = engine
        self._tracked = tracked
        self._state = state
        self._clock = clock
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
        """What to stream, as it is generated. Raises an `EngineError`; a generation that just ends is one, too."""
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
        """Commits the record, then says how the call ended."""
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
        if self._tracked is None or self._state is None:
            return
        if self._chunks:
            await self._commit("abort", self._turn.turn())
        else:
            await _abandon(self._state, self._tracked.rollout_id, self.call_id, epoch=self._tracked.epoch)

    async def settle(self, *, delivered: bool) -> None:
        """Records whether a client got the whole reply, where that decides which of several replies counts."""
        if self._tracked is None or self._state is None or (delivered and not self._tracked.may_be_retry):
            return
        mark = self._state.mark_delivered if delivered else self._state.mark_undelivered
        try:
            await mark(self._tracked.rollout_id, self.call_id, epoch=self._tracked.epoch)
        except StoreError as error:
            # Silence proves nothing: if the request was repeated, its rollout is masked.
            logger.warning("could not record whether a reply was delivered: %s", error)

    async def _commit(self, finish_reason: str, turn: AssistantTurn) -> None:
        if self._tracked is None or self._state is None:
            return
        if self._committing is None:
            # A task of its own: cancelling whoever waits for it must not leave a record half written.
            self._committing = asyncio.ensure_future(self._put(finish_reason, turn, self._tracked, self._state))
        await asyncio.shield(self._committing)

    async def _put(self, finish_reason: str, turn: AssistantTurn, tracked: Tracked, state: CallState) -> None:
        try:
            await state.put(self._entry(finish_reason, turn, tracked), epoch=tracked.epoch)
        except (RecordError, StoreError) as error:
            # Best effort, by design: the reply is served, the rollout is masked.
            await self._capture_failed(error, tracked)

    async def _capture_failed(self, error: GymCaptureError, tracked: Tracked) -> None:
        logger.error("capture failed: %s (rollout %s, call %s)", error.message, tracked.rollout_id, self.call_id)
        assert self._state is not None
        try:
            await self._state.mark_incomplete(tracked.rollout_id, f"capture_failed:{self.call_id}", epoch=tracked.epoch)
        except StoreError as second:
            # The intent stays open in the store, which makes the snapshot incomplete by itself.
            logger.error("could not mark the rollout incomplete: %s", second)

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
        turn_key = asked_key = stopped_turn_key = None
        if self.request.raw_prompt is None:  # nothing continues raw text: no conversation like it was rendered
            asked_key, turn_key = tracked.fingerprint.asked_key, tracked.fingerprint.key_with(turn)
            if not turn.tool_calls and last.stop_reason in self._generation.sampling.get("stop", ()):
                put_back = turn._replace(text=turn.text + (last.stop_reason or ""))
                stopped_turn_key = tracked.fingerprint.key_with(put_back)
        return TokenEntry(
            rollout_id=tracked.rollout_id,
            model_call_id=self.call_id,
            model=self._engine.model.name,
            requested_model=self.request.requested_model,
            has_tools=bool(self.request.conversation.tools),
            prompt_token_ids=prompt_ids,
            generation_token_ids=generated,
            generation_log_probs=np.concatenate([chunk.log_probs for chunk in self._chunks]),
            parent=_parent(resolution, supplied=supplied, not_spliced=self._prompt.not_spliced),
            output_items=items,
            token_item_index=token_item_index,
            turn_key=turn_key,
            asked_key=asked_key,
            stopped_turn_key=stopped_turn_key,
            digest=digest_ids(prompt_ids, generated),
            finish_reason=finish_reason,
            stop_reason=last.stop_reason,
            prefix_requested=isinstance(resolution, Resolved),
            prefix_supplied=supplied,
            weight_versions=last.weight_versions,
            sampling=self._sampling(),
            max_tokens=self.request.max_tokens,
            normalized=(*tracked.rules, *self.request.left_out),
            routed_experts=last.routed_experts,
            created_at=self._clock(),
        )


def _text_size(request: ModelRequest) -> int:
    """Characters of what messages say; what tool calls and definitions add to it is left out."""
    return len(request.raw_prompt or "") + sum(
        len(item.text) + (len(item.reasoning) if isinstance(item, AssistantTurn) else 0)
        for item in request.conversation.items
    )


def unknown_model(asked: str, served: str) -> UnknownModelError:
    return UnknownModelError(f"the model {asked[:64]!r} does not exist; this graph serves {served!r}")


async def _abandon(state: CallState, rollout_id: str, call_id: str, *, epoch: int) -> None:
    """Closes the intent of a call without a record; if even that fails, the open intent masks the rollout."""
    try:
        await state.abandon_call(rollout_id, call_id, epoch=epoch)
    except StoreError as error:
        logger.warning("could not close the intent of a call that ended without a record: %s", error)


def _starts_with(ids: IdArray, prefix: IdArray) -> bool:
    return ids.size >= prefix.size and bool(np.array_equal(ids[: prefix.size], prefix))


def _parent(resolution: Resolution, *, supplied: bool, not_spliced: str | None) -> Parent:
    """What is recorded: a parent only if the engine's own prompt starts with its ids."""
    if isinstance(resolution, Resolved):
        if supplied:
            return Continues(resolution.call_id, int(resolution.cumulative_ids.size))
        return Unresolved(not_spliced or "prefix_not_kept_by_engine")
    return resolution
