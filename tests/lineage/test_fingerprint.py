"""Which echoes of a conversation count as the same. Names with a case id reproduce faults of systems in the field."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from gym_capture.errors import ConfigError
from gym_capture.lineage.fingerprint import (
    BILLING_HEADER,
    DEFAULT_RULES,
    Fingerprint,
    Fingerprinter,
    NormalizationRule,
    canonical_arguments,
)

USER = Message("user", "Q")
READ, WRITE = Tool("read", "Reads a file.", "{}"), Tool("write", "Writes a file.", "{}")


def keys(*items: Item, tools: tuple[Tool, ...] = (), rules: tuple[NormalizationRule, ...] = DEFAULT_RULES) -> list[str]:
    return list(Fingerprinter(rules).fingerprint(Conversation(items, tools)).turn_keys)


def key(*items: Item) -> str:
    """Of the last assistant turn."""
    return keys(*items)[-1]


def echoes(recorded: AssistantTurn, *echo: Item) -> bool:
    """Whether a request that echoes `echo` after the user's question finds the call that generated `recorded`."""
    generated = Fingerprinter().fingerprint(Conversation((USER,))).key_with(recorded)
    return generated in keys(USER, *merge_assistant_turns(echo))


def calling(arguments: str, *, name: str = "edit", text: str = "", call_id: str = "call_1") -> AssistantTurn:
    return AssistantTurn(text, (ToolCall(call_id, name, arguments),))


# --- tool arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("echo", "same"),
    [
        ('{"n":1,"path":"a/ü.txt"}', True),
        ('{"n": 1,\n  "path": "a/\\u00FC.txt"}', True),
        ('{"n":1,"path":"a/u.txt"}', False),
    ],
)
def test_FP_01_arguments_compare_by_value_not_by_spelling(echo: str, same: bool) -> None:
    assert echoes(calling('{"path": "a/\\u00fc.txt", "n": 1}'), calling(echo)) is same


def test_FP_03_arguments_that_are_not_json_compare_as_text() -> None:
    broken = '{"file":"/t/a","new":"He said "hi" ok"}'
    assert echoes(calling(broken), calling(broken))
    assert not echoes(calling(broken), calling('{"raw":"unparsable"}'))
    assert not echoes(calling(broken), calling("{}"))
    assert not echoes(calling("a"), calling('"a"')), "text that is not JSON is not the JSON string of that text"
    assert not echoes(calling('{"a":1'), calling('{"a": 1')), "without a value to compare, spacing counts"


@pytest.mark.parametrize(
    ("recorded", "echo", "same"),
    [
        ('{"id":9007199254740993}', '{"id":9007199254740992}', True),
        ('{"x":1.0}', '{"x":1}', True),
        ('{"x":1e3}', '{"x":1000}', True),
        ('{"x":-0.0}', '{"x":0}', True),
        ('{"x":-0}', '{"x":0.0}', True),
        ('{"a":1,"a":2}', '{"a":2}', True),
        ('{"x":true}', '{"x":1}', False),
        ('{"x":false}', '{"x":0}', False),
        ('{"x":1}', '{"x":"1"}', False),
        ('{"x":1}', '{"x":"1.0"}', False),
        ('{"x":null}', '{"x":"null"}', False),
        ('{"x":null}', "{}", False),
        ('{"x":0.1}', '{"x":0.10000000000000001}', True),
        ('{"x":[1,2]}', '{"x":[2,1]}', False),
        ('{"x":[]}', '{"x":{}}', False),
    ],
)
def test_FP_04_numbers_compare_as_doubles_and_types_stay_apart(recorded: str, echo: str, same: bool) -> None:
    assert echoes(calling(recorded), calling(echo)) is same


@pytest.mark.parametrize("echo", ["", " \n", "null", "{}", " { } "])
def test_no_arguments_have_several_spellings(echo: str) -> None:
    assert echoes(calling(""), calling(echo))
    assert not echoes(calling(""), calling("[]"))
    assert not echoes(calling(""), calling('{"a":null}'))


