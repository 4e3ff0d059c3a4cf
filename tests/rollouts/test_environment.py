"""The register environment: everything follows from the task, and credit is partial."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.rollout_ids import check_rollout_id
from gym_capture.rollouts.environment import Register, Score, Task

TASK = Task("t", {"start": 4, "steps": [["add", 7], ["multiply", 3]]})


def play(calls: list[tuple[str, dict[str, Any]]], answer: str, task: Task = TASK) -> tuple[list[str], Score]:
    async def run() -> tuple[list[str], Score]:
        environment = Register()
        await environment.reset(task)
        texts = [await environment.call_tool(name, arguments) for name, arguments in calls]
        score = await environment.score(answer)
        await environment.close()
        return texts, score

    return asyncio.run(run())


def test_a_perfect_rollout_has_reward_1() -> None:
    texts, score = play([("add", {"number": 7}), ("multiply", {"number": 3})], "The register holds 33")
    assert texts == ["The register now holds 11.", "The register now holds 33."]
    assert score.reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("calls", "answer", "components"),
    [
        ([], "", {"tools": 0, "arguments": 0, "answer": 0}),
        ([], "33", {"tools": 0, "arguments": 0, "answer": 0.4}),
        ([("add", {"number": 7})], "11", {"tools": 0.15, "arguments": 0.15, "answer": 0}),
        ([("add", {"number": 1}), ("multiply", {"number": 3})], "15", {"tools": 0.3, "arguments": 0.15, "answer": 0}),
        ([("multiply", {"number": 7}), ("add", {"number": 3})], "no", {"tools": 0, "arguments": 0, "answer": 0}),
    ],
)
def test_credit_is_partial(calls: list[tuple[str, dict[str, Any]]], answer: str, components: dict[str, float]) -> None:
    _, score = play(calls, answer)
    assert score.components == pytest.approx(components)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("divide", {"number": 1}),
        ("add", {}),
        ("add", {"number": "7"}),
        ("add", {"number": True}),
        ("add", {"number": 10}),
        ("add", {"number": 7.0}),
    ],
)
def test_a_bad_tool_call_is_answered_with_text_and_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    texts, _ = play([(name, arguments), ("add", {"number": 0})], "")
    assert texts[0].startswith("Error: ")
    assert texts[1] == "The register now holds 4."


async def test_the_session_belongs_to_one_environment() -> None:
    async def run() -> str:
        first, second = Register(), Register()
        await first.reset(TASK)
        await second.reset(TASK)
        await first.call_tool("add", {"number": 9})
        return await second.call_tool("add", {"number": 1})

    assert await run() == "The register now holds 5."


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 20))
def test_tasks_follow_from_the_seed_and_name_rollouts(seed: int, count: int) -> None:
    tasks = Register.tasks(count, seed=seed)
    assert tasks == Register.tasks(count + 3, seed=seed)[:count]
    assert len({task.task_id for task in tasks}) == count
    for task in tasks:
        check_rollout_id(task.task_id)


@settings(max_examples=50, deadline=None)
@given(answer=st.text(max_size=200))
def test_no_answer_breaks_the_score(answer: str) -> None:
    _, score = play([], answer)
    assert score.reward in (0.0, pytest.approx(0.4))
