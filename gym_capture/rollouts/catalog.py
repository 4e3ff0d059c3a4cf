"""Harnesses and environments by name: what a job file says becomes an object, or one line that says what is wrong.

Invariant: everything that can be known of a name and its options before a rollout runs is said when they are resolved -
a name that does not exist, an option that nothing takes, one that is missing, a value of another type, a method that a
class lacks, a program that is not installed. Each is a `ConfigError` that names what there is.

Flow: a name of the tables below, or an import path `package.module:name` -> a factory -> called with the options of the
job file, as keywords. A harness is made once for a job. An environment is made for each rollout with the same options;
of these the environment and its `tasks` get those that they have parameters for, so that each option has one place.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from gym_capture.errors import ConfigError
from gym_capture.imports import load
from gym_capture.rollouts.environment import Environment, Task
from gym_capture.rollouts.harness import Harness

HarnessFactory: TypeAlias = Callable[..., Harness]
"""Called once for a job, with the options of its harness as keywords. Raises `ConfigError` if they cannot work or if
what it runs is not installed."""

OptionedEnvironment: TypeAlias = Callable[..., Environment]
"""Called for each rollout, with the options of the job's environment as keywords: an `EnvironmentFactory`, once it has
them."""

HARNESSES: Final[Mapping[str, str]] = {
    "tool-loop": "gym_capture.rollouts.harnesses.tool_loop:tool_loop",
    "command": "gym_capture.rollouts.harnesses.command:command",
    "claude-code": "gym_capture.rollouts.harnesses.claude_code:claude_code",
    "mini-swe-agent": "gym_capture.rollouts.harnesses.mini_swe_agent:mini_swe_agent",
    "codex": "gym_capture.rollouts.harnesses.codex:codex",
    "remote-agent": "gym_capture.rollouts.harnesses.remote_agent:remote_agent",
}
ENVIRONMENTS: Final[Mapping[str, str]] = {
    "register": "gym_capture.rollouts.environment:Register",
    "reasoning-gym": "gym_capture.rollouts.environments.reasoning_gym:ReasoningGym",
    "work-folder": "gym_capture.rollouts.environments.work_folder:WorkFolder",
}

_TASK_ARGUMENTS: Final = ("count", "seed")
_HARNESS_METHODS: Final = ("run", "close")
_ENVIRONMENT_METHODS: Final = ("reset", "call_tool", "score", "close")


def harness_factory(name: str) -> HarnessFactory:
    """The factory of the harness `name`. Raises `ConfigError` if there is none, and when called with options amiss."""
    path = _path_of(name, HARNESSES, "harness")
    factory = _loaded(path, _HARNESS_METHODS)
    takes = _Takes.of(factory, path)

    def make(**options: Any) -> Harness:
        _check_known(options, [takes], f"harness {name!r}")
        made: Harness = factory(**takes.own(options, f"harness {name!r}"))
        _check_methods(made, _HARNESS_METHODS, f"what {path!r} makes as a harness")
        return made

    return make


def environment_factory(name: str) -> OptionedEnvironment:
    """The factory of the environment `name`. Raises `ConfigError` as `harness_factory` does."""
    path = _path_of(name, ENVIRONMENTS, "environment")
    factory = _loaded(path, _ENVIRONMENT_METHODS)
    takes, of_tasks = _Takes.of(factory, path), _takes_of_tasks(path)

    def make(**options: Any) -> Environment:
        _check_known(options, [takes, *of_tasks], f"environment {name!r}")
        made: Environment = factory(**takes.own(options, f"environment {name!r}"))
        _check_methods(made, _ENVIRONMENT_METHODS, f"what {path!r} makes as an environment")
        return made

    return make


def task_maker(name: str) -> Callable[..., Sequence[Task]]:
    """The maker of the environment's own tasks: a `TaskMaker` that takes the environment's options as well.

    Raises `ConfigError` if the environment makes none.
    """
    path = _path_of(name, ENVIRONMENTS, "environment")
    takes = _Takes.of(load(path), path)
    of_tasks = _takes_of_tasks(path)
    if not of_tasks:
        raise ConfigError(f"environment {name!r} makes no tasks of its own: give it some in a file")
    maker, (takes_of_maker,) = load(f"{path}.tasks"), of_tasks

    def make(count: int, *, seed: int, **options: Any) -> Sequence[Task]:
        _check_known(options, [takes, takes_of_maker], f"environment {name!r}")
        made: Sequence[Task] = maker(
            count, seed=seed, **takes_of_maker.own(options, f"the tasks of environment {name!r}")
        )
        return made

    return make


def check_harness(name: str, options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a name or options that there are not. Nothing is made, so nothing must be installed."""
    path = _path_of(name, HARNESSES, "harness")
    takes = _Takes.of(_loaded(path, _HARNESS_METHODS), path)
    _check_known(options, [takes], f"harness {name!r}")
    takes.own(options, f"harness {name!r}")


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` as `check_harness` does."""
    path = _path_of(name, ENVIRONMENTS, "environment")
    takes, of_tasks = _Takes.of(_loaded(path, _ENVIRONMENT_METHODS), path), _takes_of_tasks(path)
    _check_known(options, [takes, *of_tasks], f"environment {name!r}")
    takes.own(options, f"environment {name!r}")


@dataclass(frozen=True)
class _Takes:
    """The options that a callable has parameters for."""

    parameters: Mapping[str, inspect.Parameter]
    takes_any: bool
    """It has `**options` too."""

    @classmethod
    def of(cls, function: Any, path: str, *, without: Iterable[str] = ()) -> _Takes:
        try:
            signature = _signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path!r} cannot be called with options: {error}") from None
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = signature.parameters.values()
        return cls(
            {one.name: one for one in parameters if one.kind in named and one.name not in without},
            any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters),
        )

    def own(self, options: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Those of `options` that are for this callable, as the types it asks for. Raises `ConfigError`."""
        missing = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is inspect.Parameter.empty and name not in options
        ]
        if missing:
            raise ConfigError(f"{what} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}")
        return {
            name: _as_annotated(value, self.parameters[name], what) if name in self.parameters else value
            for name, value in options.items()
            if name in self.parameters or self.takes_any
        }


def _loaded(path: str, methods: Sequence[str]) -> Any:
    """A factory. Of a class it is known at once whether what it makes has the methods of its seam."""
    factory = load(path)
    if inspect.isclass(factory):
        _check_methods(factory, methods, repr(path))
    return factory


def _check_methods(made: object, methods: Sequence[str], what: str) -> None:
    """Raises `ConfigError` naming what is missing."""
    missing = [name for name in methods if not callable(getattr(made, name, None))]
    if missing:
        needed = ", ".join(methods)
        raise ConfigError(f"{what} has no method {', '.join(missing)}: it needs {needed}, each `async def`")


def _takes_of_tasks(path: str) -> list[_Takes]:
    """The parameters of the `tasks` of an environment's factory; none if it makes none."""
    try:
        maker = load(f"{path}.tasks")
    except ConfigError:
        return []
    return [_Takes.of(maker, f"{path}.tasks", without=_TASK_ARGUMENTS)]


def _signature(function: Any) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # annotations for type checkers alone
        return inspect.signature(function)


def _as_annotated(value: Any, parameter: inspect.Parameter, what: str) -> Any:
    if parameter.annotation is inspect.Parameter.empty or isinstance(parameter.annotation, str):
        return value
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(parameter.annotation)
    except PydanticUserError:  # a class of the user's own
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((parameter.name, *map(str, first["loc"])))
        raise ConfigError(f"{what}, option {where}: {first['msg']}: got {first['input']!r}") from None


def _check_known(options: Mapping[str, Any], takers: Sequence[_Takes], what: str) -> None:
    if any(takes.takes_any for takes in takers):
        return
    known = sorted({name for takes in takers for name in takes.parameters})
    for name in options:
        if name not in known:
            there_are = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"{what} has no option {name!r}{_meant(name, known)}; {there_are}")


def _path_of(name: str, table: Mapping[str, str], kind: str) -> str:
    if ":" in name:
        return name
    if name not in table:
        raise ConfigError(
            f"there is no {kind} {name!r}{_meant(name, table)}; there are {', '.join(sorted(table))}, and your own "
            "by an import path such as 'package.module:name'"
        )
    return table[name]


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
