"""`gym-capture check-configs`: is a Ray Serve configuration file, or a job file, what its author meant?

Invariant: a file that passes holds no key that would be ignored. Ray Serve's own schema drops keys it does not know, so
`max_replica: 4` deploys without a word; here an unknown key is an error that names the key and the nearest known one.

Flow: read the YAML (a key given twice is an error) -> Ray Serve's schema checks the values -> a walk over the same
schema finds unknown keys -> the `args` of applications that this project builds, and the `user_config` of their
deployments, are checked by their own models, and the `args` by `graph_rules`, which asks Ray, vLLM and this machine.
A file that is no Serve configuration but has keys of a job is checked as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.config_findings import (
    Findings,
    Location,
    dotted,
    invalid_values,
    nearest,
    repeated_keys,
    unknown_keys,
)


class AppModels(NamedTuple):
    """The schemas of an application, beyond Ray Serve's own."""

    args: type[BaseModel]
    user_configs: Mapping[str, type[BaseModel]]
    """By the names of its deployments: there are no others."""


ArgsRule: TypeAlias = Callable[[Mapping[str, Any], Location], Findings]
"""Checks the `args` of an application beyond their model; told where in the file they stand."""


def command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files as given to `serve run` or `gym-capture rollouts run`.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each file.")] = False,
) -> None:
    """Validate Ray Serve configuration files and job files: values, misspelt keys, and this project's own arguments.

    Exits with 1 if any file has a problem; each is printed with the key it belongs to. What only this machine lacks,
    such as the model's folder, is a warning.
    """
    from gym_capture.commands import graph_rules
    from gym_capture.serving.config import APP_IMPORT_PATH, DEPLOYMENT, GraphArgs, Limits

    models = AppModels(GraphArgs, {DEPLOYMENT: Limits})
    console = Console(soft_wrap=True, highlight=False)
    bad = 0
    for file in files:
        found = check_file(file, {APP_IMPORT_PATH: models}, {APP_IMPORT_PATH: graph_rules.check})
        bad += bool(found.problems)
        if as_json:
            typer.echo(json.dumps({"file": str(file), **found._asdict()}))
            continue
        console.print(f"{'[red]wrong[/]' if found.problems else '[green]ok[/]   '} {escape(str(file))}")
        for problem in found.problems:
            console.print(f"      {escape(problem)}")
        for warning in found.warnings:
            console.print(f"      [yellow]warning:[/] {escape(warning)}")
    if bad:
        raise typer.Exit(1)


def check_file(file: Path, models: Mapping[str, AppModels], args_rules: Mapping[str, ArgsRule]) -> Findings:
    """The problems of a file. `models`, `args_rules`: schemas and rules of applications, by their import paths."""
    from gym_capture.commands.job_files import check_job, is_job

    try:
        text = file.read_text(encoding="utf-8")
        if is_job(text):
            return check_job(text)
        found = Findings(check_config(text, models), [])
        for at, application in _applications(text):
            if application.get("import_path") in args_rules and isinstance(application.get("args"), dict):
                further = args_rules[application["import_path"]](application["args"], (*at, "args"))
                found = Findings(found.problems + further.problems, found.warnings + further.warnings)
        return found
    except UnicodeDecodeError as error:
        return Findings([f"not UTF-8 text: {error.reason} at byte {error.start}"], [])
    except OSError as error:
        return Findings([f"cannot be read: {error.strerror}"], [])
    except RecursionError:
        nested = "nested too deeply to be a Serve configuration, or an alias stands inside of what it refers to"
        return Findings([nested], [])


def check_config(text: str, models: Mapping[str, AppModels]) -> list[str]:
    """The problems of a file's text. `models`: what checks an application, by its import path."""
    from ray.serve.schema import ServeDeploySchema

    try:
        data = yaml.safe_load(text)
        problems = list(repeated_keys(yaml.compose(text, yaml.SafeLoader), ()))
    except yaml.YAMLError as error:
        return [f"not valid YAML: {' '.join(str(error).split())}"]
    if not isinstance(data, dict):
        return ["not a mapping: a Serve configuration has `applications` at its top"]
    problems += invalid_values(data, ServeDeploySchema, ())
    problems += unknown_keys(data, ServeDeploySchema, ())
    for at, application in _applications(text):
        if application.get("import_path") in models:
            model = models[application["import_path"]]
            problems += invalid_values(application.get("args") or {}, model.args, (*at, "args"))
            problems += _invalid_user_configs(application.get("deployments"), model.user_configs, (*at, "deployments"))
    return problems


def _invalid_user_configs(deployments: object, models: Mapping[str, type[BaseModel]], at: Location) -> Iterator[str]:
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        if not isinstance(deployment, dict) or not isinstance(deployment.get("name"), str):
            continue  # Serve's schema says so
        name = deployment["name"]
        if name not in models:
            yield f"{dotted((*at, index, 'name'))}: there is no deployment {name!r}{nearest(name, models)}"
        elif deployment.get("user_config") is not None:
            yield from invalid_values(deployment["user_config"], models[name], (*at, index, "user_config"))


def _applications(text: str) -> Iterator[tuple[Location, dict[str, Any]]]:
    """The applications of a file's text, as far as it has some."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    applications = data.get("applications") if isinstance(data, dict) else None
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        if isinstance(application, dict):
            yield ("applications", index), application