def test_FP_06_whitespace_inside_strings_counts() -> None:
    recorded = calling('{"old":"    if x:\\n        return 1\\n"}')
    assert not echoes(recorded, calling('{"old":"if x:\\n        return 1"}'))
    assert echoes(recorded, calling('{"old": "    if x:\\n        return 1\\n"}'))


@pytest.mark.parametrize(
    "arguments",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        '{"n":' + "9" * 10_000 + "}",
        '{"n":-1e999}',
        "NaN",
        '{"n":-Infinity}',
        '"\\ud800"',
        '{"\\udfff":1}',
        "\ud800",
        '{"a":"\x00"}',
        "\ufeff{}",
        "1 2",
    ],
)
def test_no_arguments_raise(arguments: str) -> None:
    assert canonical_arguments(arguments) == canonical_arguments(arguments)
    assert echoes(calling(arguments), calling(arguments))
    assert not echoes(calling(arguments), calling("{}"))


# --- assistant turns -----------------------------------------------------------------------------------------------


def test_FP_05_whitespace_around_the_text_does_not_count() -> None:
    recorded = calling("{}", name="ls", text=" done.")
    assert echoes(recorded, calling("{}", name="ls", text="done."))
    assert echoes(recorded, calling("{}", name="ls", text="\n\ndone.\n"))
    assert not echoes(recorded, calling("{}", name="ls", text="do ne."))
    assert echoes(calling("{}", name="ls", text="\n"), calling("{}", name="ls"))


def test_FP_08_text_in_several_blocks_is_one_text() -> None:
    recorded = AssistantTurn("Hello")
    assert echoes(recorded, AssistantTurn("Hello"), AssistantTurn(""))
    assert echoes(recorded, AssistantTurn("Hel"), AssistantTurn("lo"))


def test_FP_10_a_turn_split_into_items_is_one_turn_if_nothing_stands_between() -> None:
    f, g = ToolCall("c1", "f", '{"a":1}'), ToolCall("c2", "g", '{"b":2}')
    recorded = AssistantTurn("Both.", (f, g))
    first, second = AssistantTurn("Both.", (f,)), AssistantTurn("", (g,))
    results = (ToolResult("c1", "1"), ToolResult("c2", "2"))
    assert echoes(recorded, first, second, *results)
    assert echoes(recorded, AssistantTurn("Both."), AssistantTurn("", (f,)), second, *results)
    assert not echoes(recorded, AssistantTurn("Both.", (g, f)), *results), "the calls in another order"
    assert not echoes(recorded, first, results[0], second, results[1]), "no parent, rather than one that is not proven"


def test_FP_15_an_empty_turn_keeps_its_place() -> None:
    fingerprinter, after = Fingerprinter(), Message("user", "And?")
    a = fingerprinter.fingerprint(Conversation((USER,))).key_with(AssistantTurn(reasoning="hmm"))
    b = fingerprinter.fingerprint(Conversation((USER, AssistantTurn(), after))).key_with(AssistantTurn("Yes"))
    assert keys(USER, AssistantTurn(""), after, AssistantTurn("Yes")) == [a, b]
    dropped = keys(USER, after, AssistantTurn("Yes"))
    assert a not in dropped
    assert b not in dropped


def test_reasoning_and_call_ids_do_not_count() -> None:
    recorded = AssistantTurn("A", (ToolCall("toolu_1", "f", "{}"),), reasoning="let me think")
    assert echoes(recorded, AssistantTurn("A", (ToolCall("call_0", "f", "{}"),)))
    assert echoes(recorded, AssistantTurn("A", (ToolCall("", "f", "{}"),), reasoning="thought <redacted>"))
    assert not echoes(recorded, AssistantTurn("A", (ToolCall("toolu_1", "F", "{}"),)))
    assert not echoes(recorded, AssistantTurn("A"))


