"""What is recorded of a model call, exactly as the engine saw and produced it.

Invariant: a `TokenEntry` that exists is well-formed. Its arrays are read-only, its log probabilities are finite
and aligned with its generated ids, its ids are non-negative int32. Whatever cannot be made into one is a
`RecordError` at construction, or a `RecordProblem` beside the entries of a `Snapshot` - never a repaired record.

Flow: the engine makes an entry with the full prompt -> `as_delta()` strips what the parent already holds -> stores
keep and ship deltas -> a `Snapshot` freezes a rollout's entries -> the builder reads it.

Ids are numpy int32, log probabilities float32. Schema version 1.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gym_capture.errors import InvalidRolloutIdError, RecordError
from gym_capture.reasons import ExcludedReason

IdArray: TypeAlias = npt.NDArray[np.int32]
LogProbArray: TypeAlias = npt.NDArray[np.float32]

_Array = TypeVar("_Array", bound=npt.NDArray[Any])

SCHEMA_VERSION: Final = 1
LOG_PROB_ROUNDING: Final = 1e-3
"""No probability is above 1; so far above 0 may the logarithm of one come out, through rounding."""
CUT_OFF: Final[Mapping[str, ExcludedReason]] = {"abort": ExcludedReason.ABORTED, "error": ExcludedReason.FAILED}
"""Finish reasons of generations that someone other than the policy ended: what they would have been is not known."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""What APIs call the limit of a generation among the sampling parameters."""
ROLLOUT_ID_PATTERN: Final = "[A-Za-z0-9_.-]{1,128}"
"""All of a rollout id; beside it, `.` and `..` are none (`check_rollout_id`)."""
_ROLLOUT_ID: Final = re.compile(ROLLOUT_ID_PATTERN)
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


