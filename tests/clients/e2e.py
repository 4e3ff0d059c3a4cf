"""Claude Code, Codex and mini-swe-agent, the real ones, against the served graph with a real vLLM engine.

`make test-clients` runs this. Each CLI does three turns with tools, and a last one without, or with the tool that ends
it. What it was told is scripted (`recital`), but sampled by the engine; what comes out must be one chain of the very
ids, whose log probabilities the model itself confirms.

The file's name keeps it out of a plain `pytest`: it needs Node and the packages that the make target installs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import ray
import torch
import yaml
from transformers import AutoModelForCausalLM

from gym_capture.auth import Keyring
from gym_capture.build.builder import BuiltRollout, Trajectory, build
from gym_capture.capture.records import Continues, LogProbArray, Root, TokenEntry
from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import ChildProcesses
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from tests.clients import clis
from tests.clients.recital import FINAL_ANSWER, MARGIN, SCRIPTS, Recital, spelled_out
from tests.serving.graph import Graph, whole

ROOT: Final = Path(__file__).parents[2]
NAMESPACE: Final = "real-clients"
POSITIONS: Final = 32_768
"""The context of the tiny model: Claude Code begins with 20,000 tokens."""
SECRET: Final = b"a secret of the tests"
"""With one, each CLI gets in with its rollout's token as its API key."""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """The graph as a user serves it, with a policy that follows the scripts."""
    directory = tmp_path_factory.mktemp("graph")
    base = yaml.safe_load((ROOT / "serve_configs" / "cpu_demo.yaml").read_text(encoding="utf-8"))
    secret_file = directory / "secret"
    secret_file.write_bytes(SECRET)
    args = {
        "model": str(tiny_dir()),
        "secret_file": str(secret_file),
        "state": {"shards": 1, "namespace": NAMESPACE, "directory": str(directory / "records")},
        # The largest logit is the one that is due, so the sampler picks it.
        "sampling_pin": {"temperature": 0.0},
        "engine_args": {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": POSITIONS,
            "max_num_seqs": 8,
            "logits_processors": [f"{Recital.__module__}:{Recital.__qualname__}"],
        },
        "ray_actor_options": {
            "num_cpus": 2,
            "runtime_env": {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}},
        },
    }
    with (
        ChildProcesses() as children,
        private_ray(cpus=4, namespace=NAMESPACE) as address,
        served_graph(
            children, base=base, args=args, address=address, directory=directory, on_wait=lambda _: None
        ) as url,
    ):
        yield Graph(url=url, namespace=NAMESPACE)


@pytest.mark.parametrize(
    ("run", "package", "tool"),
    [
        pytest.param(clis.lean_claude_code, "@anthropic-ai/claude-code", "Bash", id="claude-code-lean"),
        pytest.param(clis.claude_code, "@anthropic-ai/claude-code", "Bash", id="claude-code"),
        pytest.param(clis.codex, "@openai/codex", "exec_command", id="codex"),
        pytest.param(clis.mini_swe_agent, "mini-swe-agent", "bash", id="mini-swe-agent"),
    ],
)
def test_turns_with_tools_are_one_chain_of_the_very_ids(
    graph: Graph,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    run: Callable[..., clis.CliRun],
    package: str,
    tool: str,
) -> None:
    rollout_id: str = request.node.callspec.id
    token = Keyring(SECRET).rollout_token(rollout_id)
    ran = run(url=graph.url, rollout_id=rollout_id, token=token, task="Do three things.", folder=tmp_path)
    assert ran.answer.strip() == FINAL_ANSWER
    assert {file.name: file.read_text() for file in ran.work.iterdir()} == {
        "one.txt": "one\n",
        "two.txt": "  two  \n",
        "three.txt": "three\n",
    }

    snapshot = asyncio.run(graph.snapshot(rollout_id))
    entries = whole(snapshot)
    check_chain(entries, tool)
    built = build(snapshot)
    trajectory = check_build(built, entries)
    check_log_probs(trajectory)

    counts = built.counts
    with capsys.disabled():
        print(
            f"\n{rollout_id} {clis.version(package)}: {counts.n_calls} calls in {ran.took_s:.1f} s, "
            f"first prompt {entries[0].prompt_len} tokens, {counts.contiguous_links} of {counts.n_calls - 1} continued "
            f"by their exact ids, {counts.chains} chain of {trajectory.token_ids.size} tokens, "
            f"{counts.generated_tokens_delivered} of {counts.generated_tokens_captured} generated tokens to train on"
        )


