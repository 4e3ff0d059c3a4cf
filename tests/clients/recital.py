"""What the policy says to the real clients: a logits processor that has vLLM's sampler pick the ids of a script.

Invariant: every id comes out of the engine's own sampler, with the log probability that the model gives it once its
logit is a little above all others - so it depends on the whole prompt that the engine was fed, and can be computed
again from a trajectory. Which reply is due follows from the prompt alone, so calls at the same time do not mix.

Flow: a request's prompt tells which script (by the tool it offers) and which reply (by the assistant turns in it) ->
the reply is spelled in one id for each character, which no tokenizer would do with its text -> its ids are forced one
after another, the stop token last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from gym_capture.capture.records import IdArray, as_ids
from gym_capture.engines.hf_template import HfChatTemplate

FINAL_ANSWER: Final = "All three are done \u2705"

MARGIN: Final = 1.0
"""How far above the largest logit that of the id that is due is put."""

_GENERATION_PROMPT: Final = "<|im_start|>assistant\n"
_STOP_TOKEN: Final = "<|im_end|>"


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Arguments are spelled as no client spells them when it echoes them: spacing, escapes, order and numbers differ.
SCRIPTS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "Bash": (
            "I begin with one, caf\u00e9.\n\n"
            + _call("Bash", '{"description" : "caf\\u00e9",  "command":"echo one | tee one.txt", "timeout": 60000.0}'),
            _call("Bash", '{"command":"echo \'  two  \' > two.txt"}')
            + "\n"
            + _call("Bash", '{ "command": "cat no-such-file"}'),
            "That file is missing.\n" + _call("Bash", '{"command": "echo three > three.txt; cat *.txt"}'),
            FINAL_ANSWER,
        ),
        "bash": (
            "I begin with one, caf\u00e9.\n\n" + _call("bash", '{ "command":"echo one | tee one.txt # caf\\u00e9"}'),
            _call("bash", '{"command":"echo \'  two  \' > two.txt"}')
            + "\n"
            + _call("bash", '{"command": "cat nothing"}'),
            "That file is missing.\n" + _call("bash", '{"command" : "echo three > three.txt; cat *.txt"}'),
            _call("bash", f'{{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo \'{FINAL_ANSWER}\'"}}'),
        ),
        "exec_command": (
            "I begin with one, caf\u00e9.\n\n"
            + _call("exec_command", '{"yield_time_ms" : 10000,  "cmd":"echo one | tee one.txt # caf\\u00e9"}'),
            _call("exec_command", '{"cmd":"echo \'  two  \' > two.txt"}')
            + "\n"
            + _call("exec_command", '{ "cmd": "cat no-such-file"}'),
            "That file is missing.\n"
            + _call("exec_command", '{"cmd": "echo three > three.txt; cat *.txt"}')
            + "\n"
            + _call(
                "multi_agent_v1__close_agent", '{"target":"nobody"}'
            ),  # of a namespace, which the reply tells apart
            FINAL_ANSWER,
        ),
    }
)
"""By the name of the tool that a client must offer: the replies to its requests, in order."""


class Recital(AdapterLogitsProcessor):
    """vLLM's seam: one of these for an engine, and a `Prompter` for each of its requests."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._template = HfChatTemplate.from_model_dir(Path(vllm_config.model_config.tokenizer))

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return Prompter(self._template)


class Prompter:
    """Puts the id that is due above all others; leaves requests alone that no script is for."""

    def __init__(self, template: HfChatTemplate) -> None:
        self._template = template
        self._reply: IdArray | None = None

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if self._reply is None:
            self._reply = due_reply(self._template, as_ids(np.array(prompt_ids, dtype=np.int32)))
        if self._reply.size == 0:
            return logits
        # The engine may run a step ahead of the stop token, and throws that step's id away.
        due = int(self._reply[min(len(output_ids), self._reply.size - 1)])
        logits[due] = logits.max() + MARGIN
        return logits


def due_reply(template: HfChatTemplate, prompt: IdArray) -> IdArray:
    """The ids of the reply that is due after `prompt`, stop token included; none if no script is for it."""
    text = template.decode(prompt)
    names = [name for name in SCRIPTS if f'"name": "{name}", "description"' in text]
    if len(names) != 1:
        return as_ids(np.array([], dtype=np.int32))
    turns = _occurrences(template.encode(_GENERATION_PROMPT), prompt) - 1  # the last is the one to be generated
    return spelled_out(template, SCRIPTS[names[0]][turns])


def spelled_out(template: HfChatTemplate, reply: str) -> IdArray:
    """A reply as ids, character by character, and the stop token behind it."""
    pieces = [template.encode_plain(character) for character in reply]
    return as_ids(np.concatenate([*pieces, template.encode(_STOP_TOKEN)]))


def _occurrences(needle: IdArray, ids: IdArray) -> int:
    windows = np.lib.stride_tricks.sliding_window_view(ids, needle.size)
    return int(np.all(windows == needle, axis=1).sum())
