"""What a rollout job costs beside the agent and the model, and what it holds, against a scripted server.

Claims: a job takes at most 5 ms of processor time for a model call, all but what the same agents take without a job -
and that with its rows synced to the disk; 1,000 rollouts at a time run in one process whose memory does not grow
with how many have run; and where it builds while it plays, the trajectories of a group can be read within 1 s after its
last rollout (99 of 100). Prints one JSON object a line; exits non-zero if a claim does not hold.

    python -m benchmarks.jobs [--rollouts 400] [--many 5000] [--groups 300]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from aiohttp import web

from gym_capture.capture.record_fields import parts
from gym_capture.capture.records import Continues, Root, Snapshot, TokenEntry, digest_ids, suffix_of
from gym_capture.capture.suffixes import StoredRecord, complete
from gym_capture.data.group_files import WrittenGroup, write_groups
from gym_capture.data.group_stream import Tell
from gym_capture.data.sources import SourceSpec
from gym_capture.rollouts.environment import Environment, Observation, Register, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Outcome
from gym_capture.rollouts.harnesses.tool_loop import ToolLoop, tool_loop
from gym_capture.rollouts.job import JobOptions, RolloutJob
from gym_capture.rollouts.ledger import RolloutRow

MAX_OVERHEAD_MS: Final = 5.0
MAX_MEMORY_GROWTH: Final = 1.1
MAX_READABLE_S: Final = 1.0
THINKING_S: Final = 0.3
"""Of the model, a call, in the third claim."""
_PACED: Final = "paced"
TURNS: Final = 20
NEW_IDS: Final = 400
"""Of a turn of the rollouts that are built: prompt and generation, half each."""
AT_A_TIME: Final = 1_000
CALLS: Final = 3
ROUNDS: Final = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=400, help="of a round of the first claim")
    parser.add_argument("--many", type=int, default=5 * AT_A_TIME, help="rollouts of the second claim")
    parser.add_argument("--groups", type=int, default=300, help="groups of the third claim")
    asked = parser.parse_args()
    ours, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    url = ours.recv()
    try:
        held = [asyncio.run(_overhead(url, asked.rollouts)), asyncio.run(_many(asked.many))]
        held.append(asyncio.run(_readable(url, asked.groups)))
    finally:
        server.terminate()
        server.join()
    return 0 if all(held) else 1


# --- claims ----------------------------------------------------------------------------------------------------------


async def _overhead(url: str, rollouts: int) -> bool:
    """In turns, so that whatever else the machine does falls on both."""
    harness = tool_loop()
    with_job, without = [], []
    try:
        for _ in range(ROUNDS):
            without.append(await _cpu_s(lambda: _bare(harness, url, rollouts)))
            with_job.append(await _cpu_s(lambda: _job(harness, url, rollouts)))
    finally:
        await harness.close()
    calls = rollouts * CALLS
    overhead_ms = 1e3 * (min(with_job) - min(without)) / calls
    _report(
        "jobs.overhead",
        rollouts=rollouts,
        calls=calls,
        ms_per_call=round(1e3 * min(with_job) / calls, 2),
        ms_per_call_without=round(1e3 * min(without) / calls, 2),
        overhead_ms=round(overhead_ms, 2),
        target=MAX_OVERHEAD_MS,
        ok=overhead_ms <= MAX_OVERHEAD_MS,
    )
    return overhead_ms <= MAX_OVERHEAD_MS


async def _many(rollouts: int) -> bool:
    """Agents that hold a slot and wait, as they do for a model: a thousand at a time, several times over."""
    process = psutil.Process()
    running = most = over = 0
    first_mb = 0.0

    class Waiting:
        async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(CALLS):
                await asyncio.sleep(0.2)
                await environment.call_tool("add", {"number": 1})
            running -= 1
            return Completed("1", n_calls=CALLS)

        async def close(self) -> None:
            """Nothing is held."""

    def on_row(row: RolloutRow) -> None:
        nonlocal over, first_mb
        over += 1
        if over == AT_A_TIME:
            first_mb = process.memory_info().rss / 2**20

    with tempfile.TemporaryDirectory(prefix="gym-capture-jobs-") as folder:
        job = _made(Waiting(), Path(folder), "http://unused", tasks=rollouts // 4, concurrency=AT_A_TIME)
        began = time.process_time()
        summary = await job.run(on_row=on_row)
        cpu_ms = 1e3 * (time.process_time() - began) / rollouts
        last_mb = process.memory_info().rss / 2**20
    ok = summary.finished == rollouts and most == AT_A_TIME and last_mb <= MAX_MEMORY_GROWTH * first_mb
    _report(
        "jobs.many",
        rollouts=rollouts,
        at_a_time=most,
        cpu_ms_per_rollout=round(cpu_ms, 2),
        mb_after_1000=round(first_mb),
        mb_in_the_end=round(last_mb),
        growth=round(last_mb / first_mb, 3),
        target=MAX_MEMORY_GROWTH,
        ok=ok,
    )
    return ok


async def _readable(url: str, groups: int) -> bool:
    """Groups are built beside the agents that play on, from records of long conversations. Here a model takes its
    time, as one does: agents that only wait for the processor leave none for anything else."""
    ended: dict[str, float] = {}
    waits_s: list[float] = []

    def on_written(group: WrittenGroup) -> None:
        waits_s.append(time.monotonic() - ended[group.group_id])

    harness = tool_loop()
    with tempfile.TemporaryDirectory(prefix="gym-capture-jobs-") as folder:
        job = _made(harness, Path(folder, "job"), url, tasks=groups, concurrency=32, job_id=_PACED)

        async def play(tell: Tell) -> None:
            def over(row: RolloutRow) -> None:
                ended[row.group_id] = time.monotonic()
                tell(asdict(row))

            await job.run(on_row=over)

        began = time.monotonic()
        written = await write_groups(
            play,
            source=SourceSpec(import_path=f"{__name__}:Records"),
            out=Path(folder, "out"),
            group_size=4,
            job={},
            on_written=on_written,
        )
        took_s = time.monotonic() - began
        await harness.close()
    median_s, p99_s = np.quantile(waits_s, [0.5, 0.99])
    ok = bool(written.built.complete == 4 * groups and p99_s <= MAX_READABLE_S)
    _report(
        "jobs.readable",
        groups=groups,
        ids_of_a_rollout=TURNS * NEW_IDS,
        groups_per_s=round(groups / took_s, 1),
        median_s=round(median_s, 3),
        p99_s=round(p99_s, 3),
        most_s=round(max(waits_s), 3),
        target=MAX_READABLE_S,
        ok=ok,
    )
    return ok


class Records:
    """A `TokenSource` that has the same long conversation of every rollout."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        entries: list[StoredRecord] = []
        so_far = np.zeros(0, dtype=np.int32)
        for turn in range(TURNS):
            prompt = np.concatenate((so_far, np.arange(NEW_IDS // 2, dtype=np.int32)))
            generated = np.arange(NEW_IDS // 2, dtype=np.int32)
            parent = Continues(entries[-1].model_call_id, so_far.size) if turn else Root()
            so_far = np.concatenate((prompt, generated))
            facts = parts(
                {
                    "rollout_id": rollout_id,
                    "model_call_id": f"call-{turn}",
                    "model": "policy",
                    "requested_model": "policy",
                    "has_tools": True,
                    "generation_token_ids": generated,
                    "generation_log_probs": np.full(generated.size, -0.5, dtype=np.float32),
                    "parent": parent,
                    "digest": digest_ids(so_far),
                    "finish_reason": "stop",
                    "created_at": 0.0,
                }
            )
            entries.append(suffix_of(TokenEntry(prompt_token_ids=prompt, **facts)))
        return Snapshot(rollout_id=rollout_id, snapshot_id="s", version=1, entries=complete(entries)[0])

    async def rollout_ids(self) -> Sequence[str]:
        return ()

    async def close(self) -> None:
        """Nothing is open."""


# --- the two ways to run agents --------------------------------------------------------------------------------------


async def _bare(harness: ToolLoop, url: str, rollouts: int) -> None:
    """The same agents and environments, as a loop without a job would run them."""
    tasks = iter([(task, sample) for task in Register.tasks(rollouts // 4) for sample in range(4)])

    async def worker() -> None:
        for task, sample in tasks:
            environment = Register()
            observation = await environment.reset(task)
            endpoint = Endpoint(f"{url}/ng-rollout/bare.{task.task_id}.{sample}/v1")
            outcome = await harness.run(endpoint=endpoint, observation=observation, environment=environment)
            if not isinstance(outcome, Completed):
                raise RuntimeError(outcome.detail)
            await environment.score(outcome.answer)

    await asyncio.gather(*(worker() for _ in range(32)))


async def _job(harness: ToolLoop, url: str, rollouts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gym-capture-jobs-") as folder:
        summary = await _made(harness, Path(folder), url, tasks=rollouts // 4, concurrency=32).run()
    if summary.failed:
        raise RuntimeError(f"{summary.failed} rollouts failed: {summary.failures}")


def _made(harness: Any, folder: Path, url: str, *, tasks: int, concurrency: int, job_id: str = "bench") -> RolloutJob:
    async def nothing(rollout_id: str) -> None:
        return

    made: list[Task] = Register.tasks(tasks)
    return RolloutJob(
        tasks=made,
        options=JobOptions(job_id=job_id, samples=4, concurrency=concurrency, max_attempts=1),
        harness=harness,
        make_environment=Register,
        endpoint=lambda rollout_id: Endpoint(f"{url}/ng-rollout/{rollout_id}/v1"),
        clear=nothing,
        close=nothing,
        settings={},
        directory=folder,
    )


async def _cpu_s(work: Callable[[], Awaitable[None]]) -> float:
    began = time.process_time()
    await work()
    return time.process_time() - began


# --- the server, in a process of its own -----------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    asyncio.run(_serving(connection))


async def _serving(connection: Connection) -> None:
    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        if request.match_info["rollout_id"].startswith(_PACED):
            await asyncio.sleep(THINKING_S)
        done = sum(message["role"] == "tool" for message in body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "It holds 1."}
        if done < CALLS - 1:
            function = {"name": "add", "arguments": '{"number": 1}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{done}", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/ng-rollout/{rollout_id}/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    connection.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


def _report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
