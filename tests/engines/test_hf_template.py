"""Real templates and tokenizers: what vLLM renders, and what is found out about a template.

The chat templates are the ones that the `trl` package ships, on tokenizers made for them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template

from gym_capture.commands.audit_template import make_tokenizer, on_made_tokenizer
from gym_capture.conversation import AssistantTurn, Conversation, Message, ToolCall, ToolResult
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.errors import ConfigError
from gym_capture.splice.splicer import Spliced, full_prompt, splice
from gym_capture.splice.template import TemplateError
from tests.made_templates import (
    ASK,
    CALL,
    CALLS,
    NINE_CHARACTER_IDS,
    REPLY,
    RESULT,
    TEMPLATES,
    TOLD,
    TOOL,
    openai_message,
)

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


def vllm_keeps_all(tokenizer: Any, source: str, conversation: Conversation) -> bool:
    """Whether vLLM's rendering has every message, in order, and a late one changes nothing that is before it."""

    def rendering(numbers: list[int]) -> str:
        items = [
            item._replace(text=f"word{n}.") if isinstance(item, Message) else item
            for n, item in enumerate(conversation.items)
        ]
        return vllm_rendering(tokenizer, source, conversation._replace(items=tuple(items[n] for n in numbers))) or ""

    numbers = list(range(len(conversation.items)))
    said = [n for n in numbers if isinstance(conversation.items[n], Message)]
    text = rendering(numbers)
    places = [text.find(f"word{n}.") for n in said]
    late = [n for n in said if n and n - 1 not in said and conversation.items[n] == TOLD]
    return (
        -1 not in places
        and places == sorted(places)
        and all(
            text.partition(f"word{n + 1}.")[0].startswith(rendering([*numbers[:n], n + 1]).partition(REPLY.text)[0])
            for n in late
        )
    )


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
            if not vllm_keeps_all(tokenizer, source, conversation):
                continue  # what it loses or moves, we do not
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
    with pytest.raises(TemplateError, match="must alternate") as caught:
        on_made_tokenizer(TEMPLATES["gemma"]).render(Conversation((ASK, ASK)), add_generation_prompt=True)
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
