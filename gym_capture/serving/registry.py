"""Rollouts that nobody dispatches: their agents register them, call the model as ever, and say how they ended.

Invariant: each request may be repeated, also by somebody who does not know whether it arrived: the same again gets the
same answer, and something else for the same rollout is refused. What is answered was durable before. Nothing is guessed
of a rollout that was never completed: it has no reward.

Flow: `POST /rollouts` -> the id, a token, base URLs -> calls -> `POST /rollouts/{id}/complete`, whereupon no call of it
begins any more -> `GET /rollouts/{id}` and builds show how it ended. Completing waits for no call that is under way: it
ends and is recorded as ever, and a build before that masks the rollout (`dangling_intent`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeAlias, TypeVar

from starlette.requests import Request

from gym_capture.auth import Keyring
from gym_capture.capture.operations import Complete, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.rollout_state import RolloutStatus
from gym_capture.dialects import fields
from gym_capture.dialects.base import Schema, parse_object
from gym_capture.dialects.description import BOOLEAN, NAME, NUMBER, OPENAI_ERROR, STRING, object_of
from gym_capture.errors import AuthenticationError, InvalidRequestError, RecordError
from gym_capture.reasons import CaptureMark, reason_name
from gym_capture.rollout_ids import ROLLOUT_ID_PATTERN, check_rollout_id
from gym_capture.serving.call_service import CallService

_ANY: Final[Schema] = {}
_ID: Final[Schema] = {"type": "string", "pattern": f"^{ROLLOUT_ID_PATTERN}$", "not": {"enum": [".", ".."]}}
_SAMPLE: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": fields.MAX_COUNT}
_REGISTRATION: Final = {
    **object_of({"group_id": NAME}, {"rollout_id": _ID, "sample": _SAMPLE, "task": _ANY, "agent_completes": BOOLEAN}),
    "additionalProperties": False,
}
_OUTCOME: Final = {
    **object_of(
        {},
        {
            "reward": NUMBER,
            "reward_components": {"type": "object", "additionalProperties": NUMBER},
            "failure": NAME,
            "answer": STRING,
        },
    ),
    "additionalProperties": False,
}
_FAILURES: Final = {
    "400": "The request is at fault: the message names the field.",
    "401": "A token is missing.",
    "403": "The token is one for something else.",
    "404": "Nothing is known of such a rollout.",
    "409": "Something else was said of this rollout before, and stands.",
    "410": "The rollout's records have been consumed.",
    "413": "The body is too large.",
    "500": "The server is at fault; its log has the details.",
    "503": "The state restarts: `Retry-After` says when to ask again.",
}
_T = TypeVar("_T")
Answer: TypeAlias = Callable[[Request], Awaitable[Mapping[str, Any]]]


class Registry:
    """Answers what is said and asked of rollouts as a whole."""

    def __init__(
        self, service: CallService, *, keyring: Keyring | None, body: Callable[[Request], Awaitable[bytes]]
    ) -> None:
        """`body` reads what a request holds. Without a `keyring` everything is open."""
        self._service = service
        self._keyring = keyring
        self._body = body

    def routes(self) -> tuple[tuple[str, str, Answer, Mapping[str, Any]], ...]:
        """Method, path, what answers it, and how the server's description says it."""
        one = "/rollouts/{rollout_id}"
        return (
            ("POST", "/rollouts", self.register, _described("Register a rollout", _REGISTRATION, in_path=False)),
            ("POST", f"{one}/complete", self.complete, _described("Say how a rollout ended", _OUTCOME)),
            ("GET", one, self.look, _described("How far a rollout is", None)),
        )

    async def register(self, http: Request) -> Mapping[str, Any]:
        """The answer to a registration: all that an agent needs to play the rollout."""
        if self._keyring is not None:
            self._keyring.admit_admin(http.headers)
        said = _known(await self._body(http), "rollout_id", "group_id", "sample", "task", "agent_completes")
        group_id = fields.required_string(said, "group_id")
        if not group_id:
            raise InvalidRequestError("group_id must not be empty", param="group_id")
        rollout_id = fields.string(said, "rollout_id")
        rollout_id = f"rollout-{uuid.uuid4().hex}" if rollout_id is None else check_rollout_id(rollout_id)
        sample = fields.count(said, "sample", minimum=0)
        registration = _made(
            lambda: Registration(
                group_id=group_id,
                sample=sample,
                task=_task(said.get("task")),
                agent_completes=fields.boolean(said, "agent_completes") is not False,
            )
        )
        await self._service.write(Register(rollout_id, registration))
        base = f"{str(http.base_url).rstrip('/')}/ng-rollout/{rollout_id}"
        return {
            "rollout_id": rollout_id,
            **registered(registration),
            "token": None if self._keyring is None else self._keyring.rollout_token(rollout_id),
            "base_urls": {"chat_completions": f"{base}/v1", "responses": f"{base}/v1", "messages": base},
        }

    async def complete(self, http: Request) -> Mapping[str, Any]:
        """The outcome as it stands."""
        rollout_id = check_rollout_id(http.path_params["rollout_id"])
        await self._admit_completion(http, rollout_id)
        said = _known(await self._body(http), "reward", "reward_components", "failure", "answer")
        components = said.get("reward_components")
        components = {} if components is None else fields.mapping(components, "reward_components")
        outcome = _made(
            lambda: Outcome(
                reward=said.get("reward"),
                reward_components=tuple(components.items()),
                failure=said.get("failure"),
                answer=said.get("answer"),
            )
        )
        await self._service.write(Complete(rollout_id, outcome))
        return {"rollout_id": rollout_id, "state": "complete", "outcome": outcome.as_dict()}

    async def look(self, http: Request) -> Mapping[str, Any]:
        """The rollout's state now."""
        if self._keyring is not None:
            self._keyring.admit_reader(http.headers)
        return standing(await self._service.status(http.path_params["rollout_id"]))

    async def _admit_completion(self, http: Request, rollout_id: str) -> None:
        """A rollout's own token says how it ended only if whoever registered it left that to its agent.

        So the tokens of rollouts that somebody else dispatches or scores are good for calling the model alone.
        """
        if self._keyring is None or self._keyring.is_admin(http.headers):
            return
        self._keyring.admit_call(http.headers, rollout_id)
        registration = (await self._service.status(rollout_id)).snapshot.registration
        if registration is None or not registration.agent_completes:
            raise AuthenticationError(
                "its agent was not given this rollout to complete: that takes the token of `gym-capture token --admin`",
                forbidden=True,
                rollout_id=rollout_id,
            )


