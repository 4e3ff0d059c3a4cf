"""`gym-capture ui`: look into what was recorded and built, in a browser.

Invariant: nothing is changed but annotations, which are added beside what is looked at. No graph and no Ray is needed
for what is on disk.

Flow: a path or a URL -> what it leads to (`inspector.find`) -> the texts of ids, from a model folder's tokenizer ->
a server on this machine, until Ctrl-C.
"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError
from gym_capture.stores import DEFAULT_DIRECTORY

_PORT = 8365


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A graph's `state.directory`, a job's directory, built trajectories, NeMo Gym's captures, or a URL.",
            show_default=str(DEFAULT_DIRECTORY),
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = _PORT,
    host: Annotated[str, typer.Option(help="Address to listen at, and the name by which to ask for it.")] = "127.0.0.1",
    any_user: Annotated[
        bool, typer.Option("--any-user", help="Answer other users of this machine, too, and proxies that run as such.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder, of whose tokenizer the texts of ids are.", file_okay=False, exists=True),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="With a job's directory: where the graph keeps the records of it.", file_okay=False),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="With a URL: the graph's secret file.", envvar="GYM_CAPTURE_SECRET_FILE")
    ] = None,
    token: Annotated[str | None, typer.Option(help="With a URL: the graph's read token.")] = None,
) -> None:
    """Look into records and trajectories in a browser: every token, and why it was trained or not. Ctrl-C ends it."""
    from gym_capture.inspector.serve import listening, serve, url_of

    console = Console(soft_wrap=True, highlight=False)
    if source is not None and source.startswith(("http://", "https://")):
        from gym_capture.inspector.remote import Remote, build_remote

        if model is not None or records is not None:
            raise ConfigError("--model and --records are for what is on disk: the graph knows its own")
        keyring = None if secret_file is None else Keyring.from_file(secret_file)
        remote = Remote(source, token=token or (None if keyring is None else keyring.read_token()))
        said, app, close = remote.found(), build_remote(remote), remote.close
    else:
        from gym_capture.inspector.app import build_inspector
        from gym_capture.inspector.find import open_path
        from gym_capture.inspector.library import Library
        from gym_capture.inspector.pieces import Vocabulary
        from gym_capture.inspector.source import Options

        vocabulary = None if model is None else Vocabulary.of_folder(model)
        options = Options(special=frozenset() if vocabulary is None else vocabulary.special)
        path = DEFAULT_DIRECTORY.expanduser() if source is None else Path(source)
        library = Library(open_path(path, options, records=records))
        said, app, close = library.source.found(), build_inspector(library, vocabulary=vocabulary), library.close
        if vocabulary is None:
            said += "\nno --model: ids are shown, and those texts that are on record"
        library.wake()
    try:
        with listening(host, port) as listener:
            url = url_of(listener, host)
            console.print(f"{escape(said)}\n[bold]{url}[/] (Ctrl-C ends it)")
            if open_:
                webbrowser.open(url)
            serve(app, listener, host=host, any_user=any_user)
    finally:
        close()
