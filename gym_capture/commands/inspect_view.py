"""The views of a rollout as a terminal shows them.

Invariant: recorded text is data (`gym_capture.printable`), and does nothing to a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from gym_capture.commands.explain import meanings
from gym_capture.inspector.seen import KIND_NAMES
from gym_capture.printable import visible

_STYLES: Final = {
    "prompt": "dim",
    "trained": "green",
    "not_trained": "red",
    "inserted_close": "yellow",
    "not_told": "magenta",
}
_LINKS: Final = {"exact": "green", "rendered": "yellow", "split": "red", "none": "dim"}
_EXCERPT: Final = 160
_SHOWN_IDS: Final = 8
_SHOWN_REASONS: Final = 3
_HANGS: Final = 2


class Run(NamedTuple):
    """Neighbouring tokens of one kind, call and reason."""

    begin: int
    end: int
    kind: str
    call: str | None
    why: str | None
    versions: tuple[str, ...]
    log_prob: float | None
    """The mean of those that are known."""
    ids: tuple[int, ...]
    text: str | None


def show(
    rollout: Mapping[str, Any], trajectories: Sequence[Mapping[str, Any]], *, full: bool, without_calls: str
) -> None:
    """`without_calls`: what to say of a rollout of which there is no call."""
    console = Console(highlight=False)
    console.print(Group(*_head(rollout)))
    for reasons in _by_name(rollout["mask_reasons"]):
        console.print(Text.assemble(("masked: ", "red"), visible(", ".join(_some(reasons)))))
        console.print(Padding(Group(*_why(reasons, rollout["mask_details"])), (0, 0, 0, _HANGS)))
    if rollout["calls"]:
        console.print(tree(rollout))
    elif not trajectories:
        console.print(without_calls)
    numbers = {call["call"]: f"#{call['number']}" for call in rollout["calls"]}
    for each in trajectories:
        console.print()
        console.print(Group(*_trajectory(each, numbers, full=full)))


# --- the tree of calls ------------------------------------------------------------------------------------------------


def _head(rollout: Mapping[str, Any]) -> Iterator[Text]:
    named = ("group", "sample", "attempt", "state", "reward", "harness")
    facts = [f"{name} {visible(str(rollout[name]))}" for name in named if rollout[name] is not None]
    facts += [f"put {rollout['put_ms']:.1f} ms"] if rollout.get("put_ms") is not None else []
    yield Text.assemble((visible(rollout["rollout"]), "bold"), "  ", ", ".join(facts))
    tokens = f"{rollout['trained_tokens']:,} of {rollout['generated_tokens']:,} generated ids are trained"
    yield Text(f"{len(rollout['calls'])} calls, {rollout['trajectories']} trajectories, {tokens}")


def _by_name(reasons: Sequence[str]) -> Iterator[list[str]]:
    """Reasons that one explanation is for: those of a name, unless what follows the name is a reason itself."""
    found: dict[tuple[str, ...], list[str]] = {}
    for reason in reasons:
        found.setdefault(tuple(each.reason for each in meanings(reason)) or (reason,), []).append(reason)
    yield from found.values()


def _why(reasons: Sequence[str], details: Mapping[str, Sequence[str]]) -> Iterator[Text]:
    """What is known of it in this rollout, what it means, and what to do."""
    said = dict.fromkeys(detail for reason in reasons for detail in details.get(reason, ()))
    yield from (Text(visible(detail), "yellow") for detail in _some(list(said)))
    found = [each.reason for each in meanings(reasons[0])]
    for number, reason in enumerate(found):
        yield Text(reason.means if number == 0 else f"{reason}: {reason.means}")
    if found:  # the last one is what the others are about
        yield Text.assemble(("What to do: ", "bold"), found[-1].what_to_do)


def _some(texts: Sequence[str]) -> list[str]:
    left = len(texts) - _SHOWN_REASONS
    return [*texts[:_SHOWN_REASONS], *([f"... and {left:,} more"] if left > 0 else [])]


def tree(rollout: Mapping[str, Any]) -> Tree:
    """The calls, each below the one that it continues. A line or two for each."""
    root = Tree(Text("calls", "bold"), guide_style="dim")
    nodes: dict[str, Tree] = {}
    for call in rollout["calls"]:
        above = nodes.get(call["parent"] or "", root)
        nodes[call["call"]] = above.add(_call(call))
    return root


def _call(call: Mapping[str, Any]) -> Text:
    link, reason = call["link"]["kind"], call["link"]["reason"]
    line = Text.assemble((f"#{call['number']} ", "bold"), (str(call["role"]), "cyan"), f"  {visible(call['call'])}")
    if call["parent"] is not None or link != "none":
        line.append(f"  {link}", _LINKS[link])
    line.append(f"  {_count(call['prompt_tokens'])} ({_count(call['supplied_tokens'])} supplied)", "dim")
    line.append(f" + {_count(call['generated_tokens'])}", "dim")
    ended = [str(call[name]) for name in ("finish",) if call[name]]
    ended += [f"weights {', '.join(call['weight_versions'])}"] if call["weight_versions"] else []
    ended += [f"{call['seconds']:.1f} s"] if call["seconds"] else []
    line.append(f"  {', '.join(map(visible, ended))}", "dim")
    if reason is not None:
        line.append(f"\n{visible(reason)}: {visible(call['link']['words'])}", "yellow")
    if call["excluded"] is not None:
        line.append(f"\nnot trained, {visible(call['excluded'])}: {visible(call['excluded_words'] or '')}", "red")
    if call["preview"]:
        line.append(f"\n{visible(call['preview'])}", "italic")
    return line


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


# --- a trajectory -----------------------------------------------------------------------------------------------------


def _trajectory(trajectory: Mapping[str, Any], numbers: Mapping[str, str], *, full: bool) -> Iterator[Text | Table]:
    facts = [f"{trajectory['tokens']:,} ids, {trajectory['trained_tokens']:,} trained"]
    facts += [f"{name} {trajectory[name]:g}" for name in ("reward", "advantage") if trajectory[name] is not None]
    facts += [] if trajectory["delivered"] else ["not delivered: shown for the calls that no other has"]
    title = (f"trajectory {trajectory['trajectory']}", "bold")
    yield Text.assemble(title, f"  {visible(trajectory['id'])}  {', '.join(facts)}")
    table = Table(box=None, pad_edge=False)
    for column in ("ids", "kind", "call", "weights", "log prob", "text"):
        table.add_column(column, justify="right" if column in ("ids", "log prob") else "left", overflow="fold")
    for run in runs(trajectory["pages"], trajectory["calls"]):
        style = _STYLES[run.kind]
        table.add_row(
            f"{run.begin:,}-{run.end:,}",
            Text(f"{run.kind.replace('_', ' ')}{'' if run.why is None else f': {visible(run.why)}'}", style),
            "" if run.call is None else Text(numbers.get(run.call) or visible(run.call)),
            Text(visible(", ".join(run.versions))),
            "" if run.log_prob is None else f"{run.log_prob:.3f}",
            Text(_said(run, full=full), style),
        )
    yield table
    for split in trajectory["splits"]:
        yield from _split(split, numbers)


def runs(pages: Sequence[Mapping[str, Any]], calls: Sequence[str]) -> Iterator[Run]:
    """The stretches of a trajectory, in order."""
    tokens = [token for page in pages for token in _tokens(page)]
    begin = 0
    for (kind, call, why), same in groupby(tokens, key=lambda token: token[:3]):
        here = list(same)
        known = [token[4] for token in here if token[4] is not None]
        texts = [token[6] for token in here]
        yield Run(
            begin=begin,
            end=begin + len(here),
            kind=KIND_NAMES[kind],
            call=calls[call] if call >= 0 else None,
            why=why,
            versions=tuple(dict.fromkeys(token[3] for token in here if token[3] is not None)),
            log_prob=sum(known) / len(known) if known else None,
            ids=tuple(token[5] for token in here),
            text=None if None in texts else "".join(texts),
        )
        begin += len(here)


def _tokens(page: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Kind, call, why, version, log probability, id and text of each."""
    whys = [None if why < 0 else page["whys"][why] for why in page["why"]]
    columns = (page["kinds"], page["calls"], whys, page["versions"], page["logprobs"], page["ids"], page["texts"])
    yield from zip(*columns, strict=True)


def _said(run: Run, *, full: bool) -> str:
    if run.text is None:
        shown = run.ids if full else run.ids[:_SHOWN_IDS]
        return " ".join(map(str, shown)) + (" ..." if len(shown) < len(run.ids) else "")
    text = visible(run.text)
    half = _EXCERPT // 2
    return text if full or len(text) <= _EXCERPT else f"{text[:half]} [...] {text[-half:]}"


def _split(split: Mapping[str, Any], numbers: Mapping[str, str]) -> Iterator[Text]:
    reason = "" if split["reason"] is None else f", {visible(split['reason'])}: {visible(split['words'] or '')}"
    call, before = (numbers.get(split[name]) or visible(split[name]) for name in ("call", "parent"))
    yield Text(f"{call} parts from {before} after {split['at']:,} ids{reason}", "red")
    for side in (split["a"], split["b"]):
        texts = [visible(text) for text in side["texts"] if text is not None]
        words = " | ".join(texts) if texts else " ".join(map(str, side["ids"]))
        yield Text.assemble((f"  {visible(side['from'])}: ", "dim"), words or "(ends there)")
