"""The Completions dialect: what bodies mean, and what the official SDK reads in the replies."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from gym_capture.calls import ModelReply, ModelRequest, ReplyEvent, TextDelta, TokenLogProb, TurnBuilder, Usage
from gym_capture.conversation import Conversation
from gym_capture.dialects.base import ApiError, ReplyIdentity
from gym_capture.dialects.completions import DEFAULT_MAX_TOKENS, CompletionsDialect
from gym_capture.errors import InvalidRequestError

COMPLETIONS = CompletionsDialect()
IDENTITY = ReplyIdentity(call_id="cmpl-1", model="davinci", created=1_700_000_000)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
SHOWN = (
    TokenLogProb("né", -0.5, (("né", -0.5), ("x", float("-inf")))),
    TokenLogProb("e", float("-inf"), (("a", -0.25), ("b", -1.5))),
)


def parse(**fields: Any) -> ModelRequest:
    return COMPLETIONS.parse(json.dumps({"model": "m", "prompt": "Once upon", **fields}).encode())


def reply_to(*texts: str, finish_reason: str = "stop", **fields: Any) -> ModelReply:
    builder = TurnBuilder()
    for text in texts:
        builder.add(TextDelta(text))
    return ModelReply(turn=builder.turn(), finish_reason=finish_reason, usage=USAGE, **fields)


def whole(reply: ModelReply, **fields: Any) -> Completion:
    return Completion.model_validate_json(COMPLETIONS.reply(parse(**fields), IDENTITY, reply), strict=True)


def chunks(stream: bytes) -> list[Completion]:
    """The chunks of a finished stream. The SDK reads them loosely, so a finish reason may still be null."""
    *datas, done, end = stream.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [Completion.construct(**json.loads(data.removeprefix("data: "))) for data in datas]


def streamed(
    reply: ModelReply, *pieces: tuple[list[ReplyEvent], tuple[TokenLogProb, ...] | None], **fields: Any
) -> list[Completion]:
    encoder = COMPLETIONS.stream(parse(stream=True, **fields), IDENTITY)
    events = [encoder.events(*piece) for piece in pieces]
    return chunks(b"".join([encoder.start(7), *events, encoder.finish(reply)]))


# --- parsing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Once <|im_end|> upon", ["Once <|im_end|> upon"]])
def test_a_prompt_is_text_as_it_is(prompt: object) -> None:
    request = parse(prompt=prompt)
    assert request.raw_prompt == "Once <|im_end|> upon"
    assert request.conversation == Conversation(items=())


def test_parameters_have_the_meaning_of_this_api() -> None:
    request = parse(
        max_tokens=5,
        temperature=0.5,
        stop="\n",
        seed=3,
        logit_bias={"5": -100},
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert request.sampling == {"temperature": 0.5, "stop": ["\n"], "seed": 3, "logit_bias": {"5": -100}}
    assert (request.max_tokens, request.top_logprobs, request.stream, request.include_usage) == (5, 2, True, True)


def test_what_a_client_leaves_out() -> None:
    request = parse()
    assert (request.max_tokens, request.top_logprobs, request.stream) == (DEFAULT_MAX_TOKENS, None, False)
    assert parse(logprobs=0).top_logprobs == 0


def test_harmless_values_of_features_that_are_not_there() -> None:
    assert parse(n=1, best_of=1, echo=False, suffix=None, user="me", new_field=[1]).raw_prompt == "Once upon"


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"prompt": [1, 2, 3]}, "prompt", "arrays of token ids are refused"),
        ({"prompt": [[1, 2], [3]]}, "prompt", "arrays of token ids are refused"),
        ({"prompt": []}, "prompt", "must be text"),
        ({"prompt": ["a", "b"]}, "prompt", "one text"),
        ({"prompt": {"text": "a"}}, "prompt", "must be a string, not an object"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"model": 5}, "model", "must be a string"),
        ({"n": 2}, "n", "must be 1"),
        ({"best_of": 3}, "best_of", "must be 1"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "the end"}, "suffix", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"logprobs": True}, "logprobs", "an integer, not a boolean"),
        ({"logprobs": -1}, "logprobs", "at least 0"),
        ({"stream": "yes"}, "stream", "a boolean"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_SE_03_fields_that_name_ids_or_a_prefix_are_ignored() -> None:
    extra = {"prompt_token_ids": [1], "required_prefix_token_ids": [1], "prompt_embeds": "AAAA"}
    assert parse(**extra) == parse()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    ("model", "prompt", "n", "best_of", "echo", "suffix", "max_tokens", "logprobs", "stop", "stream", "stream_options")
)


@given(st.dictionaries(FIELDS, JSON))
def test_hostile_bodies_are_parsed_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequestError):
        parse(**fields)


# --- replies --------------------------------------------------------------------------------------------------------


def test_the_sdk_reads_the_same_text_streamed_and_whole() -> None:
    reply = reply_to("He", "llo é", finish_reason="length")
    read = whole(reply)
    assert (read.id, read.object, read.model, read.created) == ("cmpl-1", "text_completion", "davinci", 1_700_000_000)
    (choice,) = read.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("Hello é", 0, "length", None)
    parts = streamed(reply, ([TextDelta("He")], None), ([], None), ([TextDelta("llo"), TextDelta(" é")], None))
    assert [part.choices[0].text for part in parts] == ["He", "llo é", ""]
    assert [part.choices[0].finish_reason for part in parts] == [None, None, "length"]
    assert {(part.id, part.object, part.model, part.created) for part in parts} == {
        (read.id, read.object, read.model, read.created)
    }


def test_usage_is_in_every_whole_reply_and_in_streams_that_ask() -> None:
    reply = reply_to("x")
    usage = whole(reply).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 3, 10)
    assert all(part.usage is None for part in streamed(reply))
    last = streamed(reply, stream_options={"include_usage": True})[-1]
    assert last.choices == []
    assert last.usage == usage


def test_log_probs_are_aligned_arrays_streamed_and_whole() -> None:
    reply = reply_to("née", log_probs=SHOWN)
    shown = whole(reply, logprobs=2).choices[0].logprobs
    assert shown is not None
    assert shown.tokens == ["né", "e"]
    assert shown.token_logprobs == [-0.5, -9999.0]
    assert shown.text_offset == [0, 2]
    # The sampled token is always among those shown, likely or not.
    assert shown.top_logprobs == [{"né": -0.5, "x": -9999.0}, {"a": -0.25, "b": -1.5, "e": -9999.0}]
    # A token whose text is held back still has its log probability shown.
    parts = streamed(reply, ([], SHOWN[:1]), ([TextDelta("née")], SHOWN[1:]), logprobs=2)
    assert [part.choices[0].text for part in parts] == ["", "née", ""]
    pieces = [part.choices[0].logprobs for part in parts[:-1]]
    assert [token for piece in pieces if piece for token in piece.tokens or ()] == shown.tokens
    assert [offset for piece in pieces if piece for offset in piece.text_offset or ()] == shown.text_offset


def test_log_probs_without_alternatives() -> None:
    shown = whole(reply_to("né", log_probs=(TokenLogProb("né", -0.5),)), logprobs=0).choices[0].logprobs
    assert shown is not None
    assert (shown.token_logprobs, shown.top_logprobs) == ([-0.5], None)


def test_errors_are_openais_and_end_a_stream_without_done() -> None:
    error = ApiError(status=400, kind="invalid_request", message="why", param="prompt")
    expected = {"error": {"message": "why", "type": "invalid_request_error", "param": "prompt", "code": None}}
    assert json.loads(COMPLETIONS.error(error)) == expected
    frame = COMPLETIONS.stream(parse(stream=True), IDENTITY).error(error)
    assert json.loads(frame.removeprefix(b"data: ")) == expected
    assert frame.endswith(b"\n\n")
    assert COMPLETIONS.status(error) == 400


def test_a_keep_alive_is_a_comment() -> None:
    assert COMPLETIONS.stream(parse(stream=True), IDENTITY).keep_alive().startswith(b":")


@given(st.lists(st.text()))
def test_any_text_streams_as_it_is(texts: list[str]) -> None:
    parts = streamed(reply_to(*texts), *(([TextDelta(text)], None) for text in texts))
    assert "".join(part.choices[0].text for part in parts) == "".join(texts)
