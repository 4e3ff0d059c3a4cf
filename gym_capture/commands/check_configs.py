"""`gym-capture check-configs`: is a Ray Serve configuration file what its author meant?

Invariant: a file that passes holds no key that would be ignored. Ray Serve's own schema drops keys it does not know, so
`max_replica: 4` deploys without a word; here an unknown key is an error that names the key and the nearest known one.

Flow: read the YAML (a key given twice is an error) -> Ray Serve's schema checks the values -> a walk over the same
schema finds unknown keys -> the `args` of applications that this project builds, and the `user_config` of their
deployments, are checked by their own models, and the `args` by `graph_rules`, which asks Ray, vLLM and this machine.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape

Location: TypeAlias = tuple[str | int, ...]


class Findings(NamedTuple):
    """What is wrong with a file or a part of it, and what may be."""

    problems: list[str]
    warnings: list[str]


class AppModels(NamedTuple):
    """What checks an application beyond Ray Serve's schema."""

    args: type[BaseModel]
    user_configs: Mapping[str, type[BaseModel]]
    """By the names of its deployments: there are no others."""


ArgsRule: TypeAlias = Callable[[Mapping[str, Any], Location], Findings]
"""Checks the `args` of an application beyond their model; told where in the file they stand."""

APP_IMPORT_PATH = "gym_capture.serving.app:build_app"


def command(
    files: Annotated[
        list[Path], typer.Argument(help="Files as given to `serve run`.", exists=True, dir_okay=False, readable=True)
    ],
) -> None:
    """Validate Ray Serve configuration files: values, misspelt keys, and this project's own arguments.

    Exits with 1 if any file has a problem; each is printed with the key it belongs to. What only this machine lacks,
    such as the model's folder, is a warning.
    """
    from gym_capture.commands import graph_rules
    from gym_capture.serving.config import DEPLOYMENT, GraphArgs, Limits

    models = AppModels(GraphArgs, {DEPLOYMENT: Limits})
    console = Console(soft_wrap=True, highlight=False)
    bad = 0
    for file in files:
        found = check_file(file, {APP_IMPORT_PATH: models}, {APP_IMPORT_PATH: graph_rules.check})
        bad += bool(found.problems)
        console.print(f"{'[red]wrong[/]' if found.problems else '[green]ok[/]   '} {escape(str(file))}")
        for problem in found.problems:
            console.print(f"      {escape(problem)}")
        for warning in found.warnings:
            console.print(f"      [yellow]warning:[/] {escape(warning)}")
    if bad:
        raise typer.Exit(1)


def check_file(file: Path, models: Mapping[str, AppModels], args_rules: Mapping[str, ArgsRule]) -> Findings:
    """What is wrong with a file. `models`, `args_rules`: what checks an application, by its import path."""
    try:
        text = file.read_text(encoding="utf-8")
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
        problems = list(_repeated_keys(yaml.compose(text, yaml.SafeLoader), ()))
    except yaml.YAMLError as error:
        return [f"not valid YAML: {' '.join(str(error).split())}"]
    if not isinstance(data, dict):
        return ["not a mapping: a Serve configuration has `applications` at its top"]
    problems += _invalid_values(data, ServeDeploySchema, ())
    problems += unknown_keys(data, ServeDeploySchema, ())
    for at, application in _applications(text):
        if application.get("import_path") in models:
            model = models[application["import_path"]]
            problems += _invalid_values(application.get("args") or {}, model.args, (*at, "args"))
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
            yield from _invalid_values(deployment["user_config"], models[name], (*at, index, "user_config"))


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


def _invalid_values(data: object, model: type[BaseModel], at: Location) -> Iterator[str]:
    try:
        model.model_validate(data)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            where = (*at, *problem["loc"])
            if problem["type"] == "extra_forbidden":
                yield unknown(where, _known_keys(model, problem["loc"][:-1]))
            else:
                yield f"{dotted(where)}: {problem['msg']}"


def unknown_keys(data: object, annotation: object, at: Location) -> Iterator[str]:
    """Walks `data` beside the types of the schema, which itself would drop what it does not know.

    A `runtime_env` is any mapping to the schema; its keys are those that Ray knows.
    """
    from ray.runtime_env import RuntimeEnv

    if isinstance(data, list):
        for index, element in enumerate(data):
            yield from unknown_keys(element, annotation, (*at, index))
        return
    model = _model_in(annotation)
    if model is None or not isinstance(data, dict):
        return
    fields = _fields(model)
    forbids_itself = model.model_config.get("extra") == "forbid"
    for key, value in data.items():
        if key == "runtime_env" and key in fields and isinstance(value, dict):
            known = RuntimeEnv.known_fields
            yield from (unknown((*at, key, name), known) for name in value if name not in known)
        elif key in fields:
            yield from unknown_keys(value, fields[key], (*at, key))
        elif not forbids_itself:
            yield unknown((*at, key), fields)


def _known_keys(model: type[BaseModel], location: Sequence[str | int]) -> Mapping[str, object]:
    """The fields of the model that stands at `location` inside `model`; none if the location leads nowhere."""
    here: type[BaseModel] | None = model
    for key in location:
        if here is None:
            return {}
        if isinstance(key, str) and key in _fields(here):
            here = _model_in(_fields(here)[key])
    return _fields(here) if here is not None else {}


def _fields(model: type[BaseModel]) -> dict[str, object]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `Optional[List[Model]]` or `Union[Dict, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in typing.get_args(annotation) if (model := _model_in(part)) is not None), None)


def unknown(where: Location, known: Collection[str]) -> str:
    return f"{dotted(where)}: unknown key{nearest(str(where[-1]), known)}"


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a line on a name that is not known, with the known one that was meant, if there is one."""
    near = get_close_matches(name, sorted(known), n=1)
    return f", did you mean `{near[0]}`?" if near else ""


def dotted(where: Location) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return text.removeprefix(".") or "the file"


def _repeated_keys(node: Any, at: Location) -> Iterator[str]:
    """YAML lets the last of two equal keys win in silence; here they are an error. `node`: a composed YAML node."""
    if isinstance(node, yaml.SequenceNode):
        for index, element in enumerate(node.value):
            yield from _repeated_keys(element, (*at, index))
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            where = (*at, name)
            if name in seen:
                yield f"{dotted(where)}: given twice, the second time in line {key.start_mark.line + 1}"
            seen.add(name)
            yield from _repeated_keys(value, where)
