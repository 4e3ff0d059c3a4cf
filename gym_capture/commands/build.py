"""`gym-capture build`: from a directory of records to Parquet files of trajectories, without Ray.

Invariant: the command adds nothing to what `data.directory` does; it only reads options and shows an account.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands import building
from gym_capture.commands.building import listed_rollouts, progress_bar, show, warn_of_left
from gym_capture.data.directory import build_directory
from gym_capture.data.nemo_gym import compressed_files
from gym_capture.stores import DEFAULT_DIRECTORY


def command(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of <rollout>.tokens.jsonl files, or the records that a stopped graph left.",
            exists=True,
            file_okay=False,
            default_factory=DEFAULT_DIRECTORY.expanduser,
            show_default=str(DEFAULT_DIRECTORY),
        ),
    ],
    out: Annotated[str, typer.Option(help="Directory, or URI of one, for the Parquet files; made if it is not there.")],
    delivery: building.Delivery = "main_chain",
    strategy: building.Strategy = "prefix_merging",
    rollouts: Annotated[
        Path | None,
        typer.Option(
            help="Which rollouts to build, one a line: rollout_id, group_id, reward. Without it, all of them: as they "
            "were registered and completed, others each its own group and without a reward.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    side_model: building.SideModel = None,
    calibrate: building.Calibrate = True,
    scale: building.Scale = "population_std",
    vocab_size: building.VocabSize = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one for each CPU.")] = None,
    overwrite: building.Overwrite = False,
    as_json: building.AsJson = False,
) -> None:
    """Build trajectories from a directory: token captures as NeMo Gym writes them, or the records of a stopped graph.

    Writes OUT/part-*.parquet and OUT/_report.json, as build-job does on a cluster. What could not be proven is masked,
    with its reasons, not dropped. Exits with 1 if building failed for every single rollout.
    """
    options = building.options(
        strategy=strategy, delivery=delivery, side_model=side_model, calibrate=calibrate, vocab_size=vocab_size
    )
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    requests = None if rollouts is None else listed_rollouts(rollouts, stderr)
    with progress_bar(stderr) as on_progress:
        built = build_directory(
            source,
            out=out,
            options=options,
            scale=scale,
            requests=requests,
            workers=workers,
            overwrite=overwrite,
            on_progress=on_progress,
            on_left=warn_of_left(stderr, out),
        )
    if left := compressed_files(source):
        stderr.print(
            f"[yellow]warning:[/] {len(left):,} files are compressed, and were not read: gunzip {escape(left[0])}"
        )
    if not built.requested:
        why = (
            "the list of rollouts is empty"
            if rollouts
            else "it holds neither files named <rollout id>.tokens.jsonl nor a log"
        )
        stderr.print(f"[yellow]warning:[/] nothing to build in {escape(str(source))}: {why}; wrote a file without rows")
    show(built, out, as_json=as_json, console=stderr, look=source)