def test_fields_do_not_run_into_each_other() -> None:
    assert not echoes(AssistantTurn("ab"), AssistantTurn("a", (ToolCall("", "b", ""),)))
    assert not echoes(calling("{}", name="f"), AssistantTurn("", (ToolCall("", "f", "{}"), ToolCall("", "", ""))))
    assert key(Message("user", "ab"), AssistantTurn()) != key(Message("usera", "b"), AssistantTurn())
    assert keys(USER, AssistantTurn(), tools=(Tool("a", "b", "c"),)) != keys(
        USER, AssistantTurn(), tools=(Tool("ab", "c", ""),)
    )


def test_generating_on_after_an_assistant_turn_makes_one_turn_of_both() -> None:
    prefilled = Fingerprinter().fingerprint(Conversation((USER, AssistantTurn("The answer is"))))
    generated = prefilled.key_with(AssistantTurn(" 42."))
    assert [generated] == keys(USER, AssistantTurn("The answer is 42."))
    assert [generated] == keys(USER, *merge_assistant_turns((AssistantTurn("The answer is"), AssistantTurn(" 42."))))


# --- everything before the turn --------------------------------------------------------------------------------------


def test_FP_12_the_same_answer_in_another_conversation_is_another_turn() -> None:
    main = (Message("system", "You are main."), Message("user", "Fix bug"), AssistantTurn("OK."))
    helper = (Message("system", "You are helper."), Message("user", "List files"), AssistantTurn("OK."))
    assert key(*main) != key(*helper)


def test_FP_13_an_edited_history_is_another_history() -> None:
    history = (USER, calling("{}"), ToolResult("call_1", "long result"), AssistantTurn("A1"))
    edited_user = (Message("user", "Q (edited)"), *history[1:])
    trimmed_result = (*history[:2], ToolResult("call_1", "long"), history[3])
    assert not set(keys(*history)) & set(keys(*edited_user))
    assert keys(*history)[0] == keys(*trimmed_result)[0], "what stands before the edit is untouched"
    assert keys(*history)[1] != keys(*trimmed_result)[1]


def test_FP_14_other_tools_are_another_history() -> None:
    one = keys(USER, AssistantTurn("A1"), tools=(READ,))
    assert one != keys(USER, AssistantTurn("A1"), tools=(READ, WRITE))
    assert one != keys(USER, AssistantTurn("A1"))
    assert keys(USER, AssistantTurn(), tools=(READ, WRITE)) != keys(USER, AssistantTurn(), tools=(WRITE, READ))


def test_the_order_of_a_schemas_keys_does_not_count_and_everything_else_in_it_does() -> None:
    def with_schema(schema: str) -> list[str]:
        return keys(USER, AssistantTurn("A"), tools=(READ._replace(parameters_json=schema),))

    recorded = with_schema('{"type":"object","properties":{"z":{"type":"string"},"a":{"enum":[1,2]}}}')
    assert recorded == with_schema('{"properties":{"a":{"enum":[1,2]},"z":{"type":"string"}},"type":"object"}')
    assert recorded != with_schema('{"type":"object","properties":{"z":{"type":"string"},"a":{"enum":[2,1]}}}')
    assert recorded != with_schema('{"type":"object","properties":{"z":{"type":"string"}}}')
    assert with_schema("[" * 10_000) != with_schema("no JSON"), "nothing that a client sends raises"


@pytest.mark.parametrize("other", [Message("system", "Q"), Message("developer", "Q"), Message("user", "Q ")])
def test_roles_and_whitespace_of_what_the_client_wrote_count(other: Message) -> None:
    assert key(USER, AssistantTurn("A")) != key(other, AssistantTurn("A"))


def test_a_message_is_no_tool_result_though_they_compare_equal_as_tuples() -> None:
    message, result = Message("user", "x"), ToolResult("user", "x")
    assert tuple(message) == tuple(result)
    fingerprinter = Fingerprinter()
    before = fingerprinter.fingerprint(Conversation((message, AssistantTurn("A"))))
    after = fingerprinter.fingerprint(Conversation((result, AssistantTurn("A"))), before)
    assert before.turn_keys != after.turn_keys


