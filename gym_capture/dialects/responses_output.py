"""Response objects and their items, as they are sent whole and in streams.

Invariant: what a client echoes of these items is read back as the turn that was recorded. Ids say where an item stands
in its response, and nothing else depends on them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import orjson

from gym_capture.calls import ModelReply, ModelRequest, TokenLogProb, Usage
from gym_capture.conversation import ToolCall
from gym_capture.dialects.base import ApiError, ReplyIdentity
from gym_capture.dialects.chat import log_prob
from gym_capture.dialects.responses_tools import ClientTool, custom_input

ID_PREFIX: Final = "resp_"
_SEAL: Final = "gym-capture.reasoning.1."

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
JsonObject: TypeAlias = dict[str, Any]


# --- reasoning that clients hand back ------------------------------------------------------------------------------


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: for clients that echo nothing else. It hides nothing: the text is sent too."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode("ascii")


def unsealed(encrypted_content: str) -> str:
    """The reasoning that `sealed` wrote; empty for what anybody else wrote."""
    if not encrypted_content.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(encrypted_content.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return ""


# --- items ---------------------------------------------------------------------------------------------------------


class ItemWriter:
    """Output items of one response, by their position in it."""

    def __init__(self, request: ModelRequest, identity: ReplyIdentity) -> None:
        self._suffix = identity.call_id.removeprefix(ID_PREFIX)
        self._clients: Mapping[str, ClientTool] = request.echo["clients"]
        self._seals_reasoning: bool = request.echo["seals_reasoning"]

    def reasoning(self, position: int, text: str, *, status: Status) -> JsonObject:
        content = [] if status == "in_progress" else [reasoning_part(text)]
        item = {"id": self._id("rs", position), "type": "reasoning", "summary": [], "content": content}
        if self._seals_reasoning and content:
            item["encrypted_content"] = sealed(text)
        return {**item, "status": status}

    def message(
        self, position: int, text: str, *, status: Status, log_probs: Sequence[TokenLogProb] = ()
    ) -> JsonObject:
        content = [] if status == "in_progress" else [text_part(text, log_probs)]
        return {
            "id": self._id("msg", position),
            "type": "message",
            "role": "assistant",
            "content": content,
            "status": status,
        }

    def call(self, position: int, call: ToolCall, *, status: Status) -> JsonObject:
        """The call as the client knows its tool; of a name that was never offered, as the model wrote it."""
        client = self.client_tool(call.name)
        if client.is_custom:
            text = "" if status == "in_progress" else custom_input(call.arguments)
            item = {"id": self._id("ctc", position), "type": "custom_tool_call", "input": text}
        else:
            item = {"id": self._id("fc", position), "type": "function_call", "arguments": call.arguments}
        item |= {"call_id": call.id, "name": client.name}
        if client.namespace is not None:
            item["namespace"] = client.namespace
        return {**item, "status": status}

    def client_tool(self, flat: str) -> ClientTool:
        return self._clients.get(flat) or ClientTool(flat)

    def turn(self, reply: ModelReply) -> list[JsonObject]:
        """A whole turn: what the model thought, what it said, what it called.

        The log probabilities are those of every generated token, as a reply does not say which of them are its text.
        """
        turn, items = reply.turn, list[JsonObject]()
        final = final_status(reply)
        # Only the last item can have been cut off.
        after = len(turn.tool_calls)
        is_said = bool(turn.text.strip()) or not (turn.tool_calls or turn.reasoning)
        if turn.reasoning:
            status = "completed" if after or is_said else final
            items.append(self.reasoning(0, turn.reasoning, status=status))
        if is_said:
            status = "completed" if after else final
            items.append(self.message(len(items), turn.text, status=status, log_probs=reply.log_probs or ()))
        for call in turn.tool_calls:
            after -= 1
            items.append(self.call(len(items), call, status="completed" if after else final))
        return items

    def _id(self, prefix: str, position: int) -> str:
        return f"{prefix}_{self._suffix}_{position}"


def reasoning_part(text: str) -> JsonObject:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, log_probs: Sequence[TokenLogProb]) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [log_prob(p) for p in log_probs]}


def error_param(error: ApiError) -> str | None:
    """The parameter at fault. The graph knows the conversation by its name in Chat Completions."""
    return "input" if error.param == "messages" else error.param


def final_status(reply: ModelReply) -> Status:
    return "incomplete" if reply.finish_reason == "length" else "completed"


# --- the response ---------------------------------------------------------------------------------------------------


class ResponseObject:
    """A response at any point of its life. What never changes, tools included, is encoded once."""

    def __init__(self, request: ModelRequest, identity: ReplyIdentity) -> None:
        head = {
            "id": identity.call_id,
            "object": "response",
            "created_at": identity.created,
            "model": identity.model,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
            "truncation": "disabled",
        }
        members: bytes = request.echo["members"]
        self._head = orjson.dumps(head)[:-1] + b"," + members + b","

    def encode(
        self,
        status: Status,
        output: Sequence[Mapping[str, Any]] = (),
        *,
        usage: Usage | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> bytes:
        tail = {
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }
        return self._head + orjson.dumps(tail)[1:]


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
