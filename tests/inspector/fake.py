"""Made data for the inspector's pages: 10,000 rollouts, one trajectory of 100,000 tokens, hostile text.

Invariant: what is answered depends on nothing but the calls of `grow` and the notes that were posted, so a test waits
for conditions and never for a time. The answers have the form of the real server's.

Flow: `Fake()` makes the columns -> `answer(fake, path, query)` gives the JSON of a GET -> `fake.grow()` lets the live
rollout make its next call. `fake_server.py` puts it behind HTTP.
"""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from itertools import cycle
from typing import Any, Final
from urllib.parse import unquote

from gym_capture import reasons

ROLLOUTS: Final = 10_000
SAMPLES: Final = 8
START: Final = 1_795_000_000.0

TREE, LONG, LIVE = "reg-0000-0", "reg-0000-1", "reg-live"
HOSTILE: Final = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'

KINDS: Final = ["prompt", "trained", "not_trained", "inserted_close", "not_told"]
PROMPT, TRAINED, NOT_TRAINED, CLOSE = range(4)
WHYS: Final = ["aborted", "not_main_chain"]
MASKS: Final = ["unresolved_retries", "ambiguous_parent", "missing_reward", "incomplete"]

COLUMNS: Final = [
    *["rollout", "group", "sample", "attempt", "state", "reward", "mask_reason", "harness", "calls", "turns", "chains"],
    *["prompt_tokens", "generated_tokens", "trained_tokens", "eligible_links", "exact_links", "put_ms"],
    *["logprob_diff", "weight_version_min", "weight_version_max", "staleness", "finished_at"],
]

Json = dict[str, Any]

# What a tool gave, and what the policy said; broken into pieces much as a tokenizer does.
_TOOL: Final = """
dates.py:
def parse_date(text: str) -> date:
    year, month, day = (int(part) for part in text.split("-"))
    if day > DAYS[month - 1]:
        raise ValueError(f"no such day: {text}")
    return date(year, month, day)

test_dates.py::test_leap FAILED
E   ValueError: no such day: 2024-02-29
1 failed, 11 passed in 0.42s

"""
_SAID: Final = """I see: DAYS says 28 for February, whatever the year.
A year has 366 days if 4 divides it, 100 does not, or 400 does.
I change parse_date so that it asks calendar.monthrange(year, month) and run the test again.
{"name": "bash", "arguments": {"cmd": "sed -i 's/DAYS[month - 1]/monthrange(year, month)[1]/' dates.py && pytest -q"}}
"""
_PIECE: Final = re.compile(r" ?\w{1,7}|[^\S\n]+| ?[^\w\s]{1,2}|\n+ *")
_ODD: Final = ["\x1b[31m", "\x00", "\u202e", "\ufffd", "\t", "\r\n", " été", HOSTILE]
# Call by call: the calls of the rollout `TREE`, and which one each continues.
_ROLE_OF: Final = [
    *["main", "main", "side", "main", "sub_agent", "sub_agent", "main"],
    *["branch", "retry", "main", "aborted", "unresolved", "main"],
]
_PARENT_OF: Final = [None, 0, None, 1, 1, 4, 3, 3, 3, 6, 9, None, 9]


def _reasons() -> dict[str, Json]:
    sets = [kind for kind in vars(reasons).values() if isinstance(kind, type) and issubclass(kind, reasons.Reason)]
    return {
        name.value: {"title": kind.__name__, "meaning": name.means, "what_to_do": name.what_to_do}
        for kind in sets
        for name in kind
    }


