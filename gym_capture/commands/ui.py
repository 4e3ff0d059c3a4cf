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

from gym_capture.stores import DEFAULT_DIRECTORY


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A graph's `state.directory`, a job's directory, built trajectories, or NeMo Gym's captures.",
            show_default=str(DEFAULT_DIRECTORY),
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8265 + 100,
    host: Annotated[str, typer.Option(help="Where to listen; other machines reach no other name than this.")] = (
        "127.0.0.1"
    ),
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder, of whose tokenizer the texts of ids are.", file_okay=False, exists=True),
    ] = None,
) -> None:
    """Look into records and trajectories in a browser: every token, and why it was trained or not. Ctrl-C ends it."""
    from gym_capture.inspector.app import build_inspector
    from gym_capture.inspector.find import open_path
    from gym_capture.inspector.library import Library
    from gym_capture.inspector.pieces import Vocabulary
    from gym_capture.inspector.serve import listening, serve, url_of
    from gym_capture.inspector.source import Options

    console = Console(soft_wrap=True, highlight=False)
    vocabulary = None if model is None else Vocabulary.of_folder(model)
    options = Options(special=frozenset() if vocabulary is None else vocabulary.special)
    found = open_path(DEFAULT_DIRECTORY.expanduser() if source is None else Path(source), options)
    listener = listening(host, port)
    url = url_of(listener, host)
    console.print(f"{escape(found.found())}")
    if vocabulary is None:
        console.print("no --model: ids are shown, and the texts that are on record")
    console.print(f"[bold]{url}[/] (Ctrl-C ends it)")
    library = Library(found)
    library.wake()
    if open_:
        webbrowser.open(url)
    try:
        serve(build_inspector(library, vocabulary=vocabulary), listener, host=host)
    finally:
        library.close()
