"""What `ui` and `inspect` are pointed at: one way to say it, and what of it goes together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError
from gym_capture.stores import DEFAULT_DIRECTORY

SourceArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="A graph's `state.directory`, a job's directory, built trajectories, NeMo Gym's captures, or a URL.",
        show_default=str(DEFAULT_DIRECTORY),
    ),
]
ModelOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Model folder, of whose tokenizer the texts of ids are.", file_okay=False, exists=True),
]
RecordsOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="With a job's directory: where the graph keeps the records of it.", file_okay=False),
]
SecretFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="With a URL: the graph's secret file.", envvar="GYM_CAPTURE_SECRET_FILE")
]
ReadToken: TypeAlias = Annotated[str | None, typer.Option(help="With a URL: the graph's read token.")]


def url_of_graph(source: str | None, model: Path | None, records: Path | None) -> str | None:
    """The source, if it is a graph's URL. Raises `ConfigError` for what does not go with one."""
    if source is None or not source.startswith(("http://", "https://")):
        return None
    if model is not None or records is not None:
        raise ConfigError("--model and --records are for what is on disk: the graph knows its own")
    return source


def path_of(source: str | None) -> Path:
    """The source, if it is on disk."""
    return DEFAULT_DIRECTORY.expanduser() if source is None else Path(source)


def read_token(secret_file: Path | None, token: str | None) -> str | None:
    """The token itself, or that of the secret."""
    if token is None and secret_file is not None:
        return Keyring.from_file(secret_file).read_token()
    return token
