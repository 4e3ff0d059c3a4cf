"""`gym-capture verify-logprobs`: are the recorded log probabilities those of the weights that sampled them?

Invariant: nothing is changed. Each version of the weights is asked about what it sampled, and no other; what cannot be
asked of any is counted, by reason, and never taken for checked. One model is in memory at a time, and of what is read
as much as one pass of it takes.

Flow: graph's log or Parquet -> sequences -> one reading that counts -> for each folder of weights, and each scorer (the
engine, the trainer's forward pass): batches of sequences, scored and compared -> tables, the calls that differ, an exit
code.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gym_capture.commands import training_options as options
from gym_capture.commands.loading import explained
from gym_capture.commands.records import live_snapshots, scan_logs
from gym_capture.data.log_directories import holds_logs
from gym_capture.errors import ConfigError
from gym_capture.reasons import NotRescoredReason

if TYPE_CHECKING:
    from trainer_bridge.comparison import Bounds, Comparison
    from trainer_bridge.recorded import RecordedPart, RecordedSequence

_TOKENS_AT_ONCE: Final = 16_384
_NOISE: Final = {"float32": 0.01}
_NOISE_OF_OTHERS: Final = 0.5
_COLUMNS: Final = ("tokens", "impossible", "mean", "median", "p99", "max", "token_mult_prob_error", "gen_kl_error")

Score: TypeAlias = "Callable[[Sequence[RecordedSequence]], Awaitable[list[list[Bounds]]]]"


class By(StrEnum):
    """What scores again."""

    ENGINE = "engine"
    TRAINER = "trainer"
    BOTH = "both"


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A graph's `state.directory`, also while it runs; or a directory (or URI) of trajectories as Parquet."
        ),
    ],
    model: Annotated[
        list[str],
        typer.Option(
            help="VERSION=FOLDER: the model folder of the weights of that version; may be repeated. A FOLDER alone is "
            "that of every version that is not named."
        ),
    ],
    by: Annotated[By, typer.Option(help="vLLM, the trainer's forward pass, or one after the other.")] = By.BOTH,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far a log probability may be off by noise; by default 0.01 for a folder of float32, else 0.5."
        ),
    ] = None,
    max_error: Annotated[float, typer.Option(help="The most that `token_mult_prob_error` may be.")] = 1.02,
    rollouts: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many rollouts.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Of how many calls that differ the first token is shown.")] = 20,
    engine_args: Annotated[str, typer.Option(help="vLLM's, as JSON: those that the graph had.")] = "{}",
    device: options.Device = "cpu",
    tokens_per_micro_batch: options.TokensPerMicroBatch = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print the account as JSON.")] = False,
) -> None:
    """Score recorded generations again, by the engine and by the trainer, and name the calls that differ.

    Exits with 1 if a call is beyond the tolerance, if `token_mult_prob_error` is above `--max-error`, or if there was
    nothing that could be checked. What was sampled under a grammar or a bias is reported apart, and never judged.
    """
    from trainer_bridge.comparison import Comparison

    weights = Weights.of(model)
    arguments = _json_object(engine_args)
    if by is not By.ENGINE:
        options.check_device(device)
    read = _reader(source, rollouts)
    plan = _planned(read(), weights)
    found = {name: Comparison(limit=show) for name in ("engine", "trainer") if by in (name, By.BOTH)}
    with options.progress_bar() as progress:
        for scorer, comparison in found.items():
            for folder, tokens in plan.tokens.items():
                bar = progress.add_task(f"{scorer}: loading {folder.name}", total=tokens)
                noise = noise_of(folder) if tolerance is None else tolerance
                run = _Run(folder, weights, read, comparison, noise, plan.not_checked)
                with explained(f"cannot score with {folder}"):
                    making = (
                        _by_engine(folder, arguments)
                        if scorer == "engine"
                        else _by_trainer(folder, device, tokens_per_micro_batch)
                    )
                    progress.update(bar, description=f"{scorer}: {folder.name}")
                    asyncio.run(run.all(making, partial(progress.advance, bar)))
    account = _account(found, plan, max_error)
    texts = _texts(found, plan.tokens)
    if as_json:
        typer.echo(json.dumps(account | {"findings": list(_findings(found, texts))}, indent=2))
    else:
        _print(found, plan, texts)
    if not account["passed"]:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Weights:
    """Which folder has the weights of which version."""

    folders: dict[str, Path]
    others: Path | None

    @classmethod
    def of(cls, named: Sequence[str]) -> Weights:
        """Raises `ConfigError` for what is no model folder, and for a version that is named twice."""
        folders: dict[str, Path] = {}
        others: list[Path] = []
        for each in named:
            version, separator, folder = each.partition("=")
            if not separator or (Path(each) / "config.json").is_file():
                others.append(Path(each))
            elif version in folders:
                raise ConfigError(f"--model names version {version!r} twice")
            else:
                folders[version] = Path(folder)
        if len(others) > 1:
            raise ConfigError("--model has two folders without a version: write VERSION=FOLDER")
        for path in (*folders.values(), *others):
            options.check_model(path)
        return cls(folders, others[0] if others else None)

    def folder(self, part: RecordedPart) -> Path | None:
        return self.others if part.weight_version is None else self.folders.get(part.weight_version, self.others)


# --- what is read ----------------------------------------------------------------------------------------------------

_Reading: TypeAlias = "Callable[[], Iterator[RecordedSequence | int]]"
"""Sequences; a number: that many ids of calls whose prompts are not known."""


def _reader(source: str, rollouts: int | None) -> _Reading:
    from trainer_bridge.recorded import of_rollout, of_snapshot
    from trainer_bridge.stream import parquet_batches, read_rollouts

    path = Path(source)
    if not (path.is_dir() and holds_logs(path)):
        return lambda: (
            sequence
            for rollout in islice(read_rollouts(parquet_batches(source)), rollouts)
            for sequence in of_rollout(rollout)
        )

    def read() -> Iterator[RecordedSequence | int]:
        for snapshot in islice(live_snapshots(scan_logs(path)), rollouts):
            yield from of_snapshot(snapshot)
            yield sum(orphan.generation_token_ids.size for orphan in snapshot.orphans)

    return read


@dataclass(slots=True)
class _Plan:
    """What there is to do, and what cannot be done."""

    tokens: dict[Path, int] = field(default_factory=dict)
    """By folder: those to score."""
    not_checked: Counter[str] = field(default_factory=Counter)
    versions_without_weights: set[str] = field(default_factory=set)


def _planned(read: Iterable[RecordedSequence | int], weights: Weights) -> _Plan:
    plan = _Plan()
    for each in read:
        if isinstance(each, int):
            plan.not_checked[NotRescoredReason.PROMPT_UNKNOWN] += each
            continue
        for part in each.parts:
            size = part.log_probs.size
            folder, why_not = weights.folder(part), part.why_not()
            if folder is None:
                plan.not_checked[NotRescoredReason.NO_WEIGHTS] += size
                plan.versions_without_weights.add(part.weight_version or "not known")
            elif why_not is not None:
                plan.not_checked[why_not] += size
            else:
                plan.tokens[folder] = plan.tokens.get(folder, 0) + size
    plan.not_checked = +plan.not_checked
    return plan


# --- scoring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One scorer over what one folder of weights sampled."""

    folder: Path
    weights: Weights
    read: _Reading
    comparison: Comparison
    tolerance: float
    not_checked: Counter[str]

    async def all(self, making: _Making, advance: Callable[[int], None]) -> None:
        score, close = await asyncio.to_thread(making)
        try:
            for batch in self._batches():
                for sequence, bounds in zip(batch, await score(batch), strict=True):
                    for part, low_high in zip(sequence.parts, bounds, strict=True):
                        self._add(sequence, part, low_high)
                        advance(part.log_probs.size)
        finally:
            await close()

    def _add(self, sequence: RecordedSequence, part: RecordedPart, bounds: Bounds) -> None:
        import numpy as np

        if np.isnan(bounds.low).any():
            self.not_checked[NotRescoredReason.PAST_CONTEXT] += part.log_probs.size
        else:
            self.comparison.add(part, sequence.token_ids, bounds, tolerance=self.tolerance)

    def _batches(self) -> Iterator[list[RecordedSequence]]:
        batch: list[RecordedSequence] = []
        for each in self.read():
            chosen = None if isinstance(each, int) else each.chosen(self._is_own)
            if chosen is None:
                continue
            if batch and sum(one.token_ids.size for one in batch) + chosen.token_ids.size > _TOKENS_AT_ONCE:
                yield batch
                batch = []
            batch.append(chosen)
        if batch:
            yield batch

    def _is_own(self, part: RecordedPart) -> bool:
        return self.weights.folder(part) == self.folder and part.why_not() is None


