"""`gym-capture learn`: a small policy learns to use tools on a served graph, with figures, a picture and checks.

Invariant: it exits with 0 only if the reward rose and trainer and engine agree, and leaves no process behind, however
it ends. What it wrote stays.

Flow: teach the model its format, once -> `demo.learning` -> table, picture, checks -> exit code.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.demo import CONFIG as OF_DEMO
from gym_capture.commands.demo import show_checks
from gym_capture.commands.serve import read_config
from gym_capture.errors import ConfigError

CONFIG: Final = OF_DEMO.with_name("cpu_learning.yaml")
JOB: Final = CONFIG.with_name("learning.yaml")
_TRAINING: Final = (
    *("--rollouts-per-step", "32", "--ahead", "2", "--lr", "1.5e-4", "--warmup-steps", "5"),
    *("--aggregation", "dapo", "--layout", "tree", "--tokens-per-micro-batch", "1536"),
    *("--checkpoint-every", "1000", "--retire"),
)


class Arms(StrEnum):
    """Which graphs to train on."""

    BOTH = "both"
    SUPPLIED = "supplied"
    RENDERED = "rendered"


_SUPPLIED: Final = {Arms.BOTH: (True, False), Arms.SUPPLIED: (True,), Arms.RENDERED: (False,)}


def command(
    seeds: Annotated[int, typer.Option(min=1, help="Runs on each graph, each with tasks of its own.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Updates of a run.")] = 24,
    arms: Annotated[
        Arms, typer.Option(help="With prefix supply, with every conversation rendered again, or both.")
    ] = Arms.BOTH,
    model: Annotated[
        str,
        typer.Option(help="`novice`, which was taught the format and no more, or another model that can be served."),
    ] = "novice",
    job: Annotated[
        Path, typer.Option(help="Job file that is played.", exists=True, dir_okay=False, show_default=False)
    ] = JOB,
    config: Annotated[
        Path, typer.Option(help="Serve config of the graph.", exists=True, dir_okay=False, show_default=False)
    ] = CONFIG,
    train: Annotated[
        list[str] | None,
        typer.Option(help="An option of `gym-capture train`: --train=--lr=1e-4.", metavar="OPTION"),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Figures, picture, logs, records; an empty or new directory.", file_okay=False)
    ] = Path("runs/example-grpo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train a small policy while it is served: rollouts, updates and new weights at the same time.

    Everything runs on this machine, on a Ray cluster of its own: `serve run`, then `gym-capture train --play --push`
    for each seed, with prefix supply and without. Exits with 1 if one of its checks did not hold: the reward rises,
    trainer and engine agree on what was sampled, each update's weights are served.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty; remove it, or name another one")
    import_module("matplotlib")  # of `draw`: that it is missing is said now, not when all runs are over
    served = read_config(config)
    from gym_capture.demo.learning import LearnOptions, learn
    from gym_capture.demo.learning_report import checks, draw, table, to_json, to_markdown
    from gym_capture.demo.novice import novice_dir
    from gym_capture.demo.processes import ChildProcesses
    from gym_capture.demo.progress import Phases
    from gym_capture.serving.app import model_folder

    console = Console(stderr=as_json)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"Figures, logs and records: {escape(str(out))}", soft_wrap=True, highlight=False)
    children = ChildProcesses()
    with Phases(console) as phases, children:
        with phases.phase("prepare the model") as preparing:
            folder = novice_dir(progress=preparing.note) if model == "novice" else model_folder(model)
        options = LearnOptions(
            model=folder,
            config=served,
            job=job.resolve(),
            directory=out,
            seeds=range(seeds),
            arms=_SUPPLIED[arms],
            training=(*_TRAINING, *(train or ())),
        )
        runs = learn(options, steps=steps, children=children, phases=phases)
    found = checks(runs, leftovers=children.leftovers)
    (out / "metrics.json").write_text(to_json(runs, found) + "\n", encoding="utf-8")
    (out / "table.md").write_text(to_markdown(runs), encoding="utf-8")
    draw(runs, out / "reward.png")
    console.print(table(runs))
    show_checks(console, found)
    if as_json:
        typer.echo(to_json(runs, found))
    if not all(check.held for check in found):
        raise typer.Exit(1)
