"""A rollout job as its author writes it: tasks x samples x environment x harness x limits x endpoint.

Invariant: a job that validates has no key that would be ignored: the sections refuse what they do not know, and the
options of the environment and of the harness are checked by what takes them, when `prepare` makes it. Nothing has been
played by then.

Flow: a mapping (a YAML file, options of the command line) -> `JobFile` -> `prepare`: tasks, environment and harness,
made or refused -> a job on a graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from gym_capture.errors import ConfigError
from gym_capture.rollouts.catalog import environment_factory, harness_factory, task_maker
from gym_capture.rollouts.environment import Environment, EnvironmentFactory, Task
from gym_capture.rollouts.harness import Harness, check_repeats
from gym_capture.rollouts.job import JobOptions
from gym_capture.rollouts.patience import Late, Patience, Raised

__all__ = ["FORMAT_VERSION", "EndpointSection", "JobFile", "LimitsSection", "Named", "RaySection", "TasksSection"]

FORMAT_VERSION: Final = 1
_MADE_TASKS: Final = 4
_JOB_DEFAULTS: Final = JobOptions(job_id="")

_T = TypeVar("_T")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EndpointSection(_Section):
    """The graph. A job may go on at another endpoint: nothing here decides what is sampled or scored."""

    url: str = "http://127.0.0.1:8000"
    """Scheme, host and port."""
    secret_file: Path | None = None
    """That of the graph, if it has one: each rollout gets its own token."""
    ray_address: str = "auto"
    """The Ray cluster that the graph runs on."""
    namespace: str = "gym-capture"
    """Ray namespace of the graph's state actors."""


class TasksSection(_Section):
    """Either a file, or tasks that the environment makes up."""

    file: Path | None = None
    """Lines of JSON: `{"task_id": ..., "data": {...}}`."""
    count: PositiveInt | None = None
    """How many the environment makes up: 4 if nothing is said."""
    seed: int | None = None
    """Of those: 0 if nothing is said."""

    @model_validator(mode="after")
    def _one_source(self) -> TasksSection:
        if self.file is not None and (self.count is not None or self.seed is not None):
            raise ValueError(
                "tasks come from a `file`, or the environment makes them up by `count` and `seed`: not both"
            )
        return self


class Named(BaseModel):
    """An environment or a harness: its name or import path, and its own options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}


class LimitsSection(_Section):
    """Of rollouts. Limits of a call are options of the harness."""

    concurrency: PositiveInt = _JOB_DEFAULTS.concurrency
    """Rollouts at a time."""
    max_attempts: PositiveInt = _JOB_DEFAULTS.max_attempts
    """Attempts at a rollout before it counts as failed."""
    rollout_timeout_s: Seconds = _JOB_DEFAULTS.rollout_timeout_s
    """Seconds that an attempt may take, once started."""
    close_timeout_s: Seconds = _JOB_DEFAULTS.close_timeout_s
    """Seconds that its tear-down may take."""
    retry_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = _JOB_DEFAULTS.retry_wait_s
    """The wait before the first retry; it doubles, up to 30 s."""
    max_lost: NonNegativeInt = _JOB_DEFAULTS.max_lost
    """Attempts that may be lost with their node or their graph, beside `max_attempts`."""
    outage_timeout_s: Seconds = _JOB_DEFAULTS.outage_timeout_s
    """How long the job waits for a graph that does not answer."""


class RaySection(_Section):
    """The worker processes that play rollouts where these are spread over a Ray cluster."""

    rollouts_per_worker: PositiveInt = 16
    """How many a worker plays at a time."""
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.25
    """CPUs that a worker reserves on its node, with the programs that it starts."""
    resources: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    """Other reservations: resources that nodes were started with."""


class JobFile(_Section):
    """A job. Relative paths are relative to where the command is run."""

    format_version: Literal[1]
    """Of the job file."""
    out: Path
    """The job's directory. A job that was interrupted is resumed in it."""
    job_id: str | None = None
    """First part of rollout ids; without one, the name of `out` and a random part."""
    endpoint: EndpointSection = EndpointSection()
    environment: Named = Named(name="register")
    """What is played, and what scores it."""
    tasks: TasksSection = TasksSection()
    samples: PositiveInt = _JOB_DEFAULTS.samples
    """Rollouts of each task: the size of a GRPO group."""
    harness: Named = Named(name="tool-loop")
    """The agent."""
    limits: LimitsSection = LimitsSection()
    resume_turns: bool = False
    """Whether an attempt that was cut is continued from its records by the next one. It decides nothing of what is
    sampled or scored, so it may differ when the job goes on."""
    ray: RaySection = RaySection()

    def options(self, job_id: str) -> JobOptions:
        return JobOptions(job_id=job_id, samples=self.samples, **self.limits.model_dump())

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide what is sampled and scored, beside tasks and limits."""
        return {"environment": self.environment.settings, "harness": self.harness.settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The parts that a job file names, made."""

    tasks: Sequence[Task]
    make_environment: EnvironmentFactory
    harness: Harness


