"""Which of vLLM's sampling parameters a record holds.

Invariant: whatever shaped the distribution that ids were sampled from, or where the generation ended, is on record as
it was in force: after the pin, and with the model's own defaults. Every field of `SamplingParams` stands in one of the
tables here, so that one which a new vLLM brings is decided on, and not forgotten.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from vllm import SamplingParams

ALWAYS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "max_tokens",
)
"""On record in every call, unless vLLM has no value for it: what clients set, and pins pin."""

IF_SET: Final = (
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "watermarking",
    "extra_args",
)
"""On record where it does anything. No request of a client sets most of them; a model's own defaults may."""

AS_A_FACT: Final = ("structured_outputs", "repetition_detection")
"""On record as `True`: that there was one. The grammar follows from the request's tools and format."""

NOT_RECORDED: Final = frozenset(
    {
        # What is reported, and how, but not what is sampled.
        *("n", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
        *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length"),
        *("skip_reading_prefix_cache", "routed_experts_prompt_start"),
        # For replaying ids that were recorded before: this graph never sets it.
        "trace_decode_token_ids",
        # Made by vLLM from the others.
        *("_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped", "_bad_words_token_ids"),
    }
)


def recorded_sampling(params: SamplingParams) -> dict[str, Any]:
    """The parameters that shaped the generation, as they were in force. JSON all the way down."""
    values = msgspec.structs.asdict(params)
    recorded = {name: values[name] for name in ALWAYS if values[name] is not None}
    recorded |= {name: values[name] for name in IF_SET if values[name]}
    if params.logit_bias:
        recorded["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return recorded | {name: True for name in AS_A_FACT if values[name] is not None}