# --- which call a result answers -------------------------------------------------------------------------------------


def answered(call_ids: tuple[str, ...], *results: tuple[str, str]) -> str:
    turn = AssistantTurn("", tuple(ToolCall(call_id, "f", "{}") for call_id in call_ids))
    return key(USER, turn, *(ToolResult(*result) for result in results), AssistantTurn("A"))


def test_results_belong_to_calls_by_position_not_by_id() -> None:
    plain = answered(("a", "b"), ("a", "1"), ("b", "1"))
    assert plain == answered(("x", "y"), ("x", "1"), ("y", "1"))
    assert plain == answered(("", ""), ("", "1"), ("", "1")), "without ids, results answer in order"
    assert plain != answered(("a", "b"), ("b", "1"), ("a", "1")), "each result answers the other call"


def test_an_id_used_again_means_the_latest_turn_that_used_it() -> None:
    def conversation(first: str, second: str, answer: str) -> str:
        ask, again = calling("{}", call_id=first), calling("{}", call_id=second)
        return key(USER, ask, Message("user", "?"), again, ToolResult(answer, "1"), AssistantTurn("A"))

    assert conversation("a", "a", "a") == conversation("a", "b", "b")
    assert conversation("a", "a", "a") != conversation("a", "b", "a")


def test_a_result_that_answers_no_open_call_is_told_apart_by_its_id() -> None:
    assert answered(("a",), ("a", "1"), ("a", "2")) != answered(("a",), ("a", "1"), ("z", "2"))
    assert answered((), ("a", "1")) != answered((), ("b", "1"))
    assert answered((), ("#0", "1")) != answered(("#0",), ("#0", "1"))


# --- volatile headers ------------------------------------------------------------------------------------------------


def billed(value: str, rest: str = "\nYou are an agent.") -> Message:
    return Message("system", f"x-anthropic-billing-header: {value}{rest}")


def after_system(message: Message) -> Fingerprint:
    return Fingerprinter().fingerprint(Conversation((message, USER, AssistantTurn("A"))))


@pytest.mark.parametrize("other", ["cc_version=2.1.198; cch=0f3e1;", "cch=1", "nonce 8a2f"])
def test_a_billing_header_may_change_from_request_to_request(other: str) -> None:
    recorded = after_system(billed("cc_version=2.1.197; cc_entrypoint=sdk-cli; cch=5f3a1;"))
    echo = after_system(billed(other))
    assert recorded.normalized == ("billing_header",)
    assert recorded.turn_keys == echo.turn_keys


def test_only_the_volatile_part_of_a_header_is_left_out() -> None:
    recorded = after_system(billed("cch=1;"))
    assert recorded.turn_keys != after_system(billed("cch=1;", "\nYou are a helper.")).turn_keys
    assert recorded.turn_keys != after_system(Message("system", "You are an agent.")).turn_keys, "no header at all"
    assert recorded.turn_keys != after_system(Message("system", "\nYou are an agent.")).turn_keys
    assert recorded.turn_keys != after_system(Message("user", billed("cch=2;").text)).turn_keys
    run_on = [after_system(billed("cch=1;", rest)) for rest in ("You are main.", "You are helper.")]
    assert run_on[0].turn_keys != run_on[1].turn_keys, "text on the header's line is no header"
    inside = [after_system(Message("system", f"Quote:\n{billed(nonce).text}")) for nonce in ("cch=1;", "cch=2;")]
    assert inside[0].turn_keys != inside[1].turn_keys
    assert inside[0].normalized == ()


