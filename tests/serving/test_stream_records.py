"""What is on record of streams whose text says less than their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.calls import ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import Script, Step, in_order
from tests.serving.replica import Replica, streamed_text

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_ST_01_tokens_of_which_a_parser_says_nothing_are_recorded(template: HfChatTemplate, stream: bool) -> None:
    called = [ToolCallStart(0, "c", "f"), ToolCallDelta(0, "{}")]
    script = Script(
        steps=[
            Step(token_ids=[151657], log_probs=[-0.1], events=[]),
            Step(token_ids=[198], log_probs=[-0.2], events=[]),
            Step(token_ids=[4913, 606], log_probs=[-0.3, -0.4], events=called),
            Step(token_ids=[151658], log_probs=[-0.5], events=[]),
            Step(token_ids=[151645], log_probs=[-0.6], events=[]),
        ]
    )

    replica = Replica(template, lambda _: script)
    await replica.chat(USER, stream=stream)
    (entry,) = await replica.state.entries()
    assert entry.generation_token_ids.tolist() == [151657, 198, 4913, 606, 151658, 151645]
    np.testing.assert_array_equal(entry.generation_log_probs, np.float32([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]))


async def test_ST_06_a_character_split_over_tokens_is_streamed_whole_and_recorded_in_parts(
    template: HfChatTemplate,
) -> None:
    ids = template.encode_plain(" 😀!").tolist()
    assert len(ids) == 3
    steps = [
        Step(token_ids=ids[:1], log_probs=[-1], text=""),
        Step(token_ids=ids[1:2], log_probs=[-2], text=" 😀"),
        Step(token_ids=ids[2:], log_probs=[-3], text="!"),
    ]

    replica = Replica(template, lambda _: Script(steps=steps))
    response = await replica.chat(USER, stream=True)
    assert "\ufffd" not in response.content.decode("utf-8")
    assert streamed_text(response) == " 😀!"
    (entry,) = await replica.state.entries()
    assert entry.generation_token_ids.tolist() == ids
    assert entry.generation_log_probs.tolist() == [-1, -2, -3]


@pytest.mark.parametrize("text", ["", " ", " \ufffd"])
async def test_ST_06_a_turn_cut_inside_a_character_is_continued_exactly(template: HfChatTemplate, text: str) -> None:
    first = template.encode_plain(" 😀!").tolist()[:1]
    cut = Script(steps=[Step(token_ids=first, text=text)], finish_reason="length")
    later = Script(steps=[Step(token_ids=[5], text="ok")])

    replica = Replica(template, in_order([cut, later]))
    said = streamed_text(await replica.chat(USER, stream=True))
    assert said == text
    again = {"role": "user", "content": "go on"}
    await replica.chat(USER, {"role": "assistant", "content": said}, again, stream=True)
    one, two = await replica.state.entries()
    assert one.generation_token_ids.tolist() == first
    assert isinstance(two.parent, Continues)
    assert two.parent.call_id == one.model_call_id
    parent = one.cumulative_ids()
    np.testing.assert_array_equal(two.prompt_token_ids[: parent.size], parent)
