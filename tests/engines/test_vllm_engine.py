"""A real engine: what a request gets wrong stays the request's error, and an engine that dies is known to be dead."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from gym_capture.build.builder import build
from gym_capture.calls import ModelRequest, NamedToolChoice
from gym_capture.capture.records import as_ids
from gym_capture.conformance.engine import ENGINE_CHECKS, run_engine_check
from gym_capture.conversation import Conversation, Message, Tool
from gym_capture.engines.base import Generation, GenerationChunk
from gym_capture.errors import EngineDeadError, InvalidRequestError, WeightsFailedError, WeightsRefusedError
from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.models import tiny_dir
from gym_capture.serving.admission import Admission
from gym_capture.serving.call_service import CallService
from gym_capture.serving.gateway import build_gateway
from gym_capture.serving.live import LiveCalls
from tests.engines.running import PROMPT, Running
from tests.serving.replica import USER, LocalState, chat_body, chat_path, listening, until
from tests.weight_folders import moved, weights_folder

pytestmark = pytest.mark.engine

CONVERSATION = Conversation((Message("user", "hi"),))


def asking(**fields: Any) -> ModelRequest:
    return ModelRequest(**{"requested_model": "policy", "conversation": CONVERSATION, **fields})


def formatted(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def forced(parameters: object, **fields: Any) -> dict[str, Any]:
    tool = Tool("f", "", json.dumps(parameters), strict=True)
    return {"conversation": Conversation(CONVERSATION.items, (tool,)), "tool_choice": "required", **fields}


def nested(depth: int) -> object:
    schema: object = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def text(**keywords: object) -> dict[str, Any]:
    return formatted({"type": "string", **keywords})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("temperature", {"sampling": {"temperature": value}}) for value in (float("nan"), float("inf"), -1.0, 1e9)),
    *(("top_p", {"sampling": {"top_p": value}}) for value in (float("nan"), 0.0, 1.5)),
    ("min_p", {"sampling": {"min_p": 2.0}}),
    ("top_k", {"sampling": {"top_k": -5}}),
    ("presence_penalty", {"sampling": {"presence_penalty": 3.0}}),
    ("frequency_penalty", {"sampling": {"frequency_penalty": float("-inf")}}),
    *(("repetition_penalty", {"sampling": {"repetition_penalty": value}}) for value in (0.0, 1e-320, 1e308)),
    ("seed", {"sampling": {"seed": 2**70}}),
    *(
        ("logit_bias", {"sampling": {"logit_bias": bias}})
        for bias in ({"x": 1}, {"-1": 1}, {"999999999": 1}, {"5": float("nan")}, {"5": 10**400})
    ),
    *(("stop", {"sampling": {"stop": stop}}) for stop in ([""], [f"no{n}" for n in range(20_000)])),
    *(("min_tokens", {"sampling": {"min_tokens": value}}) for value in (-1, 50, 2**62)),
    ("top_logprobs", {"top_logprobs": 2**40}),
    *(
        ("response_format", {"response_format": value})
        for value in ({}, {"type": "nope"}, {"type": "json_schema"}, {"type": "structural_tag", "format": {}})
    ),
    *(
        ("response_format", formatted(schema))
        for schema in ("x", [1], {"type": "nope"}, {"$ref": "#/nowhere"}, {"enum": []}, nested(70), nested(5_000))
    ),
    ("response_format", formatted({"$ref": "#"})),  # what the engine finds out only by generating
    ("response_format", text(pattern="(((")),
    ("response_format", text(pattern="(?<=a)b")),
    ("response_format", text(pattern="a\0b")),
    ("response_format", text(pattern="^.{0,1000}a.{0,1000}$")),
    ("response_format", text(minLength=10**30)),
    ("response_format", formatted({"enum": [f"v{n}" for n in range(50_000)]})),
    ("response_format", formatted({"properties": {f"p{n}": {} for n in range(3_000)}})),
    ("tools", forced(nested(90))),
    ("tools", forced(nested(300))),
    ("tools", forced({"properties": {f"p{n}": {"type": "string"} for n in range(1_000)}})),
    ("tools", forced({"type": "object", "properties": {"a": {"type": "string", "pattern": "((("}}})),
    ("tools", forced({"$ref": "#/nowhere"})),
    ("tools", forced({"type": "object", "properties": "x"})),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=[f"{n}-{param}" for n, (param, _) in enumerate(REFUSED)])
def test_nonsense_is_refused_by_name_and_leaves_the_engine_as_it_was(
    running: Running, param: str, fields: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        running.generate(asking(**fields), stream=stream)
    assert caught.value.param == param
    assert len(caught.value.message) <= 600
    running.runner.run(running.engine.check_health())


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"top_k": 2**62, "seed": -(2**63), "temperature": 1e-300}},
        {"sampling": {"stop": ["x" * 100_000]}},
        {"sampling": {"logit_bias": {str(n): -100 for n in range(49_000)}}},
        text(pattern="^(a+)+$"),
        text(minLength=100_000),
        formatted({}),
    ],
    ids=["numbers", "stop", "bias", "pattern", "length", "anything"],
)
def test_what_is_only_odd_is_generated(running: Running, fields: dict[str, Any]) -> None:
    chunks, _ = running.generate(asking(**fields))
    assert chunks[-1].finish_reason in ("stop", "length")
    assert np.isfinite(np.concatenate([chunk.log_probs for chunk in chunks])).all()


@pytest.mark.parametrize("tool_choice", ["required", NamedToolChoice("f")], ids=["required", "named"])
def test_a_forced_call_cut_by_length_is_the_same_streamed_and_whole(running: Running, tool_choice: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    request = asking(**forced(parameters, tool_choice=tool_choice), sampling={"temperature": 0.0})
    (whole,), turn = running.generate(request, max_tokens=24)
    parts, streamed = running.generate(request, max_tokens=24, stream=True)
    assert whole.finish_reason == parts[-1].finish_reason == "length"
    assert whole.token_ids.tolist() == [int(n) for part in parts for n in part.token_ids]
    ((_, name, arguments),) = turn.tool_calls
    assert (name, turn.text) == ("f", "")
    assert [call[1:] for call in streamed.tool_calls] == [(name, arguments)]


@pytest.mark.parametrize("tool_choice", ["required", NamedToolChoice("f")], ids=["required", "named"])
def test_a_forced_call_of_a_tool_that_is_not_strict_has_an_object(running: Running, tool_choice: Any) -> None:
    conversation = Conversation(CONVERSATION.items, (Tool("f", "", '{"description":"x"}'),))
    for seed in range(8):
        request = asking(conversation=conversation, tool_choice=tool_choice, sampling={"seed": seed})
        _, turn = running.generate(request, max_tokens=24)
        ((_, name, arguments),) = turn.tool_calls
        assert name == "f"
        assert arguments.lstrip()[:1] in ("", "{")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_ST_07_text_of_a_prompt_that_ends_inside_a_character_is_not_repeated(running: Running, stream: bool) -> None:
    template = running.engine.template
    prompt = template.encode_plain("Once upon a time 😀").tolist()[:-1]
    request = asking(conversation=Conversation(()), raw_prompt="as ids", sampling={"temperature": 0.0})
    chunks, turn = running.generate(request, prompt=prompt, stream=stream)
    assert "Once" not in turn.text
    generated = np.concatenate([chunk.token_ids for chunk in chunks])
    assert turn.text.strip("\ufffd") in template.decode(generated)


@pytest.mark.parametrize("name", ENGINE_CHECKS)
def test_the_engine_keeps_the_contract(running: Running, name: str) -> None:
    result = running.runner.run(run_engine_check(name, running.engine))
    assert result.passed, f"{result.contract}\n{result.failure}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_aborted_generation_says_what_was_generated(running: Running, stream: bool) -> None:
    """Even a reply that is not streamed, of which nobody has seen anything."""
    long = {"request": asking(sampling={"min_tokens": 4000, "ignore_eos": True}), "max_tokens": 4000}

    def generation(*, stream: bool) -> Generation:
        ids = as_ids(np.array(PROMPT, np.int32))
        return running.engine.generate(call_id=os.urandom(8).hex(), prompt_ids=ids, stream=stream, **long)

    async def run() -> list[GenerationChunk]:
        aborted, beside = generation(stream=stream), generation(stream=True)

        async def all_of_it() -> list[GenerationChunk]:
            return [chunk async for chunk in aborted.chunks]

        reading = asyncio.ensure_future(all_of_it())
        steps = 0
        async for _ in beside.chunks:
            steps += 1
            if steps == 5:  # the engine runs both together
                await aborted.abort()
                chunks = await reading
                await beside.abort()
        return chunks

    chunks = running.runner.run(run())
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["abort"]
    assert (len(chunks) > 1) == stream
    prompt = chunks[0].prompt_token_ids
    assert prompt is not None
    assert prompt.tolist() == PROMPT
    sizes = [chunk.token_ids.size for chunk in chunks]
    assert 0 < sum(sizes) < 4000
    assert [chunk.log_probs.size for chunk in chunks] == sizes


def scored(tensors: Mapping[str, torch.Tensor] | None, ids: list[int]) -> np.ndarray:
    """The log probability of each id after those before it, as a trainer computes them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir(), dtype=torch.float32)
    if tensors is not None:
        model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    return np.array([log_probs[at - 1, ids[at]].item() for at in range(1, len(ids))])