async def prepare(job: JobFile) -> Prepared:
    """Makes what the job names. Raises `ConfigError` for whatever of it cannot work: a line of the tasks, an unknown
    name or option, a program that is not installed, an environment that cannot be made, or cannot make its tasks."""
    make_environment = await prepare_environment(job)
    tasks = await tasks_of(job)
    # Last: it may hold what must be closed.
    return Prepared(tasks=tasks, make_environment=make_environment, harness=prepare_harness(job))


async def prepare_environment(job: JobFile) -> EnvironmentFactory:
    """The maker of each rollout's environment, tried once. Raises `ConfigError`."""
    factory, options = environment_factory(job.environment.name), job.environment.options

    def make_environment() -> Environment:
        return factory(**options)

    await _try(make_environment, job)
    return make_environment


def prepare_harness(job: JobFile) -> Harness:
    """The harness, to be closed. Raises `ConfigError`."""
    harness = harness_factory(job.harness.name)(**job.harness.options)
    if job.resume_turns:
        check_repeats(harness, job.harness.name)
    return harness


async def _try(make_environment: EnvironmentFactory, job: JobFile) -> None:
    """Makes an environment and closes it: what does not work once does not work in any rollout."""
    environment = await _own(make_environment, job, "cannot be made")
    limit_s = job.limits.close_timeout_s
    await Patience(grace_s=limit_s).wait(environment.close, limit_s=limit_s)


async def tasks_of(job: JobFile) -> Sequence[Task]:
    """The tasks that a job names. Raises `ConfigError`."""
    section = job.tasks
    if section.file is not None:
        return read_tasks(section.file)
    maker = task_maker(job.environment.name)

    def make() -> Sequence[Task]:
        return tuple(maker(section.count or _MADE_TASKS, seed=section.seed or 0, **job.environment.options))

    tasks = await _own(make, job, "cannot make tasks")
    if not tasks:
        raise ConfigError(f"environment {job.environment.name!r} made no tasks")
    for task in tasks:
        if not isinstance(task, Task):
            raise ConfigError(f"environment {job.environment.name!r} made a task that is no `Task`: {repr(task)[:100]}")
    return tasks


async def _own(work: Callable[[], _T], job: JobFile, fails: str) -> _T:
    """The return value of the environment's code. Raises `ConfigError` for whatever it raises."""

    async def run() -> _T:
        return work()

    ended = await Patience(grace_s=job.limits.close_timeout_s).wait(run, limit_s=job.limits.rollout_timeout_s)
    if isinstance(ended, Late):
        raise ConfigError(f"environment {job.environment.name!r} {fails}: it takes longer than a rollout may")
    if isinstance(ended, Raised):
        if isinstance(ended.error, ConfigError):
            raise ended.error
        kind = type(ended.error).__name__
        raise ConfigError(f"environment {job.environment.name!r} {fails}: {kind}: {ended.error}")
    return ended.value


def read_tasks(path: Path) -> list[Task]:
    """Tasks from lines of JSON. Raises `ConfigError`, naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: the tasks cannot be read: {error.strerror}") from None
    tasks, line_of = [], dict[str, int]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = _task(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not a task: {type(error).__name__}: {error}") from None
        if task.task_id in line_of:
            raise ConfigError(
                f"{path}, line {number}: task_id {task.task_id!r} is in line {line_of[task.task_id]} already"
            )
        line_of[task.task_id] = number
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path}: there are no tasks in it")
    return tasks


def _task(found: object) -> Task:
    if not isinstance(found, dict):
        raise TypeError(f"must be an object: got {type(found).__name__}")
    unknown = sorted(found.keys() - {"task_id", "data"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}: what the environment is to know of a task stands in `data`")
    task_id, data = found["task_id"], found.get("data", {})
    if not isinstance(task_id, str | int) or isinstance(task_id, bool):
        raise TypeError(f"task_id must be a string: got {task_id!r}")
    if not isinstance(data, dict):
        raise TypeError(f"data must be an object: got {type(data).__name__}")
    return Task(str(task_id), data)