_Making: TypeAlias = "Callable[[], tuple[Score, Callable[[], Awaitable[None]]]]"
"""Loads; gives what scores, and what ends it."""


def _by_trainer(folder: Path, device: str, tokens: int) -> _Making:
    from transformers.utils import logging

    from trainer_bridge.rescoring import ForwardPass

    logging.disable_progress_bar()

    def make() -> tuple[Score, Callable[[], Awaitable[None]]]:
        forward = ForwardPass.load(folder, device=device, tokens=tokens)

        async def score(batch: Sequence[RecordedSequence]) -> list[list[Bounds]]:
            return await asyncio.to_thread(forward.score, batch)

        async def close() -> None:
            pass

        return score, close

    return make


def _by_engine(folder: Path, engine_args: dict[str, Any]) -> _Making:
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # read when vLLM is imported
    from gym_capture.engines.vllm_scoring import Drawn, VllmScorer
    from trainer_bridge.comparison import Bounds

    def drawn(part: RecordedPart) -> Drawn:
        assert part.sampling is not None
        top_k, top_p, min_p = part.sampling.top_k, part.sampling.top_p, part.sampling.min_p
        return Drawn(
            part.start, part.end, part.temperature, max(top_k or 0, 0), 1.0 if top_p is None else top_p, min_p or 0.0
        )

    def make() -> tuple[Score, Callable[[], Awaitable[None]]]:
        scorer = VllmScorer.start(model=str(folder), engine_args=engine_args)

        async def score(batch: Sequence[RecordedSequence]) -> list[list[Bounds]]:
            scoring = (scorer.score(one.token_ids, [drawn(part) for part in one.parts]) for one in batch)
            return [[Bounds(values, values) for values in each] for each in await asyncio.gather(*scoring)]

        return score, scorer.close

    return make


