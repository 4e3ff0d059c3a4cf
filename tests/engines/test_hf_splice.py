"""Chains of splices on real templates and tokenizers, and a peer that continues turns by hand-written rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import configs, create_renderer

from gym_capture.commands.audit_template import make_tokenizer, on_made_tokenizer
from gym_capture.conversation import AssistantTurn, Conversation, Message, ToolResult
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from gym_capture.splice.audit import SHAPES, Shape, sampled
from gym_capture.splice.splicer import Spliced, full_prompt, splice
from tests.made_templates import (
    ASK,
    CALL,
    CALLS,
    REPLY,
    RESULT,
    TEMPLATES,
    TOLD,
    TOOL,
    made,
    on_made_tokenizer_once,
    openai_message,
)

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


def test_a_later_system_message_that_a_template_would_move_to_the_top_stays_behind_the_turn() -> None:
    template = on_made_tokenizer(TEMPLATES["deepseekv3"])
    parent_ids = np.append(full_prompt(template, Conversation((ASK,))), template.encode("Rain."))
    request = Conversation((ASK, REPLY, Message("system", "Be brief."), ASK))
    result = splice(template, request, turn=0, parent_ids=parent_ids)
    assert isinstance(result, Spliced)
    assert "<｜User｜>Be brief." in template.decode(result.ids[parent_ids.size :])


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
