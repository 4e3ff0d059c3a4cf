"""Claude Code, Codex and mini-swe-agent, the real ones, in conversations that outgrow the policy's context.

`make test-clients` runs this: the real gateway over a scripted policy, which calls a tool until nothing fits any more,
or whose every reply is cut. A rollout is then truncated, with its records kept, whatever its agent says or does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import pytest

from gym_capture.calls import ToolCallDelta, ToolCallStart
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Scripter, Step, saying
from gym_capture.models import tiny_dir
from gym_capture.rollouts.environment import Observation, Register
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Harness, Outcome
from gym_capture.rollouts.harnesses.claude_code import claude_code
from gym_capture.rollouts.harnesses.codex import codex
from gym_capture.rollouts.harnesses.mini_swe_agent import mini_swe_agent
from tests.clients import clis
from tests.serving.replica import STOP, Replica, listening

_TIMEOUT_S: Final = 240.0
TEMPLATE: Final = HfChatTemplate.from_model_dir(tiny_dir())


def lean_claude_code() -> Harness:
    return claude_code(program=clis.CLAUDE_CODE, system_prompt="You are terse.", timeout_s=_TIMEOUT_S)


def whole_codex() -> Harness:
    return codex(program=clis.CODEX, timeout_s=_TIMEOUT_S)


def mini() -> Harness:
    return mini_swe_agent(program=str(clis.MINI_SWE_AGENT / "bin" / "mini"), timeout_s=_TIMEOUT_S)


def counting(tool: str, argument: str) -> Scripter:
    """A policy that has a tool print some 1,500 tokens, again and again."""

    def script(call: EngineCall) -> Script:
        arguments = json.dumps({argument: "seq 1 400"})
        events = [ToolCallStart(0, f"call_{call.call_id}", tool), ToolCallDelta(0, arguments)]
        said = Step(token_ids=TEMPLATE.encode_plain("calling").tolist(), events=events)
        return Script(steps=[said, Step(token_ids=TEMPLATE.encode(STOP).tolist())])

    return script


def cut(_: EngineCall) -> Script:
    return Script(steps=saying(TEMPLATE, "word " * 20, stop_token=STOP).steps[:-1], finish_reason="length")


async def play(harness: Harness, policy: Scripter, *, max_model_len: int) -> tuple[Outcome, int]:
    """How a rollout goes, and how many of its calls are recorded."""
    replica = Replica(TEMPLATE, policy, max_model_len=max_model_len)
    async with listening(replica.app) as client:
        outcome = await harness.run(
            endpoint=Endpoint(str(client.base_url.join("/ng-rollout/r1/v1"))),
            observation=Observation(({"role": "user", "content": "Count."},)),
            environment=Register(),
        )
    return outcome, len(await replica.state.entries("r1"))


@pytest.mark.parametrize(
    ("make", "tool", "argument", "max_model_len"),
    [
        pytest.param(lean_claude_code, "Bash", "command", 5_000, id="claude-code-outgrown"),
        pytest.param(whole_codex, "exec_command", "cmd", 14_000, id="codex"),
        pytest.param(mini, "bash", "command", 5_000, id="mini-swe-agent"),
    ],
)
async def test_a_conversation_that_outgrows_the_context_is_truncated(
    make: Callable[[], Harness], tool: str, argument: str, max_model_len: int
) -> None:
    outcome, calls = await play(make(), counting(tool, argument), max_model_len=max_model_len)
    assert isinstance(outcome, Completed), outcome
    assert calls > 1
    assert (outcome.truncated, outcome.failed_call) == (True, calls + 1)


@pytest.mark.parametrize(
    ("make", "max_model_len", "calls"),
    [
        pytest.param(lean_claude_code, 5_000, 4, id="claude-code-outgrown"),
        pytest.param(whole_codex, 14_000, 1, id="codex"),
    ],
)
async def test_replies_that_are_cut_are_truncated(make: Callable[[], Harness], max_model_len: int, calls: int) -> None:
    outcome, recorded = await play(make(), cut, max_model_len=max_model_len)
    assert isinstance(outcome, Completed), outcome
    assert (outcome.truncated, recorded) == (True, calls)


async def test_a_task_that_does_not_fit_is_refused() -> None:
    outcome, recorded = await play(lean_claude_code(), cut, max_model_len=500)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable, recorded) == ("refused", False, 0)
