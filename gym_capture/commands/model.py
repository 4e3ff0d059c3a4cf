"""`gym-capture model`: a small model folder to serve and train, without a hub."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer


class SmallModel(StrEnum):
    """The models that can be made."""

    SMOLLM2 = "smollm2"
    TINY = "tiny"
    NOVICE = "novice"


SERVED: Final = (SmallModel.SMOLLM2, SmallModel.TINY)
"""Those that a Serve config may name; of any other, it takes the folder."""


def command(
    model: Annotated[
        SmallModel,
        typer.Argument(
            help="smollm2: SmolLM2-135M-Instruct. tiny: 3 M random weights. novice: 7 M, taught to call tools."
        ),
    ],
    cache: Annotated[Path | None, typer.Option(help="Where model folders are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path as JSON.")] = False,
) -> None:
    """Make a small model folder, once, and print its path.

    Nothing is fetched: weights and tokenizer come from an installed package.
    """
    from gym_capture.demo.novice import novice_dir
    from gym_capture.models import smollm2_dir, tiny_dir

    make = {SmallModel.SMOLLM2: smollm2_dir, SmallModel.TINY: tiny_dir, SmallModel.NOVICE: novice_dir}[model]
    folder = make(cache, progress=lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps({"model": str(folder)}) if as_json else folder)