def test_example_job_gives_groups_that_begin_with_the_same_ids(graph: Graph, tmp_path: Path) -> None:
    """The job file of `make example-claude-code`, as its `rollouts run` plays it; here the policy does call tools."""
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    settings = {
        "tasks.count": 1,
        "harness.program": clis.CLAUDE_CODE,
        "harness.skip_permissions": True,
        "harness.arguments": [],  # without the hook that asks to look again: the script ends with its answer
        "harness.max_turns": 8,
        "harness.max_context_tokens": POSITIONS,
        "harness.environment.CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024",
        "endpoint.url": graph.url,
        "endpoint.secret_file": str(secret_file),
        "endpoint.ray_address": ray.get_runtime_context().gcs_address,
        "endpoint.namespace": NAMESPACE,
        "out": str(tmp_path / "job"),
    }
    over = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    job = ROOT / "serve_configs" / "jobs" / "claude_code_reasoning_gym.yaml"
    command = [sys.executable, "-m", "gym_capture.cli", "rollouts", "run", str(job), *over]
    played = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert played.returncode == 0, played.stderr
    rows = [json.loads(line) for line in (tmp_path / "job" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["finished"] * 2
    first_prompts = []
    for row in rows:
        snapshot = asyncio.run(graph.snapshot(row["rollout_id"]))
        entries = whole(snapshot)
        check_chain(entries, "Bash")
        check_log_probs(check_build(build(snapshot), entries))
        first_prompts.append(entries[0].prompt_token_ids)
    np.testing.assert_array_equal(*first_prompts)


def check_chain(entries: list[TokenEntry], tool: str) -> None:
    """Every call continues the one before from its very ids, which no tokenizer would have made of its text."""
    template = HfChatTemplate.from_model_dir(tiny_dir())
    assert len(entries) == len(SCRIPTS[tool]) >= 4
    assert isinstance(entries[0].parent, Root)
    for entry, reply in zip(entries, SCRIPTS[tool], strict=True):
        np.testing.assert_array_equal(entry.generation_token_ids, spelled_out(template, reply))
        assert template.encode_plain(reply).size < entry.generation_token_ids.size / 2
    for before, entry in itertools.pairwise(entries):
        assert entry.parent == Continues(before.model_call_id, before.cum_len)
        assert entry.prefix.requested
        assert entry.prefix.supplied
        np.testing.assert_array_equal(entry.prompt_token_ids[: before.cum_len], before.cumulative_ids())
        assert entry.prompt_len > before.cum_len


def check_build(built: BuiltRollout, entries: list[TokenEntry]) -> Trajectory:
    """The one trajectory: the last call's ids, with loss on all that was generated and on nothing else."""
    assert (built.masked, built.mask_reasons, built.excluded) == (False, (), ())
    assert built.counts.contiguous_links == built.counts.eligible_links == len(entries) - 1
    assert built.counts.delivered_fraction == 1.0
    (trajectory,) = built.trajectories
    assert trajectory.call_ids == tuple(entry.model_call_id for entry in entries)
    np.testing.assert_array_equal(trajectory.token_ids, entries[-1].cumulative_ids())
    generated = np.zeros(trajectory.token_ids.size, dtype=bool)
    log_probs = np.zeros(trajectory.token_ids.size, dtype=np.float32)
    for entry in entries:
        generated[entry.prompt_len : entry.cum_len] = True
        log_probs[entry.prompt_len : entry.cum_len] = entry.generation_log_probs
    np.testing.assert_array_equal(trajectory.loss_mask, generated)
    np.testing.assert_array_equal(trajectory.log_probs, log_probs)
    assert np.all(trajectory.log_probs[generated] < 0)
    return trajectory


def check_log_probs(trajectory: Trajectory) -> None:
    """They are what the model says of the trajectory's ids, so these are what the policy was conditioned on."""
    found = trajectory.log_probs[trajectory.loss_mask]
    np.testing.assert_allclose(found, replayed_log_probs(trajectory), atol=1e-4)


@torch.no_grad()
def replayed_log_probs(trajectory: Trajectory) -> LogProbArray:
    """float32 [L]: by one pass of another implementation over the whole sequence, bent as `recital` does it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir(), dtype=torch.float32)
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    trained = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
    logits = model(ids[None], logits_to_keep=trained - 1).logits[0]  # [L, vocabulary]
    bent = logits.max(dim=-1).values + MARGIN
    logits.scatter_(1, ids[trained][:, None], bent[:, None])
    log_probs: LogProbArray = (bent - logits.logsumexp(dim=-1)).numpy()
    return log_probs
