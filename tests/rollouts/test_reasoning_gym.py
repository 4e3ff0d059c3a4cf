"""Questions of the real package, and what is taken for the answer in a reply."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import create_dataset

from gym_capture.errors import ConfigError
from gym_capture.rollout_ids import check_rollout_id
from gym_capture.rollouts.catalog import environment_factory, task_maker
from gym_capture.rollouts.environment import Score, Task
from gym_capture.rollouts.environments.reasoning_gym import ReasoningGym, extracted

LEGS = task_maker("reasoning-gym")(3, seed=7, dataset="leg_counting", config={"max_animals": 4})


def played(task: Task, reply: str) -> Score:
    async def run() -> Score:
        environment = environment_factory("reasoning-gym")(dataset="leg_counting")
        observation = await environment.reset(task)
        assert [message["role"] for message in observation.messages] == ["system", "user"]
        assert observation.messages[1]["content"] == task.data["question"]
        score = await environment.score(reply)
        await environment.close()
        return score

    return asyncio.run(run())


@pytest.mark.parametrize("task", LEGS, ids=lambda task: task.task_id)
def test_a_right_answer_is_scored_by_the_data_set(task: Task) -> None:
    right = create_dataset("leg_counting", seed=7, size=3, max_animals=4)[task.data["index"]]["answer"]
    assert played(task, f"Let me see. <answer>{right}</answer>").components == {"score": 1.0}
    assert played(task, f'I counted them all: "{right}"').reward == 1.0
    assert played(task, "<answer>one</answer>").reward < 1.0
    assert played(task, f"I think it is {right}").reward == 0.0


def test_tasks_are_plain_json_and_name_rollouts() -> None:
    for task in LEGS:
        check_rollout_id(task.task_id)
        assert played(Task(task.task_id, json.loads(json.dumps(task.data))), "no").reward == 0.0
    assert len({task.data["question"] for task in LEGS}) == 3


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer>\n 4 \n</answer>.", "4"),
        ("I write <answer> often. <answer>4</answer>", "4"),
        (r"<answer>4</answer> \boxed{5} '6'", "4"),
        (r"so \boxed{3}, no, \boxed{4} and 'that' is it", "4"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed {a \} b}", r"a \} b"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{4} and \boxed{5", "4"),
        ('It is "3", or rather "4".', "4"),
        ("It is “4”.", "4"),
        ("It's the dog's: 'four legs'", "four legs"),
        ("Don't you know that it's 4?", None),
        ("<answer>4", None),
        ("</answer><answer>", None),
        ("4", None),
        ("", None),
        ("<answer></answer>", ""),
    ],
)
def test_S22_the_answer_is_found_in_the_reply(reply: str, answer: str | None) -> None:
    assert extracted(reply) == answer


@given(st.text(alphabet="<answer>/\\boxed{}\"'“” 4\n", max_size=300))
def test_no_reply_breaks_the_search_for_its_answer(reply: str) -> None:
    found = extracted(reply)
    assert found is None or found in reply


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", r"\boxed{", "{", '"', "'", " '", "“"])
def test_the_search_takes_time_in_proportion(piece: str) -> None:
    started = time.process_time()
    extracted(piece * 200_000)
    assert time.process_time() - started < 5


def test_what_there_is_not_is_named() -> None:
    make = task_maker("reasoning-gym")
    with pytest.raises(ConfigError, match="no data set 'leg_countin': did you mean leg_counting"):
        make(1, seed=0, dataset="leg_countin")
    with pytest.raises(ConfigError, match=r"no data set 'zzzzzz': it has .*leg_counting"):
        make(1, seed=0, dataset="zzzzzz")
    with pytest.raises(ConfigError, match=r"no option 'max_animal'; its options are .*max_animals"):
        make(1, seed=0, dataset="leg_counting", config={"max_animal": 3})
    with pytest.raises(ConfigError, match="cannot be made with"):
        make(1, seed=0, dataset="leg_counting", config={"max_animals": -3})
    with pytest.raises(ConfigError, match="needs the option dataset"):
        make(1, seed=0)


def test_another_version_of_the_package_is_not_taken_for_the_one_that_made_the_task() -> None:
    asked = Task("t", {**LEGS[0].data, "question": "How many legs has a snake?"})
    with pytest.raises(ConfigError, match="makes another question of it"):
        asyncio.run(ReasoningGym().reset(asked))
    with pytest.raises(ConfigError, match="task t is none of reasoning_gym"):
        asyncio.run(ReasoningGym().reset(Task("t", {"prompt": "Hi."})))


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"pip install gym-capture\[reasoning-gym\]"):
        ReasoningGym.tasks(1, seed=123, dataset="leg_counting")
