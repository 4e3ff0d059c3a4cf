"""How families of models write tool calls, by the names of vLLM's parsers of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

Call: TypeAlias = tuple[str, dict[str, Any]]
Write: TypeAlias = Callable[[Sequence[Call]], str]


class ToolFormat(NamedTuple):
    """One format."""

    write: Write
    tokens: tuple[str, ...] = ()
    """What its tokenizers have one token for."""
    closes: str | None = None
    """What ends a call, for formats in JSON: it may be spelled in arguments."""


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


LAST: Final = "\0name comes last"
"""In front of a call's name: its object has it behind the arguments."""


def objects(calls: Sequence[Call], arguments: str = "arguments") -> list[str]:
    return [
        to_json(
            {arguments: given, "name": name.removeprefix(LAST)}
            if name.startswith(LAST)
            else {"name": name, arguments: given}
        )
        for name, given in calls
    ]


def tagged(begin: str, end: str, *, arguments: str = "arguments") -> ToolFormat:
    """An object for each call between two tags."""

    def write(calls: Sequence[Call]) -> str:
        return "\n".join(begin + text + end for text in objects(calls, arguments))

    return ToolFormat(write, (begin.strip(), end.strip()), end.strip())


def array(begin: str, end: str, *tokens: str) -> ToolFormat:
    """All calls in one array."""
    return ToolFormat(lambda calls: f"{begin}[{', '.join(objects(calls))}]{end}", tokens, end or "]")


def each(
    before: str, one: Callable[[str, dict[str, Any], int], str], after: str, *tokens: str, closes: str | None = None
) -> ToolFormat:
    return ToolFormat(
        lambda calls: before + "".join(one(name, given, n) for n, (name, given) in enumerate(calls)) + after,
        tokens,
        closes,
    )


def plain(value: object) -> str:
    return value if isinstance(value, str) else to_json(value)


def pairs(given: dict[str, Any], one: str) -> str:
    """Each argument as `one` says, `K` being its name and `V` its value."""
    return "".join(one.replace("K", key).replace("V", plain(value)) for key, value in given.items())


def python(calls: Sequence[Call]) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )


