"""docs/config.md, written from the models that check a graph's arguments and a job's file.

Invariant: a key's text is the one below its field in the code; there is no second one.

    python -m tests.reference.config_page > docs/config.md      `make reference`
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gym_capture.rollouts import jobfile
from gym_capture.serving import config
from tests.reference.texts import texts

_INTRODUCTION: Final = """\
# Configuration

Every key of a graph and of a rollout job, its type, what it is if it is not said, and what it means. A key that is not
here is refused by its name, with the nearest that is: `gym-capture check-configs FILE` says so before anything starts.
`make reference` writes this file from the code.
"""

SECTIONS: Final = (
    (
        "The graph",
        "`args` of an application whose `import_path` is `gym_capture.serving.app:build_app`. Another value of any of "
        "them means new engines ([scaling.md](scaling.md)).",
        "",
        config.GraphArgs,
    ),
    ("Its state", "The section `state` of them.", "state.", config.StateArgs),
    ("Its weights", "The section `weights` of them.", "weights.", config.WeightsArgs),
    (
        "The deployment",
        "`user_config` of the deployment `Policy`: changed and deployed again, it reaches engines that run. Options of "
        "Serve's own stand beside it (`num_replicas`, `autoscaling_config`, ...): [scaling.md](scaling.md).",
        "",
        config.Limits,
    ),
    ("A job", "The file of `gym-capture rollouts run` ([jobs.md](jobs.md)).", "", jobfile.JobFile),
    ("A job's endpoint", "", "endpoint.", jobfile.EndpointSection),
    ("A job's tasks", "", "tasks.", jobfile.TasksSection),
    ("A job's limits", "", "limits.", jobfile.LimitsSection),
    ("A job's workers", "", "ray.", jobfile.RaySection),
)
_TYPES: Final = {
    "PositiveInt": "integer, from 1",
    "NonNegativeInt": "integer, from 0",
    "PositiveFloat": "number above 0",
    "NonNegativeFloat": "number, from 0",
    "Seconds": "number above 0",
    "Object": "object",
    "Path": "path",
    "str": "text",
    "int": "integer",
    "bool": "true or false",
    "Named": "object: `name`, and options of its own",
}


def document() -> str:
    parts = [_INTRODUCTION]
    for title, where, prefix, model in SECTIONS:
        parts += [f"## {title}", ""]
        parts += [where, ""] if where else []
        parts += ["| key | type | default | |", "|---|---|---|---|"]
        parts += [f"| `{prefix}{key}` | {kind} | {default} | {text} |" for key, kind, default, text in rows(model)]
        parts.append("")
    return "\n".join(parts)


def rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    said = texts(model)
    for key, field in model.model_fields.items():
        annotation, text = said[key]
        if annotation.endswith(("Args", "Section")):
            text, kind, default = "The section below.", "object", ""
        else:
            kind = _kind(annotation)
            value = field.get_default(call_default_factory=True)
            default = "**must be said**" if value is PydanticUndefined else _default(value)
        yield key, kind, default, text


def _kind(annotation: str) -> str:
    inner = re.sub(r"^Annotated\[(.*?), (?:AfterValidator|Field)\(.*\)\]$", r"\1", annotation)
    optional = inner.removesuffix(" | None")
    if optional.startswith("Literal["):
        return " or ".join(f"`{value}`" for value in ast.literal_eval(f"({optional[8:-1]},)"))
    if optional == "float":
        return "number, from 0"
    return _TYPES.get(optional, "object" if optional.startswith("dict") else optional)


def _default(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Path):
        value = re.sub(rf"^{re.escape(str(Path.home()))}/", "~/", str(value))
    text = yaml.safe_dump(value, default_flow_style=True, width=1_000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


if __name__ == "__main__":
    print(document(), end="")
