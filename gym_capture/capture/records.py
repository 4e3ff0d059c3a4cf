"""Records of model calls, exactly as the engine saw and produced them.

Invariant: a `TokenEntry` that exists is well-formed. Its arrays are read-only, its log probabilities are finite
and aligned with its generated ids, its ids are non-negative int32. Whatever cannot be made into one is a
`RecordError` at construction, or a `RecordProblem` beside the entries of a `Snapshot` - never a repaired record.

Flow: the engine's entry, whole -> stores keep and ship its `EntrySuffix`, which leaves out what the parent's record
holds (`suffixes`) -> a `Snapshot` freezes a rollout's entries, whole again -> the builder reads it.

Ids are numpy int32, log probabilities float32. Schema version 1. What the parts are called in bytes and files, and how
they are written there, is in `record_fields`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.errors import RecordError
from gym_capture.reasons import ExcludedReason
from gym_capture.rollout_ids import check_rollout_id

__all__ = [
    "SCHEMA_VERSION",
    "CallIntent",
    "CallRecord",
    "CallReply",
    "CallRequest",
    "Continues",
    "IdArray",
    "LogProbArray",
    "LostCall",
    "Parent",
    "PolicyTrace",
    "PrefixSupply",
    "RecordProblem",
    "Root",
    "Snapshot",
    "TokenEntry",
    "TurnKeys",
    "Unresolved",
    "WeightSpan",
    "as_ids",
    "delivered_by",
]

IdArray: TypeAlias = npt.NDArray[np.int32]
LogProbArray: TypeAlias = npt.NDArray[np.float32]

_Array = TypeVar("_Array", bound=npt.NDArray[Any])

SCHEMA_VERSION: Final = 1
LOG_PROB_ROUNDING: Final = 1e-3
"""No probability is above 1; so far above 0 may the logarithm of one come out, through rounding."""
CUT_OFF: Final[Mapping[str, ExcludedReason]] = {"abort": ExcludedReason.ABORTED, "error": ExcludedReason.FAILED}
"""Finish reasons of generations that someone other than the policy ended: what they would have been is not known."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The names that APIs have for the limit of a generation."""
_DIGEST_DOMAIN: Final = b"gym-capture/ids/1\0"
_INT32: Final = np.dtype(np.int32)
_FLOAT32: Final = np.dtype(np.float32)


# --- parents: what is known of where a call continues from, as a value ---------------------------------------


@dataclass(frozen=True, slots=True)
class Root:
    """The call starts a conversation: its request echoes no assistant turn."""


@dataclass(frozen=True, slots=True)
class Continues:
    """The call's prompt starts with the first `cum_len` ids, all of them, of call `call_id`'s cumulative ids."""

    call_id: str
    cum_len: int


@dataclass(frozen=True, slots=True)
class Unresolved:
    """The request echoes assistant turns, but no parent could be proven."""

    reason: str


Parent: TypeAlias = Root | Continues | Unresolved


