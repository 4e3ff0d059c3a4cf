"""docs/records.md, written from the fields of a record and from the schema of trajectories.

python -m tests.reference.records_page > docs/records.md      `make reference`
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Final

from gym_capture.capture import records
from gym_capture.capture.record_fields import FIELDS, Kind
from gym_capture.data import schema
from gym_capture.data.schema import OPTIONAL, SCHEMA, TRAJECTORY_SCHEMA_VERSION
from tests.reference.texts import texts

_INTRODUCTION: Final = """\
# Records and trajectories

What is recorded of a call, and what a build makes of it: every field and every column. `make reference` writes this
file from the code.

## A call

As `GET /ng-rollout/{rollout_id}/token-records` answers and `gym-capture records export` writes it, one object a call.
P ids of the prompt, G generated ids. On disk, a call that continues another has only the ids that its parent does not
([log-format.md](log-format.md#entries)).

| field | type | |
|---|---|---|
"""
_TRAJECTORIES: Final = """\

## A trajectory

A row of `part-*.parquet`, version {version} of the schema (in its metadata, `{key}`).
How rows come about is in [trajectories.md](trajectories.md#build). Columns with a `?` may be null; those with `*` are
absent from tables of before they were.

| columns | |
|---|---|
"""
_CLASSES: Final[Mapping[str, type[object]]] = {
    "": records.CallRecord,
    "request": records.CallRequest,
    "reply": records.CallReply,
    "keys": records.TurnKeys,
    "prefix": records.PrefixSupply,
    "policy": records.PolicyTrace,
}
_SAID_HERE: Final = {
    "rollout_id": "The rollout.",
    "model_call_id": "The call; unique in its rollout.",
    "prompt_token_ids": "int32 [P]. The whole prompt as the engine reports it.",
    "stop_reason": "What the engine says beside: the stop string or token that ended it.",
    "weight_versions": "`[start, end)` over the generated ids, and the version of the weights that sampled them.",
}
"""Of fields whose name was enough in the code."""
_TYPES: Final = {
    Kind.TEXT: "text",
    Kind.OPTIONAL_TEXT: "text?",
    Kind.FLAG: "boolean",
    Kind.OPTIONAL_FLAG: "boolean?",
    Kind.OPTIONAL_COUNT: "integer?",
    Kind.TIME: "number",
    Kind.PARENT: "object?",
    Kind.PROMPT: "list of integers",
    Kind.IDS: "list of integers",
    Kind.LOG_PROBS: "list of numbers",
    Kind.TENSOR: "array?",
    Kind.OBJECT: "object?",
    Kind.ITEMS: "list of objects",
    Kind.NAMES: "list of texts",
    Kind.RULES_BY_KEY: "object",
    Kind.SPANS: "list of objects",
}


def document() -> str:
    calls = "\n".join(f"| `{name}` | {kind} | {text} |" for name, kind, text in of_a_call())
    head = _TRAJECTORIES.format(version=TRAJECTORY_SCHEMA_VERSION, key=schema.VERSION_KEY.decode())
    rows = "\n".join(f"| {columns} | {text} |" for columns, text in of_a_trajectory())
    return f"{_INTRODUCTION}{calls}\n{head}{rows}\n"


def of_a_call() -> Iterator[tuple[str, str, str]]:
    for field in FIELDS:
        group, _, attribute = field.path.rpartition(".")
        said = texts(_CLASSES[group]).get(attribute, ("", ""))[1]
        yield field.name, _TYPES[field.kind], _plain(said) or _SAID_HERE[field.name]


def of_a_trajectory() -> Iterator[tuple[str, str]]:
    """Columns that stand together in the code, and the comment above them."""
    source = inspect.getsource(schema)
    body = source[source.index("SCHEMA: Final[pa.Schema]") :]
    columns: list[str] = []
    comment: list[str] = []
    for line in body[: body.index("metadata=")].splitlines():
        column = re.search(r'pa\.field\("(\w+)"', line)
        if column:
            columns.append(_column(column[1]))
        elif "# " in line:
            if columns:
                yield ", ".join(columns), _plain(" ".join(comment)) or "The rollout."
                columns, comment = [], []
            comment.append(line.partition("# ")[2])
    yield ", ".join(columns), _plain(" ".join(comment))


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _column(name: str) -> str:
    field = SCHEMA.field(name)
    marks = "".join(mark for mark, there in (("?", field.nullable), ("*", name in OPTIONAL)) if there)
    kind = str(field.type)
    kind = "tensor" if kind.startswith("struct<dtype") else re.sub(r"\w+: |large_| not null", "", kind)
    kind = re.sub(r"list<item: |list<", "list<", kind) if len(kind) < 40 else kind.partition("<")[0]
    return f"`{name}`{marks} `{kind}`"


if __name__ == "__main__":
    print(document(), end="")
