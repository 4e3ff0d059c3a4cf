"""Job files: read, with options of the command line over them, or checked.

Invariant: a file of another format version is refused for that, before its keys are looked at: they may have meant
something else. Otherwise every problem is said at once, with the key it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gym_capture.commands.config_findings import Findings, invalid_values, repeated_keys
from gym_capture.errors import ConfigError
from gym_capture.rollouts.catalog import check_environment, check_harness
from gym_capture.rollouts.jobfile import FORMAT_VERSION, JobFile, Named

_VERSION: Final = "format_version"


def read_job_file(
    path: Path | None, overrides: Iterable[tuple[str, Any]], *, options: Mapping[str, str] | None = None
) -> JobFile:
    """The job in a file, or without one a job of `overrides` alone: values by their dotted keys, of which later ones
    win. `options`: by key, the option of the command line that an override came by. Raises `ConfigError`, which names
    the option of a value that came by one, and the file for the others."""
    data: dict[str, Any] = {_VERSION: FORMAT_VERSION}
    if path is not None:
        data, problems = parse(_text(path))
        if problems:
            raise _wrong(path, problems)
    for key, value in overrides:
        _set(data, key, value)
    problems = list(_problems(data))
    if problems:
        raise _wrong(path, problems, options or {})
    return JobFile.model_validate(data)


def job_of_options(path: Path | None, given: Mapping[str, tuple[str, Any]], settings: Iterable[str] = ()) -> JobFile:
    """The job of a command line. `given`: by option, the key that it sets and its value, None where it was not given;
    `settings`: `key=value`, which win. Raises `ConfigError`."""
    overrides: list[tuple[str, Any]] = []
    options: dict[str, str] = {}
    for option, (key, value) in given.items():
        if value is not None:
            overrides.append((key, value))
            options[key] = f"{option} {value}"
    for setting in settings:
        overrides.append(overridden(setting))
        options[overrides[-1][0]] = f"--set {setting}"
    return read_job_file(path, overrides, options=options)


def parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """The mapping in a file's text, and what is wrong with it as YAML."""
    try:
        data = yaml.safe_load(text)
        problems = list(repeated_keys(yaml.compose(text, yaml.SafeLoader), ()))
    except yaml.YAMLError as error:
        return {}, [f"not valid YAML: {' '.join(str(error).split())}"]
    except RecursionError:
        return {}, ["nested too deeply to be a job"]
    if not isinstance(data, dict):
        return {}, [f"not a mapping: a job has `{_VERSION}` and `out` at its top"]
    return data, problems


def is_job(text: str) -> bool:
    """Whether a file's text is meant to be a job, and no Serve configuration."""
    data, _ = parse(text)
    return "applications" not in data and not data.keys().isdisjoint(JobFile.model_fields)


def check_job(text: str) -> Findings:
    """The faults of the text of a job file; what only this machine lacks is a warning. Nothing is made of it, so
    that agents and environments need not be installed."""
    data, problems = parse(text)
    problems = problems or list(_problems(data))
    if problems:
        return Findings(problems, [])
    job = JobFile.model_validate(data)
    for section, check in ((job.environment, check_environment), (job.harness, check_harness)):
        try:
            check(section.name, section.options)
        except ConfigError as error:
            problems.append(error.message)
    tasks = job.tasks.file
    absent = [] if tasks is None or tasks.is_file() else [f"tasks.file: there is no file {tasks}"]
    return Findings(problems, absent)


def overridden(option: str) -> tuple[str, Any]:
    """The key and the value of `key=value`. Raises `ConfigError`."""
    key, separator, value = option.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {option}: write it as key=value, e.g. samples=8 or harness.max_tokens=64")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {option}: the value is not valid YAML: {' '.join(str(error).split())}") from None


def _problems(data: Mapping[str, Any]) -> Iterable[str]:
    version = data.get(_VERSION)
    if version is None:
        yield f"{_VERSION}: is missing: this version of gym-capture reads {FORMAT_VERSION}"
    elif version != FORMAT_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT_VERSION
        what_to_do = "update gym-capture" if newer else "write the file anew, after docs/jobs.md"
        yield f"{_VERSION}: this version of gym-capture reads {FORMAT_VERSION}, not {version!r}: {what_to_do}"
    else:
        yield from invalid_values(data, JobFile, ())


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    here: Any = data
    for depth, section in enumerate(sections):
        inner = here.get(section)
        if inner is None:
            inner = here[section] = _whole(sections[: depth + 1])
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} cannot be set: {'.'.join(sections[: depth + 1])} is {inner!r}")
        here = inner
    here[name] = value
    if key in _REPLACES:
        for other in _REPLACES[key]:
            here.pop(other, None)


_REPLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "tasks.file": ("count", "seed"),
    "tasks.count": ("file",),
    "tasks.seed": ("file",),
}
"""Keys that say the same thing in another way."""


def _whole(section: list[str]) -> dict[str, Any]:
    """A section that the file does not have, before a part of it is set: with the name that it has by default."""
    match section:
        case ["environment" | "harness" as key]:
            default: Named = JobFile.model_fields[key].default
            return {"name": default.name}
        case _:
            return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _wrong(path: Path | None, problems: Iterable[str], options: Mapping[str, str] | None = None) -> ConfigError:
    of_file, of_options = [], []
    for problem in problems:
        option = next((name for key, name in (options or {}).items() if _is_about(problem, key)), None)
        if option is None:
            of_file.append(problem)
        else:
            of_options.append(f"{option}: {problem}")
    where = "the job" if path is None else str(path)
    return ConfigError("; ".join([*of_options, *([f"{where}: {'; '.join(of_file)}"] if of_file else [])]))


def _is_about(problem: str, key: str) -> bool:
    return problem.startswith((f"{key}:", f"{key}.", f"{key}["))
