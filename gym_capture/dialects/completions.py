"""OpenAI Completions, the API of before chat: text in, its continuation out.

Invariant: the prompt is text, and the server makes its ids. Arrays of token ids are refused: what a policy sees is
never what a client says that its ids are. No chat template, no tool calls, no reasoning: all that is generated is text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gym_capture.calls import ModelReply, ModelRequest, ReplyEvent, TextDelta, TokenLogProb
from gym_capture.conversation import Conversation
from gym_capture.dialects import fields
from gym_capture.dialects.base import ApiError, ReplyIdentity, Route, StreamEncoder, parse_object
from gym_capture.dialects.chat import ChatDialect, usage
from gym_capture.dialects.description import (
    BOOLEAN,
    NAME,
    OBJECT,
    OPENAI_ERROR,
    POSITIVE,
    SAMPLING,
    STOP,
    STRING,
    array_of,
    object_of,
    one_of,
    reply_of,
)
from gym_capture.errors import InvalidRequestError

DEFAULT_MAX_TOKENS: Final = 16
"""This API's own default."""

_CHAT: Final = ChatDialect()
_LOWEST: Final = -9999.0
"""JSON has no -inf; OpenAI uses this for "as good as impossible"."""


_BODY: Final = object_of(
    {"model": STRING, "prompt": NAME},
    {**SAMPLING, "max_tokens": POSITIVE, "stream": BOOLEAN, "stop": STOP, "n": {"enum": [1]}},
)


class CompletionsDialect:
    """`POST /v1/completions`."""

    route = Route(
        path="/v1/completions",
        summary="OpenAI Completions: text that goes on as it is, without a chat template",
        body=_BODY,
        reply=reply_of(object=one_of("text_completion"), choices=array_of(OBJECT, at_least=1), usage=OBJECT),
        error=OPENAI_ERROR,
    )
    counting = None
    id_prefix = "cmpl-"

    def parse(self, body: bytes) -> ModelRequest:
        data = parse_object(body)
        fields.one_generation(data, "n", "best_of")
        if fields.boolean(data, "echo"):
            raise InvalidRequestError("echo is not supported: the reply is what was generated, no more", param="echo")
        if fields.string(data, "suffix"):
            raise InvalidRequestError("suffix is not supported: text is generated at the end only", param="suffix")
        return ModelRequest(
            requested_model=fields.required_string(data, "model"),
            conversation=Conversation(items=()),
            raw_prompt=_prompt(data),
            sampling=fields.sampling(data),
            max_tokens=fields.count(data, "max_tokens", minimum=1) or DEFAULT_MAX_TOKENS,
            top_logprobs=fields.count(data, "logprobs", minimum=0),
            stream=bool(fields.boolean(data, "stream")),
            include_usage=fields.wants_usage(data),
        )

    def reply(self, request: ModelRequest, identity: ReplyIdentity, reply: ModelReply) -> bytes:
        log_probs = None if reply.log_probs is None else _log_probs(reply.log_probs, request.top_logprobs, offset=0)
        choice = {
            "text": reply.turn.text,
            "index": 0,
            "logprobs": log_probs,
            "finish_reason": reply.finish_reason,
        }
        return orjson.dumps({**_head(identity), "choices": [choice], "usage": usage(reply.usage)})

    def stream(self, request: ModelRequest, identity: ReplyIdentity) -> StreamEncoder:
        return _CompletionStream(request, identity)

    def error(self, error: ApiError) -> bytes:
        return _CHAT.error(_in_our_words(error))

    def status(self, error: ApiError) -> int:
        return error.status


class _CompletionStream:
    """Chunks are assembled from a prefix encoded once: one JSON string is all that a text delta costs."""

    def __init__(self, request: ModelRequest, identity: ReplyIdentity) -> None:
        self._prefix = b"data: " + orjson.dumps(_head(identity))[:-1]
        self._top = request.top_logprobs
        self._include_usage = request.include_usage
        self._offset = 0
        """Characters of the tokens whose log probabilities have been shown."""

    def start(self, prompt_tokens: int) -> bytes:
        return b""  # this API announces nothing

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def events(self, events: Sequence[ReplyEvent], log_probs: Sequence[TokenLogProb] | None) -> bytes:
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        shown = b"null"
        if log_probs:
            shown = orjson.dumps(_log_probs(log_probs, self._top, offset=self._offset))
            self._offset += sum(len(one.token) for one in log_probs)
        return self._chunk(text, log_probs=shown) if text or log_probs else b""

    def finish(self, reply: ModelReply) -> bytes:
        out = self._chunk("", finish=orjson.dumps(reply.finish_reason))
        if self._include_usage:
            out += self._prefix + b',"choices":[],"usage":' + orjson.dumps(usage(reply.usage)) + b"}\n\n"
        return out + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + _CHAT.error(_in_our_words(error)) + b"\n\n"

    def _chunk(self, text: str, *, log_probs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b,"choices":[{"text":%b,"index":0,"logprobs":%b,"finish_reason":%b}]}\n\n' % (
            self._prefix,
            orjson.dumps(text),
            log_probs,
            finish,
        )


def _in_our_words(error: ApiError) -> ApiError:
    """The graph knows the conversation by its name in Chat Completions."""
    return dataclasses.replace(error, param="prompt") if error.param == "messages" else error


def _head(identity: ReplyIdentity) -> dict[str, Any]:
    return {
        "id": identity.call_id,
        "object": "text_completion",
        "created": identity.created,
        "model": identity.model,
    }


def _log_probs(shown: Sequence[TokenLogProb], top: int | None, *, offset: int) -> dict[str, Any]:
    """This API's form: aligned arrays. Offsets count the characters of the tokens before, from the reply's start."""
    offsets = []
    for one in shown:
        offsets.append(offset)
        offset += len(one.token)
    return {
        "tokens": [one.token for one in shown],
        "token_logprobs": [max(one.log_prob, _LOWEST) for one in shown],
        "top_logprobs": [_top(one) for one in shown] if top else None,
        "text_offset": offsets,
    }


def _top(shown: TokenLogProb) -> dict[str, float]:
    """The likeliest tokens, and the sampled one whether or not it is among them."""
    likeliest = {token: max(log_prob, _LOWEST) for token, log_prob in shown.top}
    return {**likeliest, shown.token: max(shown.log_prob, _LOWEST)}


def _prompt(data: Mapping[str, Any]) -> str:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if any(isinstance(item, str) for item in prompt):
            raise InvalidRequestError("prompt must be one text: each captured call is one generation", param="prompt")
        raise InvalidRequestError(
            "prompt must be text: arrays of token ids are refused, since the ids that a policy sees are the server's",
            param="prompt",
        )
    text = fields.required_string({"prompt": prompt}, "prompt")
    if not text:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    return text
