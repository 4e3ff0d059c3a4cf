"""`gym-capture explain`: what a reason means, and what to do about it; also what writes docs/reasons.md.

A reason is given as it stands in a report or a record, with all that follows its name. What it is about may be a reason
itself (`unresolved:no_match`, `incomplete:call_timeout`), which is explained as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gym_capture.errors import ConfigError
from gym_capture.reasons import KINDS, UNRESOLVED, Kind, Reason, reason_name, split_reason

HINT: Final = "`gym-capture explain REASON` says what a reason means and what to do about it"
"""For commands that print reasons."""


class Meaning(NamedTuple):
    """A reason, and of what kind it is: one name can be of two."""

    kind: Kind
    reason: Reason


def _completed(incomplete: str) -> list[str]:
    """For a shell."""
    names = {str(name) for kind in KINDS for name in (kind.key, *kind.reasons)}
    return sorted(name for name in names if name.startswith(incomplete))


_ALL: Final = tuple(Meaning(kind, reason) for kind in KINDS for reason in kind.reasons)


def command(
    reason: Annotated[
        str | None,
        typer.Argument(
            help="As it is written, e.g. dangling_intent:call_12; or a kind. Without it, all.",
            autocompletion=_completed,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Explain a reason: why something was masked, excluded, not continued or not taken to the letter.

    Without a reason, all of them are listed by kind.
    """
    found = _ALL if reason is None else meanings(reason)
    if not found:
        raise ConfigError(_unknown(reason or ""))
    if as_json:
        for each in found:
            typer.echo(json.dumps(_row(each)))
    elif reason is None or reason == found[0].kind.key:
        _print_list(found)
    else:
        _print_meanings(found)


def meanings(reason: str) -> tuple[Meaning, ...]:
    """All that is meant by a reason as it is written, or by the key of a kind; nothing for what is not known."""
    return _named(reason) or tuple(each for each in _ALL if each.kind.key == reason)


def _named(reason: str) -> tuple[Meaning, ...]:
    name, about = split_reason(reason)
    found = tuple(each for each in _ALL if each.reason == name)
    return (*found, *_named(about)) if about and (found or name == UNRESOLVED) else found


def _unknown(reason: str) -> str:
    name, about = split_reason(reason)
    name = reason_name(about) if about and name == UNRESOLVED else name
    near = get_close_matches(name, [*(str(each.reason) for each in _ALL), *(kind.key for kind in KINDS)], n=1)
    hint = f"did you mean {near[0]!r}? " if near else "it may be a name of what wrote the files. "
    return f"no such reason: {name!r}; {hint}`gym-capture explain` lists all"


def _row(each: Meaning) -> dict[str, str]:
    kind, reason = each
    return {
        "reason": reason,
        "kind": kind.key,
        "where": kind.where,
        "means": reason.means,
        "what_to_do": reason.what_to_do,
    }


def _print_meanings(found: Sequence[Meaning]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for kind, reason in found:
        console.print(f"[bold]{reason}[/] ({kind.title}; seen in {escape(kind.where)})")
        console.print(f"  {escape(reason.means)}")
        console.print(f"  What to do: {escape(reason.what_to_do)}")


def _print_list(found: Sequence[Meaning]) -> None:
    """On a terminal by kind; in a pipe or a file a line for each, with tabs between."""
    console = Console(highlight=False)
    if not console.is_terminal:
        for kind, reason in found:
            typer.echo(f"{kind.key}\t{reason}\t{reason.means}")
        return
    for kind in KINDS:
        table = Table(show_header=False, box=None)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for each in found:
            if each.kind is kind:
                table.add_row(f" {each.reason}", escape(each.reason.means))
        if table.row_count:
            console.print(f"[bold]{kind.title}[/] ({kind.key}), seen in {escape(kind.where)}", soft_wrap=True)
            console.print(table)


def reasons_document() -> str:
    """docs/reasons.md."""
    lines = [_INTRODUCTION]
    for kind in KINDS:
        lines += [f"## {kind.title}", "", f"{(kind.reasons.__doc__ or '').strip()} Seen in: {kind.where}.", ""]
        lines += ["| reason | what it means | what to do |", "|---|---|---|"]
        lines += [f"| `{reason}` | {reason.means} | {reason.what_to_do} |" for reason in kind.reasons]
        lines.append("")
    return "\n".join(lines)


_INTRODUCTION: Final = """\
# Reasons

What cannot be proven is masked, counted and reported, each time under one of these names. `gym-capture explain REASON`
says the same at a prompt, `gym-capture explain` lists all. `make reasons-table` writes this file from
`gym_capture/reasons.py`.

A reason is written as its name, then what it is about: `dangling_intent:call_12` (a call),
`parent_mismatch:call_12:prompt_token_ids` (a call and a field of its record), `incomplete:call_timeout` (a failure),
`unresolved:no_match` (how outcomes are counted). Reports count by name alone; a rollout may have several.

A name that is not here was written by others: by NeMo Gym in its files, or by a store, a harness or a normalization
rule of your own. It is kept and shown as it stands.
"""


if __name__ == "__main__":
    print(reasons_document(), end="")
