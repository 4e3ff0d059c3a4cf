"""Rules for the graph's arguments that their schema leaves open, and Ray, vLLM or this machine can tell.

Invariant: a problem is what no machine would take: a name or a value that the installed Ray or vLLM does not know. What
another machine may have - a folder, a secret - is only a warning where it is missing.

Flow: the `args` of one application, as they stand in the file -> `check` -> problems and warnings, each with its key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo
from ray.serve.schema import RayActorOptionsSchema

from gym_capture.auth import Keyring
from gym_capture.commands.config_findings import Findings, Location, dotted, nearest, unknown, unknown_keys
from gym_capture.commands.model import SERVED
from gym_capture.errors import ConfigError
from gym_capture.serving.config import GraphArgs, Object

_ANY_TYPE: Final = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""vLLM's arguments that each multiply the GPUs of an engine."""


def check(args: Mapping[str, Any], at: Location) -> Findings:
    """`at`: where in the file `args` stands. Imports vLLM, which takes seconds, if the arguments use its names."""
    problems = list(unknown_keys(_object(args, "ray_actor_options"), RayActorOptionsSchema, (*at, "ray_actor_options")))
    engine = GraphArgs.model_fields["engine"].default
    if args.get("engine", engine) == engine:
        problems += _unknown_to_vllm(args, at)
        problems += _too_few_gpus(args, at)
    return Findings(problems, list(_not_here(args, at)))


def _unknown_to_vllm(args: Mapping[str, Any], at: Location) -> Iterator[str]:
    engine_args = _object(args, "engine_args")
    parsers = {key: args[key] for key in ("tool_parser", "reasoning_parser") if isinstance(args.get(key), str)}
    if not engine_args and not parsers:
        return
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return  # a machine that checks files need not be one that serves
    fields = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    yield from (unknown((*at, "engine_args", key), fields) for key in engine_args if key not in fields)
    yield from _wrong_for_vllm(engine_args, (*at, "engine_args"))
    registered = {
        "tool_parser": ToolParserManager.list_registered(),
        "reasoning_parser": ReasoningParserManager.list_registered(),
    }
    for key, name in parsers.items():
        if name not in registered[key]:
            yield f"{dotted((*at, key))}: vLLM has no {name!r}{nearest(name, registered[key])}"


def _wrong_for_vllm(engine_args: Mapping[str, Any], at: Location) -> Iterator[str]:
    """Values that vLLM's own configurations would refuse when an engine starts, as far as each tells by itself."""
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig

    fields: dict[str, FieldInfo] = {}
    for config in (ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig):
        fields = config.__pydantic_fields__ | fields  # the first one is whose it is
    # What is not said, or null, vLLM finds out.
    said = {key: value for key, value in engine_args.items() if key in fields and value is not None}
    wanted: dict[str, Any] = {
        key: (Annotated[fields[key].annotation, Field(), *fields[key].metadata], ...) for key in said
    }
    model = create_model("EngineArgs", __config__=_ANY_TYPE, **wanted)
    try:
        model.model_validate(said)
    except ValidationError as error:
        # Of alternatives each has its say; the first one is what is meant to be written.
        first = {problem["loc"][0]: problem["msg"] for problem in reversed(error.errors(include_url=False))}
        yield from (f"{dotted((*at, key))}: {first[key]}, got {said[str(key)]!r}" for key in reversed(first))


def _too_few_gpus(args: Mapping[str, Any], at: Location) -> Iterator[str]:
    """An engine sees the GPUs that Ray gives it, on one node. What runs without any, on CPUs, asks for none."""
    engine_args, gpus = _object(args, "engine_args"), _object(args, "ray_actor_options").get("num_gpus")
    if not isinstance(gpus, int | float) or not gpus or engine_args.get("distributed_executor_backend") == "ray":
        return
    sizes = {key: engine_args.get(key, 1) for key in _PARALLEL}
    if not all(isinstance(size, int) for size in sizes.values()):
        return  # for vLLM to report
    needed = math.prod(sizes.values())
    if needed > max(gpus, 1):  # several small engines may share one
        named = " x ".join(f"{key} {size}" for key, size in sizes.items() if size != 1)
        yield (
            f"{dotted((*at, 'ray_actor_options', 'num_gpus'))}: an engine of {named} needs {needed} GPUs of its node, "
            f"and asks Ray for {gpus:g}"
        )


def _not_here(args: Mapping[str, Any], at: Location) -> Iterator[str]:
    model, secret_file = args.get("model"), args.get("secret_file")
    if isinstance(model, str) and model not in SERVED and not Path(model).expanduser().is_dir():
        yield f"{dotted((*at, 'model'))}: {model!r} is no folder of this machine, nor one of {', '.join(SERVED)}"
    if isinstance(secret_file, str):
        try:
            Keyring.from_file(Path(secret_file))
        except ConfigError as error:
            yield f"{dotted((*at, 'secret_file'))}: {error.message}"


def _object(args: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An argument that may be written as JSON. One that is no object is for the schema to report, and empty here."""
    try:
        return TypeAdapter[dict[str, Any]](Object).validate_python(args.get(key))
    except ValidationError:
        return {}
