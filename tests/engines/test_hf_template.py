"""Real templates and tokenizers: what vLLM renders, what stays text, and chains of splices.

The chat templates are the ones that the `trl` package ships, on tokenizers made for them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import configs, create_renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizer, PreTrainedTokenizerFast
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template

from gym_capture.audit import SHAPES, Shape, sampled
from gym_capture.commands.audit_template import make_tokenizer, on_made_tokenizer, shipped_templates
from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.errors import ConfigError
from gym_capture.models import tiny_dir
from gym_capture.records import IdArray
from gym_capture.splice import NotSpliced, Spliced, full_prompt, splice
from gym_capture.template import TemplateError

TEMPLATES = shipped_templates()

ASK = Message("user", " How is the weather?\n")
REPLY = AssistantTurn("Rain.")
CALL = ToolCall("call_1", "get_weather", '{"city": "Bergen", "days": [1, 2.50], "note": "ø <b>"}')
CALLS = AssistantTurn("", (CALL,))
RESULT = ToolResult("call_1", '{"sky": "grey"}')
TOOL = Tool("get_weather", "Looks it up.", '{"properties":{"city":{"type":"string"}},"type":"object"}')


# --- the same as vLLM ---------------------------------------------------------------------------------------------


def vllm_rendering(tokenizer: Any, source: str, conversation: Conversation) -> str | None:
    """What vLLM's own chat endpoint would make of the conversation; None if it refuses."""
    config: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    try:
        messages, _, _ = parse_chat_messages(
            [openai_message(item) for item in conversation.items],
            config,
            _detect_content_format(source, default="string"),
        )
        return safe_apply_chat_template(
            config,
            tokenizer,
            messages,
            tools=[tool.as_openai() for tool in conversation.tools] or None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
        )
    except VLLMValidationError:
        return None


def openai_message(item: Item) -> Any:
    match item:
        case Message(role, text):
            return {"role": role, "content": text}
        case ToolResult(call_id, text):
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case AssistantTurn(text, calls, reasoning):
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if reasoning:
                message["reasoning"] = reasoning
            if calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in calls
                ]
            return message


