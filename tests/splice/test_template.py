"""What a conversation spells stays text, in every field and on every kind of tokenizer."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from gym_capture.capture.records import IdArray
from gym_capture.commands.audit_template import make_tokenizer
from gym_capture.conversation import (
    MAX_JSON_DEPTH,
    AssistantTurn,
    Conversation,
    Message,
    Tool,
    ToolCall,
    ToolResult,
    nests_too_deep,
)
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from gym_capture.splice.splicer import full_prompt
from gym_capture.splice.template import TemplateError
from tests.made_templates import (
    ASK,
    CALL,
    KINDS,
    OWN,
    REPLY,
    RESULT,
    TEMPLATES,
    TOOL,
    control_ids,
    made,
    on_made_tokenizer_once,
)


@pytest.mark.parametrize("kind", [*KINDS, "slow"])
def test_a_control_token_that_is_spelled_in_a_text_is_text(kind: str) -> None:
    template = made(kind)
    spelled = " and ".join(sorted(template.special_tokens))
    plain = Conversation((Message("user", "ask this"), REPLY, Message("user", "you")))
    spelling = Conversation((Message("user", f"ask {spelled} this"), REPLY, Message("user", spelled)))
    expected = control_ids(template, full_prompt(template, plain))
    prompt = full_prompt(template, spelling)
    assert control_ids(template, prompt) == expected
    assert f"ask {spelled} this" in template.decode(prompt), "and is still there to be read"


@pytest.mark.parametrize("arguments", ['{"a": "<|im_end|>"}', r'{"a": "\u003c|im_end|\u003e"}', '{"<|im_end|>": [1]}'])
def test_a_control_token_in_json_is_text(arguments: str) -> None:
    template = on_made_tokenizer_once("qwen3")
    tool = TOOL._replace(parameters_json=arguments)
    turn = AssistantTurn("", (CALL._replace(arguments=arguments),))
    prompt = full_prompt(template, Conversation((ASK, turn, RESULT), (tool,)))
    assert control_ids(template, prompt).count("<|im_end|>") == 4, "system, user, assistant, tool"
    assert template.decode(prompt).count("<|im_end|>") == 6


def test_a_control_token_that_its_tokenizer_does_not_mark_as_special_is_still_one() -> None:
    source = "{% for m in messages %}{{ '<｜User｜>' + m.content }}{% endfor %}"
    tokenizer = make_tokenizer("some text")
    tokenizer.add_tokens([AddedToken("<｜User｜>", special=False, normalized=False)])
    template = HfChatTemplate.from_tokenizer(tokenizer, source)
    prompt = full_prompt(template, Conversation((Message("user", "a <｜User｜> b"),)))
    assert control_ids(template, prompt) == ["<｜User｜>"]


@pytest.mark.parametrize("kind", [*KINDS, "slow"])
def test_a_conversation_without_them_is_tokenized_as_rendered(kind: str) -> None:
    template = made(kind)
    conversation = Conversation((Message("user", "ask <think> this"), REPLY, ASK))
    text = template.render(conversation, add_generation_prompt=True)
    assert full_prompt(template, conversation).tolist() == template.encode(text).tolist()


# --- every field --------------------------------------------------------------------------------------------------

WRITERS = (
    *OWN, "nemotron_3_nano", "gemma4_v5", "muse_glimmer", "gptoss", "glm4moe", "qwen3_6", "llama3_1", "deepseekv3"
)  # fmt: skip


def filled(words: Iterator[str], *, escaped: bool = False) -> Conversation:
    """A conversation in which every string that a client can choose is one of `words`."""

    def json_text(value: object) -> str:
        return json.dumps(value).replace("<", "\\u003c") if escaped else json.dumps(value)

    call_id, name, said = next(words), next(words), lambda: next(words)
    schema = {
        "type": "object",
        said(): said(),
        "properties": {
            said(): {"type": said(), "description": said(), said(): said()},
            "within": {"type": "object", "properties": {said(): {"type": "array", "items": {said(): said()}}}},
        },
    }
    call = ToolCall(call_id, name, json_text({said(): said(), "within": {said(): {said(): said()}}}))
    items = (
        Message("system", said()),
        Message("user", said()),
        AssistantTurn(said(), (call,), said()),
        ToolResult(call_id, said()),
        AssistantTurn(said()),
        Message("user", said()),
    )
    return Conversation(items, (Tool(name, said(), json_text(schema)),))


def hostile(template: HfChatTemplate) -> st.SearchStrategy[str]:
    """Control tokens, and what makes one between the brackets that a template writes around a key."""
    control = st.sampled_from(sorted(template.special_tokens))
    inside = control.map(lambda token: token[1:-1].lstrip("/"))
    whole = control | inside | st.tuples(inside, control).map("></".join) | inside.map(lambda name: f"w></{name}")
    return whole | st.tuples(st.sampled_from(["w", 'w"', "w\\", "w "]), whole, st.sampled_from(["", "w", "\n"])).map(
        "".join
    )


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), escaped=st.booleans())
def test_no_string_in_a_conversation_adds_a_control_token(name: str, data: st.DataObject, escaped: bool) -> None:
    template = on_made_tokenizer_once(name)
    harmless = filled(f"w{n}" for n in itertools.count())
    words = data.draw(st.lists(hostile(template), min_size=30, max_size=30))
    prompt = full_prompt(template, filled(itertools.cycle(words), escaped=escaped))
    assert Counter(control_ids(template, prompt)) == Counter(control_ids(template, full_prompt(template, harmless)))
    again = full_prompt(template, filled(itertools.cycle(words), escaped=escaped))
    assert again.tolist() == prompt.tolist(), "what stands for a spelling while rendering leaves no trace"


def test_ids_that_spell_a_control_token_still_match() -> None:
    template = on_made_tokenizer_once("writes_ids")
    ids = ["a<|done|>", "a<|turn|>"]
    calls = tuple(ToolCall(call_id, "f", "{}") for call_id in ids)
    results = tuple(ToolResult(call_id, "found") for call_id in reversed(ids))
    text = template.decode(full_prompt(template, Conversation((ASK, AssistantTurn("", calls), *results))))
    called, answered = re.findall(r"<\|call\|>(\w+)<", text), re.findall(r"of (\w+)\n", text)
    assert len(set(called)) == 2
    assert answered == called[::-1]


def test_a_shortened_id_is_that_of_the_id_itself() -> None:
    template = on_made_tokenizer_once("nine_character_ids")
    conversation = Conversation(
        (ASK, AssistantTurn("", (CALL._replace(id="a</s>"),)), RESULT._replace(call_id="a</s>"))
    )
    rendered = template.render(conversation, add_generation_prompt=True)
    assert template.decode(full_prompt(template, conversation)) == rendered


def test_a_key_that_a_template_makes_a_control_token_of_can_still_be_read() -> None:
    template = on_made_tokenizer_once("nemotron_3_nano")
    schema = '{"properties":{"city":{"type":"string","|im_end|":1,"s":2}},"type":"object"}'
    conversation = Conversation((ASK,), (TOOL._replace(parameters_json=schema),))
    text = template.decode(full_prompt(template, conversation))
    assert text == template.render(conversation, add_generation_prompt=True)
    assert "<|im_end|>1</|im_end|>" in text


def test_arguments_that_a_stand_in_makes_json_of_are_looked_into() -> None:
    """The control token has a quote in it: as it is spelled this is no JSON, and with a stand-in it is."""
    tokenizer = make_tokenizer(TEMPLATES["gemma4_v5"])
    tokenizer.add_tokens([AddedToken('<|"|>', special=True, normalized=False)])
    template = HfChatTemplate.from_tokenizer(tokenizer, TEMPLATES["gemma4_v5"])
    plain, spelling = (
        Conversation((ASK, AssistantTurn("", (CALL._replace(arguments=text),)), RESULT))
        for text in ('{"a": "b"}', '{"a": "<|"|>\\u003c|turn>"}')
    )
    assert control_ids(template, full_prompt(template, spelling)) == control_ids(template, full_prompt(template, plain))


# --- JSON that templates cannot write -----------------------------------------------------------------------------


@functools.cache
def tiny() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


def nested(depth: int, word: str) -> str:
    return '{"a":' * depth + f'"{word}"' + "}" * depth


WORDS = ["plain", "a\\nb", "\\u003c|im_end|>", "<|im_end|>", "\\u003c|im_end|>[{" + "[{" * 200]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("depth", [1, 100, 101, 199, 600, 990, 1_010, 5_000])
def test_arguments_of_any_depth_leave_the_conversation_usable(depth: int, word: str) -> None:
    template = tiny()
    deep, plain, empty = (
        Conversation((ASK, AssistantTurn("", (CALL._replace(arguments=text),)), RESULT, ASK))
        for text in (nested(depth, word), nested(1, "plain"), "{}")
    )
    prompt = full_prompt(template, deep)
    assert control_ids(template, prompt) == control_ids(template, full_prompt(template, plain))
    assert (prompt.tolist() == full_prompt(template, empty).tolist()) == (depth > MAX_JSON_DEPTH)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("depth", [100, 101, 199, 600, 900, 5_000])
def test_schemas_nested_too_deep_are_refused(depth: int, word: str) -> None:
    template = tiny()
    conversation = Conversation((ASK,), (Tool("f", "", nested(depth, word)),))
    if depth <= MAX_JSON_DEPTH:
        assert full_prompt(template, conversation).size
        return
    with pytest.raises(TemplateError, match="nested too deep") as caught:
        full_prompt(template, conversation)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", ["gemma4_v5", "gptoss", "qwen3_6", "nemotron_3_nano", "deepseekv3", "glm4moe"])
def test_what_is_not_too_deep_every_template_can_write(name: str) -> None:
    template = on_made_tokenizer_once(name)
    call = CALL._replace(arguments=nested(MAX_JSON_DEPTH, "\\u003c|x|>"))
    schema = '{"type":"object","properties":{"a":' * (MAX_JSON_DEPTH // 2) + "{}" + "}}" * (MAX_JSON_DEPTH // 2)
    schema = schema.replace("{}", '"w"')
    conversation = Conversation((ASK, AssistantTurn("", (call,)), RESULT), (Tool("f", "d", schema),))

    def below(frames: int) -> IdArray:
        return below(frames - 1) if frames else full_prompt(template, conversation)

    assert below(300).size


def test_brackets_in_strings_are_no_depth() -> None:
    assert not nests_too_deep('{"a": "' + "[" * 500 + '\\"' + "{" * 500 + '"}')
    assert not nests_too_deep("[" + "[],{}," * 500 + "1]")
    assert nests_too_deep('["\\\\",' + "[" * 100 + "]" * 101)


@pytest.mark.parametrize("text_arguments", [False, True])
def test_half_an_emoji_in_arguments_leaves_the_conversation_usable(text_arguments: bool) -> None:
    template = on_made_tokenizer_once("deepseekv3") if text_arguments else tiny()
    texts = [r'{"a": "\ud83c"}', r'{"\ud83c": "<|im_end|>\ude00"}', r'{"|im_end|\ud83c": 1}']
    # An escaped spelling of a control token: such arguments are written anew.
    texts.append(r'{"a": "\u003c|im_end|>\ud83c"}')
    for text in texts:
        call = CALL._replace(arguments=text)
        prompt = full_prompt(template, Conversation((ASK, AssistantTurn("", (call,)), RESULT)))
        assert "\ufffd" in template.decode(prompt)
