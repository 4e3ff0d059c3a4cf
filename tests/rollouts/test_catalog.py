"""What a job file names is found, or refused in words that help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gym_capture.errors import ConfigError
from gym_capture.rollouts.catalog import (
    ENVIRONMENTS,
    HARNESSES,
    check_environment,
    check_harness,
    environment_factory,
    harness_factory,
    task_maker,
)
from gym_capture.rollouts.environment import Register, Task
from gym_capture.rollouts.harnesses.tool_loop import ToolLoop

OWN = f"{__name__}:Own"


class Own(Register):
    """An environment whose options are its own, those of its tasks, and both."""

    def __init__(self, *, limit: int = 3, shared: str = "a") -> None:
        super().__init__()
        self.options = (limit, shared)

    @staticmethod
    def tasks(count: int, *, seed: int = 0, size: int = 2, shared: str = "a") -> list[Task]:  # type: ignore[override]
        return [Task(f"{seed}-{size}-{shared}-{index}") for index in range(count)]


def pass_on(**options: Any) -> Own:
    own = Own()
    own.options = tuple(options.items())  # type: ignore[assignment]
    return own


class OfTheirType:
    pass


def with_an_object(*, held: OfTheirType | None = None, needed: int) -> Own:
    return Own(limit=needed)


class Harnessed:
    """A harness without an end."""

    async def run(self, **_: object) -> None: ...


class Unscored:
    """An environment that somebody forgot to finish."""

    score = None

    async def reset(self, task: Task) -> None: ...
    async def close(self) -> None: ...


def unscored() -> Unscored:
    return Unscored()


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_every_harness_of_the_table_can_be_loaded(name: str) -> None:
    harness_factory(name)


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_every_environment_of_the_table_can_be_loaded(name: str) -> None:
    environment_factory(name)
    task_maker(name)


async def test_a_harness_is_made_with_the_options_of_the_job_file() -> None:
    harness = harness_factory("tool-loop")(max_calls=5, forced_calls=4)
    assert isinstance(harness, ToolLoop)
    assert (harness._options.max_calls, harness._options.forced_calls) == (5, 4)
    await harness.close()


def test_an_option_goes_to_whoever_takes_it() -> None:
    options = {"limit": 4, "size": 3, "shared": "b"}
    made = environment_factory(OWN)(**options)
    assert isinstance(made, Own)
    assert made.options == (4, "b")
    assert [task.task_id for task in task_maker(OWN)(2, seed=7, **options)] == ["7-3-b-0", "7-3-b-1"]
    assert task_maker("register")(1, seed=0, steps=3) == Register.tasks(1, seed=0, steps=3)


def test_a_factory_may_take_whatever_comes() -> None:
    made = environment_factory(f"{__name__}:pass_on")(anything=1)
    assert isinstance(made, Own)
    assert made.options == (("anything", 1),)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (OWN, {"limt": 4}, "no option 'limt' (did you mean 'limit'?); its options are limit, shared, size"),
        (OWN, {"limit": "four"}, "option limit: Input should be a valid integer, unable to parse string as an integer"),
        ("register", {"zzz": 1}, "environment 'register' has no option 'zzz'; its options are steps"),
        (f"{__name__}:with_an_object", {}, "needs the option needed"),
        (f"{__name__}:with_an_object", {"held": 1, "needed": 2, "x": 3}, "no option 'x'; its options are held, needed"),
        ("regster", {}, "there is no environment 'regster' (did you mean 'register'?); there are "),
        ("gym_capture.no_such:Thing", {}, "cannot load 'gym_capture.no_such:Thing'"),
        ("gym_capture.rollouts.catalog:HARNESSES", {}, "cannot be called with options"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(name: str, options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        environment_factory(name)(**options)
    assert said in raised.value.message


def test_a_method_that_is_missing_is_named_where_it_can_be_known() -> None:
    said = r"has no method close: it needs run, close, each `async def`"
    with pytest.raises(ConfigError, match=f"Harnessed' {said}"):
        check_harness(f"{__name__}:Harnessed", {})
    with pytest.raises(ConfigError, match=said):
        harness_factory(f"{__name__}:Harnessed")
    said = r"has no method call_tool, score: it needs reset, call_tool, score, close"
    with pytest.raises(ConfigError, match=f"Unscored' {said}"):
        check_environment(f"{__name__}:Unscored", {})
    # What a function makes is known when it has made it.
    check_environment(f"{__name__}:unscored", {})
    with pytest.raises(ConfigError, match=f"unscored' makes as an environment {said}"):
        environment_factory(f"{__name__}:unscored")()


def test_options_of_tasks_are_checked_like_those_of_the_environment() -> None:
    with pytest.raises(ConfigError, match="option size"):
        task_maker(OWN)(1, seed=0, size="large")
    with pytest.raises(ConfigError, match="no option 'sise'"):
        task_maker(OWN)(1, seed=0, sise=1)
    with pytest.raises(ConfigError, match="makes no tasks of its own"):
        task_maker(f"{__name__}:pass_on")


def test_an_unknown_harness_and_its_options_are_named_too() -> None:
    with pytest.raises(ConfigError, match=r"no harness 'tool_loop' \(did you mean 'tool-loop'\?\); there are "):
        harness_factory("tool_loop")
    with pytest.raises(
        ConfigError, match=r"harness 'tool-loop' has no option 'max_cals' \(did you mean 'max_calls'\?\)"
    ):
        harness_factory("tool-loop")(max_cals=1)
    with pytest.raises(ConfigError, match="forced_calls must be less than max_calls"):
        harness_factory("tool-loop")(max_calls=1, forced_calls=1)
