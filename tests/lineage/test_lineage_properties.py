"""A lineage answer `Resolved` is never wrong, whatever a harness echoes - and never missing where it is provable.

Rollouts of several calls are played with a harness that edits, drops, repeats, swaps and mixes up what it echoes. Each
answer must be the one that an oracle gives which compares requests with recorded calls item by item, without hashing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.records import Continues, Root, TokenEntry, Unresolved, as_ids, digest_ids, suffix_of
from gym_capture.conversation import (
    AssistantTurn,
    Conversation,
    Item,
    Message,
    Tool,
    ToolCall,
    ToolResult,
    merge_assistant_turns,
)
from gym_capture.lineage.fingerprint import Fingerprint, Fingerprinter
from gym_capture.lineage.index import LineageIndex
from tests.calls import entry_of

# --- the oracle ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A call as it happened."""

    entry: TokenEntry
    request: Conversation
    turn: AssistantTurn


def expected(calls: list[Recorded], request: Conversation) -> Resolution:
    """The answer for a request of the rollout that made `calls`."""
    positions = [at for at, item in enumerate(request.items) if isinstance(item, AssistantTurn)]
    if not positions:
        return Root()
    if not calls:
        return Unresolved("unknown_rollout")
    for turn, at in reversed(list(enumerate(positions))):
        history = Conversation(request.items[: at + 1], request.tools)
        owners = [call.entry for call in calls if can_be_continued(call.entry) and same(whole(call), history)]
        if owners:
            ids = {tuple(owner.cumulative_ids().tolist()) for owner in owners}
            if len(ids) > 1:
                ids = {tuple(owner.cumulative_ids().tolist()) for owner in owners if owner.delivered is not False}
                if len(ids) != 1 or not any(owner.delivered for owner in owners):
                    return Unresolved("ambiguous")
            (only,) = ids
            names = [owner.model_call_id for owner in owners if tuple(owner.cumulative_ids().tolist()) == only]
            return Resolved(min(names), turn, as_ids(only))
    return Unresolved("no_match")


def can_be_continued(entry: TokenEntry) -> bool:
    return entry.reply.finish_reason in ("stop", "length", "tool_calls") and entry.generation_token_ids.size > 0


def whole(call: Recorded) -> Conversation:
    return Conversation(merge_assistant_turns((*call.request.items, call.turn)), call.request.tools)


def same(a: Conversation, b: Conversation) -> bool:
    return (
        [tuple(tool) for tool in a.tools] == [tuple(tool) for tool in b.tools]
        and len(a.items) == len(b.items)
        and all(same_item(a.items, b.items, at) for at in range(len(a.items)))
    )


def same_item(a: tuple[Item, ...], b: tuple[Item, ...], at: int) -> bool:
    match a[at], b[at]:
        case Message(role, text), Message(other_role, other_text):
            return role == other_role and steady(role, text) == steady(other_role, other_text)
        case AssistantTurn(text, calls), AssistantTurn(other_text, other_calls):
            return (
                text.strip() == other_text.strip()
                and [call.name for call in calls] == [call.name for call in other_calls]
                and all(same_arguments(x.arguments, y.arguments) for x, y in zip(calls, other_calls, strict=True))
            )
        case ToolResult(_, text), ToolResult(_, other_text):
            return text == other_text and answers(a, at) == answers(b, at)
    return False


def steady(role: str, text: str) -> tuple[str, ...]:
    """A message's text without what the default rules leave out."""
    if role not in ("system", "developer"):
        return (text,)
    header = ""
    if text.startswith("x-anthropic-billing-header: "):
        header, _, text = text.partition("\n")
    before, found, after = text.partition("Today's date: ")
    if found and len(after) >= 10 and after[:10].replace("-", "").isdigit():
        return ("billed" if header else "", before, "dated", after[10:])
    return ("billed" if header else "", text)


def answers(items: tuple[Item, ...], at: int) -> tuple[int, int] | str:
    """(item, call in it) that the tool result at `at` answers; the result's id if there is none."""
    result = items[at]
    assert isinstance(result, ToolResult)
    for earlier in range(at - 1, -1, -1):
        turn = items[earlier]
        if isinstance(turn, AssistantTurn):
            places = [place for place, call in enumerate(turn.tool_calls) if call.id == result.call_id]
            if places:
                between = items[earlier:at]
                answered = sum(isinstance(item, ToolResult) and item.call_id == result.call_id for item in between)
                return (earlier, places[answered]) if answered < len(places) else result.call_id
    return result.call_id


