"""Begins model calls: from a parsed request to an engine that generates.

Invariant: a failure before generation costs no compute, and leaves no open intent behind.

Flow: `CallService.begin` registers the intent and resolves the parent (one round trip), renders or splices the prompt,
and starts the engine - or, in an attempt that goes on from an earlier one, finds the call on its record (`replay`);
what becomes of the call then is `CallInFlight`'s concern (`call`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, Protocol

from gym_capture.calls import ModelRequest
from gym_capture.capture.operations import Operation
from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.records import CallIntent, Root, Snapshot, TokenEntry
from gym_capture.capture.rollout_state import RolloutStatus
from gym_capture.capture.sinks import BegunCall
from gym_capture.conversation import AssistantTurn, Item
from gym_capture.dialects import fields
from gym_capture.engines.base import Engine, Generation
from gym_capture.errors import (
    ContextLengthError,
    InvalidRequestError,
    Overflow,
    StoreError,
    UnknownModelError,
    UnknownRolloutError,
)
from gym_capture.lineage.fingerprint import Fingerprint, Fingerprinter
from gym_capture.reasons import NotSplicedReason, RequestRule
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollout_ids import check_rollout_id
from gym_capture.serving.call import CallInFlight, Prompt
from gym_capture.serving.capture import Capture, Tracked, Untracked, abandon
from gym_capture.serving.replay import Replays, options_key, replayed
from gym_capture.serving.stats import ShardStats
from gym_capture.splice.splicer import Spliced, full_prompt, splice
from gym_capture.splice.turn_start import turn_start

logger = logging.getLogger(__name__)

_SESSION_CHARACTERS: Final = 256 * 2**20
"""Text of conversations whose fingerprints are kept."""
_LONGEST_MODEL_NAME: Final = 256


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


class CallState(Protocol):
    """The part of the state actors that model calls need."""

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str]) -> BegunCall:
        """Makes the intent durable and resolves what the call continues: one round trip."""
        ...

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution: ...
    async def too_long(self, rollout_id: str) -> None:
        """A call of the rollout was refused, because its conversation has outgrown the model's context."""
        ...

    async def is_outgrown(self, rollout_id: str) -> bool:
        """Whether that is the last that became of its calls."""
        ...

    async def freeze(self, rollout_id: str) -> Snapshot: ...
    async def status(self, rollout_id: str) -> RolloutStatus: ...
    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]: ...
    async def write(self, operation: Operation) -> int: ...
    async def stats(self) -> ShardStats: ...


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
        self._replays = None if state is None else Replays(state.freeze)
        # One thread: rendering is Python, so more would not help, but the event loop must go on streaming meanwhile.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="render")

    async def begin(
        self, request: ModelRequest, *, rollout_id: str | None, call_id: str, request_digest: str
    ) -> CallInFlight:
        """Everything up to the first token. Raises a `RequestError`, `StoreError` or `EngineError`."""
        self._check(request, rollout_id)
        try:
            return await self._begin(request, rollout_id, call_id, request_digest)
        except ContextLengthError:
            await self._outgrown(rollout_id)
            raise

    async def _begin(
        self, request: ModelRequest, rollout_id: str | None, call_id: str, request_digest: str
    ) -> CallInFlight:
        self._check_length(request)
        adapted = self._engine.template.adapt(request.conversation)
        sampling = {**request.sampling, **self._pin}
        request = replace(request, conversation=adapted.conversation, sampling=sampling)
        capture: Capture = Untracked()
        resolution: Resolution = Root()
        begun: BegunCall | None = None
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
            rules = (*fingerprint.normalized, *adapted.rules, *_found_by(resolution, fingerprint))
            capture = Tracked(begun.sink, call_id, fingerprint, begun.may_be_retry, rules)
            self._sessions.keep(rollout_id, fingerprint, size=_text_size(request))
        try:
            prompt = await self._rendered(request, resolution)
            recorded = None
            if begun is not None and isinstance(capture, Tracked) and begun.went_on:
                recorded = await self._recorded(begun, capture, request, prompt)
            generation = self._generate(request, prompt, call_id) if recorded is None else replayed(recorded)
        except BaseException:
            await capture.abandon()
            raise
        return CallInFlight(
            call_id=call_id,
            request=request,
            prompt=prompt,
            generation=generation,
            engine=self._engine,
            capture=capture,
            clock=self._clock,
            replayed_from=None if recorded is None else recorded.model_call_id,
        )

    async def count(self, request: ModelRequest, *, rollout_id: str | None) -> int:
        """How many ids the prompt of this request would have if it were a call now. Raises as `begin` does."""
        self._check(request, rollout_id)
        self._check_length(request)
        request = replace(request, conversation=self._engine.template.adapt(request.conversation).conversation)
        resolution: Resolution = Root()
        if rollout_id is not None and self._state is not None:
            keys = self._fingerprint(rollout_id, request).turn_keys
            resolution = await self._state.resolve(rollout_id, keys)
        return int((await self._rendered(request, resolution)).ids.size)

    async def _outgrown(self, rollout_id: str | None) -> None:
        """Notes that a call did not fit. Best effort: harnesses go by their agents' words, if it is not known."""
        if rollout_id is None or self._state is None:
            return
        try:
            await self._state.too_long(rollout_id)
        except StoreError as error:
            logger.warning("could not note that a call was too long: %s (rollout %s)", error, rollout_id)

    async def outgrown(self, rollout_id: str) -> tuple[bool, int]:
        """Whether the rollout's last call was refused as too long, and how many calls are recorded."""
        check_rollout_id(rollout_id)
        if self._state is None:
            raise UnknownRolloutError("this graph records no rollouts", rollout_id=rollout_id)
        is_outgrown = await self._state.is_outgrown(rollout_id)
        (counts,) = await self._state.counts((rollout_id,))
        return is_outgrown, counts.calls

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
        conversation = request.conversation
        calls = sum(len(item.tool_calls) for item in conversation.items if isinstance(item, AssistantTurn))
        parts = len(conversation.items) + len(conversation.tools) + calls
        if parts > limit:
            raise ContextLengthError(Overflow(parts, limit, is_at_least=True))
        size = _text_size(request)
        # Twice: a tokenizer may normalize characters away, and a template write arguments in fewer than the client.
        if longest is not None and size > 2 * longest * limit:
            raise ContextLengthError(Overflow(-(-size // (2 * longest)), limit, is_at_least=True))

    async def _rendered(self, request: ModelRequest, resolution: Resolution) -> Prompt:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, self._opened, request, resolution)

    async def _register(self, state: CallState, intent: CallIntent, fingerprint: Fingerprint) -> BegunCall:
        """Begins the call; a client that leaves meanwhile leaves no open intent, which would mask its rollout."""
        registering = asyncio.ensure_future(state.begin(intent, fingerprint.turn_keys, fingerprint.asked_keys))
        try:
            return await asyncio.shield(registering)
        except asyncio.CancelledError:
            begun = await registering
            await abandon(begun.sink, intent.model_call_id)
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
        not_spliced: NotSplicedReason | None = None
        if isinstance(resolution, Resolved):
            if not self._prefix_supply:
                not_spliced = NotSplicedReason.PREFIX_SUPPLY_OFF
            else:
                spliced = splice(template, conversation, turn=resolution.turn, parent_ids=resolution.cumulative_ids)
                if isinstance(spliced, Spliced):
                    return Prompt(spliced.ids, resolution)
                not_spliced = spliced.reason
        return Prompt(full_prompt(template, conversation), resolution, not_spliced)

    async def _recorded(
        self, begun: BegunCall, capture: Tracked, request: ModelRequest, prompt: Prompt
    ) -> TokenEntry | None:
        """The record of an earlier attempt that answers this call, if there is one. Raises a `StoreError`."""
        if self._replays is None or request.top_logprobs is not None:
            return None  # a client that wants to see alternatives cannot have them from a record
        return await self._replays.claim(
            begun,
            capture.call_id,
            prompt_ids=prompt.ids,
            options=options_key(request, tools_key=capture.fingerprint.tools_key),
            model=self._engine.model.name,
            room=self._room(request, prompt, capture.call_id),
        )

    def _room(self, request: ModelRequest, prompt: Prompt, call_id: str) -> int:
        """Ids that the generation may have. Raises `ContextLengthError`."""
        limit = self._engine.model.max_model_len
        room = limit - int(prompt.ids.size)
        if room < 1:
            raise ContextLengthError(Overflow(int(prompt.ids.size), limit), call_id=call_id)
        return min(request.max_tokens or room, room)

    def _generate(self, request: ModelRequest, prompt: Prompt, call_id: str) -> Generation:
        return self._engine.generate(
            call_id=call_id,
            prompt_ids=prompt.ids,
            request=request,
            max_tokens=self._room(request, prompt, call_id),
            stream=request.stream,
            turn_start=prompt.turn_start,
        )

    async def snapshot(self, rollout_id: str) -> Snapshot:
        """A rollout's records, frozen. Raises `UnknownRolloutError` if nothing is, or a `StoreError`."""
        check_rollout_id(rollout_id)
        snapshot = None if self._state is None else await self._state.freeze(rollout_id)
        if snapshot is None or snapshot.version == 0:
            raise UnknownRolloutError("nothing is recorded of this rollout", rollout_id=rollout_id)
        return snapshot

    async def status(self, rollout_id: str) -> RolloutStatus:
        """How a rollout stands, without its records. Raises as `snapshot`."""
        check_rollout_id(rollout_id)
        status = None if self._state is None else await self._state.status(rollout_id)
        if status is None or status.snapshot.version == 0:
            raise UnknownRolloutError("nothing is recorded of this rollout", rollout_id=rollout_id)
        return status

    async def write(self, operation: Operation) -> None:
        """Makes durable what is said of a rollout. Raises as a store; `UnknownRolloutError` where nothing is kept."""
        if self._state is None:
            raise UnknownRolloutError("this graph records no rollouts", rollout_id=operation.rollout_id)
        await self._state.write(operation)

    async def stats(self) -> ShardStats | None:
        """Counts of the state actors; None if nothing is captured. Raises a `StoreError` if they do not answer."""
        return None if self._state is None else await self._state.stats()

    async def check_health(self) -> None:
        """Raises `EngineDeadError`."""
        await self._engine.check_health()

    async def close(self) -> None:
        self._renderer.shutdown(wait=False)
        await self._engine.close()


def _found_by(resolution: Resolution, fingerprint: Fingerprint) -> tuple[str, ...]:
    """Names of the rules by which the request was taken to continue its parent."""
    if not isinstance(resolution, Resolved):
        return ()
    rules = () if resolution.rule is None else (resolution.rule,)
    is_latest = resolution.turn == len(fingerprint.turn_keys) - 1
    return rules if is_latest else (*rules, str(RequestRule.TURNS_ADDED))


def _text_size(request: ModelRequest) -> int:
    """Characters of what a conversation says: its messages, the arguments of calls, the tools that are offered."""
    conversation = request.conversation
    return (
        len(request.raw_prompt or "")
        + sum(map(_item_size, conversation.items))
        + sum(len(tool.name) + len(tool.description) + len(tool.parameters_json) for tool in conversation.tools)
    )


def _item_size(item: Item) -> int:
    if not isinstance(item, AssistantTurn):
        return len(item.text)
    calls = sum(len(call.name) + len(call.arguments) for call in item.tool_calls)
    return len(item.text) + len(item.reasoning) + calls


def unknown_model(asked: str, served: str) -> UnknownModelError:
    return UnknownModelError(f"the model {asked[:64]!r} does not exist; this graph serves {served!r}")
