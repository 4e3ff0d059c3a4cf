"""Claude Code, Codex and mini-swe-agent as harnesses, played by scripts that say what the real ones say.

What they wrote was noted from Claude Code 2.1.197, Codex 0.171.0 and mini-swe-agent 2.4.6, against a server that
answers with each status. `make test-clients` runs the agents themselves.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.catalog import harness_factory
from gym_capture.rollouts.environment import Observation, Register
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome

ENDPOINT: Final = Endpoint("http://127.0.0.1:9/ng-rollout/r1/v1", "token-of-r1")
TASK: Final = {"role": "user", "content": "--do it"}

TOO_LONG: Final = (
    "Prompt is too long",
    "API Error: 400 prompt is too long: 70 tokens > 63 maximum",
    "API Error: Claude's response exceeded the 32000 output token maximum. To configure this behavior, set ...",
    "Incomplete response returned, reason: max_output_tokens",
    "Codex ran out of room in the model's context window. Start a new thread or clear earlier history before retrying.",
    'unexpected status 400 Bad Request: {"error":{"message":"no","code":"context_length_exceeded"}}',
)

RESULT: Final[Mapping[str, Any]] = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 1}
EVENTS: Final[Sequence[Mapping[str, Any]]] = (
    {"type": "thread.started", "thread_id": "1"},
    {"type": "item.completed", "item": {"id": "item_0", "type": "error", "message": "no metadata for the model"}},
    {"type": "turn.started"},
)


def played(name: str, script: str, *messages: Mapping[str, Any], **options: Any) -> Outcome:
    program = [sys.executable, "-I", "-S", "-c", script]
    harness = harness_factory(name)(program=program, **options)
    observation = Observation(messages or (TASK,))
    return asyncio.run(harness.run(endpoint=ENDPOINT, observation=observation, environment=Register()))


def saying(lines: Sequence[Mapping[str, Any]], *, status: int = 0) -> str:
    text = "\n".join(map(json.dumps, lines))
    return f"print({text!r}); raise SystemExit({status})"


def claude(status: int = 0, **fields: Any) -> Outcome:
    return played("claude-code", saying([{**RESULT, **fields}], status=status))


def codex(message: str) -> Outcome:
    failed = [{"type": "error", "message": message}, {"type": "turn.failed", "error": {"message": message}}]
    return played("codex", saying([*EVENTS, *failed], status=1))


def told(name: str, where: Path, *messages: Mapping[str, Any], **options: Any) -> Any:
    """What the program was told: its words, environment, standard input, and the files in its home."""
    script = f"""
import json, os, sys
home = os.environ["HOME"]
files = {{}}
for path, _, names in os.walk(home):
    for name in names:
        files[os.path.relpath(os.path.join(path, name), home)] = open(os.path.join(path, name)).read()
