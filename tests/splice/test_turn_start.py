"""Where the generation prompt begins, whatever came before it."""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.conversation import AssistantTurn, Conversation, Message, ToolCall, ToolResult
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from gym_capture.splice.splicer import full_prompt
from gym_capture.splice.template import TemplateError
from gym_capture.splice.turn_start import turn_start

ASKED = Message("user", "hi</think>")
THOUGHT = AssistantTurn("answer", (), "thought </think>")
CALLED = AssistantTurn("", (ToolCall("c1", "f", "{}"),))


@pytest.fixture(scope="module")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


@pytest.mark.parametrize("items", [(ASKED,), (ASKED, THOUGHT, ASKED)])
def test_ST_12_it_is_what_the_template_adds(
    template: HfChatTemplate, items: tuple[Message | AssistantTurn, ...]
) -> None:
    conversation = Conversation(items)
    prompt = full_prompt(template, conversation)
    start = turn_start(template, conversation, prompt)
    assert template.decode(prompt[start:]) == "<|im_start|>assistant\n"
    # However what is before it came about.
    other = np.concatenate((prompt[:5], prompt))
    assert turn_start(template, conversation, other) == (start or 0) + 5


class Written(HfChatTemplate):
    """Writes what it is told to."""

    prompted = plain = ""

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        if not add_generation_prompt and self.plain == "raise":
            raise TemplateError("no")
        return self.prompted if add_generation_prompt else self.plain


@pytest.mark.parametrize(
    ("prompted", "plain", "found"),
    [
        ("one two three", "one two", " three"),
        ("one two three", "one two<|im_end|>", " three"),  # closed where nothing follows
        ("one two", "one two", ""),
        ("one two", "raise", None),
        ("one unlike the prompt", "one", None),
    ],
)
def test_what_a_template_may_write(prompted: str, plain: str, found: str | None) -> None:
    template = Written.from_model_dir(tiny_dir())
    template.prompted, template.plain = prompted, plain
    prompt = template.encode("one two three" if "three" in prompted else "one two")
    start = turn_start(template, Conversation((ASKED,)), prompt)
    assert (None if start is None else template.decode(prompt[start:])) == found


def test_a_turn_that_goes_on_after_tool_results_begins_where_it_began() -> None:
    template = Written.from_model_dir(tiny_dir())
    template.prompted = template.plain = "one two"
    prompt = template.encode("one two")
    assert turn_start(template, Conversation((ASKED, CALLED, ToolResult("c1", "r"))), prompt) is None
