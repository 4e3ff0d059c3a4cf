"""A policy that gets better: training runs on a graph that serves what they train, with prefix supply and without.

Invariant: what runs is what a user runs - `serve run`, and `gym-capture train --play JOB --push URL` as a process of
its own, which plays rollouts on the graph while it trains, and pushes its weights after every step. The runs of the two
arms differ in one argument of the graph and in nothing else; all begin with the same model.

Flow, for each arm: a Ray cluster -> `serve run` -> for each seed: `gym-capture train`, whose metrics are followed ->
its run's folder -> `learning_report`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gym_capture.demo.graph import ENGINE_BACK_WITHIN_S, private_ray, served_graph
from gym_capture.demo.learning_report import Run, read_run
from gym_capture.demo.processes import Child, ChildProcesses
from gym_capture.demo.progress import Phase, Phases
from gym_capture.errors import ConfigError

_CPUS: Final = 8
_NAMESPACE: Final = "gym-capture-learn"
_POLL_S: Final = 0.5
_METRICS: Final = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """What is trained, how often, and where everything goes."""

    model: Path
    """The model folder that every run begins with."""
    config: Mapping[str, Any]
    """The Serve config to serve it with."""
    job: Path
    """The job file that every run plays; its tasks are made up with the seed."""
    directory: Path
    seeds: Sequence[int]
    arms: Sequence[bool]
    """Whether prefixes are supplied."""
    training: Sequence[str]
    """Options of `gym-capture train` beside where it plays and pushes."""


def learn(options: LearnOptions, *, steps: int, children: ChildProcesses, phases: Phases) -> list[Run]:
    """All runs, of `steps` steps each. Raises `ConfigError` with the end of its log if a command failed."""
    runs: list[Run] = []
    for supplied in options.arms:
        # Each arm has a cluster of its own: Serve's client in this process outlives the controller it knows.
        with private_ray(cpus=_CPUS, namespace=_NAMESPACE) as address:
            arm = _Arm(options, address, children, phases, supplied=supplied)
            with arm.served() as url:
                runs += [arm.train(url, seed, steps) for seed in options.seeds]
    return runs


class _Arm:
    """The runs with prefix supply, or those without, on one graph."""

    def __init__(
        self, options: LearnOptions, address: str, children: ChildProcesses, phases: Phases, *, supplied: bool
    ) -> None:
        self._options = options
        self._address = address
        self._children = children
        self._phases = phases
        self._supplied = supplied
        self._name = "supplied" if supplied else "rendered"
        self._directory = options.directory / self._name

    @contextmanager
    def served(self) -> Iterator[str]:
        """The graph's URL, while it is served."""
        args = self._options.config["applications"][0].get("args", {})
        records = str(self._directory / "records")
        with ExitStack() as serving:
            with self._phases.phase(f"{self._name}: serve") as starting:
                graph = served_graph(
                    self._children,
                    base=self._options.config,
                    args={
                        "model": str(self._options.model),
                        "prefix_supply": self._supplied,
                        "state": {**args.get("state", {}), "namespace": _NAMESPACE, "directory": records},
                    },
                    address=self._address,
                    directory=self._directory,
                    on_wait=starting.note,
                )
                url = serving.enter_context(graph)
            yield url

    def train(self, url: str, seed: int, steps: int) -> Run:
        """One run. The graph serves the weights of the run before: the command has it serve its own first."""
        folder = self._directory / f"seed-{seed}"
        job = {
            "out": folder / "job",
            "tasks.seed": seed,
            "endpoint.url": url,
            "endpoint.ray_address": self._address,
            "endpoint.namespace": _NAMESPACE,
            "limits.outage_timeout_s": f"{ENGINE_BACK_WITHIN_S:g}",
        }
        command = [
            # One thread, as the engine has the other core: two that wait for each other are slower.
            *("env", "OMP_NUM_THREADS=1"),
            *(sys.executable, "-m", "gym_capture.cli", "train", "--model", str(self._options.model)),
            *("--play", str(self._options.job), "--push", url, "--steps", str(steps), "--out", str(folder / "run")),
            *(word for key, value in job.items() for word in ("--set", f"{key}={value}")),
            *self._options.training,
        ]
        with self._phases.phase(f"{self._name}: train, seed {seed}") as phase:
            folder.mkdir(parents=True)
            child = self._children.start(command, log=folder / "train.log")
            _watch(child, folder / "run" / _METRICS, phase, steps)
        return read_run(folder, supplied=self._supplied, seed=seed, seconds=phase.seconds)


def _watch(child: Child, metrics: Path, phase: Phase, steps: int) -> None:
    """Follows a run to its end. Raises `ConfigError` with the end of what it wrote if it failed."""
    while True:
        status = child.ended()  # before the look at its lines: the last of them is seen, too
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        phase.count(len(lines), steps)
        if lines:
            last = json.loads(lines[-1])
            phase.note(f"step {last['step']} of {steps}, mean reward {last['mean_reward'] or 0.0:.2f}")
        if status is not None:
            break
        time.sleep(_POLL_S)
    if status != 0:
        raise ConfigError(f"gym-capture train ended with {status}; the end of {child.log}:\n{child.log_tail()}")
