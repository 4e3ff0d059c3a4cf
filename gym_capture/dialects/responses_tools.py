"""Tools of the Responses API, and the flat list of functions that a model is offered for them.

Invariant: a call is the same call in every form. What the model calls by a flat name reaches the client under the name
that the client gave the tool, and what the client then echoes is read back as what the model called.

- A function of a namespace is offered as `<namespace>__<name>`, and its calls carry `namespace` and `name` apart.
- A custom tool, which takes free text, is offered as a function of one string, `input`. Its client is given that
  string. Arguments that are anything else travel as `{"INVALID_ARGUMENTS": text}`, which the tool refuses, as it must,
  and the policy is told; nothing is guessed, closed or cut.
- Tools that OpenAI defines and the client runs (local shell, patches, computers) have no schema here to offer, and the
  client relies on them: an error.
- Everything else (web search, file search, code interpreter, MCP servers...) would have to run on the server. Clients
  send such tools without being asked, so they are left out of the offer, and counted; only forcing one is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from gym_capture.calls import NamedToolChoice, ToolChoice
from gym_capture.conversation import Tool
from gym_capture.dialects import fields
from gym_capture.errors import InvalidRequestError
from gym_capture.lineage.fingerprint import canonical_arguments

_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_RUN_BY_CLIENT: Final = ("local_shell", "apply_patch", "computer", "computer_use_preview", "computer-preview")
"""Types of tools that OpenAI defines and clients run."""
_INVALID: Final = "INVALID_ARGUMENTS"
_INVALID_HEAD: Final = f'{{"{_INVALID}":'


class ClientTool(NamedTuple):
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that the model is offered."""

    tools: tuple[Tool, ...]
    clients: Mapping[str, ClientTool]
    """Every one of them as the client knows it, by its flat name."""
    left_out: tuple[str, ...]
    """Tools that are not among them, by `fields.left_out`."""


def flat_name(name: str, namespace: str | None) -> str:
    """The name that the model knows a tool by."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool that was given `text`: undoes `custom_input`."""
    if text.startswith(_INVALID_HEAD):
        value = _parsed(text)
        if isinstance(value, dict) and len(value) == 1 and isinstance(arguments := value.get(_INVALID), str):
            return arguments
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input that a custom tool is given: two argument texts give the same one only if they mean the same.

    So the echo of a call is that call and no other, up to what a comparison of arguments ignores
    (`fingerprint.canonical_arguments`). To be sure of that, a string is only given as it is if it comes back as what
    it was taken from; one that reads like wrapped arguments does not, so that its own arguments are wrapped.
    """
    value = _parsed(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    if isinstance(text, str) and canonical_arguments(custom_arguments(text)) == canonical_arguments(arguments):
        return text
    return orjson.dumps({_INVALID: arguments}).decode()


def _parsed(text: str) -> object:
    """The JSON value, or None. Strings in it can be sent: half an emoji is no JSON here."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


# --- what is offered ----------------------------------------------------------------------------------------------


def offer(entries: Iterable[tuple[str, object]]) -> Offer:
    """Reads tools, each with the path that errors name it by."""
    tools: list[Tool] = []
    clients: dict[str, ClientTool] = {}
    left_out: dict[str, None] = {}
    for at, value in entries:
        for path, client, tool in _read(at, value, left_out):
            if clients.setdefault(tool.name, client) != client:
                raise InvalidRequestError(f"{path}: there is another tool named {tool.name[:80]!r}", param=path)
            tools.append(tool)
    return Offer(tuple(tools), clients, tuple(left_out))


