"""What `ui` and `inspect` are pointed at: one way to say it, and what of it goes together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, TypeAlias

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


_ON_DISK: Final = ("model", "records")
_OF_GRAPH: Final = ("secret_file", "token")


def url_of_graph(source: str | None, context: typer.Context) -> str | None:
    """The source, if it is a graph's URL. Raises `ConfigError` for options of the command that do not go with it."""
    url = source if source is not None and source.startswith(("http://", "https://")) else None
    names = [name for name in (_ON_DISK if url else _OF_GRAPH) if _is_given(context, name)]
    if names:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        is_for = "is for" if len(names) == 1 else "are for"
        if url:
            raise ConfigError(f"{options} {is_for} what is on disk: the graph knows its own")
        raise ConfigError(f"{options} {is_for} a graph's URL: {path_of(source)} is read as this user may read it")
    return url


def _is_given(context: typer.Context, name: str) -> bool:
    """On the command line: the environment's secret file is there for whatever asks a graph."""
    origin = context.get_parameter_source(name)
    return origin is not None and origin.name == "COMMANDLINE"  # its class stands in no public module of typer


def path_of(source: str | None) -> Path:
    """The source, if it is on disk."""
    return DEFAULT_DIRECTORY.expanduser() if source is None else Path(source)


def read_token(secret_file: Path | None, token: str | None) -> str | None:
    """The token itself, or that of the secret."""
    if token is None and secret_file is not None:
        return Keyring.from_file(secret_file).read_token()
    return token