def test_what_stands_for_a_volatile_part_cannot_be_written() -> None:
    number = NormalizationRule("number", r"(?P<volatile>\d+)", roles=("user",))
    texts = ["a1b", "anumberb", "a6:numberb", "a\x00number\x00b", "ab", "a1b1", "1ab"]
    assert len({keys(Message("user", text), AssistantTurn(), rules=(number,))[0] for text in texts}) == len(texts)
    assert keys(Message("user", "a1b"), AssistantTurn(), rules=(number,)) == keys(
        Message("user", "a22b"), AssistantTurn(), rules=(number,)
    )


@pytest.mark.parametrize(
    "line",
    [
        "Today's date: 2026-11-30",
        "Today's date: 11/30/2026",
        "Today's date: Mon, Nov 30 2026",
        "Today's date: Monday, November 30, 2026",
    ],
)
def test_a_date_line_may_change_while_a_rollout_runs(line: str) -> None:
    recorded = after_system(Message("system", "<env>\nOS: linux\nToday's date: 2026-11-29\n</env>"))
    echo = after_system(Message("system", f"<env>\nOS: linux\n{line}\n</env>"))
    assert recorded.turn_keys == echo.turn_keys
    assert recorded.normalized == echo.normalized == ("current_date",)


def test_dates_elsewhere_count() -> None:
    for text in ("Release date: {}", "Today's date: {} (in Paris)", "Q due {}"):
        message, other = (Message("user", text.format(day)) for day in ("2026-11-29", "2026-11-30"))
        assert after_system(message).turn_keys != after_system(other).turn_keys
    message, other = (Message("system", f"Release date: 2026-11-{day}") for day in (29, 30))
    assert after_system(message).turn_keys != after_system(other).turn_keys


def test_rules_are_named_configurable_and_reported_when_they_fire() -> None:
    session = NormalizationRule("session", r"session=(?P<volatile>\w+)", roles=("user",))
    fingerprinter = Fingerprinter((session, BILLING_HEADER))
    prints = [
        fingerprinter.fingerprint(
            Conversation((billed(nonce), Message("user", f"session={nonce} go"), AssistantTurn()))
        )
        for nonce in ("aa", "bb")
    ]
    assert prints[0].turn_keys == prints[1].turn_keys
    assert prints[0].normalized == ("session", "billing_header")
    assert keys(billed("aa"), AssistantTurn(), rules=()) != keys(billed("bb"), AssistantTurn(), rules=())


def test_overlapping_rules_leave_out_what_the_earlier_match_says() -> None:
    word = NormalizationRule("word", r"(?P<volatile>[a-z]+)", roles=("user",))
    pair = NormalizationRule("pair", r"(?P<volatile>[a-z]+ [a-z]+)", roles=("user",))
    print_ = Fingerprinter((word, pair)).fingerprint(Conversation((Message("user", "one two"), AssistantTurn())))
    assert print_.normalized == ("word",)


@pytest.mark.parametrize("pattern", ["(", "date: .*"])
def test_a_rule_that_cannot_work_says_so(pattern: str) -> None:
    with pytest.raises(ConfigError, match="'mine'"):
        NormalizationRule("mine", pattern)
    with pytest.raises(ConfigError, match="names of their own"):
        Fingerprinter((BILLING_HEADER, BILLING_HEADER))


# --- the previous fingerprint ----------------------------------------------------------------------------------------

short_text = st.sampled_from(["", " ", "a", "b", "a\n", "#0", "x-anthropic-billing-header: cch=1;\nS", "\ud800"])
call_ids = st.sampled_from(["", "c1", "c2", "user", "#0"])
tool_calls = st.builds(ToolCall, call_ids, st.sampled_from(["f", "g"]), st.sampled_from(["", "{}", '{"a":1}', "{"]))
items: st.SearchStrategy[Item] = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user", "c1"]), short_text),
    st.builds(AssistantTurn, short_text, st.lists(tool_calls, max_size=2).map(tuple), short_text),
    st.builds(ToolResult, call_ids, short_text),
)
conversations = st.builds(
    Conversation,
    st.lists(items, max_size=8).map(merge_assistant_turns),
    st.lists(st.sampled_from([READ, WRITE]), max_size=2).map(tuple),
)


