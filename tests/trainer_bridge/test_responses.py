"""What goes out as a Responses object is one by OpenAI's own types, whatever the records lacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)

from gym_capture.capture.record_fields import with_values
from gym_capture.conversation import AssistantTurn, ToolCall
from gym_capture.output_items import output_items
from tests.rollout_strategies import snapshot_of
from trainer_bridge.nemo_rl import project
from trainer_bridge.responses import response_item

from .test_nemo_rl import CALL_A, CALL_B, finished

TURN = AssistantTurn(
    reasoning="Two and two.",
    text="So it is 4.",
    tool_calls=(ToolCall(id="call_1", name="add", arguments='{"n":1}'),),
)


def validated(response: dict[str, Any]) -> Response:
    """Strictly, as a reader of JSON would: the item with ids is one of its kind with more fields."""
    return Response.model_validate(response)


def test_RO_01_items_and_response_validate_as_openais_own_types() -> None:
    items, carrier = output_items(TURN)
    call = with_values(CALL_A, output_items=items, token_item_index=carrier)
    response = validated(project(finished(snapshot_of([call])), created_at=5.0)["response"])
    assert response.created_at == 5.0
    reasoning, message, tool_call = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert [part.text for part in reasoning.summary] == ["Two and two."]
    assert isinstance(message, ResponseOutputMessage)
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    (content,) = message.content
    assert isinstance(content, ResponseOutputText)
    assert (content.text, content.annotations) == ("So it is 4.", [])
    assert isinstance(tool_call, ResponseFunctionToolCall)
    assert (tool_call.name, tool_call.arguments, tool_call.call_id) == ("add", '{"n":1}', "call_1")
    assert len({reasoning.id, message.id, tool_call.id}) == 3
    assert response.output_text == "So it is 4."


@pytest.mark.parametrize("items", [(), ({"role": "assistant", "content": "said"},), ({"type": "reasoning"},)])
def test_RO_01_whatever_the_records_lack(items: tuple[dict[str, Any], ...]) -> None:
    call = with_values(CALL_A, output_items=items, token_item_index=None)
    record = project(finished(snapshot_of([call])))
    validated(record["response"])
    (item,) = record["response"]["output"]
    assert item["generation_token_ids"] == [3, 9]


def test_a_rollout_of_which_nothing_is_known_has_a_response_that_validates() -> None:
    validated(project(finished(snapshot_of([])))["response"])


def test_what_was_cut_off_says_so() -> None:
    cut = with_values(CALL_B, finish_reason="length", parent=None)
    response = validated(project(finished(snapshot_of([cut])))["response"])
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


def test_what_a_record_says_is_left_alone() -> None:
    said = {
        "type": "message",
        "id": "msg_own",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "x", "annotations": [{"type": "file_path"}]}],
        "phase": "final_answer",
    }
    assert response_item(said, call_id="c", position=0) == said
    thought = {"type": "reasoning", "id": "rs_own", "summary": [{"type": "summary_text", "text": "short"}]}
    assert response_item(thought, call_id="c", position=0) == thought
    search = {"type": "web_search_call", "id": "ws", "status": "completed"}
    assert response_item(search, call_id="c", position=0) == search


def test_the_ids_on_an_item_are_those_that_were_sampled() -> None:
    items, carrier = output_items(TURN)
    call = with_values(CALL_A, output_items=items, token_item_index=carrier)
    output = project(finished(snapshot_of([call])))["response"]["output"]
    assert [item.get("generation_token_ids") for item in output] == [None, None, [3, 9]]
    assert output[2]["generation_log_probs"] == np.array([-0.5, -0.25], dtype=np.float32).tolist()
