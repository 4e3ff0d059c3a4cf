"""The main job, twice: with prefix supply, and with every conversation rendered again.

Invariant: both runs differ in one argument of the graph and in nothing else - same model, tasks, agent, sampling - so
what differs in their figures is what prefix supply does.

Flow, for each: `serve run` -> a rollout job over HTTP -> a Ray Data job freezes the rollouts and writes Parquet ->
serving ends -> one GRPO step reads the Parquet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gym_capture.capture.operations import Clear, Close
from gym_capture.data.job import JobOptions as BuildJobOptions
from gym_capture.data.job import write_trajectories
from gym_capture.data.report import BuildReport
from gym_capture.data.requests import read_requests
from gym_capture.data.sources import SourceSpec
from gym_capture.demo.graph import ENGINE_BACK_WITHIN_S, grammar_calls_of, private_ray, served_graph
from gym_capture.demo.processes import ChildProcesses
from gym_capture.demo.progress import Phase, Phases
from gym_capture.demo.report import Mode, mean_and_std, read_built
from gym_capture.demo.training import train
from gym_capture.reasons import CaptureMark, MaskReason, ProblemReason
from gym_capture.rollouts.environment import Register
from gym_capture.rollouts.harnesses.tool_loop import ToolLoopOptions, tool_loop
from gym_capture.rollouts.job import JobOptions, JobSummary
from gym_capture.rollouts.ledger import ROWS_FILE, RolloutRow
from gym_capture.rollouts.on_graph import play_on_graph
from gym_capture.serving.state import connect

_CPUS: Final = 8
_NAMESPACE: Final = "gym-capture-demo"
_INCOMPLETE: Final = (*CaptureMark, MaskReason.INCOMPLETE, ProblemReason.UNREADABLE)
"""Names of mask reasons that say: not everything of a rollout was captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """One demo: its model, how that is served, how much is played, and where everything goes."""

    model: Path
    """A model folder."""
    config: Mapping[str, Any]
    """The Serve config to serve it with."""
    directory: Path
    """Where everything goes: configs, logs, records, rows, Parquet."""
    loop: ToolLoopOptions
    tasks: int = 3
    samples: int = 4
    concurrency: int = 8
    seed: int = 0


def run_demo(options: DemoOptions, *, children: ChildProcesses, phases: Phases) -> tuple[Mode, Mode]:
    """The figures with prefix supply and without."""
    return (
        _on_a_cluster(options, children, phases, prefix_supply=True),
        _on_a_cluster(options, children, phases, prefix_supply=False),
    )


def _on_a_cluster(options: DemoOptions, children: ChildProcesses, phases: Phases, *, prefix_supply: bool) -> Mode:
    """Each run has a cluster of its own: Serve's client in this process outlives the controller it knows."""
    with private_ray(cpus=_CPUS, namespace=_NAMESPACE) as address:
        # The phases say what goes on; Ray Data would say it a second time.
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        return _Run(options, address, children, phases, prefix_supply=prefix_supply).run()


