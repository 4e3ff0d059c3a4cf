"""`gym-capture check-configs`: is a Ray Serve configuration file what its author meant?

Invariant: a file that passes holds no key that would be ignored. Ray Serve's own schema drops keys it does not know, so
`max_replica: 4` deploys without a word; here an unknown key is an error that names the key and the nearest known one.

Flow: read the YAML (a key given twice is an error) -> Ray Serve's schema checks the values -> a walk over the same
schema finds unknown keys -> the `args` of applications that this project builds are checked by their own model.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape

Location: TypeAlias = tuple[str | int, ...]

APP_IMPORT_PATH = "gym_capture.serving.app:build_app"


def command(
    files: Annotated[
        list[Path], typer.Argument(help="Files as given to `serve run`.", exists=True, dir_okay=False, readable=True)
    ],
) -> None:
    """Validate Ray Serve configuration files: values, misspelt keys, and this project's own arguments.

    Exits with 1 if any file has a problem; each is printed with the key it belongs to.
    """
    from gym_capture.serving.config import GraphArgs

    console = Console(soft_wrap=True, highlight=False)
    bad = 0
    for file in files:
        problems = check_file(file, {APP_IMPORT_PATH: GraphArgs})
        bad += bool(problems)
        console.print(f"{'[red]wrong[/]' if problems else '[green]ok[/]   '} {escape(str(file))}")
        for problem in problems:
            console.print(f"      {escape(problem)}")
    if bad:
        raise typer.Exit(1)


def check_file(file: Path, args_models: Mapping[str, type[BaseModel]]) -> list[str]:
    """The problems of a file, none if it is sound."""
    try:
        return check_config(file.read_text(encoding="utf-8"), args_models)
    except UnicodeDecodeError as error:
        return [f"not UTF-8 text: {error.reason} at byte {error.start}"]
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    except RecursionError:
        return ["nested too deeply to be a Serve configuration, or an alias stands inside of what it refers to"]


def check_config(text: str, args_models: Mapping[str, type[BaseModel]]) -> list[str]:
    """The problems of a file's text. `args_models`: what checks `args`, by application import path."""
    from ray.serve.schema import ServeDeploySchema

    try:
        data = yaml.safe_load(text)
        problems = list(_repeated_keys(yaml.compose(text, yaml.SafeLoader), ()))
    except yaml.YAMLError as error:
        return [f"not valid YAML: {' '.join(str(error).split())}"]
    if not isinstance(data, dict):
        return ["not a mapping: a Serve configuration has `applications` at its top"]
    problems += _invalid_values(data, ServeDeploySchema, ())
    problems += _unknown_keys(data, ServeDeploySchema, ())
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        if isinstance(application, dict) and application.get("import_path") in args_models:
            model = args_models[application["import_path"]]
            problems += _invalid_values(application.get("args") or {}, model, ("applications", index, "args"))
    return problems


def _invalid_values(data: object, model: type[BaseModel], at: Location) -> Iterator[str]:
    try:
        model.model_validate(data)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            where = (*at, *problem["loc"])
            if problem["type"] == "extra_forbidden":
                yield _unknown(where, _known_keys(model, problem["loc"][:-1]))
            else:
                yield f"{_dotted(where)}: {problem['msg']}"


def _unknown_keys(data: object, annotation: object, at: Location) -> Iterator[str]:
    """Walks `data` beside the types of the schema, which itself would drop what it does not know."""
    if isinstance(data, list):
        for index, element in enumerate(data):
            yield from _unknown_keys(element, annotation, (*at, index))
        return
    model = _model_in(annotation)
    if model is None or not isinstance(data, dict):
        return
    fields = _fields(model)
    forbids_itself = model.model_config.get("extra") == "forbid"
    for key, value in data.items():
        if key in fields:
            yield from _unknown_keys(value, fields[key], (*at, key))
        elif not forbids_itself:
            yield _unknown((*at, key), fields)


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


def _unknown(where: Location, known: Mapping[str, object]) -> str:
    near = get_close_matches(str(where[-1]), known, n=1)
    return f"{_dotted(where)}: unknown key" + (f", did you mean `{near[0]}`?" if near else "")


def _dotted(where: Location) -> str:
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
                yield f"{_dotted(where)}: given twice, the second time in line {key.start_mark.line + 1}"
            seen.add(name)
            yield from _repeated_keys(value, where)
