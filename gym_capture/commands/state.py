"""`gym-capture state`: the state actors of a graph, which outlive `serve run`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from gym_capture.errors import ConfigError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """The state actors of a graph. They keep its records, and outlive `serve run`."""


@app.command("stop")
def stop(
    ray_address: Annotated[str, typer.Option(help="The Ray cluster that the graph ran on.")] = "auto",
    namespace: Annotated[str, typer.Option(help="Ray namespace of the state actors.")] = "gym-capture",
) -> None:
    """End the state actors, once the graph is stopped. Their logs stay, and are read by whoever starts them next."""
    import ray

    from gym_capture.serving.state import stop_shards

    try:
        ray.init(address=ray_address, namespace=namespace, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster at {ray_address!r}: {error}") from None
    stopped = stop_shards(namespace=namespace)
    Console(stderr=True, highlight=False).print(f"{stopped} state actors of namespace {namespace} ended")
