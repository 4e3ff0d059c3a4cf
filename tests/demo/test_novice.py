"""A policy that was taught to call tools: what it is shown, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_capture.demo import novice
from gym_capture.demo.novice import Example, examples, novice_dir
from gym_capture.models import tiny_dir
from gym_capture.rollouts.environment import Register


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_dir())


def shown(tokenizer: Any, *, right: float, count: int = 40) -> list[Example]:
    return examples(tokenizer, Register.tasks(count, seed=3), right=right, rng=random.Random(1))


def turns(tokenizer: Any, example: Example) -> list[str]:
    """What the policy says, turn by turn."""
    said = tokenizer.decode([example.token_ids[place] for place in example.said])
    return said.split("<|im_end|>")[:-1]


async def reward(task: Any, said: list[str]) -> float:
    environment = Register()
    await environment.reset(task)
    *calls, answer = said
    for text in calls:
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        await environment.call_tool(call["name"], call["arguments"])
    return (await environment.score(answer)).reward


def test_what_is_right_earns_the_whole_reward_and_what_is_not_less(tokenizer: Any) -> None:
    tasks = Register.tasks(40, seed=3)
    for right, least, most in ((1.0, 1.0, 1.0), (novice.RIGHT, 0.2, 0.6)):
        played = zip(tasks, shown(tokenizer, right=right), strict=True)
        mean = sum(asyncio.run(reward(task, turns(tokenizer, each))) for task, each in played) / len(tasks)
        assert least - 1e-9 <= mean <= most + 1e-9


def test_both_spellings_of_json_are_shown(tokenizer: Any) -> None:
    calls = [text for each in shown(tokenizer, right=1.0) for text in turns(tokenizer, each)[:-1]]
    blank = sum('"number": ' in text for text in calls)
    assert 0.3 < blank / len(calls) < 0.7
    assert all(('"number": ' in text) != ('"number":' in text and '"number": ' not in text) for text in calls)


def test_the_policy_is_taught_its_turns_and_nothing_else(tokenizer: Any) -> None:
    example = shown(tokenizer, right=1.0, count=1)[0]
    said = set(example.said)
    heard = tokenizer.decode([each for place, each in enumerate(example.token_ids) if place not in said])
    assert "<tool_response>\nThe register now holds" in heard
    assert '"number":' not in heard.rpartition("</tools>")[2].partition("Results come back")[2]
    assert len(turns(tokenizer, example)) == 3
    assert heard.count("<|im_start|>assistant\n\n") == 3, "a turn's end is what the policy says; the line's is not"


def test_what_a_batch_shares_is_computed_once_and_changes_nothing(tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    batch = shown(tokenizer, right=1.0, count=4)
    used = sorted({each for example in batch for each in example.token_ids})
    number_of = {token_id: number for number, token_id in enumerate(used)}
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(used) + 1, tie_word_embeddings=True, **size))
    counts_U = torch.ones(len(used) + 1)
    counts_U[-1] = 1000
    shared = novice._shared([each.token_ids for each in batch])
    assert 200 < shared < min(each.said[0] for each in batch)
    loss = novice._loss(model, batch, number_of, counts_U.log(), shared)
    found = []
    for example in batch:
        ids_T = torch.tensor([number_of[each] for each in example.token_ids])
        logits_T_U = model(ids_T[None]).logits[0] + counts_U.log()
        places = torch.tensor(example.said)
        found.append(torch.nn.functional.cross_entropy(logits_T_U[places - 1], ids_T[places], reduction="none"))
    torch.testing.assert_close(loss, torch.cat(found).mean())


def test_it_is_a_whole_model_that_gives_what_it_was_taught_with(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(novice, "_STEPS", (3, 2))
    monkeypatch.setattr(novice, "_POOL", 16)
    taught: list[tuple[Any, list[int]]] = []
    teach = novice._teach

    def kept(pupil: Any, lessons: Any, used: list[int], **options: Any) -> None:
        teach(pupil, lessons, used, **options)
        taught.append((pupil, used))

    monkeypatch.setattr(novice, "_teach", kept)
    before = torch.get_num_threads()
    said: list[str] = []
    model = AutoModelForCausalLM.from_pretrained(novice_dir(tmp_path, progress=said.append))
    assert torch.get_num_threads() == before
    assert said[0].startswith("teaching")
    assert said[-1].startswith("ready")
    embedding_V_H = model.get_input_embeddings().weight
    rows, counts = embedding_V_H.unique(dim=0, return_counts=True)
    (unused,) = counts[counts > 1].tolist()
    assert len(rows) - 1 + unused == len(tokenizer), "all ids that were never shown share one row, and no other does"
    ((pupil, used),) = taught
    numbers = list(range(0, len(used), 3))
    with torch.no_grad():
        small = pupil(torch.tensor([numbers])).logits[0, -1]
        large = model(torch.tensor([[used[number] for number in numbers]])).logits[0, -1]
    torch.testing.assert_close(large[used], small[:-1])
