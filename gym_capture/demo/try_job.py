"""A job file, played as a user plays it, against a small graph of its own.

Invariant: what runs is what the README tells to run - `serve run`, `gym-capture rollouts run JOB.YAML`, `gym-capture
build-job` - as processes of their own, which are told nothing but where the graph is.

Flow: a Ray cluster -> `serve run` -> `rollouts run` -> `build-job` -> serving ends -> one step of the reference trainer
reads the Parquet, and says whether it finds the ids as likely as the engine did.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gym_capture.data.requests import read_requests
from gym_capture.demo.graph import ENGINE_BACK_WITHIN_S, grammar_calls_of, private_ray, served_graph
from gym_capture.demo.job_report import Tried, read_tried
from gym_capture.demo.processes import ChildProcesses
from gym_capture.demo.progress import Phase, Phases
from gym_capture.demo.training import train
from gym_capture.errors import ConfigError
from gym_capture.rollouts.ledger import ROWS_FILE

_CPUS: Final = 8
_NAMESPACE: Final = "gym-capture-try-job"
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TryOptions:
    """The job to try, the model, and where everything goes."""

    job: Path
    """A job file."""
    settings: Sequence[str]
    """`key=value` over it."""
    model: Path
    """A model folder."""
    config: Mapping[str, Any]
    """The Serve config to serve it with."""
    temperature: float
    """That the graph pins, and the trainer is told."""
    directory: Path


def try_job(options: TryOptions, *, children: ChildProcesses, phases: Phases) -> Tried:
    """Plays the job, builds and trains. Raises `ConfigError` with the end of its log if a command failed."""
    with private_ray(cpus=_CPUS, namespace=_NAMESPACE) as address:
        return _Try(options, address, children, phases).run()


class _Try:
    """One job under way."""

    def __init__(self, options: TryOptions, address: str, children: ChildProcesses, phases: Phases) -> None:
        self._options = options
        self._address = address
        self._children = children
        self._phases = phases
        self._seconds: dict[str, float] = {}

    def run(self) -> Tried:
        options, directory = self._options, self._options.directory
        job, trajectories = directory / "job", directory / "trajectories"
        with ExitStack() as serving:
            with self._phase("serve", "Ray Serve starts, vLLM loads the model: about a minute") as starting:
                graph = served_graph(
                    self._children,
                    base=options.config,
                    args=self._graph_args(),
                    address=self._address,
                    directory=directory,
                    on_wait=starting.note,
                )
                url = serving.enter_context(graph)
            with self._phase("rollouts", "the job plays: as long as its agents take") as playing:
                every = [f"limits.outage_timeout_s={ENGINE_BACK_WITHIN_S:g}", *options.settings]
                settings = [word for setting in every for word in ("--set", setting)]
                where = ["--url", url, "--ray-address", self._address, "--namespace", _NAMESPACE]
                self._run(playing, "rollouts", "run", str(options.job), "--out", str(job), *where, *settings)
            with self._phase("build", "a Ray Data job, its workers start: a quarter of a minute") as building:
                where = ["--out", str(trajectories), "--namespace", _NAMESPACE]
                self._run(building, "build-job", str(job / ROWS_FILE), *where)
                requests = read_requests(job / ROWS_FILE).table
                ids = requests.column("rollout_id").to_pylist()
                grammar_calls = asyncio.run(grammar_calls_of(ids, namespace=_NAMESPACE))
        with self._phase("GRPO step", "forward and backward passes on the CPU") as stepping:
            training = train(
                trajectories,
                model=options.model,
                grammar_calls=grammar_calls,
                on_note=stepping.note,
                temperature=options.temperature,
            )
        return read_tried(trajectories, training=training, seconds=self._seconds)

    @contextmanager
    def _phase(self, name: str, about: str) -> Iterator[Phase]:
        with self._phases.phase(name, about) as phase:
            yield phase
        self._seconds[name] = phase.seconds

    def _graph_args(self) -> dict[str, Any]:
        args = self._options.config["applications"][0].get("args", {})
        state = {
            **args.get("state", {}),
            "namespace": _NAMESPACE,
            "directory": str(self._options.directory / "records"),
        }
        pin = {**args.get("sampling_pin", {}), "temperature": self._options.temperature}
        return {"model": str(self._options.model), "sampling_pin": pin, "state": state}

    def _run(self, phase: Phase, *arguments: str) -> None:
        """A command of ours to its end. Raises `ConfigError` with the end of what it wrote if it failed."""
        log = self._options.directory / f"{arguments[0]}.log"
        # `build-job` has no option for the cluster: Ray takes it from there.
        environment = ["env", f"RAY_ADDRESS={self._address}"]
        child = self._children.start([*environment, sys.executable, "-m", "gym_capture.cli", *arguments], log=log)
        while (status := child.ended()) is None:
            phase.note(child.log_tail().rpartition("\n")[2])
            time.sleep(_POLL_S)
        if status != 0:
            raise ConfigError(f"gym-capture {arguments[0]} ended with {status}; the end of {log}:\n{child.log_tail()}")
        phase.note("")
