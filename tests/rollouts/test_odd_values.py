"""Environments and harnesses that give what nobody expects: their rollouts fail or are kept, the job goes on, and every
group of it is built.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from gym_capture.commands.job_rows import build_while_playing
from gym_capture.data.group_files import StreamReport
from gym_capture.data.sources import SourceSpec
from gym_capture.errors import described
from gym_capture.rollouts.environment import Environment, Observation, Register, Score, Task
from gym_capture.rollouts.exchanges import Exchanges
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, carry_out
from gym_capture.rollouts.job import JobOptions, JobSummary, RolloutJob
from gym_capture.rollouts.jobfile import JobFile
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.progress import JobProgress
from gym_capture.rollouts.rows import exchange_of
from tests.data import made_rollouts
from tests.rollouts.scripted_job import nothing

HALF = "\ud83d"


def circle() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["in"] = made
    return made


def deep(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def says(content: Any, **further: Any) -> Observation:
    return Observation(({"role": "user", "content": content, **further},))


def unsayable() -> Any:
    class UnsayableError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    raise UnsayableError


class Case(NamedTuple):
    """What is given, and what comes of it: no words for a rollout that finishes, else those of its failure."""

    words: str = ""
    reset: Callable[[], Any] = lambda: says("hi")
    run: Callable[[], Any] = lambda: Completed("1", n_calls=1)
    score: Callable[[], Any] = lambda: Score({"right": 1.0})


CASES: dict[str, Case] = {
    "observation-is-a-dict": Case("must return an Observation: got dict", reset=lambda: {"messages": []}),
    "observation-is-none": Case("must return an Observation: got NoneType", reset=lambda: None),
    "no-messages": Case("not iterable", reset=lambda: Observation(None)),  # type: ignore[arg-type]
    "message-is-text": Case("must be objects: got str", reset=lambda: Observation(("hi",))),  # type: ignore[arg-type]
    "tool-is-text": Case("must be objects: got str", reset=lambda: Observation((), ("add",))),  # type: ignore[arg-type]
    "content-is-a-number": Case("a text or a list of parts: got int", reset=lambda: says(5)),
    "content-is-bytes": Case("a text or a list of parts: got bytes", reset=lambda: says(b"hi")),
    "parts-are-texts": Case("a text or a list of parts: got list", reset=lambda: says(["hi"])),
    "message-in-itself": Case("must be JSON: Circular", reset=lambda: says("hi", more=circle())),
    "message-too-deep": Case("nested deeper than 100", reset=lambda: says("hi", more=deep(300))),
    "message-far-too-deep": Case("must be JSON: maximum recursion", reset=lambda: says("hi", more=deep(100_000))),
    "key-is-no-text": Case("must be JSON: keys must be str", reset=lambda: says([{(1, 2): 3}])),
    "messages-come-once": Case(reset=lambda: Observation(iter(says("hi").messages))),  # type: ignore[arg-type]
    "half-an-emoji-in-a-message": Case(reset=lambda: says(HALF)),
    "outcome-is-none": Case("must return Completed or Failed: got NoneType", run=lambda: None),
    "outcome-is-text": Case("must return Completed or Failed: got str", run=lambda: "1"),
    "half-an-emoji-in-a-reason": Case("it broke \ufffd", run=lambda: Failed(f"mine{HALF}", f"it broke {HALF}")),
    "reason-is-a-number": Case("it broke", run=lambda: Failed(5, "it broke")),  # type: ignore[arg-type]
    "no-reason": Case("it broke", run=lambda: Failed(None, "it broke")),  # type: ignore[arg-type]
    "no-number-of-calls": Case("as an integer", run=lambda: Completed("1", n_calls=None)),  # type: ignore[arg-type]
    "numpy-number-of-calls": Case(run=lambda: Completed("1", n_calls=np.int64(1))),  # type: ignore[arg-type]
    "answer-is-none": Case("answer of a harness must be a string", run=lambda: Completed(None, 1)),  # type: ignore[arg-type]
    "response-is-a-list": Case("must be an object: got list", run=lambda: Completed("1", 1, response=[1])),  # type: ignore[arg-type]
    "response-in-itself": Case("must be JSON: Circular", run=lambda: Completed("1", 1, response=circle())),
    "response-too-deep": Case("nested deeper than", run=lambda: Completed("1", 1, response={"output": deep(300)})),
    "response-has-a-set": Case(run=lambda: Completed("1", 1, response={"output": [], "tags": {1}})),
    "native-without-output": Case("a list of items", run=lambda: Completed("1", 1, response={"a": 1}, output="native")),
    "native-items-are-none": Case(
        "a list of items", run=lambda: Completed("1", 1, response={"output": [5]}, output="native")
    ),
    "rewards-of-calls-are-none": Case("must be a mapping", run=lambda: Completed("1", 1, call_rewards=None)),  # type: ignore[arg-type]
    "half-an-emoji-in-a-call": Case(run=lambda: Completed("1", 1, call_rewards={HALF: 1.0})),
    "words-cannot-be-had": Case("<exception str() failed>", run=unsayable),
    "no-score": Case("'NoneType' object has no attribute", score=lambda: None),
    "half-an-emoji-in-a-component": Case(score=lambda: Score({f"right{HALF}": 1.0})),
    "components-of-one-name": Case("must have different names", score=lambda: Score({1: 1.0, "1": 2.0})),  # type: ignore[dict-item]
    "component-too-large": Case("too large", score=lambda: Score({"right": 10**400})),
}


class Odd(Register):
    """Its tasks are the cases."""

    async def reset(self, task: Task) -> Observation:
        self.case = CASES[task.task_id]
        made: Observation = self.case.reset()
        return made

    async def score(self, answer: str) -> Score:
        made: Score = self.case.score()
        return made


class OddHarness:
    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Any:
        assert isinstance(environment, Odd)
        return environment.case.run()

    async def close(self) -> None: ...


class Built(NamedTuple):
    summary: JobSummary
    report: StreamReport
    said: str


async def built(directory: Path, *names: str) -> Built:
    """A job of these cases, built while it plays."""
    options = JobOptions(job_id="job", samples=1, max_attempts=1, retry_wait_s=0.0)
    tasks = [Task(name) for name in names]
    said = io.StringIO()
    found: list[JobSummary] = []
    with Exchanges(directory / "job") as exchanges:

        async def play(over: Callable[[RolloutRow], None]) -> None:
            job = RolloutJob(
                tasks=tasks,
                options=options,
                harness=OddHarness(),
                make_environment=Odd,
                endpoint=Endpoint,
                clear=nothing,
                close=nothing,
                settings={},
                directory=directory / "job",
                keep=lambda row, outcome: exchanges.add(row.rollout_id, exchange_of(outcome)),
            )
            found.append(await job.run(on_row=over, on_kept=over))

        report = await build_while_playing(
            play,
            job=JobFile.model_validate({"format_version": 1, "out": directory / "job"}),
            options=options,
            tasks=tasks,
            source=SourceSpec(import_path=made_rollouts.IMPORT_PATH),
            exchanges=exchanges,
            out=str(directory / "built"),
            console=Console(file=said, width=1000),
            progress=JobProgress(),
        )
    return Built(found[0], report, said.getvalue())


async def test_what_one_rollout_gives_ends_neither_its_job_nor_the_building_of_it(tmp_path: Path) -> None:
    summary, report, said = await built(tmp_path, *CASES)
    rows = {row.task_id: row for row in summary.rows}
    for name, case in CASES.items():
        status = "failed" if case.words else "finished"
        assert (rows[name].status, case.words in (rows[name].detail or "")) == (status, True), (name, rows[name])
    assert report.built.groups == len(CASES)
    assert said == ""  # every group has its rows
    assert (tmp_path / "job" / "rows.jsonl").read_bytes().count(b"\n") == len(CASES)


@pytest.mark.parametrize("content", [None, b"", b"PAR1 no more"])
async def test_a_part_that_cannot_be_read_any_more_costs_the_rows_of_its_group(
    tmp_path: Path, content: bytes | None
) -> None:
    """Where a job died before it wrote them."""
    names = ("messages-come-once", "numpy-number-of-calls")
    await built(tmp_path, *names)
    (tmp_path / "job" / "rows.jsonl").unlink()
    part = tmp_path / "built" / "part-00000.parquet"
    part.unlink()
    part.write_bytes(content) if content is not None else part.mkdir()
    _, report, said = await built(tmp_path, *names)
    assert report.built.groups == len(names)
    assert "has its trajectories, and no rows: part-00000.parquet cannot be read" in said
    assert (tmp_path / "job" / "rows.jsonl").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("given", [None, {"holds": 5}, 5])
async def test_a_tool_that_answers_with_no_text_is_the_environments_fault(given: object) -> None:
    class Tools(Register):
        async def call_tool(self, name: str, arguments: Any) -> Any:
            return given

    with pytest.raises(TypeError, match="call_tool must return a text"):
        await carry_out("add", "{}", Tools())


def test_an_error_whose_words_cannot_be_had_is_described() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - it has no words
        unsayable()
    assert described(caught.value).startswith("UnsayableError: <exception str() failed> (at ")
