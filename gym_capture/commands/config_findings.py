"""Problems of a part of a Serve configuration file, each with the key that it belongs to.

Invariant: a key that a schema does not know is found, also where the schema itself would drop it, and the nearest known
one is named.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError

Location: TypeAlias = tuple[str | int, ...]


class Findings(NamedTuple):
    """Problems of a file or a part of it: what is wrong, and what may be."""

    problems: list[str]
    warnings: list[str]


def invalid_values(data: object, model: type[BaseModel], at: Location) -> Iterator[str]:
    """The problems that `model` finds in `data`, each with the key it belongs to."""
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


def repeated_keys(node: Any, at: Location) -> Iterator[str]:
    """YAML lets the last of two equal keys win in silence; here they are an error. `node`: a composed YAML node."""
    if isinstance(node, yaml.SequenceNode):
        for index, element in enumerate(node.value):
            yield from repeated_keys(element, (*at, index))
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            where = (*at, name)
            if name in seen:
                yield f"{dotted(where)}: given twice, the second time in line {key.start_mark.line + 1}"
            seen.add(name)
            yield from repeated_keys(value, where)