def test_each_token_is_sampled_by_the_version_that_its_span_names(running: Running, tmp_path: Path) -> None:
    weights, payload = running.engine.weights, weights_folder(tmp_path, 1)
    sums = running.runner.run(weights.checksums())

    async def run() -> list[GenerationChunk]:
        await weights.label("0")
        generation = running.engine.generate(
            call_id=os.urandom(8).hex(),
            prompt_ids=as_ids(np.array(PROMPT, np.int32)),
            request=asking(sampling={"min_tokens": 120, "ignore_eos": True}),
            max_tokens=120,
            stream=True,
        )
        chunks: list[GenerationChunk] = []
        async for chunk in generation.chunks:
            chunks.append(chunk)
            if sum(each.token_ids.size for each in chunks) >= 20 and weights_are_old:
                weights_are_old.clear()
                await weights.check(payload, allow_non_finite=False)
                await weights.apply(payload, version="1")
                await weights.resume()
        return chunks

    weights_are_old = ["yes"]
    chunks = running.runner.run(run())
    ids = [*PROMPT, *np.concatenate([chunk.token_ids for chunk in chunks]).tolist()]
    log_probs = np.concatenate([chunk.log_probs for chunk in chunks])
    old, new = chunks[-1].weight_versions
    assert (old.version, old.start, new.version, new.end) == ("0", 0, "1", 120)
    assert 20 <= old.end == new.start < 120
    for span, tensors in ((old, None), (new, moved(1))):
        expected = scored(tensors, ids)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(log_probs[span.start : span.end], expected[span.start : span.end], atol=1e-3)
    # ... and the two versions do differ by more than that.
    assert np.abs(scored(None, ids) - scored(moved(1), ids)).max() > 0.1
    assert running.runner.run(weights.checksums()) != sums
    running.runner.run(back_to_the_model(running))
    assert running.runner.run(weights.checksums()) == sums


