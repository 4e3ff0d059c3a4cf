"""The chat templates that the `trl` package ships on tokenizers made for them, and conversations to render."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from gym_capture.capture.records import IdArray
from gym_capture.commands.audit_template import on_made_tokenizer, shipped_templates
from gym_capture.conversation import AssistantTurn, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.engines.hf_template import HfChatTemplate

TEMPLATES = shipped_templates()

ASK = Message("user", " How is the weather?\n")
REPLY = AssistantTurn("Rain.")
CALL = ToolCall("call_1", "get_weather", '{"city": "Bergen", "days": [1, 2.50], "note": "ø <b>"}')
CALLS = AssistantTurn("", (CALL,))
RESULT = ToolResult("call_1", '{"sky": "grey"}')
TOOL = Tool("get_weather", "Looks it up.", '{"properties":{"city":{"type":"string"}},"type":"object"}')
TOLD = Message("system", "Be brief.")


def openai_message(item: Item) -> Any:
    match item:
        case Message(role, text):
            return {"role": role, "content": text}
        case ToolResult(call_id, text):
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case AssistantTurn(text, calls, reasoning):
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if reasoning:
                message["reasoning"] = reasoning
            if calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in calls
                ]
            return message


def metaspace_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Of the SentencePiece kind: a text's first word is tokenized unlike its others, and `</s>` swallows whitespace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    characters = sorted({*source, *map(chr, range(32, 127)), "\n", "▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", "<s>"], initial_alphabet=characters, show_progress=False
    )
    tokenizer.train_from_iterator([source], trainer)
    tokenizer.add_special_tokens([AddedToken("</s>", rstrip=True, normalized=False), "[INST]", "[/INST]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


INSTRUCTIONS = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ message.content + eos_token + '\n' }}
{%- else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""


NINE_CHARACTER_IDS = """
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id|length != 9 %}{{ raise_exception('Tool call IDs must be 9 characters') }}{% endif %}
{{- '<|result|>' + message.tool_call_id + ' ' + message.content }}
{%- else %}
{{- '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if call.id|length != 9 %}{{ raise_exception('Tool call IDs must be 9 characters') }}{% endif %}
{{- call.id + ' ' + call.function.name + ' ' + call.function.arguments|tojson }}
{%- endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endif %}
{%- endfor %}"""

WRITES_IDS = """
{%- for tool in tools or [] %}{{ '<|tool|>' + tool | tojson + '<|done|>' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|result|>of ' + message.tool_call_id + '\n' + message.content }}
{%- else %}{{ '<|turn|>' + message.role + '\n' + (message.reasoning or '') + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|call|>' + call.id + '<|name|>' + call.function.name + '<|arguments|>' + call.function.arguments | tojson }}
{%- endfor %}
{%- endif %}{{ '<|done|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"""
"""It writes what most templates only compare, if they read it at all: the ids of calls, and of what results answer."""


class CharacterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python that parses special tokens whatever one asks for."""

    def __init__(self, **kwargs: Any) -> None:
        self._characters = [chr(n) for n in range(256)]
        super().__init__(eos_token="</s>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return {character: n for n, character in enumerate(self._characters)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return super().tokenize(text, **{**kwargs, "split_special_tokens": False})


def control_ids(template: HfChatTemplate, ids: IdArray) -> list[str]:
    texts = [template.decode(np.asarray([n], dtype=np.int32)) for n in ids.tolist()]
    return [text for text in texts if text in template.special_tokens]


@functools.cache
def made(kind: str) -> HfChatTemplate:
    if kind == "slow":
        return HfChatTemplate.from_tokenizer(CharacterTokenizer(), INSTRUCTIONS)
    if kind == "metaspace":
        return HfChatTemplate.from_tokenizer(metaspace_tokenizer(INSTRUCTIONS + " ask you"), INSTRUCTIONS)
    return on_made_tokenizer(TEMPLATES[kind])


KINDS = ("metaspace", "qwen3", "llama3_1", "deepseekv3", "gptoss", "phi3")


OWN = {"writes_ids": WRITES_IDS, "nine_character_ids": NINE_CHARACTER_IDS}


@functools.cache
def on_made_tokenizer_once(name: str) -> HfChatTemplate:
    return on_made_tokenizer(OWN.get(name) or TEMPLATES[name])
