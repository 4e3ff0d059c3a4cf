"""`gym-capture token`: the tokens that a server with a `secret_file` asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError


def command(
    secret_file: Annotated[Path, typer.Option(help="The server's secret file.", envvar="GYM_CAPTURE_SECRET_FILE")],
    rollout_ids: Annotated[list[str] | None, typer.Argument(help="Rollouts whose agents call the model.")] = None,
    untracked: Annotated[bool, typer.Option("--untracked", help="For calls without a rollout.")] = False,
    admin: Annotated[bool, typer.Option("--admin", help="For registering rollouts, and for their outcomes.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="For changing the weights of the engines.")] = False,
    read: Annotated[bool, typer.Option("--read", help="For reading the records of every rollout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print tokens: for an agent's rollout (its API key), for calls without one, for records, rollouts, weights.

    One token is printed alone. Several are lines of a rollout's id or the option, a tab, and the token.
    """
    keyring = Keyring.from_file(secret_file)
    tokens = [(rollout_id, keyring.rollout_token(rollout_id)) for rollout_id in rollout_ids or ()]
    # A rollout may be called `read`: what is no rollout goes by its option.
    tokens += [("--untracked", keyring.untracked_token())] * untracked + [("--read", keyring.read_token())] * read
    tokens += [("--admin", keyring.admin_token())] * admin + [("--weights", keyring.weights_token())] * weights
    if not tokens:
        raise ConfigError("name a rollout, or say --untracked, --read, --admin or --weights")
    for name, token in tokens:
        if as_json:
            print(json.dumps({"of": name, "token": token}))
        else:
            print(token if len(tokens) == 1 else f"{name}\t{token}")