class Fake:
    """The data, and what may change: calls of the live rollout, notes."""

    def __init__(self) -> None:
        self.live_calls = 3
        self.notes: list[Json] = []
        self.asked: list[str] = []
        self.token: str | None = None
        self.columns = self._columns()
        self.group_of = dict(zip(self.columns["rollout"], self.columns["group"], strict=True))

    # --- what moves ---

    def grow(self) -> None:
        """The live rollout makes a call; nothing else changes."""
        self.live_calls += 1
        self.columns["calls"][0] = self.live_calls

    # --- the job ---

    @staticmethod
    def _columns() -> dict[str, list[Any]]:
        rng = random.Random(7)
        names = list(COLUMNS)
        columns: dict[str, list[Any]] = {name: [] for name in names}

        def add(*values: Any) -> None:
            for name, value in zip(names, values, strict=True):
                columns[name].append(value)

        add(
            LIVE,
            "task-live",
            0,
            1,
            "live",
            None,
            None,
            "tool-agent",
            3,
            3,
            1,
            900,
            120,
            None,
            2,
            2,
            2.1,
            None,
            "40",
            "40",
            0,
            None,
        )
        for index in range(ROLLOUTS - 1):
            group, sample = divmod(index, SAMPLES)
            done = index / ROLLOUTS
            failed, masked = rng.random() < 0.02, rng.random() < 0.07
            turns = 1 + int(rng.expovariate(0.22))
            generated = turns * rng.randint(20, 220)
            exact = max(0, turns - 1 - (rng.random() < 0.12))
            version = int(done * 40)
            mask = rng.choice(MASKS) + (":call-3" if rng.random() < 0.3 else "") if masked else None
            add(
                f"reg-{group:04d}-{sample}",
                f"task-{group:04d}",
                sample,
                1 + (rng.random() < 0.03),
                "failed" if failed else "finished",
                None if failed else round(min(1.0, max(0.0, rng.gauss(0.2 + 0.6 * done, 0.3))), 3),
                "incomplete" if failed else mask,
                rng.choice(["tool-agent", "tool-agent", "claude-code", "codex"]),
                turns + (rng.random() < 0.2),
                turns,
                1 + (rng.random() < 0.1),
                400 + turns * 90,
                generated,
                0 if masked or failed else generated,
                turns - 1,
                exact,
                round(rng.lognormvariate(0.6, 0.4), 2),
                abs(rng.gauss(6e-6, 2e-6)),
                str(max(0, version - (rng.random() < 0.3))),
                str(version),
                rng.choice([0, 0, 1, 2]),
                START + index * 3.1 + rng.random(),
            )
        columns["calls"][1], columns["turns"][1], columns["chains"][1] = len(_ROLE_OF), 6, 3
        columns["calls"][2] = columns["turns"][2] = len({call for _, _, call, _ in _tokens(LONG, 0)["segments"]})
        columns["mask_reason"][1] = columns["mask_reason"][2] = None
        return columns

    def source(self) -> Json:
        shows = {"records": True, "trajectories": True, "job": True, "annotations": True}
        return {
            "title": "runs/register",
            "kind": "job",
            "live": True,
            "shows": shows,
            "reasons": _reasons(),
            "kinds": KINDS,
            "version": "0.1.0",
        }

    def rollouts(self, since: str | None) -> Json:
        said = {
            "cursor": str(self.live_calls),
            "is_all": since is None,
            "gone": [],
            "complete": True,
            "unread": 0,
            "problem": None,
        }
        if since is None:
            return {**said, "columns": self.columns}
        rows = [] if since == str(self.live_calls) else [0]
        return {**said, "columns": {name: [column[row] for row in rows] for name, column in self.columns.items()}}

    def series(self) -> Json:
        steps = list(range(40))
        return {
            "series": {
                "trainer/loss": {
                    "axis": "step",
                    "x": steps,
                    "y": [0.4 / (1 + step / 9) for step in steps],
                    "unit": "",
                    "title": "trainer: loss",
                }
            }
        }

    def row(self, rollout: str) -> Json | None:
        if rollout not in self.group_of:
            return None
        at = self.columns["rollout"].index(rollout)
        return {name: column[at] for name, column in self.columns.items()}

    def group(self, group: str) -> Json | None:
        members = [rollout for rollout, of in self.group_of.items() if of == group]
        if not members:
            return None
        rows = [row for row in map(self.row, members) if row is not None]
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        differ = group == "task-0000"
        shown = [
            {
                "rollout": row["rollout"],
                "sample": row["sample"],
                "reward": row["reward"],
                "mask_reason": row["mask_reason"],
                "advantage": None if row["reward"] is None else round(row["reward"] - mean, 3),
                "first_prompt": {
                    "tokens": 41 + (differ and row["sample"] == 2),
                    "text": _messages(0)[1]["text"] + (" Today is Tuesday." if differ and row["sample"] == 2 else ""),
                },
            }
            for row in rows
        ]
        a, b = (
            {"ids": [13, 151645], "texts": [".", "<|im_end|>"]},
            {"ids": [13, 11, 374, 12], "texts": [".", " Today", " is", " Tuesday"]},
        )
        differences = [{"rollout": rows[2]["rollout"], "at": 40, "a": a, "b": b}] if differ else []
        return {"group": group, "rollouts": shown, "first_prompts_equal": not differ, "differences": differences}

    # --- one rollout ---

    def calls(self, rollout: str) -> list[Json]:
        row = self.row(rollout)
        assert row is not None
        count = self.live_calls if rollout == LIVE else row["calls"]
        return [self._call(rollout, number) for number in range(count)]

    @staticmethod
    def _call(rollout: str, number: int) -> Json:
        tree = rollout == TREE
        parent = _PARENT_OF[number] if tree else (number - 1 if number else None)
        role = _ROLE_OF[number] if tree else "main"
        split = (rollout == LONG and number % 7 == 3) or (tree and number == 6)
        kind = "none" if parent is None else "split" if split else "exact"
        reason, words = (None, "")
        if split:
            reason, words = (
                "turn_lost",
                "The template left a turn of the conversation out: it strips thinking from history.",
            )
        elif role == "unresolved":
            reason, words = (
                "no_match",
                "No call of this rollout has this conversation before it: its history was edited or compacted.",
            )
        return {
            "call": f"{rollout}-c{number}",
            "number": number + 1,
            "parent": None if parent is None else f"{rollout}-c{parent}",
            "role": role,
            "link": {"kind": kind, "reason": reason, "words": words},
            "dialect": "chat",
            "started_at": START + number * 2,
            "seconds": 0.4 + number / 10,
            "prompt_tokens": 120 + 60 * number,
            "supplied_tokens": 100 + 60 * number if kind == "exact" else 0,
            "generated_tokens": 40,
            "finish": "aborted" if role == "aborted" else "tool_calls",
            "weight_versions": ["12"],
            "excluded": None,
            "excluded_words": None,
            "preview": HOSTILE if tree and number == 1 else f"I read step {number} of the file and run its test.",
        }

    def rollout(self, rollout: str, since: str | None) -> Json | None:
        row = self.row(rollout)
        if row is None:
            return None
        calls = self.calls(rollout)
        if since == str(len(calls)):
            return {"rollout": rollout, "cursor": since, "state": row["state"], "unchanged": True}
        return {
            **{
                name: row[name] for name in ("rollout", "group", "state", "reward", "mask_reason", "attempt", "harness")
            },
            "mask_reasons": [row["mask_reason"]] if row["mask_reason"] else [],
            "mask_details": {},
            "cursor": str(len(calls)),
            "calls": calls,
        }

    def call(self, rollout: str, call: str) -> Json | None:
        row = self.row(rollout)
        number = int(call.rpartition("-c")[2]) if "-c" in call else -1
        if row is None or not 0 <= number < len(self.calls(rollout)):
            return None
        messages = [{**message, "new": index >= 2 * number} for index, message in enumerate(_messages(number))]
        return {
            "call": call,
            "messages": messages,
            "reply": {**_reply(number), "new": True},
            "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512},
            "tokens": {"prompt": 120 + 60 * number, "generated": 40},
            "notes": [],
        }

    def trajectories(self, rollout: str) -> list[Json] | None:
        row = self.row(rollout)
        if row is None:
            return None
        data = self._tokens_of(row)
        generated = {
            f"{rollout}-c{call}": [start, end]
            for start, end, call, kind in data["segments"]
            if kind in (TRAINED, NOT_TRAINED)
        }
        calls = list(generated)
        a = {
            "ids": [151667, 198, 40, 1366, 151668, 9707],
            "texts": ["<think>", "\n", "I", " want", "</think>", "Hello"],
            "from": "reply of c0",
        }
        b = {"ids": [9707, 11, 1879, 13], "texts": ["Hello", ",", " world", "."], "from": "prompt of the call"}
        split = {
            "call": calls[-1],
            "parent": calls[0],
            "reason": "turn_lost",
            "words": "The template strips thinking from history.",
            "at": 412,
            "a": a,
            "b": b,
        }
        return [
            {
                "trajectory": 0,
                "id": f"{rollout}/{calls[-1]}",
                "calls": calls,
                "generated": generated,
                "delivered": True,
                "tokens": len(data["ids"]),
                "trained_tokens": data["kinds"].count(TRAINED),
                "mask_reason": row["mask_reason"],
                "reward": row["reward"],
                "advantage": 0.31,
                "splits": [split] if rollout in (TREE, LONG) else [],
                "segments": data["segments"],
            }
        ]

    def _tokens_of(self, row: Json) -> Json:
        is_live = row["rollout"] == LIVE
        return _tokens(
            row["rollout"], 1_000 * self.live_calls if is_live else row["generated_tokens"] + row["prompt_tokens"]
        )

    def tokens(self, rollout: str, start: int, end: int) -> Json | None:
        row = self.row(rollout)
        if row is None:
            return None
        data = self._tokens_of(row)
        total = len(data["ids"])
        end = min(end, total)
        cut = {
            name: data[name][start:end] for name in ("ids", "texts", "kinds", "calls", "logprobs", "versions", "why")
        }
        overlays = {name: values[start:end] for name, values in data["overlays"].items()}
        return {"from": start, "to": end, "total": total, **cut, "whys": WHYS, "overlays": overlays}

    # --- search, notes ---

    def search(self, query: str, where: str, limit: int, begin: int) -> Json:
        if where == "reason":
            found = [
                (name, mask)
                for name, mask in zip(self.columns["rollout"], self.columns["mask_reason"], strict=True)
                if mask and query in mask
            ]
            hits = [
                {"rollout": name, "trajectory": None, "token": None, "call": None, "excerpt": mask}
                for name, mask in found
            ]
        elif where == "id":
            found_ids = [name for name in self.columns["rollout"] if query in name]
            hits = [
                {"rollout": name, "trajectory": None, "token": None, "call": None, "excerpt": name}
                for name in found_ids
            ]
        else:
            data = _tokens(LONG, 0)
            at = [index for index, text in enumerate(data["texts"]) if query.lower() in text.lower()]
            hits = [
                {
                    "rollout": LONG,
                    "trajectory": 0,
                    "token": index,
                    "call": None,
                    "excerpt": "".join(data["texts"][index - 8 : index + 8]),
                }
                for index in at
            ]
        end = begin + limit
        return {"hits": hits[begin:end], "complete": len(hits) <= end, "after": str(end) if len(hits) > end else None}

    def annotate(self, body: Json) -> Json:
        assert {"rollout", "call", "name"} <= set(body), "an annotation names rollout, call and name"
        self.notes.append({**body, "at": START})
        return {"added": 1}


