"""Every error this package raises on purpose, as one tree.

Each carries the rollout and the call it belongs to where they are known, so that one log line is enough to
find the record. Errors are classified once, at the boundary that answers the client (`serving.errors`).

`Exception` itself is caught at boundaries only, where what one rollout or caller brings about must not reach others:
where clients are answered (`serving.gateway`), between the callers of a state actor (`serving.state_shard`), in front
of Ray (`serving.state_client`) and of libraries that load what a person named (`commands.loading`), where a rollout is
built (`data.groups`), and where weights are changed, of which the others must hear (`engines.vllm_weights`,
`serving.weights_agent`).

    GymCaptureError
    ├── RecordError                a record is malformed: names the field
    │   └── SchemaVersionError     ...or written by a newer version
    ├── StoreError                 state could not be read or written
    │   ├── ConflictingCallError   the same call id came twice with different content
    │   ├── CompletedRolloutError  a call or another outcome, of a rollout that has one
    │   ├── ConflictingRegistrationError   ...another registration, of a rollout that has one
    │   ├── RetiredRolloutError    a late writer of a rollout that was dropped, cleared, closed or handed on
    │   ├── ReplayedCallError      a second call is to be answered from one record of an earlier attempt
    │   ├── StaleSnapshotError     drop() named a version that is no longer current
    │   ├── CorruptLogError        a log fails its checksum in the middle, or its header is not one that is read
    │   └── StoreUnavailableError  retryable: the store (or its actor) cannot answer now
    │       ├── StoreOverloadedError   ...because too many records wait to become durable
    │       └── StreamLostError        ...for longer than a restart takes: a stream of its groups ends
    ├── RequestError               the client's fault
    │   ├── InvalidRequestError    malformed or unsupported: names the parameter
    │   │   └── TemplateError      the chat template refuses the conversation (`gym_capture.splice.template`)
    │   ├── ContextLengthError     the prompt does not fit the model's context
    │   ├── RequestTooLargeError   more bytes than the server takes
    │   ├── RequestTimeoutError    the body did not arrive in time
    │   ├── UnknownModelError      a model this graph does not serve, on an untracked route
    │   ├── UnknownRolloutError    nothing is recorded of the rollout whose records are asked for
    │   ├── InvalidRolloutIdError  an id outside the allowed alphabet or length
    │   └── AuthenticationError    a missing or wrong token
    ├── EngineError                the engine failed
    │   ├── EngineOverloadedError  retryable: no capacity now
    │   └── EngineDeadError        retryable on another replica
    ├── MirrorLostError            a log's second copy cannot be reached (`gym_capture.stores.mirror`)
    │   └── MirrorTakenError       ...or has been claimed by a later opening of the log
    ├── WeightsError               new weights are not served: all replicas go on with those they had
    │   ├── WeightsRefusedError    ...since they are not weights of this model, or not whole: nothing was changed
    │   ├── WeightsBusyError       ...since another update runs, or none does: nothing was changed
    │   └── WeightsFailedError     ...since a replica, or the disk, failed with them: says which and why
    │       └── LostMemberError    ...since a replica died, or does not answer (`gym_capture.serving.weights_members`)
    ├── StreamOverError            no group is left for a trainer that waits for one (`trainer_bridge.trl_worker`)
    ├── StepGivenUpError           a step was told to stop, and has changed nothing (`trainer_bridge.grpo`)
    ├── JobError                   a build job cannot go on: its workers die
    └── ConfigError                a configuration that cannot work: says which key and what to do
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final, NamedTuple

_LONGEST: Final = 500
"""Characters of a message; some libraries tell all that they were given."""


class GymCaptureError(Exception):
    """Base of the tree. `message` is for a person; ids are for finding the record."""

    retryable: bool = False

    def __init__(self, message: str, *, rollout_id: str | None = None, call_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rollout_id = rollout_id
        self.call_id = call_id

    def __str__(self) -> str:
        where = [f"rollout {self.rollout_id}"] if self.rollout_id else []
        where += [f"call {self.call_id}"] if self.call_id else []
        return f"{self.message} ({', '.join(where)})" if where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))


def described(error: BaseException) -> str:
    """An exception in words, and where it was raised: often a bug in what a user wrote."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = str(traceback.TracebackException(type(error), error, None))  # also where its own `str` raises
    return f"{type(error).__name__}: {said}"[:_LONGEST] + where


def _rebuild(cls: type[GymCaptureError], message: str, state: dict[str, object]) -> GymCaptureError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class RecordError(GymCaptureError):
    """A record is malformed. `field` names what is wrong with it."""

    def __init__(self, message: str, *, field: str, rollout_id: str | None = None, call_id: str | None = None) -> None:
        super().__init__(message, rollout_id=rollout_id, call_id=call_id)
        self.field = field


