"""`gym-capture build-job`: finished rollouts into Parquet, in parallel on Ray.

Invariant: records are dropped only after every trajectory is written, and only those that were consumed.

Flow: the rollouts of a job, or all that are recorded -> the records of the running graph, or of the directory that a
stopped one left -> the Ray Data job under a progress bar -> a table of what became of the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands import building
from gym_capture.commands.building import listed_rollouts, progress_bar, show, warn_of_left
from gym_capture.commands.cluster import join_cluster
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.data.sources import SourceSpec


def command(
    out: Annotated[str, typer.Option(help="Directory, or URI of one, for the Parquet files; all nodes write to it.")],
    rollouts: Annotated[
        Path | None,
        typer.Argument(
            help="Rollouts, one JSON object a line, as a rollout job writes them. Without it, all that are recorded, "
            "as they were registered and completed."
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Records that a stopped graph left. By default: of the running one.", file_okay=False),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Ray namespace of the running graph's state.")] = "gym-capture",
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster; by default RAY_ADDRESS, or the one on this machine.")
    ] = None,
    strategy: building.Strategy = "prefix_merging",
    delivery: building.Delivery = "main_chain",
    scale: building.Scale = "population_std",
    side_model: building.SideModel = None,
    calibrate: building.Calibrate = True,
    vocab_size: building.VocabSize = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; by default what has room.")] = None,
    worker_cpus: Annotated[float, typer.Option(min=0.0, help="Logical CPUs that a worker takes up.")] = 1.0,
    overwrite: building.Overwrite = False,
    drop_consumed: Annotated[
        bool,
        typer.Option(
            "--retire", help="Drop the records that were consumed; without a list, of complete rollouts only."
        ),
    ] = False,
    as_json: building.AsJson = False,
) -> None:
    """Build trajectories of finished rollouts, with rewards and group advantages, as Parquet.

    Exits with 1 if there are rollouts and not a single one can be trained on.
    """
    from gym_capture.data import job
    from gym_capture.data.requests import groups_recorded
    from gym_capture.data.sources import recorded, retire

    console = Console(stderr=True)
    requests = None if rollouts is None else listed_rollouts(rollouts, console)
    join_cluster(ray_address, namespace=None)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    options = job.JobOptions(
        build=building.options(
            strategy=strategy, delivery=delivery, side_model=side_model, calibrate=calibrate, vocab_size=vocab_size
        ),
        scale=scale,
        workers=workers,
        worker_cpus=worker_cpus,
    )
    with _source(records, namespace) as source:
        standings = asyncio.run(recorded(source)) if requests is None else ()
        total = len(standings) if requests is None else requests.num_rows
        with progress_bar(console) as on_progress:
            built = job.write_trajectories(
                groups_recorded(standings) if requests is None else requests,
                source=source,
                out=out,
                options=options,
                overwrite=overwrite,
                on_progress=lambda done: on_progress(done, total),
                on_left=warn_of_left(console, out),
            )
        # One that nobody has completed is still being played, for all that is known.
        still_open = {each.rollout_id for each in standings if each.outcome is None}
        consumed = {name: snapshot for name, snapshot in built.snapshots.items() if name not in still_open}
        changed = asyncio.run(retire(source, consumed)) if drop_consumed else ()
    for rollout_id in changed:
        console.print(f"[yellow]warning:[/] {escape(rollout_id)} has changed since it was built and is kept")
    show(built, out, as_json=as_json, console=console)
    if built.requested and not built.complete:
        raise typer.Exit(1)


@contextmanager
def _source(records: Path | None, namespace: str) -> Iterator[SourceSpec]:
    from gym_capture.data.log_source import opened_logs
    from gym_capture.data.sources import SourceSpec
    from gym_capture.serving.state import connect

    if records is None:
        connect(namespace=namespace)  # if there is none, that is known before anything is started or written
        yield SourceSpec(import_path="gym_capture.serving.state:connect", kwargs={"namespace": namespace})
        return
    if not records.is_dir():
        raise ConfigError(f"{records} is not a directory")
    with opened_logs(records) as source:
        yield source