def _messages(number: int) -> list[Json]:
    """The conversation before call `number`."""
    messages: list[Json] = [
        {
            "role": "system",
            "text": "You are a careful agent with a shell. Use the tools.",
            "reasoning": None,
            "tool_calls": [],
            "tool_result_of": None,
        },
        {
            "role": "user",
            "text": "The test of parse_date fails on the 29th of February. Find out why and mend it.",
            "reasoning": None,
            "tool_calls": [],
            "tool_result_of": None,
        },
    ]
    for turn in range(number):
        result = "\n".join(
            f"{line:4d}  def test_{line}(): assert parse_date('2024-02-{line % 28 + 1:02d}')"
            for line in range(30 * (1 + turn % 3))
        )
        result = HOSTILE if turn == 1 else result
        messages += [
            _reply(turn),
            {"role": "tool", "text": result, "reasoning": None, "tool_calls": [], "tool_result_of": f"tool-{turn}"},
        ]
    return messages


def _reply(turn: int) -> Json:
    return {
        "role": "assistant",
        "text": f"I read step {turn} of the file and run its test.",
        "reasoning": f"The failure is in step {turn}: I want to see what the parser gets." if turn % 2 else None,
        "tool_calls": [{"name": "bash", "arguments": json.dumps({"cmd": f"sed -n {turn}0,{turn}9p dates.py"})}],
        "tool_result_of": None,
    }