class _Run:
    """One of the two."""

    def __init__(
        self, options: DemoOptions, address: str, children: ChildProcesses, phases: Phases, *, prefix_supply: bool
    ) -> None:
        self._options = options
        self._address = address
        self._children = children
        self._phases = phases
        self._prefix_supply = prefix_supply
        self._name = "prefix supply" if prefix_supply else "rendered again"
        self._seconds: dict[str, float] = {}
        self._directory = options.directory / ("supplied" if prefix_supply else "rendered")

    def run(self) -> Mode:
        with ExitStack() as serving:
            with self._phase("serve", "Ray Serve starts, vLLM loads the model: about a minute") as starting:
                graph = served_graph(
                    self._children,
                    base=self._options.config,
                    args=self._graph_args(),
                    address=self._address,
                    directory=self._directory,
                    on_wait=starting.note,
                )
                url = serving.enter_context(graph)
            with self._phase(
                "rollouts", "agents call the model, seconds a call on two cores: half a minute"
            ) as playing:
                summary = self._roll_out(url, playing)
            with self._phase("build", "a Ray Data job, its workers start: a quarter of a minute") as building:
                report = self._build(building, total=len(summary.rows))
                grammar_calls = asyncio.run(
                    grammar_calls_of([row.rollout_id for row in summary.rows], namespace=_NAMESPACE)
                )
        with self._phase("GRPO step", "forward and backward passes on the CPU: a quarter of a minute") as stepping:
            training = train(
                self._trajectories, model=self._options.model, grammar_calls=grammar_calls, on_note=stepping.note
            )
        built = read_built(self._trajectories)
        finished = [row for row in summary.rows if row.status == "finished"]
        mean_reward, reward_std = mean_and_std(_rewards(finished))
        return Mode(
            prefix_supply=self._prefix_supply,
            rollouts=built.rollouts,
            failed_rollouts=summary.failed,
            calls=built.calls,
            expected_links=sum(row.n_calls - 1 for row in finished),
            eligible_links=built.eligible_links,
            contiguous_links=built.contiguous_links,
            masked_rollouts=built.masked_rollouts,
            incomplete_rollouts=len(report.missing) + sum(report.mask_reasons.get(name, 0) for name in _INCOMPLETE),
            generated_tokens_captured=built.captured,
            generated_tokens_delivered=built.delivered,
            mean_reward=mean_reward,
            reward_std=reward_std,
            training=training,
            seconds=dict(self._seconds),
        )

    @property
    def _trajectories(self) -> Path:
        return self._directory / "trajectories"

    @contextmanager
    def _phase(self, name: str, about: str) -> Iterator[Phase]:
        with self._phases.phase(f"{self._name}: {name}", about) as phase:
            yield phase
        self._seconds[name] = phase.seconds

    def _graph_args(self) -> dict[str, Any]:
        args = self._options.config["applications"][0].get("args", {})
        state = {
            **args.get("state", {}),
            "namespace": _NAMESPACE,
            "directory": str(self._options.directory / "records"),
        }
        return {"model": str(self._options.model), "prefix_supply": self._prefix_supply, "state": state}

    def _roll_out(self, url: str, phase: Phase) -> JobSummary:
        options = self._options
        total = options.tasks * options.samples
        loop = asdict(options.loop)
        done: list[RolloutRow] = []

        def on_row(row: RolloutRow) -> None:
            done.append(row)
            phase.count(len(done), total)
            mean_reward, _ = mean_and_std(_rewards(done))
            phase.note(f"{len(done)}/{total}, mean reward {mean_reward:.2f}")

        state = connect(namespace=_NAMESPACE)

        async def clear(rollout_id: str) -> None:
            await state.write(Clear(rollout_id))

        async def close(rollout_id: str) -> None:
            await state.write(Close(rollout_id))

        phase.count(0, total)
        return asyncio.run(
            play_on_graph(
                url=url,
                tasks=Register.tasks(options.tasks, seed=options.seed),
                make_environment=Register,
                options=JobOptions(
                    job_id=f"demo-{self._directory.name}",
                    samples=options.samples,
                    concurrency=options.concurrency,
                    outage_timeout_s=ENGINE_BACK_WITHIN_S,
                ),
                harness=tool_loop(**loop),
                settings={"environment": {"name": "register"}, "harness": {"name": "tool-loop", **loop}},
                clear=clear,
                close=close,
                directory=self._directory,
                on_row=on_row,
            )
        )

    def _build(self, phase: Phase, *, total: int) -> BuildReport:
        return write_trajectories(
            read_requests(self._directory / ROWS_FILE).table,
            source=SourceSpec(import_path="gym_capture.serving.state:connect", kwargs={"namespace": _NAMESPACE}),
            out=self._trajectories,
            # Two parts, so that two workers share them.
            options=BuildJobOptions(rollouts_per_part=max(1, total // 2), workers=2),
            on_progress=lambda done: phase.count(done, total),
        )


def _rewards(rows: Sequence[RolloutRow]) -> list[float]:
    return [row.reward for row in rows if row.reward is not None]
