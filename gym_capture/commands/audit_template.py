"""`gym-capture audit-template`: which turns of a model's chat template can be continued from their exact ids?

Invariant: nothing is loaded but a tokenizer and a template, and no network is used. A template file is audited on a
small tokenizer that is trained on the template itself and knows its control tokens; a model folder on its own.

Flow: model folder or template file -> `HfChatTemplate` -> `audit`, shape by shape -> a table, and exit code 1 if there
is a hole. `python -m gym_capture.commands.audit_template` prints docs/contiguity.md, the same over all the chat
templates that the `trl` package ships.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gym_capture.commands.loading import explained
from gym_capture.errors import ConfigError
from gym_capture.models import smollm2_dir, tiny_dir
from gym_capture.reasons import TemplateRule
from gym_capture.splice.audit import MESSAGES, SHAPES, Cell, audit, audit_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gym_capture.engines.hf_template import HfChatTemplate

PACKAGED: Final = Path(__file__).parent.parent / "templates"

_SMALL_MODELS: Final = {"smollm2": smollm2_dir, "tiny": tiny_dir}
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_MARKS: Final = {"exact": "=", "holds": "~", "refused": "·"}
_COLORS: Final = {"exact": "green", "holds": "green", "hole": "bold red", "refused": "dim"}
_MEANINGS: Final = {
    "exact": "parent's ids kept; equal to the full rendering id for id",
    "holds": "parent's ids kept; the template would have rewritten that turn",
    "hole": "not continued: the whole conversation is rendered again",
    "refused": "the template does not render this",
}
_CONTROLS: Final = re.compile(
    r"<\|[^<>|\s'\"]+\|?>|<[^<>|\s'\"]+\|>|<｜[^<>\s]+?｜>|<(?:start|end)_of_[a-z]+>|</?s>|<[be]os>|\[(?:/?[A-Z_]{3,}|gMASK)\]|<sop>"
)
_TAGS: Final = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


def command(
    target: Annotated[
        str, typer.Argument(help="A model folder, a chat template file (.jinja), or smollm2 or tiny: see `model`.")
    ],
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A template file to use in place of the model's own.", exists=True, dir_okay=False),
    ] = None,
    kwargs: Annotated[
        str, typer.Option("--chat-template-kwargs", help="JSON object for the template: '{\"enable_thinking\": false}'")
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print turns and messages as JSON.")] = False,
) -> None:
    """Show which turns of a chat template are continued from their exact ids, and which are not, and why.

    Exits with 1 if any turn that the template renders cannot be continued.
    """
    template = load(locate(target), chat_template, _parse_kwargs(kwargs))
    cells, messages = audit(template), audit_messages(template)
    if as_json:
        turns = {name: {"continued": cell.verdict, "detail": cell.detail or None} for name, cell in cells.items()}
        typer.echo(json.dumps({"target": target, "turns": turns, "messages": messages}))
    else:
        _print(target, cells, messages)
    if any(cell.verdict == "hole" for cell in cells.values()):
        raise typer.Exit(1)


def _print(target: str, cells: Mapping[str, Cell], messages: Mapping[str, Sequence[str] | None]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table(title=escape(target), title_justify="left")
    for column in ("turn", "continued", "meaning"):
        table.add_column(column)
    for name, cell in cells.items():
        meaning = _MEANINGS[cell.verdict] + (f" ({cell.detail})" if cell.detail else "")
        table.add_row(name, f"[{_COLORS[cell.verdict]}]{cell.verdict}[/]", escape(meaning))
    console.print(table)
    written = Table(title="messages", title_justify="left")
    for column in ("message", "how it is written"):
        written.add_column(column)
    for name, rules in messages.items():
        written.add_row(name, _written(rules, as_sent="as it was sent", refused="[dim]refused[/]"))
    console.print(written)


def locate(target: str) -> Path:
    """The folder or file that a person named, or the folder of a small model. Raises `ConfigError`."""
    path = Path(target)
    if path.exists():
        return path
    if target in _SMALL_MODELS:
        return _SMALL_MODELS[target](progress=lambda line: typer.echo(line, err=True))
    raise ConfigError(
        f"{target} does not exist: name a model folder, a chat template file (.jinja), or one of "
        f"{', '.join(_SMALL_MODELS)}"
    )


def load(target: Path, chat_template: Path | None, kwargs: Mapping[str, Any]) -> HfChatTemplate:
    """The template of a model folder, or of a template file on a tokenizer made for it. Raises `ConfigError`."""
    from gym_capture.engines.hf_template import HfChatTemplate

    if target.is_file():
        if chat_template is not None:
            raise ConfigError(f"--chat-template goes with a model folder: {target} is a file")
        return on_made_tokenizer(_read_template(target), **kwargs)
    if not any((target / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"{target} is not a model folder: it has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    source = None if chat_template is None else _read_template(chat_template)
    with explained(f"cannot load the tokenizer of {target}"):
        return HfChatTemplate.from_model_dir(target, source, **kwargs)


def on_made_tokenizer(source: str, **kwargs: Any) -> HfChatTemplate:
    """A template on a tokenizer made for it."""
    from gym_capture.engines.hf_template import HfChatTemplate

    return HfChatTemplate.from_tokenizer(make_tokenizer(source), source, **kwargs)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `text`, of which everything that looks like a control token is one.

    Being trained on little, it merges far: whatever two texts meet, it has a token that would cross their boundary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1_500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in sorted(set(_TAGS.findall(text)))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=sorted(set(_CONTROLS.findall(text)) - {"<s>", "</s>"}),
    )


def shipped_templates() -> dict[str, str]:
    """Name -> Jinja text of this package's templates and of those in the `trl` package, sorted."""
    folders = (PACKAGED, resources.files("trl") / "chat_templates")
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith(".jinja")]
    return {file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8") for file in sorted(files, key=str)}


def contiguity_document() -> str:
    """docs/contiguity.md."""
    templates = {name: on_made_tokenizer(source) for name, source in sorted(shipped_templates().items())}
    turns = {
        name: [_MARKS.get(cell.verdict, cell.detail) for cell in audit(template).values()]
        for name, template in templates.items()
    }
    messages = {
        name: [_written(rules, as_sent="=", refused="·") for rules in audit_messages(template).values()]
        for name, template in templates.items()
    }
    text = _INTRODUCTION.format(trl=importlib.metadata.version("trl"), **_MARKS)
    rules = _MESSAGES.format(rules="\n".join(f"| `{rule}` | {rule.means} |" for rule in TemplateRule))
    return "\n".join(
        [text, *_table([shape.name for shape in SHAPES], turns), "", rules, *_table(tuple(MESSAGES), messages), ""]
    )


_INTRODUCTION: Final = """\
# Which turns are continued from their exact ids

When a conversation goes on, the next prompt is the earlier call's own ids, followed by what the chat template writes
after that turn (`gym_capture/splice/splicer.py`). This table says for which turns of which templates that works. Read a
cell as: *the model generated a turn of this shape, the client echoed it and added a message or tool results; what did
the next prompt become?*

| | |
|---|---|
| `{exact}` | the earlier ids are kept, and the prompt equals a rendering of the whole conversation id for id |
| `{holds}` | the earlier ids are kept; a rendering would not have, since the template rewrites that turn |
| `{refused}` | the template does not render such a turn, or no tool results after it |
| a name | the turn is not continued: the conversation is rendered again as a whole, and the name says why |

Templates rewrite turns in two ways: they strip thinking from history, or they open a turn in history otherwise than
the generation prompt opened it.

Templates are those of this package (`chatml_tools`) and of `trl` {trl}, each on a small tokenizer trained on its text
that knows its control tokens. Templates of a family that agree in every cell share a row. For a model of your own:
`gym-capture audit-template MODEL_FOLDER`. `make contiguity-table` writes this file.
"""

_MESSAGES: Final = """\
## Messages that a template has no place for

Agents send more kinds of messages than templates know: a developer's, one of the system in the middle of a
conversation, results of parallel calls in the order in which they were done. A template may refuse such a message,
leave it out without a word, or write it to the top, which changes all that was written before. So each template is
asked once, by rendering probes, and a message goes to the first place that keeps it - in words that stay the same as
the conversation goes on. A message, or a tool result, that the template writes nowhere is a 400: for every prompt that
is rendered as a whole, marks in its messages show that all of them arrived.

| | |
|---|---|
| `=` | written as it was sent |
{rules}
| `·` | a 400: the template does not write it |

Each call's record names the rules that fired on its request (`normalized`), and `/stats` counts them (`rules`). Results
are put in order only if they are one for each call of the turn before, each by its id; everything else keeps its order.
Lineage compares conversations with results in that order: it takes either order for the same where the template does.

A developer message is written as such only by templates that speak of one. `results as they came` are two results in
the reverse order of their calls.
"""


def _table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Templates by family; those of a family that agree in every cell share a row."""
    lines = [f"| template | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for family, names in groupby(rows, key=_family):
        lines.append(f"| **{family}** |" + " |" * len(columns))
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(" | ".join(rows[name]), []).append(f"`{name}`")
        lines += [f"| {', '.join(members)} | {cells} |" for cells, members in alike.items()]
    return lines


def _written(rules: Sequence[str] | None, *, as_sent: str, refused: str) -> str:
    return refused if rules is None else ", ".join(rules) or as_sent


def _family(name: str) -> str:
    return re.split(r"v?\d|_", name)[0]


def _read_template(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no chat template: it is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {path}: {error.strerror}") from None
    if "messages" not in source:
        raise ConfigError(f"{path} is no chat template: it does not read `messages`")
    return source


def _parse_kwargs(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("--chat-template-kwargs must be a JSON object")
    return value


if __name__ == "__main__":
    print(contiguity_document(), end="")
