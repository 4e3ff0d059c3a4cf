"""How clients hand a turn back otherwise than the policy sampled it, and it still is that turn: by named rules.

Invariant: a rule is about what is known of that very turn - the stop string that ended it, the call that a limit cut -
and gives the one text, or the few, that a client is known to make of it. Whatever else a client makes of a turn is a
turn of its own.

Flow: a call's record owns the key of its turn, and those of its `echoes` -> lineage finds the call under any of them,
and the record of the call that continues it names the rule.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from pydantic_core import from_json

from gym_capture.conversation import AssistantTurn
from gym_capture.reasons import RequestRule


def echoes(
    turn: AssistantTurn, *, finish_reason: str, stop_reason: str | None, stop_strings: Collection[str]
) -> Iterator[tuple[RequestRule, AssistantTurn]]:
    """The turn as some clients hand it back, with the name of the rule by which it is that turn."""
    if not turn.tool_calls:
        if stop_reason is not None and stop_reason in stop_strings:
            yield RequestRule.STOP_STRING_PUT_BACK, turn._replace(text=turn.text + stop_reason)
        return
    last = turn.tool_calls[-1]
    if finish_reason == "length" and is_cut(last.arguments):
        yield RequestRule.CUT_CALL_LEFT_OUT, turn._replace(tool_calls=turn.tool_calls[:-1])
        if last.arguments.strip():
            # What Anthropic's library makes of the deltas of a call that never ends.
            begun = last._replace(arguments=json.dumps(from_json(last.arguments, allow_partial=True)))
            yield RequestRule.CUT_CALL_CLOSED, turn._replace(tool_calls=(*turn.tool_calls[:-1], begun))


def is_cut(arguments: str) -> bool:
    """Whether the text is the beginning of an object, and no more."""
    text = arguments.strip()
    if not text.startswith("{"):
        return not text
    try:
        json.JSONDecoder().raw_decode(text)
    except ValueError:
        try:
            from_json(text, allow_partial=True)
        except ValueError:
            return False
        return True
    except RecursionError:
        return False
    return False
