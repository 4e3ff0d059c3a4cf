"""`gym-capture state`: the state actors of a graph, which outlive `serve run`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from gym_capture.commands.cluster import join_cluster
from gym_capture.errors import ConfigError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """The state actors of a graph. They keep its records, and outlive `serve run`."""


@app.command("stop")
def stop(
    ray_address: Annotated[str, typer.Option(help="The Ray cluster that the graph ran on.")] = "auto",
    namespace: Annotated[str, typer.Option(help="Ray namespace of the state actors.")] = "gym-capture",
    force: Annotated[
        bool, typer.Option("--force", help="Also while Serve runs an application, whose calls then fail.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print how many there were as JSON.")] = False,
) -> None:
    """End the state actors, once the graph is stopped. Their logs stay, and are read by whoever starts them next."""
    from ray import serve

    from gym_capture.serving.state import stop_shards

    join_cluster(ray_address, namespace=namespace)
    served = sorted(serve.status().applications)
    if served and not force:
        raise ConfigError(
            f"Serve runs {', '.join(served)} on this cluster, and a graph does not outlive its state actors: end it "
            "first - Ctrl-C in `serve run`, or, where that is gone (a `serve run` that got SIGTERM leaves its graph "
            "running), `serve shutdown -y` - or insist with --force"
        )
    stopped = stop_shards(namespace=namespace)
    if as_json:
        typer.echo(json.dumps({"namespace": namespace, "ended": stopped}))
    Console(stderr=True, highlight=False).print(f"state actors of namespace {namespace} ended: {stopped}")
