"""`gym-capture verify-logprobs` over what a real engine sampled, doctored and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gym_capture import cli
from gym_capture.build.builder import build
from gym_capture.calls import ModelRequest
from gym_capture.capture.operations import Begin, Commit
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Continues, Root, Snapshot, TokenEntry, WeightSpan, as_ids, digest_ids
from gym_capture.conformance import sample_intent
from gym_capture.conversation import Conversation
from gym_capture.data.schema import rows, to_table
from gym_capture.engines.vllm import VllmEngine
from gym_capture.models import tiny_dir
from gym_capture.stores.log import LogStore
from tests.calls import call, snapshot
from tests.engines.running import ENGINE_ARGS as RUNNING_ARGS
from tests.engines.running import Running

pytestmark = pytest.mark.engine

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.4},
    "top-k": {"temperature": 0.9, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 0.8, "min_p": 0.05, "top_k": 200, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5},
    "constrained": {"temperature": 1.0, "logit_bias": {"7": 12.0}},
}
VERSIONS = {"penalties": "1"}


async def sampled(engine: VllmEngine, name: str, prompt: Sequence[int], parent: TokenEntry | None) -> TokenEntry:
    call_id = f"{name}-{0 if parent is None else 1}"
    request = ModelRequest(
        requested_model="policy",
        conversation=Conversation(()),
        sampling={"ignore_eos": True, "seed": 3, **SAMPLINGS[name]},
    )
    ids = as_ids(np.array(prompt, np.int32))
    generation = engine.generate(call_id=call_id, prompt_ids=ids, request=request, max_tokens=12, stream=False)
    (chunk,) = [each async for each in generation.chunks]
    version = VERSIONS.get(name, "0")
    return call(
        call_id,
        prompt,
        chunk.token_ids.tolist(),
        rollout_id=name,
        log_probs=chunk.log_probs.tolist(),
        parent=Root() if parent is None else Continues(parent.model_call_id, parent.cum_len),
        sampling=dict(generation.sampling),
        weight_versions=(WeightSpan(0, 5, version), WeightSpan(5, chunk.token_ids.size, version)),
        finish_reason=chunk.finish_reason,
        digest=digest_ids(ids, chunk.token_ids),
    )


@pytest.fixture(scope="module")
def recorded(running: Running) -> list[Snapshot]:
    """A rollout of two calls for each way to sample."""

    async def sample() -> list[Snapshot]:
        made = []
        for number, name in enumerate(SAMPLINGS):
            first = await sampled(running.engine, name, [1, 50 + number, 60, 70], None)
            second = await sampled(running.engine, name, [*first.cumulative_ids().tolist(), 80, 90], first)
            made.append(snapshot(first, second, rollout_id=name))
        return made

    return running.runner.run(sample())


def as_log(snapshots: Sequence[Snapshot], directory: Path) -> Path:
    async def write() -> None:
        store = await LogStore.open(directory / "shard-0000")
        for each in snapshots:
            for entry in each.entries:
                epoch = await store.write(Begin(sample_intent(each.rollout_id, entry.model_call_id)))
                await store.write(Commit(entry, epoch=epoch))
        await store.close()

    asyncio.run(write())
    return directory


def as_parquet(snapshots: Sequence[Snapshot], directory: Path) -> Path:
    directory.mkdir()
    made = [row for each in snapshots for row in rows(build(each), snapshot=each, group_id="g", reward=1.0)]
    pq.write_table(to_table(made), directory / "part-00000.parquet")
    return directory


def verified(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify-logprobs", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "error:" not in err, err
    # Here vLLM was imported before the command could send its log to stderr.
    return int(stop.value.code or 0), "{" + out.partition("\n{\n")[2] if "\n{\n" in out else out


ENGINE_ARGS = json.dumps(RUNNING_ARGS)
BOTH = ("--engine-args", ENGINE_ARGS, "--json")
TRAINER = ("--by", "trainer", "--json")
MODEL = ("--model", f"0={tiny_dir()}")


def doctored(snapshots: Sequence[Snapshot], call_id: str, **values: Any) -> list[Snapshot]:
    return [
        replace(
            each,
            entries=tuple(with_values(one, **values) if one.model_call_id == call_id else one for one in each.entries),
        )
        for each in snapshots
    ]


def test_what_was_recorded_is_what_the_trainer_computes(
    recorded: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = verified(capsys, as_log(recorded, tmp_path / "state"), "--model", tiny_dir(), *TRAINER)
    account = json.loads(out)
    assert code == 0, account
    found = account["differences"]["trainer"]
    assert {name: each["tokens"] for name, each in found.items()} == {
        "all": 7 * 24,
        "constrained: no": 6 * 24,
        "constrained: yes": 24,
        "finish: length": 7 * 24,
        "weights: 0": 7 * 24,
    }
    assert found["constrained: no"]["max"] < 1e-3
    assert found["constrained: no"]["impossible"] == 0
    assert found["constrained: no"]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
    assert account["findings"] == []


def test_engine_and_trainer_agree_with_each_other_and_find_one_token_that_is_another(
    recorded: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(one for each in recorded for one in each.entries if one.model_call_id == "top-k-1")
    ids = entry.generation_token_ids.copy()
    ids[3] = 5
    log = as_log(doctored(recorded, "top-k-1", generation_token_ids=ids, digest=None), tmp_path / "state")
    code, out = verified(capsys, log, "--model", tiny_dir(), "--tolerance", "1e-3", *BOTH)
    account = json.loads(out)
    assert (code, account["passed"], account["not_checked"]) == (1, False, {"penalties": 24})
    assert account["calls_beyond"] == {"engine": 1, "trainer": 1}
    assert {found["call_id"] for found in account["findings"]} == {"top-k-1"}
    for scorer in ("engine", "trainer"):
        first, *behind = (found for found in account["findings"] if found["by"] == scorer)
        assert (first["position"], first["token_id"], first["rescored"]) == (3, 5, None)
        assert all(found["position"] > 3 for found in behind)  # they were sampled behind another token
    for scorer in ("engine", "trainer"):
        found = account["differences"][scorer]
        assert (found["constrained: no"]["tokens"], found["constrained: yes"]["tokens"]) == (6 * 24, 24)
        assert found["constrained: yes"]["max"] > 0.1


def test_one_log_probability_that_is_another_is_named(
    recorded: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(one for each in recorded for one in each.entries if one.model_call_id == "warm-1")
    log_probs = entry.generation_log_probs.copy()
    log_probs[7] -= 0.05
    data = as_parquet(doctored(recorded, "warm-1", generation_log_probs=log_probs), tmp_path / "data")
    code, out = verified(capsys, data, *MODEL, *TRAINER)
    account = json.loads(out)
    assert (code, account["passed"], account["calls_beyond"]) == (1, False, {"trainer": 1})
    (finding,) = account["findings"]
    assert (finding["rollout_id"], finding["call_id"], finding["position"]) == ("warm", "warm-1", 7)
    assert (finding["token_id"], finding["tokens_beyond"]) == (int(entry.generation_token_ids[7]), 1)
    assert finding["recorded"] == pytest.approx(float(log_probs[7]))
    assert finding["rescored"] == pytest.approx(float(log_probs[7]) + 0.05, abs=1e-3)
    assert account["not_checked"] == {"no_weights": 24}
    assert account["versions_without_weights"] == ["1"]


def test_a_person_reads_which_token_it_is(
    recorded: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(one for each in recorded for one in each.entries if one.model_call_id == "plain-0")
    log_probs = entry.generation_log_probs.copy()
    log_probs[[2, 4]] -= 0.5
    log = as_log(doctored(recorded, "plain-0", generation_log_probs=log_probs), tmp_path / "state")
    code, out = verified(capsys, log, *MODEL, "--by", "trainer")
    assert code == 1
    (line,) = [line for line in out.splitlines() if "rollout plain" in line]
    assert line.startswith("trainer: rollout plain, call plain-0, position 2: ")
    assert f"(id {entry.generation_token_ids[2]}): recorded {log_probs[2]:.4f}, scored " in line
    assert "; 2 tokens of the call differ; version 0" in line
    assert "not checked: no_weights: 24 tokens (of version 1)" in out
    assert "trainer: 1 calls beyond noise, of 144 tokens checked" in out


def test_other_weights_are_beyond_noise(
    recorded: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_dir(), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.2)
    model.save_pretrained(other)
    data = as_parquet(recorded, tmp_path / "data")
    # A version's own folder comes before the one of all others.
    code, out = verified(capsys, data, "--model", other, "--model", f"0={tiny_dir()}", *TRAINER)
    assert (code, json.loads(out)["calls_beyond"]) == (0, {"trainer": 0})
    code, out = verified(capsys, data, "--model", f"0={other}", "--show", "0", *TRAINER)
    account = json.loads(out)
    assert (code, account["findings"]) == (1, [])
    assert account["calls_beyond"]["trainer"] > 3


def test_nothing_that_could_be_checked_is_no_success(
    recorded: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_parquet(recorded, tmp_path / "data")
    code, out = verified(capsys, data, "--model", f"7={tiny_dir()}", *TRAINER)
    account = json.loads(out)
    assert (code, account["not_checked"]) == (1, {"no_weights": 8 * 24})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "0=/nowhere"], "/nowhere is not a model folder"),
        ([*MODEL, *MODEL], "names version '0' twice"),
        ([*MODEL, "--engine-args", "{"], "--engine-args is not JSON"),
        ([*MODEL, "--engine-args", "3"], "--engine-args must be an object"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify-logprobs", str(tmp_path), *arguments])
    error = capsys.readouterr().err
    assert (stop.value.code, len(error.splitlines())) == (2, 1)
    assert said in error