async def back_to_the_model(running: Running) -> None:
    await running.engine.weights.apply(None, version="0")
    await running.engine.weights.resume()


def test_WU_01_no_block_of_old_weights_serves_a_prompt_under_new_ones(running: Running, tmp_path: Path) -> None:
    payload = weights_folder(tmp_path, 1)
    prompt = list(range(3, 403))

    def cached() -> int:
        chunks, _ = running.generate(asking(), prompt=prompt, max_tokens=1)
        return chunks[-1].cached_tokens

    async def update() -> None:
        await running.engine.weights.apply(payload, version="1")
        await running.engine.weights.resume()

    cached()
    assert cached() > 0
    running.runner.run(update())
    assert cached() == 0
    assert cached() > 0
    running.runner.run(back_to_the_model(running))
    assert cached() == 0


def test_after_a_load_that_failed_the_weights_before_it_can_be_applied(running: Running, tmp_path: Path) -> None:
    weights, payload = running.engine.weights, weights_folder(tmp_path, 1)
    before = running.runner.run(weights.checksums())

    async def run() -> None:
        await weights.check(payload, allow_non_finite=False)
        # Half of the layers are there when the load fails, as when the storage goes away in the middle.
        file = Path(payload.folder) / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(WeightsFailedError, match="collective_rpc"):
            await weights.apply(payload, version="1")
        await back_to_the_model(running)

    running.runner.run(run())
    assert running.runner.run(weights.checksums()) == before
    chunks, _ = running.generate(asking())
    assert [span.version for span in chunks[-1].weight_versions] == ["0"]