def same_arguments(a: str, b: str) -> bool:
    (kind_a, value_a), (kind_b, value_b) = meaning(a), meaning(b)
    return kind_a == kind_b and same_value(value_a, value_b)


def meaning(arguments: str) -> tuple[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return "text", arguments
    return "json", {} if value is None else value


def same_value(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, bool) or isinstance(b, bool) or isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b) and bool(a == b)
    return not isinstance(a, dict) and not isinstance(b, dict) and float(a) == float(b)


# --- the harness -----------------------------------------------------------------------------------------------------

ARGUMENTS = [
    ["", "{}", "null"],
    ['{"a": 1, "b": "x"}', '{"b":"\\u0078","a":1.0}', '{"a":2,"a":1,"b":"x"}'],
    ['{"a": true, "b": "x"}', '{"b":"x","a":true}'],
    ['{"a": "1", "b": "x"}'],
    ['{"a": 9007199254740993}', '{"a":9007199254740992}'],
    ['{"a": 1', '{"a": 1'],
    ['{"a":1'],
]
"""Each list: spellings of the same arguments."""
IDS = ["c1", "c2", ""]
USER_TEXTS, ANSWERS, RESULTS = ["Q", "Q2", "c1"], ["", "OK.", "c1"], ["1", "2"]
SYSTEM_TEXTS = [f"x-anthropic-billing-header: cch={n};\nS" for n in range(2)]
SYSTEM_TEXTS += ["S", "S2", "S\nToday's date: 2026-11-29", "S\nToday's date: 2026-11-30", "S\nToday's date: unknown"]
TOOLS = [(), (Tool("f", "F", "{}"),), (Tool("f", "F", "{}"), Tool("g", "G", "{}"))]

messages: st.SearchStrategy[Item] = st.one_of(
    st.builds(Message, st.sampled_from(["system", "developer"]), st.sampled_from(SYSTEM_TEXTS)),
    st.builds(Message, st.just("user"), st.sampled_from(USER_TEXTS)),
)
results: st.SearchStrategy[Item] = st.builds(ToolResult, st.sampled_from(IDS), st.sampled_from(RESULTS))
spellings = st.sampled_from([spelling for same_arguments_ in ARGUMENTS for spelling in same_arguments_])
calls_of_turn = st.lists(st.builds(ToolCall, st.sampled_from(IDS), st.sampled_from(["f", "g"]), spellings), max_size=2)
turns = st.builds(AssistantTurn, st.sampled_from(ANSWERS), calls_of_turn.map(tuple), st.sampled_from(["", "hm"]))


def respelled(arguments: str, draw: Callable[[st.SearchStrategy[str]], str]) -> str:
    return next(draw(st.sampled_from(spelled)) for spelled in ARGUMENTS if arguments in spelled)


def harmless(item: Item, draw: Callable[[st.SearchStrategy[str]], str]) -> Item:
    """What clients do to items without meaning anything by it."""
    match item:
        case AssistantTurn(text, calls):
            calls = tuple(call._replace(arguments=respelled(call.arguments, draw)) for call in calls)
            return AssistantTurn(draw(st.sampled_from(["", "\n"])) + text.strip(), calls)
        case Message("system" | "developer", text):
            return item._replace(text=text.replace("cch=0", "cch=1").replace("11-29", "11-30"))
        case _:
            return item


def tampered(request: Conversation, others: list[Item], draw: Callable[[st.SearchStrategy[Any]], Any]) -> Conversation:
    """What an adversarial harness does to a conversation before it sends it."""
    items, tools = list(request.items), request.tools
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(len(items) - 1, 0)))
        match draw(st.sampled_from(["replace", "drop", "repeat", "swap", "insert", "renumber", "arguments", "tools"])):
            case "replace" if items:
                items[at] = draw(st.one_of(messages, turns, results))
            case "drop" if items:
                del items[at]
            case "repeat" if items:
                items.insert(at, items[at])
            case "swap" if items:
                items[at], items[0] = items[0], items[at]
            case "insert" if others:
                items.insert(at, draw(st.sampled_from(others)))
            case "renumber":
                names = dict(zip(IDS, draw(st.permutations(["t1", "t2", "t3"])), strict=True))
                items = [renumbered(item, names) for item in items]
            case "arguments":
                items = [with_arguments(item, draw(spellings)) for item in items]
            case "tools":
                tools = draw(st.sampled_from(TOOLS))
    return Conversation(merge_assistant_turns(items), tools)