# --- the record of one call ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Generated ids `[start, end)` were sampled under weights `version`."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenEntry:
    """One model call. Shapes: P ids stored of the prompt, G generated ids.

    Raises `RecordError`, naming the field, when made from anything that is not well-formed.
    """

    rollout_id: str
    model_call_id: str
    model: str
    """The policy that generated."""
    requested_model: str
    """The model name that the client asked for; harnesses ask for several. Empty: not known."""
    has_tools: bool
    """Whether the request offered tools."""
    prompt_token_ids: IdArray
    """int32 [P]. The prompt as the engine reports it; without its first `prompt_offset` ids if this is a delta."""
    prompt_offset: int = 0
    """0: the prompt is whole. Else a delta: the first `prompt_offset` prompt ids are the parent's cumulative ids."""
    generation_token_ids: IdArray
    """int32 [G]. As sampled, the stop token included."""
    generation_log_probs: LogProbArray
    """float32 [G]. Of the sampled ids, after the sampling pin's processing; finite, above 0 only by rounding."""
    parent: Parent | None
    """The decision taken at request time; None for imported records without one."""
    output_items: tuple[Mapping[str, Any], ...] = ()
    """The assistant's turn as Responses items (text, tool calls, reasoning), without token arrays."""
    token_item_index: int | None = None
    """Which of `output_items` the generated ids belong to; None when there is no item."""
    turn_key: str | None = None
    """Fingerprint of the conversation up to and including the generated turn: what lineage matches; None: imported."""
    asked_key: str | None = None
    """Fingerprint of the conversation that the turn was generated for, without the turn: by it lineage knows a turn
    that a client rewrote. None: imported, or raw text."""
    other_turn_keys: Mapping[str, str] = field(default_factory=dict)
    """As `turn_key`, of the turn as some clients are known to hand it back -> the name of the rule (`echoes`)."""
    digest: str | None = None
    """`digest_ids` of the cumulative ids (whole prompt + generation); None for imported records without one."""
    finish_reason: str | None = None
    """stop | length | tool_calls | abort | error."""
    stop_reason: str | None = None
    delivered: bool | None = None
    """Whether the reply is known to have been delivered whole; None: not known."""
    prefix_requested: bool = False
    """Lineage found a unique verified parent: this call was eligible for prefix supply."""
    prefix_supplied: bool = False
    """The prompt that the engine reports starts with that parent's cumulative ids."""
    weight_versions: tuple[WeightSpan, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that were used, after pinning. A limit of the generation among them was asked for."""
    max_tokens: int | None = None
    """The generation limit that the request asked for."""
    normalized: tuple[str, ...] = ()
    """Names of the rules by which the request was not taken to the letter: of normalization, by which lineage leaves a
    volatile header out; of templates, by which a message is written in another place; of lineage, by which the parent
    was found; `tool_left_out:<type>`, a tool that nobody here could run and the policy was not offered."""
    routed_experts: npt.NDArray[Any] | None = None
    """[rows, layers, topk] of a MoE policy, rows >= whole prompt + G - 1."""
    sampling_mask: npt.NDArray[Any] | None = None
    """[G, ...] of the engine."""
    created_at: float = 0.0
    """Unix seconds at which the record was made."""

    def __post_init__(self) -> None:
        check_rollout_id(self.rollout_id)
        if not self.model_call_id:
            raise self._error("model_call_id", "must not be empty")
        prompt = self._ids("prompt_token_ids", self.prompt_token_ids)
        generation = self._ids("generation_token_ids", self.generation_token_ids)
        log_probs = self._log_probs(self.generation_log_probs)
        if log_probs.ndim != 1 or log_probs.size != generation.size:
            raise self._error(
                "generation_log_probs",
                f"must align with generation_token_ids: got {log_probs.size}, expected {generation.size}",
            )
        if log_probs.size:
            if not math.isfinite(np.add.reduce(log_probs)) and not np.isfinite(log_probs).all():
                raise self._error("generation_log_probs", "must be finite")
            highest = np.maximum.reduce(log_probs)
            if highest > LOG_PROB_ROUNDING:
                raise self._error("generation_log_probs", f"must not be above 0: got {highest}")
        # What came as it should is left as it is: to set a field again costs more than to look.
        if prompt is not self.prompt_token_ids:
            object.__setattr__(self, "prompt_token_ids", prompt)
        if generation is not self.generation_token_ids:
            object.__setattr__(self, "generation_token_ids", generation)
        log_probs = _frozen(log_probs)
        if log_probs is not self.generation_log_probs:
            object.__setattr__(self, "generation_log_probs", log_probs)
        if self.prompt_offset < 0:
            raise self._error("prompt_offset", f"must not be negative: got {self.prompt_offset}")
        if self.prompt_offset:
            if not isinstance(self.parent, Continues):
                raise self._error("prompt_offset", "a delta needs a parent to be a delta of")
            if self.prompt_offset != self.parent.cum_len:
                raise self._error(
                    "prompt_offset",
                    f"must be the parent's cum_len: got {self.prompt_offset}, expected {self.parent.cum_len}",
                )
        prompt_len = self.prompt_offset + prompt.size
        if not prompt_len:
            raise self._error("prompt_token_ids", "missing_prompt_ids: a call has at least one prompt id")
        if isinstance(self.parent, Continues) and prompt_len < self.parent.cum_len:
            raise self._error(
                "prompt_token_ids",
                f"must be at least as long as the parent's cumulative ids: got {prompt_len}, "
                f"expected >= {self.parent.cum_len}",
            )
        end = 0
        for span in self.weight_versions:
            if span.start != end or span.end < span.start:
                raise self._error("weight_versions", f"must tile [0, {generation.size}): got {self.weight_versions}")
            end = span.end
        if self.weight_versions and end != generation.size:
            raise self._error("weight_versions", f"spans must end at {generation.size}: got {end}")

    def _error(self, field_name: str, message: str) -> RecordError:
        return RecordError(
            f"{field_name} {message}", field=field_name, rollout_id=self.rollout_id, call_id=self.model_call_id
        )

    def _ids(self, name: str, value: npt.ArrayLike) -> IdArray:
        try:
            return as_ids(value)
        except ValueError as error:
            raise self._error(name, str(error)) from None

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

    @property
    def asked_max_tokens(self) -> int | None:
        """The generation limit that the request asked for, wherever it is recorded; None: it asked for none."""
        if self.max_tokens is not None:
            return self.max_tokens
        if not self.sampling:
            return None
        limits = [self.sampling.get(name) for name in _LIMITS]
        return min((limit for limit in limits if type(limit) is int), default=None)

    @property
    def is_delta(self) -> bool:
        return self.prompt_offset > 0

    @property
    def prompt_len(self) -> int:
        """Length of the whole prompt, in ids."""
        return self.prompt_offset + self.prompt_token_ids.size

    @property
    def cum_len(self) -> int:
        """Length of the cumulative ids: whole prompt and generation."""
        return self.prompt_offset + self.prompt_token_ids.size + self.generation_token_ids.size

    def cumulative_ids(self) -> IdArray:
        """int32 [cum_len]. Raises `RecordError` on a delta: `expand` it first."""
        if self.is_delta:
            raise self._error("prompt_token_ids", "is a delta; expand() it with its parent's cumulative ids")
        ids: IdArray = np.concatenate((self.prompt_token_ids, self.generation_token_ids))
        return _frozen(ids)

    def as_delta(self) -> TokenEntry:
        """The same call without the prompt ids that its parent holds; itself if there are none to leave out."""
        if self.is_delta or not isinstance(self.parent, Continues):
            return self
        offset = self.parent.cum_len
        return replace(self, prompt_token_ids=self.prompt_token_ids[offset:], prompt_offset=offset)

    def expand(self, parent_cumulative_ids: IdArray) -> TokenEntry:
        """The same call with its whole prompt. Raises `RecordError` if the parent's ids have another length."""
        if not self.is_delta:
            return self
        if parent_cumulative_ids.size != self.prompt_offset:
            raise self._error(
                "prompt_offset",
                f"must be the length of the parent's cumulative ids: got {self.prompt_offset}, "
                f"expected {parent_cumulative_ids.size}",
            )
        whole = np.concatenate((parent_cumulative_ids, self.prompt_token_ids))
        return replace(self, prompt_token_ids=whole, prompt_offset=0)


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
    """What other calls show of one that was begun and left neither a record nor a refusal."""

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
    """One rollout, frozen. `entries` may be deltas and may stand in any order."""

    rollout_id: str
    snapshot_id: str
    version: int
    entries: tuple[TokenEntry, ...]
    incomplete: tuple[str, ...] = ()
    """Why the capture is not complete: as `reasons.join_reason` writes a `CaptureMark` and, where known, a call id."""
    problems: tuple[RecordProblem, ...] = ()
    lost_calls: tuple[LostCall, ...] = ()
    """Of the calls with a `dangling_intent`, those of which it is known what they were for, by call id."""


# --- small things that everything shares -----------------------------------------------------------------------


def check_rollout_id(rollout_id: str) -> str:
    """Returns the id, or raises `InvalidRolloutIdError`: ids become file names, log fields and metric labels."""
    if _ROLLOUT_ID.fullmatch(rollout_id) is None or rollout_id in (".", ".."):
        shown = rollout_id if len(rollout_id) <= 64 else rollout_id[:61] + "..."
        raise InvalidRolloutIdError(
            f"invalid rollout id {shown!r}: use 1 to 128 of A-Z a-z 0-9 _ . - (and not '.' or '..')"
        )
    return rollout_id


def delivered_by(said: Iterable[bool | None]) -> bool | None:
    """What comes of all that is said of one reply's delivery, None being nothing.

    If it is said both that it was delivered and that it was not, it was not: a connection can turn out to have been
    lost after everything was handed to it.
    """
    known = [each for each in said if each is not None]
    return all(known) if known else None


def not_a_turn(entry: TokenEntry) -> ExcludedReason | None:
    """Why what a call generated is no turn of the policy, to be trained or continued; None: it is one.

    A turn that a length limit or a stop string ended is one: the policy sampled all of it.
    """
    cut_off = CUT_OFF.get(entry.finish_reason or "")
    if cut_off is None and entry.generation_token_ids.size == 0:
        return ExcludedReason.EMPTY_GENERATION
    return cut_off


def as_ids(value: npt.ArrayLike) -> IdArray:
    """A read-only int32 vector. Raises `ValueError` on anything that is not a vector of non-negative int32 values."""
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
    if ids.size and np.minimum.reduce(ids) < 0:
        raise ValueError("must be ids in [0, 2**31)")
    return _frozen(ids)


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