def noise_of(folder: Path) -> float:
    """What a log probability may be off by when a model of the folder's data type is computed in another order."""
    with explained(f"cannot read {folder}/config.json"):
        config = json.loads((folder / "config.json").read_text())
    return _NOISE.get(config.get("dtype") or config.get("torch_dtype") or "float32", _NOISE_OF_OTHERS)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine-args is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'--engine-args must be an object, as {{"dtype": "float32"}}: got {text}')
    return value


# --- what is said of it ----------------------------------------------------------------------------------------------


def _account(found: dict[str, Comparison], plan: _Plan, max_error: float) -> dict[str, Any]:
    judged = [each.judged for each in found.values()]
    return {
        "passed": bool(judged)
        and all(each.tokens and each.token_mult_prob_error <= max_error for each in judged)
        and not any(each.calls_beyond for each in found.values()),
        "not_checked": dict(plan.not_checked),
        "versions_without_weights": sorted(plan.versions_without_weights),
        "calls_beyond": {scorer: each.calls_beyond for scorer, each in found.items()},
        "differences": {
            scorer: {_name(key): distribution.as_dict() for key, distribution in each.groups.items()}
            for scorer, each in found.items()
        },
    }


def _texts(found: dict[str, Comparison], folders: Iterable[Path]) -> Callable[[int], str]:
    """The text of an id. Versions of one model share their tokenizer."""
    if not any(each.findings for each in found.values()):
        return str
    from transformers import AutoTokenizer

    folder = next(iter(folders))
    with explained(f"cannot load the tokenizer of {folder}"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return lambda token_id: str(tokenizer.decode([token_id]))


def _findings(found: dict[str, Comparison], texts: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    for scorer, each in found.items():
        for finding in each.findings:
            yield {"by": scorer} | finding.as_dict() | {"token": texts(finding.token_id)}


def _print(found: dict[str, Comparison], plan: _Plan, texts: Callable[[int], str]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for scorer, each in found.items():
        table = Table(title=f"|recorded - {scorer}|", title_justify="left", box=None)
        table.add_column("")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for key, distribution in sorted(each.groups.items()):
            row = distribution.as_dict()
            table.add_row(escape(_name(key)), *(f"{row[column]:.6g}" for column in _COLUMNS))
        console.print(table)
    for reason, count in plan.not_checked.items():
        versions = ", ".join(sorted(plan.versions_without_weights))
        of = f" (of version {escape(versions)})" if reason == NotRescoredReason.NO_WEIGHTS else ""
        console.print(f"not checked: {reason}: {count:,} tokens{of}")
    for finding in _findings(found, texts):
        rescored = "not possible" if finding["rescored"] is None else f"{finding['rescored']:.4f}"
        version = finding["weight_version"]
        console.print(
            escape(
                f"{finding['by']}: rollout {finding['rollout_id']}, call {finding['call_id']}, position "
                f"{finding['position']}: {finding['token']!r} (id {finding['token_id']}): recorded "
                f"{finding['recorded']:.4f}, scored {rescored}; {finding['tokens_beyond']} tokens of the call differ"
                + (f"; version {version}" if version else "")
            )
        )
    for scorer, each in found.items():
        console.print(f"{scorer}: {each.calls_beyond:,} calls beyond noise, of {each.judged.tokens:,} tokens checked")


def _name(key: tuple[str, str]) -> str:
    return ": ".join(filter(None, key))