@given(conversations, conversations, st.integers(0, 8), st.integers(0, 8), st.sampled_from(["1", "2"]), st.data())
def test_the_previous_fingerprint_never_changes_the_result(
    previous: Conversation, other: Conversation, keep: int, skip: int, nonce: str, data: st.DataObject
) -> None:
    """The request keeps some of the previous one's items, in place, and differs in headers and in the rest."""
    spliced = previous.items[:keep] + other.items[skip:]
    renewed = tuple(
        item._replace(text=item.text.replace("cch=1", f"cch={nonce}")) if isinstance(item, Message) else item
        for item in spliced
    )
    conversation = Conversation(renewed, data.draw(st.sampled_from([previous.tools, other.tools])))
    rules = data.draw(st.sampled_from([DEFAULT_RULES, ()]))
    before = Fingerprinter(rules).fingerprint(previous)
    alone = Fingerprinter().fingerprint(conversation)
    assert Fingerprinter().fingerprint(conversation, before) == alone
    # ...nor does a previous one that was made with a previous one.
    again = Fingerprinter().fingerprint(previous, alone)
    assert Fingerprinter().fingerprint(conversation, again) == alone
    turn = AssistantTurn("next", reasoning="r")
    assert Fingerprinter().fingerprint(conversation, again).key_with(turn) == alone.key_with(turn)


def test_a_previous_fingerprint_under_other_rules_is_of_no_use() -> None:
    conversation = Conversation((billed("cch=1;"), USER, AssistantTurn("A")))
    unruly = Fingerprinter(()).fingerprint(conversation)
    assert Fingerprinter().fingerprint(conversation, unruly) == Fingerprinter().fingerprint(conversation)
    assert unruly.turn_keys != Fingerprinter().fingerprint(conversation, unruly).turn_keys


def test_rules_that_fired_only_on_what_is_gone_are_not_reported() -> None:
    before = Fingerprinter().fingerprint(Conversation((USER, AssistantTurn("A"), billed("cch=1;"))))
    after = Fingerprinter().fingerprint(Conversation((USER, AssistantTurn("A"), Message("user", "B"))), before)
    assert (before.normalized, after.normalized) == (("billing_header",), ())


@given(conversations)
def test_the_key_of_a_generated_turn_is_the_key_of_its_echo(conversation: Conversation) -> None:
    turn = AssistantTurn("next", (ToolCall("c9", "f", "{}"),), "r")
    generated = Fingerprinter().fingerprint(conversation).key_with(turn)
    echo = Conversation(merge_assistant_turns((*conversation.items, turn)), conversation.tools)
    assert Fingerprinter().fingerprint(echo).turn_keys[-1] == generated


@given(conversations)
def test_the_next_request_says_which_request_its_latest_turn_answers(conversation: Conversation) -> None:
    asked = Fingerprinter().fingerprint(conversation)
    turn = AssistantTurn("a reply")
    if isinstance(conversation.items[-1] if conversation.items else None, AssistantTurn):
        assert asked.request_key == "", "what is generated goes on with a turn, and is no answer of its own"
        return
    echo = Conversation((*conversation.items, turn, USER), conversation.tools)
    assert Fingerprinter().fingerprint(echo, asked).latest_answer == (asked.request_key, asked.key_with(turn))
    assert Fingerprinter().fingerprint(conversation).request_key == asked.request_key != ""


def test_a_request_without_turns_answers_nothing() -> None:
    assert Fingerprinter().fingerprint(Conversation((USER,))).latest_answer is None


def test_fingerprints_travel_between_processes() -> None:
    conversation = Conversation((billed("cch=1;"), USER, calling("{}"), ToolResult("call_1", "1"), AssistantTurn("A")))
    fingerprint = Fingerprinter().fingerprint(conversation)
    assert pickle.loads(pickle.dumps(fingerprint)) == fingerprint