_PARAMETER = "<parameter=K>\nV\n</parameter>\n"
_GLM = "<arg_key>K</arg_key>\n<arg_value>V</arg_value>\n"
_DOTS = "<parameter name=K>V</parameter>"
_MINICPM = '<param name="K">V</param>'
_MINIMAX = '<parameter name="K">V</parameter>\n'
_SEED = "<parameter=K>V</parameter>\n"
_HY = "<arg_key>K</arg_key><arg_value>V</arg_value>"
NEW_LINE = "\n"
HERMES = tagged("<tool_call>\n", "\n</tool_call>")
LLAMA = ToolFormat(lambda calls: "; ".join(objects(calls, "parameters")), ("<|python_tag|>",), ";")
QWEN_XML = each(
    "",
    lambda name, given, n: f"<tool_call>\n<function={name}>\n{pairs(given, _PARAMETER)}</function>\n</tool_call>\n",
    "",
    "<tool_call>",
    "</tool_call>",
)
GLM = each(
    "",
    lambda name, given, n: f"<tool_call>{name}\n{pairs(given, _GLM)}</tool_call>\n",
    "",
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
HY = tuple(f"<{slash}{tag}>" for tag in ("tool_calls", "tool_call", "arg_key", "arg_value") for slash in ("", "/"))


def dsml(begin: str, end: str, space: str) -> ToolFormat:
    d = f"｜DSML｜{space}"

    def one(name: str, given: dict[str, Any], n: int) -> str:
        values = "".join(
            f'<{d}parameter name="{key}" string="{to_json(isinstance(value, str))}">{plain(value)}</{d}parameter>\n'
            for key, value in given.items()
        )
        return f'<{d}invoke name="{name}">\n{values}</{d}invoke>\n'

    return each(f"<{d}{begin}>\n", one, f"</{d}{end}>")


TOOL_FORMATS: dict[str, ToolFormat] = {
    "apertus": ToolFormat(
        lambda calls: f"<|tools_prefix|>[{', '.join(to_json({name: given}) for name, given in calls)}]<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        "<|tools_suffix|>",
    ),
    "deepseek_v3": each(
        DEEPSEEK[0],
        lambda name, given, n: f"{DEEPSEEK[2]}function{DEEPSEEK[4]}{name}\n```json\n{to_json(given)}\n```{DEEPSEEK[3]}",
        DEEPSEEK[1],
        *DEEPSEEK,
        closes=f"```{DEEPSEEK[3]}",
    ),
    "deepseek_v31": each(
        DEEPSEEK[0],
        lambda name, given, n: f"{DEEPSEEK[2]}{name}{DEEPSEEK[4]}{to_json(given)}{DEEPSEEK[3]}",
        DEEPSEEK[1],
        *DEEPSEEK,
        closes=DEEPSEEK[3],
    ),
    "deepseek_v32": dsml("function_calls", "function_calls", ""),
    "deepseek_v4": dsml("tool_calls", "tool_calls", ""),
    "deepseek_v41": dsml("calls", "calls", " "),
    "dots": each(
        "<dots_function_call>",
        lambda name, given, n: f"<invoke name={name}>{pairs(given, _DOTS)}</invoke>",
        "</dots_function_call>",
    ),
    "ernie45": HERMES,
    "functiongemma": each(
        "",
        lambda name, given, n: (
            f"<start_function_call>call:{name}{{{pairs(given, 'K:<escape>V<escape>')}}}<end_function_call>"
        ),
        "",
    ),
    "gigachat3": ToolFormat(
        lambda calls: f"<|function_call|>{objects(calls)[0]}",
        ("<|function_call|>", "<|message_sep|>"),
        "<|message_sep|>",
    ),
    "glm45": GLM,
    "glm47": GLM,
    "granite": array("<|tool_call|>", "", "<|tool_call|>"),
    "granite-20b-fc": ToolFormat(
        lambda calls: "".join(f"<function_call> {text}" for text in objects(calls)), (), "<function_call>"
    ),
    "granite4": tagged("<tool_call>", "</tool_call>"),
    "hermes": HERMES,
    "hunyuan_a13b": array("<tool_calls>", "</tool_calls>"),
    "hy_v3": each(
        "<tool_calls>\n",
        lambda name, given, n: f"<tool_call>{name}<tool_sep>\n{pairs(given, _GLM)}</tool_call>\n",
        "</tool_calls>",
        *HY,
        "<tool_sep>",
    ),
    "hy_v4": each(
        "<tool_calls>",
        lambda name, given, n: f"<tool_call>{name}{pairs(given, _HY)}</tool_call>",
        "</tool_calls>",
        *HY,
    ),
    "internlm": ToolFormat(
        lambda calls: f"<|action_start|><|plugin|>\n{objects(calls, 'parameters')[0]}<|action_end|>",
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        "<|action_end|>",
    ),
    "jamba": array("<tool_calls>", "</tool_calls>", "<tool_calls>", "</tool_calls>"),
    "inkling": each(
        "",
        lambda name, given, n: (
            f"<|message_model|>{name}<|content_invoke_tool_json|>{objects([(name, given)], 'args')[0]}<|end_message|>"
        ),
        "",
        *("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"),
        closes="<|end_message|>",
    ),
    "kimi_k2": each(
        "<|tool_calls_section_begin|>",
        lambda name, given, n: (
            f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{to_json(given)}<|tool_call_end|>"
        ),
        "<|tool_calls_section_end|>",
        *(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        closes="<|tool_call_end|>",
    ),
    "lfm2": ToolFormat(
        lambda calls: f"<|tool_call_start|>[{python(calls)}]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "ling3": GLM,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": ToolFormat(
        lambda calls: f"<|python_start|>[{python(calls)}]<|python_end|>", ("<|python_start|>", "<|python_end|>")
    ),
    "longcat": tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": each(
        "",
        lambda name, given, n: f"<tool_call>\n<function={name}>\n{pairs(given, _SEED)}</function>\n</tool_call>\n",
        "",
        "<tool_call>",
        "</tool_call>",
    ),
    "minicpm5": each(
        "",
        lambda name, given, n: f"<function name='{name}'>{pairs(given, _MINICPM)}</function>",
        "",
    ),
    "minimax_m2": each(
        "",
        lambda name, given, n: (
            f"<minimax:tool_call>\n<invoke name='{name}'>\n{pairs(given, _MINIMAX)}</invoke>\n</minimax:tool_call>\n"
        ),
        "",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ),
    "mistral": each(
        "",
        lambda name, given, n: f"[TOOL_CALLS]{name}[ARGS]{to_json(given)}",
        "",
        "[TOOL_CALLS]",
        "[ARGS]",
        closes="[TOOL_CALLS]",
    ),
    "olmo3": ToolFormat(
        lambda calls: f"<function_calls>{NEW_LINE.join(python([call]) for call in calls)}</function_calls>"
    ),
    "phi4_mini_json": array("functools", ""),
    "plamo3": each(
        "<|plamo:begin_tool_requests:plamo|>",
        lambda name, given, n: (
            f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{to_json(given)}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        ),
        "<|plamo:end_tool_requests:plamo|>",
        closes="<|plamo:end_tool_arguments:plamo|>",
    ),
    "poolside_v1": GLM,
    "pythonic": ToolFormat(lambda calls: f"[{python(calls)}]"),
    "qwen3_coder": QWEN_XML,
    "qwen3_json": HERMES,
    "qwen3_xml": QWEN_XML,
    "seed_oss": each(
        "",
        lambda name, given, n: (
            f"<seed:tool_call>\n<function={name}>\n{pairs(given, _SEED)}</function>\n</seed:tool_call>\n"
        ),
        "",
        "<seed:tool_call>",
        "</seed:tool_call>",
    ),
    "step3p5": QWEN_XML,
    "xlam": array("[TOOL_CALLS]", ""),
}

ONE_CALL = {"gigachat3", "internlm"}
"""Formats that have but one call in a turn."""
NOT_HERE = {
    "cohere_command3": "needs a package of its own",
    "cohere_command4": "needs a package of its own",
    "hf": "needs a tokenizer that describes its replies",
    "openai": "reads ids of a vocabulary of its own",
    "gemma4": "XML",
    "k2_horizon": "XML",
    "kimi_k3": "channels",
    "minimax_m3": "XML",
    "muse_glimmer": "channels",
    "step3": "XML",
}
"""Parsers without an entry above. Those in XML could have one: what ends a value there may end it anywhere."""