told = [sys.argv[1:], dict(os.environ), sys.stdin.read(), files]
open({str(where)!r}, "w").write(json.dumps(told))
"""
    played(name, script, *messages, **options)
    return json.loads(where.read_text())


def test_claude_code_gets_the_task_and_its_rollout(tmp_path: Path) -> None:
    words, environment, task, files = told(
        "claude-code", tmp_path / "told", max_turns=7, max_context_tokens=4096, call_timeout_s=90.5
    )
    assert task == "--do it"
    assert "--do it" not in words
    assert words[words.index("--tools") + 1] == "Bash"
    assert words[words.index("--max-turns") + 1] == "7"
    assert words[words.index("--model") + 1] == "policy"
    assert not {"--system-prompt", "--append-system-prompt"} & {*words}
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9/ng-rollout/r1"
    assert environment["ANTHROPIC_API_KEY"] == "token-of-r1"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert environment["API_TIMEOUT_MS"] == environment["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "90500"
    assert files == {}


def test_an_agent_compacts_only_if_it_is_told_the_context(tmp_path: Path) -> None:
    _, environment, _, _ = told("claude-code", tmp_path / "told")
    assert (environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], environment["DISABLE_COMPACT"]) == ("1000000", "1")
    _, environment, _, _ = told("claude-code", tmp_path / "told", max_context_tokens=4096)
    assert "DISABLE_COMPACT" not in environment
    for options, window in (({}, 1_000_000_000), ({"max_context_tokens": 4096}, 4096)):
        _, _, _, files = told("codex", tmp_path / "told", **options)
        assert tomllib.loads(files[".codex/config.toml"])["model_context_window"] == window


@pytest.mark.parametrize(
    ("options", "flag", "said"),
    [
        ({}, "--append-system-prompt", "Be brief."),
        ({"system_prompt": "Code."}, "--system-prompt", "Code.\n\nBe brief."),
    ],
)
def test_what_the_environment_says_as_the_system_stands_with_the_prompt_of_the_agent(
    tmp_path: Path, options: Mapping[str, Any], flag: str, said: str
) -> None:
    system = {"role": "system", "content": "Be brief."}
    words, _, task, _ = told("claude-code", tmp_path / "told", system, TASK, **options)
    assert words[words.index(flag) + 1] == said
    assert task == "--do it"


@pytest.mark.parametrize("skip", [True, False])
def test_claude_code_asks_nobody_only_where_it_is_told_to(tmp_path: Path, skip: bool) -> None:
    words, _, _, _ = told("claude-code", tmp_path / "told", skip_permissions=skip)
    assert ("--dangerously-skip-permissions" in words) is skip


def test_tools_first_is_one_conversation_of_two_runs(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, os, sys\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as runs:\n"
        "    extra = os.environ.get('CLAUDE_CODE_EXTRA_BODY')\n"
        "    print(json.dumps([extra, sys.argv[1:], sys.stdin.read()]), file=runs)\n"
        f"print({json.dumps({**RESULT, 'result': 'said'})!r})\n"
        "raise SystemExit('--continue' not in sys.argv)\n",  # the first ends by its limit of turns, with an error
        encoding="utf-8",
    )
    script = Path(__file__).parents[2] / "docs" / "examples" / "tools_first.sh"
    harness = harness_factory("claude-code")(program=["sh", str(script), sys.executable, "-I", "-S", str(agent)])
    run = harness.run(endpoint=ENDPOINT, observation=Observation((TASK,)), environment=Register())
    assert asyncio.run(run) == Completed("said", n_calls=0)
    first, then = map(json.loads, (tmp_path / "runs").read_text().splitlines())
    assert (json.loads(first[0]), first[2]) == ({"tool_choice": {"type": "any"}}, "--do it")
    assert (then[0], then[1]) == (None, [*first[1], "--continue"])
    assert "<answer>" in then[2]


def test_codex_gets_the_task_and_its_rollout(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    words, environment, task, files = told("codex", tmp_path / "told", system, TASK, model='a "model"')
    assert task == "Be brief.\n\n--do it"
    assert words[-1] == "-"
    assert environment["ROLLOUT_TOKEN"] == "token-of-r1"
    config = tomllib.loads(files.pop(".codex/config.toml"))
    assert files == {}
    assert config["model"] == 'a "model"'
    assert config["model_providers"]["graph"]["base_url"] == ENDPOINT.base_url
    assert config["model_providers"]["graph"]["stream_idle_timeout_ms"] == 3_600_000
    assert config["analytics"]["enabled"] is False


def test_an_answer_is_the_last_thing_that_was_said() -> None:
    assert claude(result="All done.") == Completed("All done.", n_calls=0)
    script = "import sys; open(sys.argv[sys.argv.index('--output-last-message') + 1], 'w').write('All done.\\n')"
    assert played("codex", script) == Completed("All done.", n_calls=0)


def test_the_limit_of_turns_is_an_end() -> None:
    outcome = claude(1, subtype="error_max_turns", is_error=True, errors=["Reached maximum number of turns (2)"])
    assert outcome == Completed("", n_calls=0)


@pytest.mark.parametrize(
    ("status", "reason", "retryable", "ends_job"),
    [
        (401, AttemptFailure.UNAUTHORIZED, False, True),
        (400, AttemptFailure.REFUSED, False, False),
        (429, AttemptFailure.SERVER_ERROR, True, False),
        (500, AttemptFailure.SERVER_ERROR, True, False),
    ],
)
@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_an_error_of_the_server_is_the_failure_that_it_is_for_any_harness(
    name: str, status: int, reason: AttemptFailure, retryable: bool, ends_job: bool
) -> None:
    if name == "claude-code":
        said = f"API Error: {status} it says no"
        outcome = claude(1, is_error=True, api_error_status=status, result=said)
    else:
        said = f"unexpected status {status} Whatever: it says no, url: {ENDPOINT.base_url}/responses"
        outcome = codex(said)
    assert outcome == Failed(reason, said, 0, retryable, ends_job)


@pytest.mark.parametrize("said", TOO_LONG)
def test_a_conversation_that_outgrows_the_context_is_an_end_that_says_so(said: str) -> None:
    assert codex(said) == Completed("", n_calls=0, truncated=True)
    assert claude(1, is_error=True, api_error_status=400, result=said) == Completed("", n_calls=0, truncated=True)
    # What an agent answers is no error, whatever it says.
    assert claude(result=said) == Completed(said, n_calls=0)


def test_other_errors_are_told_in_the_agents_own_words() -> None:
    outcome = codex("We are experiencing high demand.")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.detail) == (
        AttemptFailure.COMMAND_FAILED,
        "exit status 1: We are experiencing high demand.",
    )
    outcome = claude(1, subtype="error_during_execution", is_error=True, errors=["it broke"])
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.detail) == (AttemptFailure.COMMAND_FAILED, "['it broke']")


@pytest.mark.parametrize("name", ["claude-code", "codex", "mini-swe-agent"])
def test_a_crash_is_told_with_its_last_words(name: str) -> None:
    outcome = played(name, "import sys; sys.exit('Error: Cannot find module')")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (AttemptFailure.COMMAND_FAILED, True)
    assert "Cannot find module" in outcome.detail


@pytest.mark.parametrize("output", ["", "[1]", "{", '{"type": "result"}', "[" * 50_000])
def test_an_output_that_is_not_understood_is_no_answer(output: str) -> None:
    outcome = played("claude-code", f"print({output!r})")
    assert isinstance(outcome, Failed)
    assert outcome.reason == AttemptFailure.NO_ANSWER
    assert isinstance(outcome := played("codex", f"print({output!r})"), Failed)
    assert outcome.reason == AttemptFailure.NO_ANSWER


def mini(status: str, *, submission: str = "", calls: int = 2, code: int = 0, error: str = "") -> Outcome:
    info = {"exit_status": status, "submission": submission, "model_stats": {"api_calls": calls}, "mini_version": "2"}
    script = f"""