def test_transfers_without_a_backend_are_refused(running: Running) -> None:
    with pytest.raises(WeightsRefusedError, match="weight_transfer_config"):
        running.runner.run(running.engine.weights.transfer("init", {}))


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_SF_08_calls_in_flight_while_the_weights_get_another_version(running: Running, mode: str) -> None:
    """Twice as many calls as the engine runs at a time, so that some have no token yet; every other one is streamed."""
    llm, state = running.engine._llm, LocalState()
    model = running.engine.model
    calls = LiveCalls(interval_s=0.0, admission=Admission(running=64, waiting=0))

    async def run() -> list[httpx.Response]:
        service = CallService(
            running.engine,
            state=state,
            fingerprinter=Fingerprinter(),
            prefix_supply=True,
            sampling_pin={},
            session_cache=4,
        )
        app = build_gateway(service, model_name=model.name, max_model_len=model.max_model_len, calls=calls)
        async with listening(app) as client:

            async def ask(number: int) -> httpx.Response:
                body = chat_body(USER, stream=number % 2 == 0, max_tokens=100, min_tokens=100, ignore_eos=True)
                return await client.post(chat_path(f"r{number}"), json=body)

            await llm.update_weight_version("old")
            asking = [asyncio.ensure_future(ask(number)) for number in range(16)]
            # Some stream, and by then as many as may run do.
            await until(lambda: sum(bool(live._pieces) for live in calls._all) >= 2)
            await llm.pause_generation(mode=mode, clear_cache=False)
            await llm.update_weight_version("new")
            await llm.resume_generation()
            responses = await asyncio.gather(*asking)
            assert (await ask(16)).status_code == 200
        return responses

    responses = running.runner.run(run())
    snapshots = [running.runner.run(state.snapshot(f"r{number}")) for number in range(16)]
    assert all(snapshot.incomplete == () for snapshot in snapshots)
    entries = [entry for snapshot in snapshots for entry in snapshot.entries]
    versions = {tuple(span.version for span in entry.policy.weight_versions) for entry in entries}
    if mode == "keep":
        assert [response.status_code for response in responses] == [200] * 16
        assert [(entry.reply.finish_reason, entry.generation_token_ids.size) for entry in entries] == [
            ("length", 100)
        ] * 16
        assert {("old", "new"), ("new",)} <= versions
        return
    assert all(
        (response.status_code == 503 and response.headers["retry-after"] == "1")
        or ("[DONE]" not in response.text and "ask again" in response.text)
        for response in responses
    )
    assert {entry.reply.finish_reason for entry in entries} == {"abort"}
    assert all(entry.generation_token_ids.size < 100 for entry in entries)
    assert versions <= {("old",), ()}
    assert all(not np.any(chain.loss_mask) for snapshot in snapshots for chain in build(snapshot).trajectories)


def test_ST_08_an_engine_that_dies_is_dead_in_flight_and_later(running: Running) -> None:
    """The last one: it ends the engine that those above share."""
    engine = running.engine

    async def killed_in_flight() -> None:
        ids = as_ids(np.array(PROMPT, np.int32))
        request = asking(sampling={"min_tokens": 4000})
        generation = engine.generate(call_id="c", prompt_ids=ids, request=request, max_tokens=4000, stream=True)
        async for _ in generation.chunks:
            for process in psutil.Process().children(recursive=True):
                if "EngineCore" in process.name():
                    process.kill()

    with pytest.raises(EngineDeadError):
        running.runner.run(killed_in_flight())
    with pytest.raises(EngineDeadError):
        running.generate(asking())
    with pytest.raises(EngineDeadError):
        running.runner.run(engine.check_health())
