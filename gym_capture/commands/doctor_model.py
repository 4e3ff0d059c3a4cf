"""What `doctor` looks at in a model folder: its files, which turns of its template stay exact, its parsers.

Invariant: no weights are loaded. A parser that is named is looked up in vLLM; one that is guessed from the template is
called a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gym_capture.commands.audit_template import load, locate
from gym_capture.commands.config_findings import nearest
from gym_capture.commands.doctor_machine import Finding
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.errors import ConfigError, GymCaptureError
from gym_capture.splice.audit import audit

_TOOL_MARKS: Final = (
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
)
"""What templates write around calls, and the parser that most models with such a template have; the first counts."""
_THINKS: Final = re.compile(r"<think>|reasoning_content")


def check_model(model: str, tool_parser: str | None, reasoning_parser: str | None) -> Iterator[Finding]:
    """The findings on one folder."""
    try:
        folder = locate(model)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        yield _weights(folder)
        template = load(folder, None, {})
    except GymCaptureError as error:
        yield Finding("model", "mend", error.message, "name the folder that has config, weights and tokenizer")
        return
    yield from _template(model, template)
    source = _source(folder)
    yield from _parser("tool", tool_parser, next((name for mark, name in _TOOL_MARKS if mark in source), None))
    yield from _parser("reasoning", reasoning_parser, "qwen3" if _THINKS.search(source) else None)


def _weights(folder: Path) -> Finding:
    files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights = _object(index).get("weight_map")
        if not isinstance(weights, dict):
            return Finding("model: weights", "mend", f"{index.name} names no weights", "copy it again")
        wanted = set(map(str, weights.values()))
        if missing := sorted(wanted - files.keys()):
            found = f"{len(missing)} files are missing: {missing[0]}"
            return Finding("model: weights", "mend", found, "copy them again")
    if not files:
        return Finding("model: weights", "mend", "no *.safetensors", "weights are pushed and verified as safetensors")
    return Finding("model: weights", "ok", f"{len(files)} files, {sum(files.values()) / 2**30:.1f} GiB")


def _template(model: str, template: HfChatTemplate) -> Iterator[Finding]:
    cells = audit(template)
    holes = [name for name, cell in cells.items() if cell.verdict == "hole"]
    exact = sum(cell.verdict in ("exact", "holds") for cell in cells.values())
    if not holes:
        yield Finding("model: template", "ok", f"all {exact} kinds of turns that it renders are continued exactly")
        return
    todo = f"their conversations are rendered again: `gym-capture audit-template {model}` says why"
    yield Finding("model: template", "note", f"{exact} kinds of turns are continued, not {', '.join(holes)}", todo)


def _source(folder: Path) -> str:
    """The template's text; empty where the tokenizer has it from somewhere else."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    if config.is_file():
        return json.dumps(_object(config).get("chat_template"), ensure_ascii=False)
    return ""


def _object(file: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing if it is broken."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parser(kind: str, named: str | None, guessed: str | None) -> Iterator[Finding]:
    what = f"model: {kind} parser"
    if named is None:
        if guessed is not None:
            todo = f"{kind}_parser: {guessed} in the config, if it is so; without one, it stays text in the reply"
            yield Finding(what, "note", f"the template looks like {guessed}, which is a guess", todo)
        else:
            yield Finding(what, "ok", "none named, and the template shows no need of one")
        return
    registered = _registered(kind)
    if registered is None:
        yield Finding(what, "note", f"{named}: vLLM is not installed, which would know", "")
    elif named in registered:
        yield Finding(what, "ok", named)
    else:
        found = f"vLLM has no {named!r}{nearest(named, registered)}"
        yield Finding(what, "mend", found, f"--{kind}-parser names another")


def _registered(kind: str) -> list[str] | None:
    try:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return None
    manager = ToolParserManager if kind == "tool" else ReasoningParserManager
    return list(manager.list_registered())