import json, sys
open(sys.argv[sys.argv.index("--output") + 1], "w").write(json.dumps({{"info": {info!r}, "messages": []}}))
sys.stderr.write("Traceback\\n" + {error!r} + "\\n")
sys.exit({code})
"""
    return played("mini-swe-agent", script)


def test_mini_swe_agent_gets_the_task_and_its_rollout(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    words, environment, _, files = told("mini-swe-agent", tmp_path / "told", system, TASK, max_steps=7, model="m")
    assert "--task=Be brief.\n\n--do it" in words
    assert {"--model=openai/m", "agent.step_limit=7", "model.model_kwargs.timeout=3600.0"} <= {*words}
    assert environment["OPENAI_API_BASE"] == ENDPOINT.base_url
    assert environment["OPENAI_API_KEY"] == "token-of-r1"
    assert environment["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert files == {}


def test_how_mini_swe_agent_ends() -> None:
    assert mini("Submitted", submission="All done.\n", calls=3) == Completed("All done.", n_calls=3)
    for limit in ("LimitsExceeded", "TimeExceeded", "RepeatedFormatError"):
        assert mini(limit, calls=50) == Completed("", n_calls=50)
    assert mini("ContextWindowExceededError", code=1, calls=7) == Completed("", n_calls=7, truncated=True)
    said = "litellm.BadRequestError: OpenAIException - it says no"
    assert mini("BadRequestError", code=1, error=said) == Failed(
        AttemptFailure.REFUSED, f"BadRequestError: {said}", 2, retryable=False
    )
    outcome = mini("AuthenticationError", code=1)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.ends_job) == (AttemptFailure.UNAUTHORIZED, True)
    outcome = mini("SomethingNew", code=1, error="oh")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (AttemptFailure.COMMAND_FAILED, True)


@pytest.mark.parametrize("trajectory", ["", "[]", '{"info": {}}', '{"info": {"exit_status": "Submitted"}}'])
def test_a_trajectory_that_is_not_understood_is_no_answer(trajectory: str) -> None:
    script = f"import sys; open(sys.argv[sys.argv.index('--output') + 1], 'w').write({trajectory!r})"
    outcome = played("mini-swe-agent", script)
    assert isinstance(outcome, Failed)
    assert outcome.reason == AttemptFailure.NO_ANSWER


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("claude-code", "npm install -g @anthropic-ai/claude-code"),
        ("codex", "npm install -g @openai/codex"),
        ("mini-swe-agent", "pipx install mini-swe-agent"),
    ],
)
def test_what_is_not_installed_is_said_before_anything_runs(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"is not on the PATH .*: {how}"):
        harness_factory(name)()