class SchemaVersionError(RecordError):
    """A record was written by a newer version than this one reads."""


class StoreError(GymCaptureError):
    """State could not be read or written."""


class ConflictingCallError(StoreError):
    """The same call id arrived twice with different content; the first stays, the rollout is masked."""


class CompletedRolloutError(StoreError):
    """The rollout has an outcome: it takes no new call, and no other outcome."""


class ConflictingRegistrationError(StoreError):
    """The rollout was registered with other content; the first registration stays."""


class RetiredRolloutError(StoreError):
    """A write belongs to an attempt that was dropped, cleared, closed or handed on."""


class ReplayedCallError(StoreError):
    """A recorded call answers one call, and it has answered another one already."""


class StaleSnapshotError(StoreError):
    """`drop` named a snapshot that later writes have superseded: freeze again, consume, drop that one."""


class CorruptLogError(StoreError):
    """A log fails its checksum in the middle, or has a header this version does not read."""


class StoreUnavailableError(StoreError):
    """The store, or the actor that hosts it, cannot answer now."""

    retryable = True


class StoreOverloadedError(StoreUnavailableError):
    """Too many records wait to become durable for another call to begin; those of calls under way are still taken."""


class StreamLostError(StoreUnavailableError):
    """Where a stream of groups comes from is gone. What was handed out is whole; it can go on from its position."""


class RequestError(GymCaptureError):
    """The request is at fault."""


class InvalidRequestError(RequestError):
    """Malformed or unsupported. `param` names the part of the request at fault, dotted."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        rollout_id: str | None = None,
        call_id: str | None = None,
    ) -> None:
        super().__init__(message, rollout_id=rollout_id, call_id=call_id)
        self.param = param


class Overflow(NamedTuple):
    """By how much a prompt does not fit. In tokens."""

    tokens: int
    """Of the prompt."""
    context: int
    """Ids that the model's context holds, generation included."""
    is_at_least: bool = False
    """The prompt was not rendered, since it is far too long: `tokens` is what it has at least."""

    @property
    def counted(self) -> str:
        """The prompt's tokens, as a message says them."""
        return f"at least {self.tokens}" if self.is_at_least else str(self.tokens)

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that would have fitted: one token is left to generate."""
        return self.context - 1


class ContextLengthError(RequestError):
    """The prompt does not fit the model's context. Each dialect has words of its own for it."""

    def __init__(self, overflow: Overflow, *, call_id: str | None = None) -> None:
        super().__init__(
            f"the prompt has {overflow.counted} tokens, but this model's context holds {overflow.context}, "
            "generation included; shorten the conversation",
            call_id=call_id,
        )
        self.overflow = overflow


class RequestTooLargeError(RequestError):
    """The body has more bytes than the server takes."""


class RequestTimeoutError(RequestError):
    """The body did not arrive whole in time."""


class UnknownModelError(RequestError):
    """A model this graph does not serve."""


class UnknownRolloutError(RequestError):
    """Nothing is recorded of this rollout."""


class InvalidRolloutIdError(RequestError):
    """A rollout id outside `[A-Za-z0-9_.-]{1,128}`, or `.` or `..`."""


class AuthenticationError(RequestError):
    """A token is missing (`forbidden` is False) or belongs to something else (`forbidden` is True)."""

    def __init__(self, message: str, *, forbidden: bool = False, rollout_id: str | None = None) -> None:
        super().__init__(message, rollout_id=rollout_id)
        self.forbidden = forbidden


class EngineError(GymCaptureError):
    """The engine failed on this call."""


class EngineOverloadedError(EngineError):
    """No capacity now; `retry_after_s` is a hint for the client."""

    retryable = True

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        rollout_id: str | None = None,
        call_id: str | None = None,
    ) -> None:
        super().__init__(message, rollout_id=rollout_id, call_id=call_id)
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine process is gone; another replica may serve the call."""

    retryable = True


class WeightsError(GymCaptureError):
    """New weights are not served; all replicas go on with those that they had."""


class WeightsRefusedError(WeightsError):
    """What was offered cannot be served: another model's, half a folder, a version that goes back. Nothing changed."""


class WeightsBusyError(WeightsError):
    """An update does not fit what goes on: another one runs, or none was started. Nothing changed."""


class WeightsFailedError(WeightsError):
    """An update went wrong on its way: says which replica and why, and what is served now."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class JobError(GymCaptureError):
    """A build job cannot go on."""


class ConfigError(GymCaptureError):
    """A configuration that cannot work."""