def _read(
    at: str, value: object, left_out: dict[str, None], namespace: str | None = None
) -> Iterable[tuple[str, ClientTool, Tool]]:
    """The functions that one entry stands for; notes in `left_out` an entry that stands for none."""
    entry = fields.mapping(value, at)
    kind = entry.get("type", "function")
    if kind == "namespace" and namespace is None:
        name = fields.required_string(entry, "name", at=f"{at}.")
        for index, inner in enumerate(fields.array(entry.get("tools"), f"{at}.tools")):
            yield from _read(f"{at}.tools.{index}", inner, left_out, name)
    elif kind in ("function", "custom"):
        is_custom = kind == "custom"
        name = fields.required_string(entry, "name", at=f"{at}.")
        description = fields.string(entry, "description", at=f"{at}.") or ""
        tool = fields.tool(
            flat_name(name, namespace),
            description + _grammar(entry, at) if is_custom else description,
            _CUSTOM_PARAMETERS if is_custom else entry.get("parameters"),
            at,
            strict=fields.boolean(entry, "strict", at=f"{at}."),
        )
        yield at, ClientTool(name, namespace, is_custom), tool
    elif _is_run_by_client(entry):
        raise InvalidRequestError(
            f"{at}: tools of type {fields.shown(kind)!r} are not supported, since only OpenAI's models know what they "
            "take; offer a function of your own with parameters",
            param=f"{at}.type",
        )
    else:
        left_out[fields.left_out(kind)] = None


def _is_run_by_client(entry: Mapping[str, Any]) -> bool:
    kind = entry.get("type")
    if kind == "shell":  # in a container it is the server that runs it
        environment = entry.get("environment")
        return not isinstance(environment, dict) or environment.get("type") == "local"
    if kind == "tool_search":
        return entry.get("execution") == "client"
    return kind in _RUN_BY_CLIENT


def _grammar(entry: Mapping[str, Any], at: str) -> str:
    """The grammar of a custom tool, in words for its description: the model must write what the tool can read."""
    form = entry.get("format")
    if form is None or fields.mapping(form, f"{at}.format").get("type") != "grammar":
        return ""
    syntax = fields.required_string(form, "syntax", at=f"{at}.format.")
    definition = fields.required_string(form, "definition", at=f"{at}.format.")
    return f"\n\n`input` must follow this {syntax} grammar:\n{definition}"


# --- what is chosen -----------------------------------------------------------------------------------------------


def choose(value: object, offered: Offer) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that are left to choose from.

    `allowed_tools` narrows the offer itself, as that is the one way in which every model obeys it.
    """
    tools = offered.tools
    if value is None or value == "auto":
        return "auto", tools
    if value == "none":
        return "none", tools
    if value == "required":
        return _required(tools), tools
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "tool_choice must be 'auto', 'none', 'required' or an object that names a function", param="tool_choice"
        )
    kind = value.get("type")
    if kind == "allowed_tools":
        return _choose_among(value, offered)
    if kind not in ("function", "custom"):
        raise InvalidRequestError(
            f"tool_choice forces a tool of type {fields.shown(kind)!r}, which this server cannot run",
            param="tool_choice",
        )
    return NamedToolChoice(_chosen(value, offered, "tool_choice")), tools


def _choose_among(value: Mapping[str, Any], offered: Offer) -> tuple[ToolChoice, tuple[Tool, ...]]:
    mode = value.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequestError("tool_choice.mode must be 'auto' or 'required'", param="tool_choice.mode")
    allowed: set[str] = set()
    for index, item in enumerate(fields.array(value.get("tools"), "tool_choice.tools")):
        at = f"tool_choice.tools.{index}"
        entry = fields.mapping(item, at)
        if entry.get("type") in ("function", "custom"):
            allowed.add(_chosen(entry, offered, at))
    tools = tuple(tool for tool in offered.tools if tool.name in allowed)
    if mode == "auto":
        return "auto", tools
    if len(allowed) == 1:
        return NamedToolChoice(allowed.pop()), offered.tools
    return _required(tools), tools


def _required(tools: tuple[Tool, ...]) -> ToolChoice:
    if not tools:
        raise InvalidRequestError("tool_choice needs functions to choose from", param="tool_choice")
    return "required"


def _chosen(entry: Mapping[str, Any], offered: Offer, at: str) -> str:
    """The flat name of the one tool that `entry` means: by its own name, or by its flat one."""
    name = fields.required_string(entry, "name", at=f"{at}.")
    namespace = fields.string(entry, "namespace", at=f"{at}.")
    is_custom = entry.get("type") == "custom"
    found = [
        flat
        for flat, client in offered.clients.items()
        if client.is_custom == is_custom and name in (client.name, flat) and namespace in (None, client.namespace)
    ]
    if name in found and namespace is None:
        return name
    if len(found) != 1:
        what = "more than one of" if found else "none of"
        raise InvalidRequestError(f"{at} names {name[:64]!r}, which is {what} the tools", param=at)
    return found[0]
