"""The shell blocks of the pages, as commands that can be run here.

Invariant: a command of a block is run - by `tests.docs.walk`, or by the test beside it - or a row of `LEFT_OUT` says
why not, and no row is about nothing.

Flow: a block -> its commands, one a line -> those that are left out, taken away -> names that stand for the reader's
own, replaced (`Placeholders`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, inline

SHELL: Final = ("bash", "sh", "console")

LEFT_OUT: Final = {
    r"make (setup|test|test-fast|lint typecheck .*)$": "CI runs these targets",
    r"make demo$": "tests/demo runs it; CI has it in `make test`",
    r"make bench|python -m benchmarks\.": "minutes: `make bench ARGS=--quick` runs all",
    r"make example-|gym-capture learn ": "minutes for each arm: the same loop is run here, in one step",
    r"(claude|codex|mini) ": "other people's agents: `make test-clients`",
    r"accelerate launch ": "`make test-trl-graph`",
    r"gym-capture export .* --to labels|make reasons-table|pytest |gym-capture explain too_short": (
        "in a checkout that has the recipe: tests/docs/test_recipes.py"
    ),
    r"gym-capture conformance .*ActorStore": "minutes: tests/contract/test_actor_store.py",
    r"gym-capture conformance my_module:": "a store of the reader's",
    r"(source \S+ && )?ray (start|stop)|serve deploy": "several nodes, GPUs; `ray stop` ends every Ray of a machine",
}
"""What is not run, by how a command begins, and why."""

INLINE: Final = (
    "gym-capture --help",
    "gym-capture doctor",
    "gym-capture explain",
    "gym-capture explain REASON",
    "gym-capture records list",
    "gym-capture records verify",
    "gym-capture inspect ROLLOUT",
    "gym-capture check-configs FILE",
    "gym-capture audit-template MODEL_FOLDER",
    "gym-capture model smollm2",
    "gym-capture rollouts run --out runs/first --generate 8",
    "gym-capture rollouts run --out runs/job",
    "gym-capture rollouts run serve_configs/jobs/register.yaml --build runs/register/trajectories",
    "gym-capture weights status",
    "gym-capture weights abort",
)
"""Commands in the midst of text that are whole. The others are parsed only (`tests/docs/test_pages.py`)."""

NO_GRAPH: Final = (
    r"gym-capture token",
    r"\(umask",
    r"gym-capture --install",
    r"gym-capture rollouts run \S+ --dry-run",
)
"""Commands that need nothing that runs, and take a second."""


_FIRST_OF_JOB: Final = (
    'python -c \'import json; print(json.loads(open("runs/register/rollouts.jsonl").readline())["rollout_id"])\''
)


@dataclass(frozen=True)
class Command:
    """A command of a block: a line, with those that continue it."""

    block: Block
    text: str

    @property
    def why_not(self) -> str | None:
        """The row of `LEFT_OUT` that it is under."""
        return next((pattern for pattern in LEFT_OUT if re.match(pattern, self.text)), None)


def commands_of(block: Block) -> list[Command]:
    lines = block.text.replace("\\\n", " ").splitlines()
    told = [re.sub(r"\s+#\s.*$|^#.*$", "", line) for line in lines]
    return [Command(block, " ".join(text.split())) for text in told if text.strip()]


def shell_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in SHELL]


def commands() -> Iterator[Command]:
    """All of them, in the order of the pages."""
    for page in PAGES:
        for block in shell_blocks(page):
            yield from commands_of(block)


def in_text() -> set[str]:
    """Commands of ours that stand in the midst of text, whole or in part."""
    said = {" ".join(token.content.split()) for page in PAGES for token in inline(page, "code_inline")}
    return {text for text in said if text.startswith("gym-capture ")}


@dataclass
class Placeholders:
    """What stands in the pages for something of the reader's, and what it is in the working folder."""

    model: str
    """A model folder."""
    dashboard: str = "http://127.0.0.1:8265"
    job_id: str = "none"
    """Of the job that was submitted last."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def filled(self, text: str) -> str:
        for pattern, value in self._table().items():
            text = re.sub(pattern, value, text)
        return text

    def _table(self) -> dict[str, str]:
        number = next(self._numbers)
        built = "runs/register/trajectories"
        return {
            # Models: the small random one. `novice` is one that is taught for minutes, smollm2 of half a gigabyte.
            r"/models/[\w-]+|\bMODEL_FOLDER\b|/shared/checkpoint-3\b": self.model,
            r"--model MODEL\b": f"--model {self.model}",
            r"\b(smollm2|novice)\b": "tiny",
            r'"bfloat16"': '"float32"',  # in which that one was served: else it is told apart
            r"(serve serve_configs/cpu_demo.yaml)": r"\1 --model tiny",
            # What a page calls by a name, once as what is there and once as what is made.
            r"--out OUT\b": f"--out runs/built-{number}",
            r"--out EXPORT\b": f"--out runs/exported-{number}",
            r"--out RUN\b": f"--out runs/trained-{number}",
            r"\bOUT\b": built,
            r"build DIR\b": "build captures",
            r"\brollouts\.jsonl": "runs/register/rollouts.jsonl",
            r"\b(job|JOB)\.yaml|\bJOB\.YAML": "job.yaml",
            r"\bFILE\b": "my_graph.yaml",
            r"\bROLLOUT runs/register\b": f"$({_FIRST_OF_JOB}) runs/register",
            r"\bROLLOUT\b": "what-i.0",
            r"\bREASON\b": "dangling_intent",
            r"\bfirst-1f0c2a9b\b": self.job_id,
            # Where things are.
            r"http://head:8265": self.dashboard,
            r"/shared/gym-capture/records\b": "~/.cache/gym-capture/records",
            r"/shared/runs\b": "$PWD/shared/runs",
            r"/backup\b": "backup",
            r"/etc/gym-capture\b": "etc/gym-capture",
            r"make setup && ": "",
            # How much.
            r"--generate 1000\b": "--generate 2",
            r"--steps 24 --rollouts-per-step 32\b": "--steps 1 --rollouts-per-step 8",
        }


def files() -> Iterator[Block]:
    """Blocks that are files: a reader writes them."""
    for page in PAGES:
        yield from (block for block in blocks_of(page) if block.file is not None)


def first_agent() -> str:
    """The agent of README.md: a block of Python that is no file."""
    (text,) = [block.text for block in blocks_of(ROOT / "README.md") if "/ng-rollout/my-rollout/" in block.text]
    return text


def configuration() -> str:
    """The graph that docs/models.md checks: what comes along, with another parser."""
    text = (ROOT / "serve_configs" / "cpu_demo.yaml").read_text(encoding="utf-8")
    return text.replace("model: smollm2", "model: tiny")