TOLD = Message("system", "Be brief.")
CONVERSATIONS = {
    "one question": (ASK,),
    "system": (TOLD, ASK, REPLY, ASK),
    "two systems": (TOLD, TOLD, ASK),
    "developer": (Message("developer", "Be brief."), ASK),
    "system later": (ASK, REPLY, TOLD, ASK),
    "call": (TOLD, ASK, CALLS, RESULT),
    "text and call": (ASK, CALLS._replace(text="Let me see."), RESULT, AssistantTurn("Grey."), ASK),
    "two calls": (
        ASK,
        AssistantTurn("", (CALL, CALL._replace(id="call_2"))),
        RESULT,
        RESULT._replace(call_id="call_2"),
    ),
    "calls that are no objects": (
        ASK,
        AssistantTurn("", tuple(ToolCall(f"c{n}", "f", text) for n, text in enumerate(("{oops", "[1]", "", "null")))),
        *(ToolResult(f"c{n}", "no") for n in range(4)),
    ),
    "empty turn": (ASK, AssistantTurn(), ASK),
    "ends with the assistant": (ASK, REPLY),
    "reasoning": (ASK, REPLY._replace(reasoning="Hm."), ASK),
    "reasoning and call": (ASK, CALLS._replace(reasoning="Hm."), RESULT),
}
READ_FROM_THINKING = {"gptoss", "gptoss_training", "lfm2_2_5"}
"""They read reasoning from a field that vLLM does not fill, and would lose it."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_vllm_renders(name: str) -> None:
    source = TEMPLATES[name]
    tokenizer = make_tokenizer(source)
    template = HfChatTemplate.from_tokenizer(tokenizer, source)
    n_rendered = 0
    for title, items in CONVERSATIONS.items():
        if name in READ_FROM_THINKING and title.startswith("reasoning"):
            continue
        for tools in ((), (TOOL,)):
            conversation = Conversation(items, tools)
            expected = vllm_rendering(tokenizer, source, conversation)
            if expected is None:
                continue  # what it refuses, we may refuse or render
            n_rendered += 1
            assert template.render(conversation, add_generation_prompt=True) == expected, title
    assert n_rendered >= 8


def test_developer_messages_stay_where_they_were_said() -> None:
    """vLLM moves them to the top, which changes every id that a conversation already has."""
    template = on_made_tokenizer(TEMPLATES["qwen3"])
    conversation = Conversation((ASK, REPLY, Message("developer", "Be brief."), ASK))
    text = template.render(conversation, add_generation_prompt=True)
    assert text.index("Rain.") < text.index("<|im_start|>system\nBe brief.")


def test_a_system_message_in_the_middle_becomes_a_user_message_where_the_template_refuses_it() -> None:
    template = on_made_tokenizer(TEMPLATES["qwen3_6"])
    text = template.render(Conversation((TOLD, TOLD, ASK, REPLY, TOLD, ASK)), add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nBe brief.<|im_end|>")
    assert text.count("<|im_start|>system") == 1
    assert "<|im_start|>user\nBe brief.<|im_end|>" in text


def test_reasoning_reaches_templates_that_call_it_thinking() -> None:
    template = on_made_tokenizer(TEMPLATES["gptoss"])
    turn = CALLS._replace(reasoning="Hm, weather.")
    assert "Hm, weather." in template.render(Conversation((ASK, turn, RESULT)), add_generation_prompt=True)
    template.render(Conversation((ASK, turn._replace(text="Let me see."), RESULT)), add_generation_prompt=True)


def test_arguments_are_text_where_the_template_joins_them_to_text() -> None:
    template = on_made_tokenizer(TEMPLATES["deepseekv3"])
    text = template.render(Conversation((ASK, CALLS, RESULT)), add_generation_prompt=True)
    assert '{"city": "Bergen", "days": [1, 2.5], "note": "ø <b>"}' in text


NINE_CHARACTER_IDS = """
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id|length != 9 %}{{ raise_exception('Tool call IDs must be 9 characters') }}{% endif %}
{{- '<|result|>' + message.tool_call_id + ' ' + message.content }}
{%- else %}
{{- '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if call.id|length != 9 %}{{ raise_exception('Tool call IDs must be 9 characters') }}{% endif %}
{{- call.id + ' ' + call.function.name + ' ' + call.function.arguments|tojson }}
{%- endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endif %}
{%- endfor %}"""


def test_call_ids_are_shortened_where_the_template_wants_nine_characters() -> None:
    template = on_made_tokenizer(NINE_CHARACTER_IDS)
    long_id, short_id = CALL.id * 3, "abcDEF123"
    turn = AssistantTurn("", (CALL._replace(id=long_id), CALL._replace(id=short_id)))
    conversation = Conversation((ASK, turn, ToolResult(long_id, "a"), ToolResult(short_id, "b")))
    text = template.render(conversation, add_generation_prompt=True)
    shortened = text.partition("<|assistant|>")[2][:9]
    assert text.count(shortened) == 2
    assert text.count(short_id) == 2
    parent_ids = np.append(full_prompt(template, Conversation((ASK,))), template.encode("a call</s>"))
    assert isinstance(splice(template, conversation, turn=0, parent_ids=parent_ids), Spliced)


def test_a_refusal_carries_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match="System role not supported") as caught:
        on_made_tokenizer(TEMPLATES["gemma"]).render(Conversation((TOLD, ASK)), add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_template_arguments_go_to_every_rendering() -> None:
    thinking, other = (on_made_tokenizer(TEMPLATES["qwen3"], enable_thinking=value) for value in (True, False))
    conversation = Conversation((ASK,))
    assert not thinking.render(conversation, add_generation_prompt=True).endswith("</think>\n\n")
    assert other.render(conversation, add_generation_prompt=True).endswith("</think>\n\n")


# --- configuration ------------------------------------------------------------------------------------------------


def test_a_model_folder_has_the_template_and_the_stop_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(TEMPLATES["llama3_1"] + "<|eom_id|>")
    tokenizer.chat_template = TEMPLATES["llama3_1"]
    tokenizer.save_pretrained(tmp_path)
    assert HfChatTemplate.from_model_dir(tmp_path).stop_tokens == {"</s>", "<|eot_id|>"}
    ends = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
    template = HfChatTemplate.from_model_dir(tmp_path)
    assert template.stop_tokens == {"</s>", "<|eot_id|>", "<|eom_id|>"}
    parent_ids = np.append(full_prompt(template, Conversation((ASK,), (TOOL,))), template.encode("a call<|eom_id|>"))
    result = splice(template, Conversation((ASK, CALLS, RESULT), (TOOL,)), turn=0, parent_ids=parent_ids)
    assert isinstance(result, Spliced)
    assert template.decode(result.ids[parent_ids.size :]).startswith("<|start_header_id|>ipython")


def test_what_cannot_work_is_a_config_error(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("nothing")
    with pytest.raises(ConfigError, match="no chat template"):
        HfChatTemplate.from_tokenizer(tokenizer)
    with pytest.raises(ConfigError, match="line 2"):
        HfChatTemplate.from_tokenizer(tokenizer, "fine\n{% if %}")
    with pytest.raises(ConfigError, match="not a folder"):
        HfChatTemplate.from_model_dir(tmp_path / "nowhere")


def test_of_several_named_templates_the_one_for_tools_is_taken() -> None:
    tokenizer = make_tokenizer(TEMPLATES["qwen3"])
    tokenizer.chat_template = {"default": "no tools here", "tool_use": TEMPLATES["qwen3"]}
    template = HfChatTemplate.from_tokenizer(tokenizer)
    assert template.render(Conversation((ASK,)), add_generation_prompt=True).startswith("<|im_start|>user")


def test_the_users_tokenizer_is_left_alone() -> None:
    tokenizer = make_tokenizer(TEMPLATES["qwen3"])
    template = HfChatTemplate.from_tokenizer(tokenizer, TEMPLATES["qwen3"])
    text = "<|im_start|>user\nhello<|im_end|>"
    before = tokenizer(text, truncation=True, max_length=3)["input_ids"]
    assert template.encode_plain(text).size > template.encode(text).size > len(before)
    assert tokenizer(text, truncation=True, max_length=3)["input_ids"] == before


# --- what stays text ----------------------------------------------------------------------------------------------


def metaspace_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Of the SentencePiece kind: a text's first word is tokenized unlike its others, and `</s>` swallows whitespace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    characters = sorted({*source, *map(chr, range(32, 127)), "\n", "▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", "<s>"], initial_alphabet=characters, show_progress=False
    )
    tokenizer.train_from_iterator([source], trainer)
    tokenizer.add_special_tokens([AddedToken("</s>", rstrip=True, normalized=False), "[INST]", "[/INST]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


INSTRUCTIONS = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ message.content + eos_token + '\n' }}
{%- else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""


class CharacterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python that parses special tokens whatever one asks for."""

    def __init__(self, **kwargs: Any) -> None:
        self._characters = [chr(n) for n in range(256)]
        super().__init__(eos_token="</s>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return {character: n for n, character in enumerate(self._characters)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return super().tokenize(text, **{**kwargs, "split_special_tokens": False})


def control_ids(template: HfChatTemplate, ids: IdArray) -> list[str]:
    texts = [template.decode(np.asarray([n], dtype=np.int32)) for n in ids.tolist()]
    return [text for text in texts if text in template.special_tokens]


def made(kind: str) -> HfChatTemplate:
    if kind == "slow":
        return HfChatTemplate.from_tokenizer(CharacterTokenizer(), INSTRUCTIONS)
    if kind == "metaspace":
        return HfChatTemplate.from_tokenizer(metaspace_tokenizer(INSTRUCTIONS + " ask you"), INSTRUCTIONS)
    return on_made_tokenizer(TEMPLATES[kind])


KINDS = ("metaspace", "qwen3", "llama3_1", "deepseekv3", "gptoss", "phi3")


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
    template = on_made_tokenizer(TEMPLATES["qwen3"])
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


# --- continuing ---------------------------------------------------------------------------------------------------

STABLE = ("chatml_tools", "qwen2_5", "qwen3_8", "lfm2_2_5", "muse_glimmer", "gemma4_v2", "glm4moe", "qwen3_training")
"""Templates that write history the way it was sampled, so that a splice must equal a rendering."""


def generated(template: HfChatTemplate, history: Conversation, turn: AssistantTurn) -> str:
    """What the template itself writes for a turn: what a model that was trained with it would sample."""
    opened = template.render(history, add_generation_prompt=True)
    said = template.render(history._replace(items=(*history.items, turn)), add_generation_prompt=False)
    assert said.startswith(opened)
    written = said[len(opened) :]
    ends = [written.rfind(stop) + len(stop) for stop in template.stop_tokens if stop in written]
    return written[: max(ends, default=len(written))]


words = st.text(st.sampled_from("ab \n.{}\"'<|>éø€"), min_size=1, max_size=12).map(lambda text: f"w{text}w")
pairs = st.one_of(
    st.tuples(words.map(AssistantTurn), words),
    st.tuples(st.just(CALLS), words),
)


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=40, deadline=None)
@given(exchanges=st.lists(pairs, min_size=1, max_size=4), told=st.booleans())
def test_a_chain_of_splices_equals_the_whole_rendering(
    name: str, exchanges: list[tuple[AssistantTurn, str]], told: bool
) -> None:
    template = on_made_tokenizer_once(name)
    conversation = Conversation((TOLD, ASK) if told else (ASK,), (TOOL,))
    prompt = full_prompt(template, conversation)
    for n, (turn, text) in enumerate(exchanges):
        parent_ids = np.append(prompt, template.encode(generated(template, conversation, turn)))
        answer = ToolResult(CALL.id, text) if turn.tool_calls else Message("user", text)
        conversation = conversation._replace(items=(*conversation.items, turn, answer))
        result = splice(template, conversation, turn=n, parent_ids=parent_ids)
        assert isinstance(result, Spliced), result
        assert result.ids[: parent_ids.size].tolist() == parent_ids.tolist()
        assert result.added_close == 0
        prompt = full_prompt(template, conversation)
        assert result.ids.tolist() == prompt.tolist()


@functools.cache
def on_made_tokenizer_once(name: str) -> HfChatTemplate:
    return on_made_tokenizer(TEMPLATES[name])


@pytest.mark.parametrize("ending", ["</s>", ""])
def test_a_tail_is_tokenized_as_it_would_be_behind_its_parent(ending: str) -> None:
    """Here the sampled `</s>` swallows the newline that follows it, and no word of the tail is a text's first."""
    template = made("metaspace")
    opening = Conversation((Message("user", "ask"),))
    request = Conversation((*opening.items, REPLY, Message("user", "ask you")))
    parent_ids = np.append(full_prompt(template, opening), template.encode(f"[/INST]{REPLY.text}{ending}")[1:])
    result = splice(template, request, turn=0, parent_ids=parent_ids)
    assert isinstance(result, Spliced)
    assert result.ids.tolist() == full_prompt(template, request).tolist()


def test_a_real_vocabulary_is_continued_exactly() -> None:
    template = HfChatTemplate.from_model_dir(tiny_dir())
    turn = AssistantTurn("Let me see: naïve café, 12345 times.\n\n", (CALL,))
    opening = Conversation((TOLD, ASK), (TOOL,))
    request = Conversation((*opening.items, turn, RESULT), (TOOL,))
    parent_ids = np.append(full_prompt(template, opening), template.encode(generated(template, opening, turn)))
    result = splice(template, request, turn=0, parent_ids=parent_ids)
    assert isinstance(result, Spliced)
    assert result.ids.tolist() == full_prompt(template, request).tolist()


def test_a_later_system_message_that_a_template_moves_to_the_top_is_not_spliced() -> None:
    template = on_made_tokenizer(TEMPLATES["deepseekv3"])
    parent_ids = np.append(full_prompt(template, Conversation((ASK,))), template.encode("Rain."))
    request = Conversation((ASK, REPLY, Message("system", "Be brief."), ASK))
    result = splice(template, request, turn=0, parent_ids=parent_ids)
    assert result == NotSpliced("new_item_moved", "item 2")


# --- a peer -------------------------------------------------------------------------------------------------------

PEERS = {
    "qwen3": configs.Qwen3RendererConfig,
    "qwen3_5_think": configs.Qwen35RendererConfig,
    "qwen3_6": configs.Qwen36RendererConfig,
    "qwen3_8": configs.Qwen38RendererConfig,
    "qwen3_vl": configs.Qwen3VLRendererConfig,
    "nemotron_3_nano": configs.Nemotron3RendererConfig,
    "nemotron_3_ultra": configs.Nemotron3UltraRendererConfig,
    "llama3_1": configs.Llama3RendererConfig,
    "gemma4_v5": configs.Gemma4RendererConfig,
}
THEIR_TOKENS = (
    "<|endoftext|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <|eom_id|> "
    "<|begin_of_text|> <|end_of_text|> <|python_tag|> <bos> <eos> <|image|> <|image> <image|> <|audio|> <|audio> "
    "<audio|> <|video|> <|think|> <|vision_start|>"
)


@pytest.mark.parametrize("name", PEERS)
def test_agrees_with_hand_written_renderers(name: str) -> None:
    """`renderers` has a bridge from one turn to the next for some families: each id is the same."""
    source = TEMPLATES[name]
    tokenizer = make_tokenizer(source + THEIR_TOKENS)
    template = HfChatTemplate.from_tokenizer(tokenizer, source)
    peer = create_renderer(tokenizer, PEERS[name](thinking_retention="all"))
    compared = [
        bridged(peer, template, shape) for shape in SHAPES if not (name == "llama3_1" and "parallel" in shape.name)
    ]
    assert sum(compared) >= 8


def bridged(peer: Any, template: HfChatTemplate, shape: Shape) -> bool:
    """Compares one shape; False if the peer does not bridge it."""
    opening = Conversation((TOLD, ASK), (TOOL,))
    request = Conversation((*opening.items, shape.turn, *shape.next), (TOOL,))
    prompt, completion = full_prompt(template, opening), template.encode(sampled(template, shape, opening))
    tools = [TOOL.as_openai()]
    theirs = peer.bridge_to_next_turn(prompt.tolist(), completion.tolist(), peer_messages(shape), tools=tools)
    if theirs is None:
        return False
    ours = splice(template, request, turn=0, parent_ids=np.append(prompt, completion))
    assert isinstance(ours, Spliced), (shape.name, ours)
    assert ours.ids.tolist() == theirs.token_ids, shape.name
    return True


def peer_messages(shape: Shape) -> Sequence[dict[str, Any]]:
    names = {call.id: call.name for call in shape.turn.tool_calls}
    messages = json.loads(json.dumps([openai_message(item) for item in shape.next]))
    return [m | ({"name": names[m["tool_call_id"]]} if m["role"] == "tool" else {}) for m in messages]


@pytest.mark.parametrize(
    ("depth", "word"), [(600, "\\u003c|im_end|>\\n"), (5_000, "\\u003c|im_end|>\\n"), (5_000, "plain")]
)
def test_schemas_nested_too_deep_are_refused(depth: int, word: str) -> None:
    template = HfChatTemplate.from_model_dir(tiny_dir())
    schema = '{"a":' * depth + f'"{word}"' + "}" * depth
    with pytest.raises(TemplateError, match=r"too deep|recursion"):
        full_prompt(template, Conversation((ASK,), (Tool("f", "", schema),)))


def test_arguments_nested_too_deep_leave_the_conversation_usable() -> None:
    template = HfChatTemplate.from_model_dir(tiny_dir())
    call = ToolCall("c", "f", "[" * 5_000 + '"\\n"' + "]" * 5_000)
    assert full_prompt(template, Conversation((ASK, AssistantTurn("", (call,)), ToolResult("c", "x")))).size
