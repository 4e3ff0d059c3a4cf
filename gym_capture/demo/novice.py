"""A policy that knows how to call tools and not yet which: what `make example-grpo` trains.

Invariant: always the same one, from nothing but what is installed. What it has been shown are conversations in the
environment `register`, rendered by the same tokenizer and chat template that serve it; every choice in them - which
tool, which number, which answer - is right with the probability `RIGHT`, else drawn at random. So it writes calls
that can be parsed, and is right now and then: the rest is for a reward to teach.

It is a small llama with SmolLM2's tokenizer, trained here on a CPU. Nearly all of a model this size is its vocabulary
of 49,152, of which the conversations use a hundred or two. While it is taught, all others share one row of the
embedding; the softmax over all ids is then one over those in use, with the shared one counted as often as it stands
there.

Tool calls come in two spellings of JSON, `{"number": 7}` and `{"number":7}`, one as often as the other, as they do in
data of several sources. A chat template writes the first one, whatever was sampled.

Flow: tasks -> the environment, played by a teacher -> ids, and which of them the policy says -> cross-entropy over
these, batch after batch -> a model folder.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from gym_capture.models import Progress, prepared, quiet, tokenizer_into
from gym_capture.rollouts.environment import Register, Task

RIGHT: Final = 0.4
"""Of the choices that it was shown."""

_RECIPE: Final = "novice float32 1"
_POSITIONS: Final = 4_096
_HIDDEN: Final = 128
_LAYERS: Final = 4
_HEADS: Final = 4
_BATCH: Final = 16
_STEPS: Final = (700, 80)
"""With every choice right, so that it learns where to look; then with `RIGHT` of them."""
_LR: Final = 3e-3
"""At first; it falls to 0."""
_POOL: Final = 1_500
_WARM_UP: Final = 20
_SAID_EVERY: Final = 50
_SEED: Final = 0
_ASSISTANT: Final = "<|im_start|>assistant\n"
_END: Final = "<|im_end|>"
_NUMBERS: Final = range(2, 10)
_ANSWERS: Final = range(4, 200)


def novice_dir(cache: Path | None = None, *, progress: Progress = quiet) -> Path:
    """The model folder, about 28 MB; made once (about three minutes), then found.

    Raises `ConfigError` if the package that carries the tokenizer is not installed.
    """
    return prepared("novice", _RECIPE, cache, _write, progress)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation as the policy is shown it."""

    token_ids: list[int]
    said: list[int]
    """Places of the ids that the policy says: what it learns."""


def examples(tokenizer: Any, tasks: Iterable[Task], *, right: float, rng: random.Random) -> list[Example]:
    """A conversation for each task, every choice of which is right with the probability `right`, else a random one."""

    async def play() -> list[Example]:
        return [_example(tokenizer, *await _played(task, right, rng), rng) for task in tasks]

    return asyncio.run(play())


async def _played(task: Task, right: float, rng: random.Random) -> tuple[list[dict[str, Any]], Sequence[Any]]:
    """Messages and tools of a conversation with the environment."""
    environment = Register(strict=False)
    start = await environment.reset(task)
    messages = [dict(message) for message in start.messages]
    answer = ""
    for name, number in task.data["steps"]:
        tool = name if rng.random() < right else rng.choice(("add", "multiply"))
        arguments = {"number": number if rng.random() < right else rng.choice(_NUMBERS)}
        text = await environment.call_tool(tool, arguments)
        call = {"type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": text}]
        answer = text.removesuffix(".").rpartition(" ")[2]
    said = answer if rng.random() < right else str(rng.choice(_ANSWERS))
    return [*messages, {"role": "assistant", "content": said}], start.tools