def renumbered(item: Item, names: dict[str, str]) -> Item:
    match item:
        case AssistantTurn(_, calls):
            return item._replace(tool_calls=tuple(call._replace(id=names.get(call.id, call.id)) for call in calls))
        case ToolResult(call_id):
            return item._replace(call_id=names.get(call_id, call_id))
        case _:
            return item


def with_arguments(item: Item, arguments: str) -> Item:
    if isinstance(item, AssistantTurn):
        return item._replace(tool_calls=tuple(call._replace(arguments=arguments) for call in item.tool_calls))
    return item


# --- the play --------------------------------------------------------------------------------------------------------


def assert_same(answer: Resolution, wanted: Resolution) -> None:
    if isinstance(wanted, Resolved):
        assert isinstance(answer, Resolved), (answer, wanted)
        assert (answer.call_id, answer.turn) == (wanted.call_id, wanted.turn)
        np.testing.assert_array_equal(answer.cumulative_ids, wanted.cumulative_ids)
    else:
        assert answer == wanted


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_answer_is_the_one_that_comparing_item_by_item_gives(data: st.DataObject) -> None:
    draw = data.draw
    fingerprinter, index = Fingerprinter(), LineageIndex()
    rollouts: dict[str, list[Recorded]] = {"r": [], "other": []}
    previous: dict[str, Fingerprint | None] = {"r": None, "other": None}
    asked: list[tuple[str, Conversation]] = []

    for number in range(draw(st.integers(2, 12))):
        rollout_id = draw(st.sampled_from(["r", "r", "r", "other"]))
        everything = [call for calls in rollouts.values() for call in calls]
        kind = draw(st.sampled_from(["go on", "go on", "go on", "retry", "start"])) if everything else "start"
        turn = draw(turns)
        if kind == "start":
            request = Conversation(tuple(draw(st.lists(messages, max_size=2))), draw(st.sampled_from(TOOLS)))
        elif kind == "retry":
            retried = draw(st.sampled_from(everything))
            request, turn = retried.request, retried.turn
        else:
            known = whole(draw(st.sampled_from(everything[::-1])))
            echo = tuple(harmless(item, draw) for item in known.items)
            request = Conversation((*echo, *draw(st.lists(results | messages, max_size=2))), known.tools)
            if draw(st.integers(0, 2)) == 0:
                request = tampered(request, [item for call in everything for item in whole(call).items], draw)
        asked.append((rollout_id, request))

        fingerprint = fingerprinter.fingerprint(request, previous[rollout_id])
        answer = index.resolve(rollout_id, fingerprint.turn_keys)
        assert_same(answer, expected(rollouts[rollout_id], request))

        entry = generated(rollout_id, f"c{draw(st.integers(0, 9))}-{number}", answer, fingerprint.key_with(turn), draw)
        assert index.add(suffix_of(entry)) == ()
        rollouts[rollout_id].append(Recorded(entry, request, turn))
        previous[rollout_id] = fingerprint if draw(st.booleans()) else None

    rebuilt = LineageIndex()
    records = [suffix_of(call.entry) for calls in rollouts.values() for call in calls]
    assert rebuilt.rebuild(draw(st.permutations(records))) == ()
    for rollout_id, request in asked:
        answer = rebuilt.resolve(rollout_id, fingerprinter.fingerprint(request).turn_keys)
        assert_same(answer, expected(rollouts[rollout_id], request))


def generated(
    rollout_id: str, call_id: str, answer: Resolution, turn_key: str, draw: Callable[[st.SearchStrategy[Any]], Any]
) -> TokenEntry:
    """What the policy makes of a request: few distinct ids, so that retries now and then come out the same."""
    parent = answer.cumulative_ids.tolist() if isinstance(answer, Resolved) else []
    prompt = [*parent, *draw(st.lists(st.integers(1, 2), min_size=0 if parent else 1, max_size=2))]
    generation = draw(st.lists(st.integers(1, 2), max_size=1) | st.just([1]) | st.just([2]))
    return entry_of(
        rollout_id=rollout_id,
        model_call_id=call_id,
        model="policy",
        requested_model="policy",
        has_tools=False,
        prompt_token_ids=as_ids(prompt),
        generation_token_ids=as_ids(generation),
        generation_log_probs=np.zeros(len(generation), dtype=np.float32),
        parent=Continues(answer.call_id, len(parent)) if isinstance(answer, Resolved) else answer,
        turn_key=turn_key,
        digest=digest_ids(as_ids([*prompt, *generation])),
        finish_reason=draw(st.sampled_from(["stop", "stop", "stop", "tool_calls", "length", "abort", "error"])),
        delivered=draw(st.sampled_from([None, None, True, False])),
    )