@lru_cache(maxsize=8)
def _tokens(rollout: str, about: int) -> Json:
    total = 100_000 if rollout == LONG else max(about, 200)
    rng = random.Random(rollout)
    segments: list[list[int]] = []
    at, call = 0, 0
    while at < total:
        for length, of, kind in (
            (rng.randint(60, 900 if rollout == LONG else 90), call, PROMPT),
            (rng.randint(30, 400), call, TRAINED),
            (rng.randint(0, 1), call + 1, CLOSE),
        ):
            kind = NOT_TRAINED if kind == TRAINED and call % 9 == 5 else kind
            end = min(total, at + length)
            if end > at:
                segments.append([at, end, of, kind])
            at = end
        call += 1
    said, tool = cycle(_PIECE.findall(_SAID)), cycle(_PIECE.findall(_TOOL))
    texts = [
        next(said if kind in (TRAINED, NOT_TRAINED) else tool)
        for start, end, _, kind in segments
        for _ in range(start, end)
    ]
    for place in rng.sample(range(200, total), total // 300) if total > 300 else ():
        texts[place] = rng.choice(_ODD)
    texts[40:42] = ["\x07\x00", HOSTILE]
    kinds = [kind for start, end, _, kind in segments for _ in range(start, end)]
    calls = [of for start, end, of, _ in segments for _ in range(start, end)]
    sampled = [kind in (TRAINED, NOT_TRAINED) for kind in kinds]
    logprobs = [-rng.expovariate(1.4) if yes else None for yes in sampled]
    return {
        "segments": segments,
        "texts": texts,
        "ids": [hash_of(text) for text in texts],
        "kinds": kinds,
        "calls": calls,
        "logprobs": logprobs,
        "versions": [str(12 + of // 40) if yes else None for yes, of in zip(sampled, calls, strict=True)],
        "why": [of % 2 if kind == NOT_TRAINED else -1 for kind, of in zip(kinds, calls, strict=True)],
        "overlays": {
            "entropy": [rng.expovariate(0.9) if yes else None for yes in sampled],
            "difference": [rng.gauss(0, 0.02) if yes else None for yes in sampled],
            "advantage": [0.31 if yes else None for yes in sampled],
        },
    }


def hash_of(text: str) -> int:
    """An id for a text, the same in every process."""
    return sum((index + 1) * ord(letter) * 131 for index, letter in enumerate(text)) % 151_000


def answer(fake: Fake, path: str, query: dict[str, str]) -> Any:
    """The JSON of a GET; None: there is no such thing."""
    match [unquote(part) for part in path.split("/")]:
        case ["source"]:
            return fake.source()
        case ["rollouts"]:
            return fake.rollouts(query.get("since"))
        case ["series"]:
            return fake.series()
        case ["groups", group]:
            return fake.group(group)
        case ["rollouts", rollout]:
            return fake.rollout(rollout, query.get("since"))
        case ["rollouts", rollout, "calls", call]:
            return fake.call(rollout, call)
        case ["rollouts", rollout, "trajectories"]:
            return fake.trajectories(rollout)
        case ["rollouts", rollout, "trajectories", "0", "tokens"]:
            return fake.tokens(rollout, int(query["from"]), int(query["to"]))
        case ["search"]:
            return fake.search(query["q"], query["where"], int(query.get("limit", 50)), int(query.get("after", 0)))
        case ["annotations"]:
            return {"annotations": [note for note in fake.notes if note["rollout"] == query["rollout"]]}
    return None