def _example(tokenizer: Any, messages: Sequence[Any], tools: Sequence[Any], rng: random.Random) -> Example:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    token_ids: list[int] = []
    said: list[int] = []

    def add(piece: str) -> None:
        token_ids.extend(tokenizer(piece, add_special_tokens=False).input_ids)

    opening, *turns = text.split(_ASSISTANT)
    add(opening)
    for turn in turns:
        spoken, end, rest = turn.partition(_END)
        if rng.random() < 0.5:
            spoken = spoken.replace(": ", ":").replace(", ", ",")
        add(_ASSISTANT)
        start = len(token_ids)
        add(spoken + end)
        said.extend(range(start, len(token_ids)))
        add(rest)
    return Example(token_ids, said)


def _write(gguf: Path, folder: Path, progress: Progress) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    progress("teaching a small model how to call tools (about three minutes, once)")
    tokenizer = tokenizer_into(gguf, folder, _POSITIONS)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings: dict[str, Any] = {
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    rng = random.Random(_SEED)
    lessons = [examples(tokenizer, Register.tasks(_POOL, seed=_SEED), right=right, rng=rng) for right in (1.0, RIGHT)]
    used = sorted({each for lesson in lessons for example in lesson for each in example.token_ids})
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(_SEED)
        pupil = LlamaForCausalLM(LlamaConfig(vocab_size=len(used) + 1, **settings))
        _teach(pupil, lessons, used, unused=len(tokenizer) - len(used), rng=rng, progress=progress)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **settings, **special))
    taught = pupil.state_dict()
    rows_U_H = taught["model.embed_tokens.weight"]
    embedding_V_H = rows_U_H[-1].repeat(len(tokenizer), 1)
    embedding_V_H[used] = rows_U_H[:-1]
    model.load_state_dict(taught | dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), embedding_V_H))
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)


@contextmanager
def _one_thread() -> Iterator[None]:
    """How sums are split over threads changes their last bits, and with them, in the end, the model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _teach(
    pupil: Any,
    lessons: Sequence[Sequence[Example]],
    used: Sequence[int],
    *,
    unused: int,
    rng: random.Random,
    progress: Progress,
) -> None:
    """Cross-entropy on what the policy says, lesson after lesson. Id k of `pupil` is `used[k]`, its last one stands for
    `unused` ids."""
    number_of = {token_id: number for number, token_id in enumerate(used)}
    counts_U = torch.ones(len(used) + 1)
    counts_U[-1] = unused
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=_LR, betas=(0.9, 0.98), weight_decay=0.0)
    shared = _shared([list(example.token_ids) for lesson in lessons for example in lesson])
    of = sum(_STEPS)
    for step in range(of):
        lesson = lessons[step >= _STEPS[0]]
        for group in optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (step + 1) / _WARM_UP) * (1.0 - step / of)
        loss = _loss(pupil, rng.sample(lesson, _BATCH), number_of, counts_U.log(), shared)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % _SAID_EVERY == 0:
            progress(f"taught {step + 1} of {of} batches, loss {loss.item():.3f}")


def _loss(
    pupil: Any, batch: Sequence[Example], number_of: Mapping[int, int], log_counts_U: torch.Tensor, shared: int
) -> torch.Tensor:
    """Of a batch whose first `shared` ids are the same: these are computed once."""
    opening = torch.tensor([[number_of[each] for each in batch[0].token_ids[:shared]]])
    cache = pupil.model(opening, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(batch))
    ids_B_T = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([number_of[each] for each in example.token_ids[shared:]]) for example in batch], batch_first=True
    )
    hidden_B_T_H = pupil.model(ids_B_T, past_key_values=cache).last_hidden_state
    row_N = torch.tensor([row for row, example in enumerate(batch) for _ in example.said])
    place_N = torch.tensor([place - shared for example in batch for place in example.said])
    logits_N_U = pupil.lm_head(hidden_B_T_H[row_N, place_N - 1]) + log_counts_U
    return torch.nn.functional.cross_entropy(logits_N_U, ids_B_T[row_N, place_N])


def _shared(rows: Sequence[list[int]]) -> int:
    """How many ids all of them begin with."""
    first, last = min(rows), max(rows)
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
