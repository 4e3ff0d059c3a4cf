"""`gym-capture ui`: look into what was recorded and built, in a browser.

Invariant: nothing is changed but annotations, which are added beside what is looked at. No graph and no Ray is needed
for what is on disk.

Flow: a path or a URL -> what it leads to (`inspector.find`) -> the texts of ids, from a model folder's tokenizer ->
a server on this machine, until Ctrl-C.
"""

from __future__ import annotations

import json
import os
import webbrowser
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.looking import (
    ModelOption,
    ReadToken,
    RecordsOption,
    SecretFile,
    SourceArgument,
    path_of,
    read_token,
    url_of_graph,
)

_PORT = 8365


def command(
    context: typer.Context,
    source: SourceArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = _PORT,
    host: Annotated[str, typer.Option(help="Address to listen at, and the name by which to ask for it.")] = "127.0.0.1",
    any_user: Annotated[
        bool, typer.Option("--any-user", help="Answer other users of this machine, too, and proxies that run as such.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    model: ModelOption = None,
    records: RecordsOption = None,
    secret_file: SecretFile = None,
    token: ReadToken = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it listens as a line of JSON, once it does.")
    ] = False,
) -> None:
    """Look into records and trajectories in a browser: every token, and why it was trained or not. Ctrl-C ends it."""
    from gym_capture.inspector.serve import listening, serve, url_of

    console = Console(soft_wrap=True, highlight=False)
    if (graph := url_of_graph(source, context)) is not None:
        from gym_capture.inspector.remote import Remote, build_remote

        remote = Remote(graph, token=read_token(secret_file, token))
        kind, said, app, close = "graph", remote.found(), build_remote(remote), remote.close
    else:
        from gym_capture.inspector.app import build_inspector
        from gym_capture.inspector.find import open_path
        from gym_capture.inspector.library import Library
        from gym_capture.inspector.pieces import Vocabulary
        from gym_capture.inspector.source import Options

        vocabulary = None if model is None else Vocabulary.of_folder(model)
        options = Options(special=frozenset() if vocabulary is None else vocabulary.special)
        library = Library(open_path(path_of(source), options, records=records))
        kind, said = library.source.kind, library.source.found()
        app, close = build_inspector(library, vocabulary=vocabulary), library.close
        if vocabulary is None:
            said += "\nno --model: ids are shown, and those texts that are on record"
        library.wake()
    try:
        with listening(host, port) as listener:
            url = url_of(listener, host)
            if as_json:
                typer.echo(json.dumps({"url": url, "kind": kind, "pid": os.getpid()}))
            else:
                console.print(f"{escape(said)}\n[bold]{url}[/] (Ctrl-C ends it)")
            if open_:
                webbrowser.open(url)
            serve(app, listener, host=host, any_user=any_user)
    finally:
        close()
