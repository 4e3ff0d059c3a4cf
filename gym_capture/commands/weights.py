"""`gym-capture weights`: the weights that a graph serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError
from gym_capture.weights import PAUSE_MODES, is_sealed, payload_at, seal
from trainer_bridge.weight_client import WeightClient

app = typer.Typer(no_args_is_help=True)

Url = Annotated[str, typer.Option(help="Where the graph is served.")]
Token = Annotated[
    str | None, typer.Option(help="Of `gym-capture token --weights`.", envvar="GYM_CAPTURE_WEIGHTS_TOKEN")
]
SecretFile = Annotated[
    Path | None,
    typer.Option(help="The graph's secret file, in place of a token.", envvar="GYM_CAPTURE_SECRET_FILE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON on stdout.")]
_URL = "http://127.0.0.1:8000"


@app.callback()
def group() -> None:
    """The weights that a graph serves: push others while it runs, see which they are."""


@app.command("push")
def push(
    folder: Annotated[Path, typer.Argument(help="A folder of safetensors that all replicas see.")],
    version: Annotated[int | None, typer.Option(help="Its number, if it has none yet.", min=0)] = None,
    url: Url = _URL,
    token: Token = None,
    mode: Annotated[str, typer.Option(help="Calls under way: keep, wait or abort.")] = "keep",
    force: Annotated[bool, typer.Option("--force", help="Also if the version goes back.")] = False,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Also if values are NaN or infinite.")
    ] = False,
    takeover: Annotated[bool, typer.Option("--takeover", help="Give up an update that another has begun.")] = False,
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Have all replicas serve the weights of FOLDER."""
    if mode not in PAUSE_MODES:
        raise ConfigError(f"--mode: must be keep, wait or abort, got {mode!r}")
    path = folder.expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"{folder} is no folder that is seen from here")
    if is_sealed(path):
        payload = payload_at(str(path))
    elif version is None:
        raise ConfigError(f"{folder} has no number yet: say --version")
    else:
        payload = seal(path, version=version)
    if version is not None and payload.version != version:
        raise ConfigError(f"{folder} is sealed as version {payload.version}, not {version}")
    with _client(url, token, secret_file) as client:
        client.info()  # a graph that is not there, or another token, is said at once, and not tried again and again
        pushed = client.push(
            payload,
            mode=mode,  # type: ignore[arg-type]  # one of those, as was just looked at
            force=force,
            allow_non_finite=allow_non_finite,
            takeover=takeover,
        )
    if as_json:
        typer.echo(json.dumps(asdict(pushed)))
    Console(stderr=True, highlight=False).print(
        f"version {pushed.version} is served by {pushed.replicas} replicas; "
        f"paused for {pushed.paused_s:.3f} s, {pushed.seconds:.1f} s in all"
    )


@app.command("status")
def status(
    url: Url = _URL,
    token: Token = None,
    checksums: Annotated[bool, typer.Option("--checksums", help="Also compare the tensors of all replicas.")] = False,
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Say which weights are served."""
    with _client(url, token, secret_file) as client:
        found = dict(client.info())
        if checksums:
            found["checksums"] = client.checksums()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        typer.echo(f"{name:<24}{value if isinstance(value, str) else json.dumps(value)}")


@app.command("abort")
def abort(url: Url = _URL, token: Token = None, secret_file: SecretFile = None, as_json: AsJson = False) -> None:
    """Give up the update under way: the graph goes on with the weights that it serves."""
    with _client(url, token, secret_file) as client:
        was_there = client.abort()
    if as_json:
        typer.echo(json.dumps({"was_under_way": was_there}))
    Console(stderr=True, highlight=False).print("the update was given up" if was_there else "no update was under way")


def _client(url: str, token: str | None, secret_file: Path | None) -> WeightClient:
    if token is None and secret_file is not None:
        token = Keyring.from_file(secret_file).weights_token()
    try:
        return WeightClient(url, token=token)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url} is not a URL such as {_URL}: {error}") from None
