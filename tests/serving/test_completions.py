"""The Completions API as the official SDK has it, and what is on record of its calls."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI, BadRequestError

from gym_capture.capture.records import Root
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import Script, Step
from tests.serving.replica import Replica

SCRIPT = Script(
    steps=[
        Step(token_ids=[5], log_probs=[-0.25], text=" upon"),
        Step(token_ids=[6, 7], log_probs=[-1, -2], text=" a <tool_call>"),
    ],
    finish_reason="length",
)
PROMPT = "Once<|im_end|>"


def sdk(replica: Replica) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url="http://gateway/ng-rollout/r1/v1", api_key="none", max_retries=0, http_client=replica.http
    )


async def test_a_text_is_continued_as_it_is_and_recorded_as_a_root(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: SCRIPT)
    client = sdk(replica)
    whole = await client.completions.create(model="policy", prompt=PROMPT, max_tokens=3, logprobs=1)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" upon a <tool_call>", "length")
    assert whole.id.startswith("cmpl-")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs == [-0.25, -1.0, -2.0]
    stream = await client.completions.create(model="policy", prompt=PROMPT, max_tokens=3, stream=True)
    parts = [part async for part in stream]
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == "length"

    calls = replica.engine.calls
    assert [call.max_tokens for call in calls] == [3, 3]
    for call in calls:
        assert call.request.conversation.items == ()
        # What a user spells like a control token is text.
        assert template.decode(call.prompt_ids) == PROMPT
        assert call.prompt_ids.tolist() != template.encode(PROMPT).tolist()
    entries = await replica.state.entries()
    assert [entry.parent for entry in entries] == [Root(), Root()]
    assert [entry.generation_token_ids.tolist() for entry in entries] == [[5, 6, 7], [5, 6, 7]]
    assert {entry.model_call_id for entry in entries} == {whole.id, parts[0].id}


async def test_what_this_api_does_not_do_is_a_400_that_says_so(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: SCRIPT)
    with pytest.raises(BadRequestError, match="arrays of token ids are refused") as caught:
        await sdk(replica).completions.create(model="policy", prompt=[1, 2, 3])
    assert caught.value.param == "prompt"
    assert replica.engine.calls == []
    assert await replica.state.entries() == ()