def registered(registration: Registration | None) -> dict[str, Any]:
    """A registration as clients see it."""
    if registration is None:
        return dict.fromkeys(("group_id", "sample", "task", "agent_completes"))
    return {**asdict(registration), "task": None if registration.task is None else json.loads(registration.task)}


def standing(status: RolloutStatus) -> dict[str, Any]:
    """A rollout as clients see it."""
    snapshot, counts = status
    under_way = [reason for reason in snapshot.incomplete if reason_name(reason) == CaptureMark.DANGLING_INTENT]
    return {
        "rollout_id": snapshot.rollout_id,
        "state": "open" if snapshot.outcome is None else "complete",
        **registered(snapshot.registration),
        "calls": counts.calls,
        "generated_tokens": counts.generated_tokens,
        "eligible_links": counts.eligible_links,
        "contiguous_links": counts.contiguous_links,
        "calls_under_way": len(under_way),
        "outcome": None if snapshot.outcome is None else snapshot.outcome.as_dict(),
        "incomplete": list(snapshot.incomplete),
        "problems": [problem.reason for problem in snapshot.problems],
    }


def _known(body: bytes, *names: str) -> Mapping[str, Any]:
    """The fields of a body that has no others: a misspelt reward would be none."""
    said = parse_object(body)
    unknown = min(said.keys() - set(names), default=None)
    if unknown is not None:
        raise InvalidRequestError(f"no such field: {unknown[:40]!r}; there are {', '.join(names)}", param=unknown[:40])
    return said


def _task(task: object) -> str | None:
    """One text for equal tasks."""
    if task is None:
        return None
    try:
        return json.dumps(task, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"task must be JSON: {error}", param="task") from None


def _made(make: Callable[[], _T]) -> _T:
    """A client's words, as a value; of a field that cannot be, the client is told."""
    try:
        return make()
    except RecordError as error:
        raise InvalidRequestError(error.message, param=error.field) from None


def _described(summary: str, body: Schema | None, *, in_path: bool = True) -> Mapping[str, Any]:
    error = {"application/json": {"schema": OPENAI_ERROR}}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "As it stands.", "content": {"application/json": {"schema": {"type": "object"}}}},
            **{status: {"description": why, "content": error} for status, why in _FAILURES.items()},
        },
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if in_path:
        found["parameters"] = [{"name": "rollout_id", "in": "path", "required": True, "schema": _ID}]
    return found