# --- the parts of a record -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Generated ids `[start, end)` were sampled under weights `version`."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """The request."""

    requested_model: str = ""
    """The model name that the client asked for; harnesses ask for several. Empty: not known."""
    has_tools: bool = False
    """Whether the request offered tools."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that were used, after pinning. A limit of the generation among them was asked for."""
    max_tokens: int | None = None
    """The generation limit that the request asked for."""
    normalized: tuple[str, ...] = ()
    """Names of the rules by which the request was not taken to the letter: of normalization, by which lineage leaves a
    volatile header out; of templates, by which a message is written in another place; of lineage, by which the parent
    was found; `tool_left_out:<type>`, a tool that nobody here could run and the policy was not offered."""
    options_key: str = ""
    """Hash of all that the request asked for, beside its prompt, that decides what is sampled: sampling parameters
    after pinning, limit, tools, how they may be called, format. Empty: not known."""

    @property
    def asked_max_tokens(self) -> int | None:
        """The generation limit that the request asked for, wherever it is recorded; None: it asked for none."""
        if self.max_tokens is not None:
            return self.max_tokens
        if not self.sampling:
            return None
        limits = [self.sampling.get(name) for name in _LIMITS]
        return min((limit for limit in limits if type(limit) is int), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReply:
    """The reply, but for its ids."""

    output_items: tuple[Mapping[str, Any], ...] = ()
    """The assistant's turn as Responses items (text, tool calls, reasoning), without token arrays."""
    token_item_index: int | None = None
    """Which of `output_items` the generated ids belong to; None when there is no item."""
    finish_reason: str | None = None
    """stop | length | tool_calls | abort | error."""
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnKeys:
    """Fingerprints by which lineage finds the call again."""

    turn_key: str | None = None
    """Of the conversation up to and including the generated turn: what lineage matches; None: imported."""
    asked_key: str | None = None
    """Of the conversation that the turn was generated for, without the turn: by it lineage knows a turn that a client
    rewrote. None: imported, or raw text."""
    other_turn_keys: Mapping[str, str] = field(default_factory=dict)
    """As `turn_key`, of the turn as some clients are known to hand it back -> the name of the rule (`echoes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSupply:
    """Whether the call's prompt was to start with its parent's ids, and did."""

    requested: bool = False
    """Lineage found a unique verified parent: this call was eligible for prefix supply."""
    supplied: bool = False
    """The prompt that the engine reports starts with that parent's cumulative ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTrace:
    """The policy that generated, and the engine's account of how."""

    model: str = ""
    """The policy that generated."""
    weight_versions: tuple[WeightSpan, ...] = ()
    routed_experts: npt.NDArray[Any] | None = None
    """[rows, layers, topk] of a MoE policy, rows >= whole prompt + G - 1."""
    sampling_mask: npt.NDArray[Any] | None = None
    """[G, ...] of the engine."""
    replayed_from: str | None = None
    """Id of the call of an earlier attempt at the same rollout whose generation this is; None: it is the call's own."""


# --- the record of one call ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CallRecord:
    """The record of a call, in either form of its prompt: a `TokenEntry` or an `EntrySuffix`.

    Raises `RecordError`, naming the field, when made from anything that is not well-formed.
    """

    rollout_id: str
    model_call_id: str
    generation_token_ids: IdArray
    """int32 [G]. As sampled, the stop token included."""
    generation_log_probs: LogProbArray
    """float32 [G]. Of the sampled ids, after the sampling pin's processing; finite, above 0 only by rounding."""
    parent: Parent | None
    """The decision taken at request time; None for imported records without one."""
    digest: str | None = None
    """`digest_ids` of the cumulative ids (whole prompt + generation); None for imported records without one."""
    delivered: bool | None = None
    """Whether the reply is known to have been delivered whole; None: not known."""
    created_at: float = 0.0
    """Unix seconds at which the record was made."""
    request: CallRequest = CallRequest()
    reply: CallReply = CallReply()
    keys: TurnKeys = TurnKeys()
    prefix: PrefixSupply = PrefixSupply()
    policy: PolicyTrace = PolicyTrace()

    @property
    def prompt_len(self) -> int:
        """Length of the whole prompt, in ids."""
        raise NotImplementedError

    @property
    def cum_len(self) -> int:
        """Length of the cumulative ids: whole prompt and generation."""
        return self.prompt_len + self.generation_token_ids.size

    def _check(self) -> None:
        """Checks of every record, whatever its prompt is."""
        check_rollout_id(self.rollout_id)
        if not self.model_call_id:
            raise self._error("model_call_id", "must not be empty")
        self._set_ids("generation_token_ids", "generation_token_ids", self.generation_token_ids)
        generated = self.generation_token_ids.size
        log_probs = self._log_probs(self.generation_log_probs)
        if log_probs.ndim != 1 or log_probs.size != generated:
            raise self._error(
                "generation_log_probs",
                f"must align with generation_token_ids: got {log_probs.size}, expected {generated}",
            )
        if log_probs.size:
            # A NaN is both the highest and the lowest. `argmax` costs a third of what `max` does.
            highest, lowest = log_probs[log_probs.argmax()], log_probs[log_probs.argmin()]
            if not (math.isfinite(highest) and math.isfinite(lowest)):
                raise self._error("generation_log_probs", "must be finite")
            if highest > LOG_PROB_ROUNDING:
                raise self._error("generation_log_probs", f"must not be above 0: got {highest}")
        log_probs = _frozen(log_probs)
        if log_probs is not self.generation_log_probs:
            object.__setattr__(self, "generation_log_probs", log_probs)
        spans = self.policy.weight_versions
        end = 0
        for span in spans:
            if span.start != end or span.end < span.start:
                raise self._error("weight_versions", f"must tile [0, {generated}): got {spans}")
            end = span.end
        if spans and end != generated:
            raise self._error("weight_versions", f"spans must end at {generated}: got {end}")

    def _set_ids(self, name: str, field_name: str, value: npt.ArrayLike) -> None:
        """Makes attribute `name` ids, or raises, naming the field."""
        try:
            ids = as_ids(value)
        except ValueError as error:
            raise self._error(field_name, str(error)) from None
        if ids is not value:  # to set a field again costs more than to look
            object.__setattr__(self, name, ids)

    def _log_probs(self, value: npt.ArrayLike) -> LogProbArray:
        if isinstance(value, np.ndarray) and value.dtype == _FLOAT32:
            return value
        try:
            raw = _plain_array(value)
        except ValueError as error:
            raise self._error("generation_log_probs", str(error)) from None
        if raw.size and raw.dtype.kind not in "fiu":
            raise self._error("generation_log_probs", f"must be numbers: got dtype {raw.dtype}")
        with np.errstate(over="ignore"):  # what overflows is not finite
            return raw.astype(np.float32)

    def _error(self, field_name: str, message: str) -> RecordError:
        return RecordError(
            f"{field_name} {message}", field=field_name, rollout_id=self.rollout_id, call_id=self.model_call_id
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenEntry(CallRecord):
    """One model call, whole. Shapes: P ids of the prompt, G generated ids."""

    prompt_token_ids: IdArray
    """int32 [P]. The whole prompt as the engine reports it."""

    def __post_init__(self) -> None:
        self._set_ids("prompt_token_ids", "prompt_token_ids", self.prompt_token_ids)
        self._check()
        if not self.prompt_token_ids.size:
            raise self._error("prompt_token_ids", "missing_prompt_ids: a call has at least one prompt id")
        if isinstance(self.parent, Continues) and self.prompt_len < self.parent.cum_len:
            raise self._error(
                "prompt_token_ids",
                f"must be at least as long as the parent's cumulative ids: got {self.prompt_len}, "
                f"expected >= {self.parent.cum_len}",
            )

    @property
    def prompt_len(self) -> int:
        return self.prompt_token_ids.size

    def cumulative_ids(self) -> IdArray:
        """int32 [cum_len]."""
        ids: IdArray = np.concatenate((self.prompt_token_ids, self.generation_token_ids))
        return _frozen(ids)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntrySuffix(CallRecord):
    """One model call as it is stored and shipped: without the prompt ids that its parent's record holds.

    The whole prompt is all `parent.cum_len` cumulative ids of the parent, then `new_prompt_ids`.
    """

    parent: Continues
    new_prompt_ids: IdArray
    """int32. May be empty."""

    def __post_init__(self) -> None:
        self._set_ids("new_prompt_ids", "prompt_token_ids", self.new_prompt_ids)
        self._check()
        if not isinstance(self.parent, Continues):
            raise self._error("parent", "a suffix needs a parent to be a suffix of")
        if self.parent.cum_len <= 0:
            raise self._error("parent", f"must have ids to leave out: got {self.parent.cum_len}")

    @property
    def prompt_len(self) -> int:
        return self.parent.cum_len + self.new_prompt_ids.size


def suffix_of(record: TokenEntry | EntrySuffix) -> TokenEntry | EntrySuffix:
    """The same call without the prompt ids that its parent holds, by its own word; itself if there are none."""
    if isinstance(record, EntrySuffix) or not isinstance(record.parent, Continues) or record.parent.cum_len <= 0:
        return record
    return _of_checked_parts(EntrySuffix, record, new_prompt_ids=record.prompt_token_ids[record.parent.cum_len :])


def whole_entry(suffix: EntrySuffix, *, prompt: IdArray, generation: IdArray) -> TokenEntry:
    """The call with its whole prompt: the parent's cumulative ids, then the suffix's.

    The caller has put both arrays together, read-only, of ids that were checked as parts of records. They are not
    checked again: else a conversation of n calls would be read n times over.
    """
    return _of_checked_parts(TokenEntry, suffix, prompt_token_ids=prompt, generation_token_ids=generation)


def _of_checked_parts(kind: type[_Record], record: CallRecord, **own: IdArray) -> _Record:
    made = object.__new__(kind)
    for read, write in _COMMON:
        write(made, read(record))
    for name, ids in own.items():
        object.__setattr__(made, name, ids)
    return made


_Record = TypeVar("_Record", TokenEntry, EntrySuffix)
_SLOTS: Final = tuple(vars(CallRecord)[each.name] for each in fields(CallRecord))
_COMMON: Final = tuple((slot.__get__, slot.__set__) for slot in _SLOTS)
"""Past what keeps records from being changed: they are being made."""


# --- a frozen rollout --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallIntent:
    """Written before a call generates: an intent that never gets an entry means a call was lost."""

    rollout_id: str
    model_call_id: str
    created_at: float
    request_digest: str = ""
    """SHA-256 of the request body; the same for a client's retry."""
    request_key: str = ""
    """Fingerprint of the whole conversation that the request sends; empty: not known."""
    asked_key: str = ""
    """Fingerprint of the conversation before the request's latest assistant turn: the `request_key` of the request that
    this turn was the answer to. Empty: the request echoes no turn.
    """
    answer_key: str = ""
    """Fingerprint through that turn: the `turn_key` of the call that generated it, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCall:
    """A call that was begun and left neither a record nor a refusal, as other calls show it."""

    model_call_id: str
    retries: tuple[str, ...]
    """Ids of the calls that the same request body was sent for."""
    answers: tuple[str, ...]
    """Turn keys that later requests echo in answer to this very request: each was generated by one of its tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordProblem:
    """A record that could not be made into a `TokenEntry`, or that contradicts another: masks its rollout."""

    reason: str
    """A `ProblemReason`."""
    call_id: str | None
    field: str | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """One rollout, frozen. Records may stand in any order."""

    rollout_id: str
    snapshot_id: str
    version: int
    entries: tuple[TokenEntry, ...]
    orphans: tuple[EntrySuffix, ...] = ()
    """Calls whose prompts are not known whole: their parents are not here, or have other lengths. They mask."""
    incomplete: tuple[str, ...] = ()
    """Why the capture is not complete: as `reasons.join_reason` writes a `CaptureMark` and, where known, a call id."""
    problems: tuple[RecordProblem, ...] = ()
    lost_calls: tuple[LostCall, ...] = ()
    """Of the calls with a `dangling_intent`, those of which it is known what they were for, by call id."""
    registration: Registration | None = None
    """Which rollout it is, if somebody registered it."""
    outcome: Outcome | None = None
    """How it ended, if somebody said so."""
    went_on: tuple[str, ...] = ()
    """Rollout ids of the earlier attempts from whose records it went on."""

    @property
    def records(self) -> tuple[TokenEntry | EntrySuffix, ...]:
        """All calls, whole or not."""
        return (*self.entries, *self.orphans)


# --- small things that everything shares -----------------------------------------------------------------------


def delivered_by(said: Iterable[bool | None]) -> bool | None:
    """Whether a reply was delivered, of all that is said of it; None says nothing.

    If it is said both that it was delivered and that it was not, it was not: a connection can turn out to have been
    lost after everything was handed to it.
    """
    known = [each for each in said if each is not None]
    return all(known) if known else None


def not_a_turn(entry: CallRecord) -> ExcludedReason | None:
    """Why what a call generated is no turn of the policy, to be trained or continued; None: it is one.

    A turn that a length limit or a stop string ended is one: the policy sampled all of it.
    """
    cut_off = CUT_OFF.get(entry.reply.finish_reason or "")
    if cut_off is None and entry.generation_token_ids.size == 0:
        return ExcludedReason.EMPTY_GENERATION
    return cut_off


def as_ids(value: npt.ArrayLike) -> IdArray:
    """A read-only, contiguous int32 vector. Raises `ValueError` on what is no vector of non-negative int32 values."""
    raw = value if type(value) is np.ndarray else _plain_array(value)
    if raw.dtype == _INT32:
        ids = raw
    elif raw.size == 0 and raw.ndim == 1:
        ids = np.zeros(0, dtype=np.int32)
    elif raw.dtype.kind in "iu":
        if raw.size and (int(raw.max()) > np.iinfo(np.int32).max or int(raw.min()) < 0):
            raise ValueError("must be ids in [0, 2**31)")
        ids = raw.astype(np.int32)
    else:
        raise ValueError(f"must be integers: got dtype {raw.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"must be a vector: got shape {ids.shape}")
    if ids.size and ids[ids.argmin()] < 0:  # a third of what `min` costs
        raise ValueError("must be ids in [0, 2**31)")
    return _frozen(ids if ids.flags.c_contiguous else np.ascontiguousarray(ids))


def _plain_array(value: npt.ArrayLike) -> npt.NDArray[Any]:
    """An array of what the values are. Raises `ValueError` on booleans among numbers, which numpy takes for 0 and 1."""
    if isinstance(value, list | tuple) and not {bool, np.bool_}.isdisjoint(map(type, value)):
        raise ValueError("must be numbers: got a boolean among them")
    return np.asarray(value)


def digest_ids(*parts: IdArray) -> str:
    """SHA-256 (hex) over a domain tag and the little-endian int32 bytes of the concatenated `parts`.

    Independent of how the sequence is split, so it can be updated call by call (`new_digest`).
    """
    state = new_digest()
    for part in parts:
        state.update(id_bytes(part))
    return state.hexdigest()


def new_digest() -> hashlib._Hash:
    """A digest state over no ids yet; feed it `id_bytes`, copy it at each call."""
    return hashlib.sha256(_DIGEST_DOMAIN)


def id_bytes(ids: IdArray) -> memoryview:
    """The little-endian int32 bytes of `ids`, without a copy on little-endian machines."""
    return np.ascontiguousarray(ids, dtype="<i4").data.cast("B")


def _frozen(array: _Array) -> _Array:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
