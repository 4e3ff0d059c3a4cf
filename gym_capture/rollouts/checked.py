"""What other people's environments and harnesses give, checked where they give it.

Invariant: what passes can be kept, scored, written and built, so nothing that one rollout's code gave ends the job, or
the build of its group, later. What does not pass is a `TypeError` in words, which fails the attempt that met it. Texts
keep no half of a surrogate pair, which neither UTF-8 nor Arrow has.

Flow: `reset` -> `checked_observation` -> `run` -> `checked_outcome` -> `score` -> `checked_components`.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gym_capture.conversation import without_surrogates
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.environment import Observation
from gym_capture.rollouts.harness import Completed, Failed, Outcome

_DEEPEST: Final = 100
"""Levels of what is kept: readers of JSON have a limit too, and theirs must not be met first."""


def checked_observation(given: object) -> Observation:
    """Raises `TypeError`."""
    if not isinstance(given, Observation):
        raise TypeError(f"reset must return an Observation: got {_kind(given)}")
    observation = replace(given, messages=tuple(given.messages), tools=tuple(given.tools))
    for each in (*observation.messages, *observation.tools):
        if not isinstance(each, Mapping):
            raise TypeError(f"messages and tools of an Observation must be objects: got {_kind(each)}")
    for message in observation.messages:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else []
        if not (content is None or isinstance(content, str | list | tuple)) or not all(map(_is_object, parts)):
            raise TypeError(f"the content of a message must be a text or a list of parts: got {_kind(content)}")
    _check_json("an Observation", [*map(dict, observation.messages), *map(dict, observation.tools)])
    return observation


def checked_outcome(given: object) -> Outcome:
    """Raises `TypeError`."""
    match given:
        case Failed():
            reason, detail = _text(given.reason) or AttemptFailure.FAILED, _text(given.detail)
            return replace(given, reason=reason, detail=detail, n_calls=operator.index(given.n_calls))
        case Completed():
            if not isinstance(given.answer, str):
                raise TypeError(f"the answer of a harness must be a string: got {_kind(given.answer)}")
            _check_response(given)
            rewards = _named("call_rewards", given.call_rewards)
            return replace(given, n_calls=operator.index(given.n_calls), call_rewards=rewards)
        case _:
            raise TypeError(f"a harness must return Completed or Failed: got {_kind(given)}")


def checked_components(given: Mapping[str, float]) -> dict[str, float]:
    """As plain numbers, which JSON has: what computes rewards may well give those of numpy. Raises `TypeError`."""
    return {name: float(value) for name, value in _named("components", given).items()}


def _check_response(completed: Completed) -> None:
    response = completed.response
    if response is None:
        return
    if not isinstance(response, dict):
        raise TypeError(f"the response of a harness must be an object: got {_kind(response)}")
    _check_json("the response of a harness", response)
    items = response.get("output")
    if completed.output == "native" and not (isinstance(items, list) and all(map(_is_object, items))):
        raise TypeError("a response whose output is left alone must have a list of items as its output")


def _named(what: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping: got {_kind(given)}")
    named = {_text(name): value for name, value in given.items()}
    if len(named) < len(given):
        raise TypeError(f"{what} must have different names: got {list(given)}")
    return named


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} must be JSON: {error}") from None
    if not _is_within(value, _DEEPEST):
        raise TypeError(f"{what} must not be nested deeper than {_DEEPEST} levels")


def _is_within(value: object, levels: int) -> bool:
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return True
    inside = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_within(each, levels - 1) for each in inside)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _text(value: object) -> str:
    return "" if value is None else without_surrogates(str(value))


def _kind(value: object) -> str:
    return type(value).__name__
