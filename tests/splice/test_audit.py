"""The audit of chat templates, its table in the docs, and its command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from gym_capture.capture.records import IdArray
from gym_capture.commands.audit_template import command, contiguity_document, make_tokenizer, on_made_tokenizer
from gym_capture.conversation import AssistantTurn, Conversation, ToolResult
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.splice.audit import SHAPES, Cell, audit
from gym_capture.splice.template import Adapted, TemplateError

DOCUMENT = Path(__file__).parents[2] / "docs" / "contiguity.md"

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<call>' + call.function.name + call.function.arguments | tojson + '</call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_the_table_in_the_docs_is_what_the_splice_does_today() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == contiguity_document(), "run: make contiguity-table"


def test_every_turn_that_a_shipped_template_renders_is_continued() -> None:
    rows = [
        line.split("|")[2:-1] for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    cells = [cell.strip() for row in rows if len(row) == len(SHAPES) for cell in row]
    assert len(cells) >= 20 * len(SHAPES)
    assert set(cells) <= {"=", "~", "·"}


def test_a_plain_template_continues_every_turn_exactly_but_the_thinking_it_never_writes() -> None:
    cells = audit(on_made_tokenizer(CHATML))
    assert list(cells) == [shape.name for shape in SHAPES]
    assert {name: cell for name, cell in cells.items() if cell != Cell("exact")} == {
        "reasoning + text": Cell("holds"),
        "reasoning + call": Cell("holds"),
    }


@dataclass
class Flawed:
    """Another template with a flaw."""

    base: HfChatTemplate
    flaw: str

    @property
    def special_tokens(self) -> frozenset[str]:
        return self.base.special_tokens

    @property
    def stop_tokens(self) -> frozenset[str]:
        return self.base.stop_tokens

    def adapt(self, conversation: Conversation) -> Adapted:
        return self.base.adapt(conversation)

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        items = conversation.items
        has_calls = any(isinstance(item, AssistantTurn) and item.tool_calls for item in items)
        match self.flaw:
            case "refuses calls" if has_calls:
                raise TemplateError("no tools, please")
            case "drops results":
                items = tuple(item for item in items if not isinstance(item, ToolResult))
            case "drops calls":
                items = tuple(i._replace(tool_calls=()) if isinstance(i, AssistantTurn) else i for i in items)
            case "says turns twice":
                items = tuple(twice for i in items for twice in ([i, i] if isinstance(i, AssistantTurn) else [i]))
        return self.base.render(Conversation(items, conversation.tools), add_generation_prompt=add_generation_prompt)

    def encode(self, text: str) -> IdArray:
        ids = self.base.encode(text)
        is_whole = "Bergen" in text and "Thanks" in text
        return np.append(ids, ids[-1:]) if self.flaw == "tokenizes badly" and is_whole else ids

    def encode_plain(self, text: str) -> IdArray:
        return self.base.encode_plain(text)

    def decode(self, ids: IdArray) -> str:
        return self.base.decode(ids)


@pytest.mark.parametrize(
    ("flaw", "shape", "expected"),
    [
        ("none", "text", Cell("exact")),
        ("refuses calls", "tool call", Cell("refused", "no tools, please")),
        ("refuses calls", "text", Cell("exact")),
        ("drops results", "parallel calls", Cell("refused", "does not write tool results")),
        ("drops calls", "tool call", Cell("refused", "does not write tool calls")),
        ("says turns twice", "text", Cell("hole", "turn_repeated")),
        ("tokenizes badly", "text", Cell("hole", "not_equal")),
    ],
)
def test_names_what_a_flawed_template_cannot_do(flaw: str, shape: str, expected: Cell) -> None:
    assert audit(Flawed(on_made_tokenizer(CHATML), flaw))[shape] == expected


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_the_command_audits_a_template_file(tmp_path: Path) -> None:
    file = tmp_path / "some.jinja"
    file.write_text(CHATML)
    exit_code, output = run(str(file))
    assert exit_code == 0
    assert output.count("exact") == len(SHAPES) - 2


def test_the_command_audits_a_model_folder_and_fails_on_a_hole(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    assert run(str(tmp_path))[0] == 0
    replacement = tmp_path / "counts.jinja"
    replacement.write_text(CHATML + "{{ messages | map(attribute='content') | join | length }}")
    exit_code, output = run(str(tmp_path), "--chat-template", str(replacement))
    assert exit_code == 1
    assert "tail_differs" in output


@pytest.mark.parametrize("kwargs", ["{", "[]"])
def test_template_arguments_must_be_a_json_object(tmp_path: Path, kwargs: str) -> None:
    file = tmp_path / "some.jinja"
    file.write_text(CHATML)
    assert run(str(file), "--chat-template-kwargs", kwargs)[0] != 0
    assert run(str(file), "--chat-template-kwargs", '{"enable_thinking": false}')[0] == 0


def test_the_command_says_how_messages_are_written(tmp_path: Path) -> None:
    file = tmp_path / "some.jinja"
    file.write_text(
        CHATML.replace(
            "{%- for message",
            "{%- if messages[1].role == 'system' %}{{ raise_exception('once') }}{% endif %}{%- for message",
            1,
        )
    )
    _, output = run(str(file))
    assert "system_joined" in output
    assert "results_in_call_order" in output
