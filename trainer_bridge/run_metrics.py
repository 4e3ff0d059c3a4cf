"""A training run as metrics that Prometheus scrapes: what `metrics.jsonl` says, whoever writes it.

Invariant: what is exported is what the lines of the run's folder say; nothing of the trainer is asked or held up. A
run that goes on from a checkpoint has fewer steps than it had, which Prometheus takes for a counter that began again.
A line that is broken is left out, and counted.

Flow: `served(run, port)` answers `GET /metrics` from a thread -> each time the lines that are new are added up
(`RunMetrics`) -> text in Prometheus' format. The label `run` is the name of the folder.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, NamedTuple

from gym_capture.errors import ConfigError

__all__ = ["COUNTERS", "GAUGES", "LABELLED", "PREFIX", "RunMetrics", "served"]

PREFIX: Final = "gym_capture_trainer_"


class Shown(NamedTuple):
    """A metric, and the key of a step's line that it is of."""

    key: str
    text: str


GAUGES: Final[Mapping[str, Shown]] = {
    "step": Shown("step", "Steps that the run has made"),
    "loss": Shown("loss", "Loss of the last step"),
    "grad_norm": Shown("grad_norm", "Norm of its gradient, before clipping"),
    "clipped_ratio": Shown("clip_fraction", "Tokens whose ratio is outside of the clip range"),
    "entropy_nats": Shown("entropy", "Mean entropy over its trained tokens"),
    "reference_kl_nats": Shown("kl", "Mean divergence from the reference weights"),
    "gen_kl_error": Shown("gen_kl_error", "KL of generation and trainer, k3; 0 if they agree"),
    "token_mult_prob_error": Shown("token_mult_prob_error", "Factor that a token's probability is off by"),
    "log_prob_diff_mean": Shown("mean_abs_log_prob_diff", "Mean of |log prob of trainer - of generation|"),
    "log_prob_diff_max": Shown("max_abs_log_prob_diff", "The largest of them"),
    "importance_mean": Shown("mean_importance", "Mean of the importance weights, within their limits"),
    "importance_outside_ratio": Shown("importance_outside", "Tokens whose weight was truncated or masked"),
    "mean_reward": Shown("mean_reward", "Of the rollouts of the last step that are not masked"),
    "packing_ratio": Shown("packing", "How much of the room in micro-batches is ids of rows"),
    "policy_version": Shown("version", "Version of the weights that were trained, where they are pushed"),
    "policy_lag_mean": Shown("lag_mean", "Versions that the weights that sampled are behind those that are trained"),
    "policy_lag_max": Shown("lag_max", "The most of them, of a group"),
    "pushed_version": Shown("pushed_version", "Version of the weights that was pushed last"),
}
"""Of the last step. One whose key is null, or not there, is not exported."""

COUNTERS: Final[Mapping[str, Shown]] = {
    "updates": Shown("updates", "Updates of the weights"),
    "groups": Shown("groups", "Groups that were taken"),
    "groups_without_spread": Shown("groups_without_spread", "Of which all rewards are the same"),
    "groups_of_several_prompts": Shown("groups_of_several_prompts", "Whose first prompts differ"),
    "rollouts": Shown("rollouts", "Rollouts that were taken, trained on or not"),
    "sequences": Shown("sequences", "Sequences of them"),
    "trained_tokens": Shown("trained_tokens", "Tokens with loss"),
    "tokens_without_log_prob": Shown("tokens_without_log_prob", "Of which no log probability is known: not trained"),
    "tokens_of_assumed_temperature": Shown("tokens_of_assumed_temperature", "Of which no temperature is on record"),
    "reshaped_tokens": Shown("reshaped_tokens", "That top-p, top-k, penalties or a grammar had a say in"),
    "row_tokens": Shown("row_tokens", "Ids of all rows, one by one"),
    "computed_tokens": Shown("computed_tokens", "Ids of forward passes: more by padding, fewer by shared prefixes"),
    "micro_batches": Shown("micro_batches", "Forward and backward passes of an update"),
    "step_seconds": Shown("seconds", "Time that steps took"),
    "push_seconds": Shown("push_s", "Time that pushes of weights took"),
    "push_paused_seconds": Shown("paused_s", "Time for which the graph was paused by them"),
    "broken_lines": Shown("broken_lines", "Lines of the run that cannot be read, and are left out of all this"),
}
"""Sums over the steps of the run; exported with `_total` behind the name."""

LABELLED: Final[Mapping[str, tuple[str, Shown]]] = {
    "left_out_rollouts": ("reason", Shown("left_out/", "Rollouts that were not trained on, by reason")),
}
"""Sums by a label: of the keys that begin so, what stands behind."""


_SUMMED: Final = frozenset(shown.key for shown in COUNTERS.values())
_SHOWN: Final = _SUMMED | {shown.key for shown in GAUGES.values()}
_LABELS: Final = tuple(shown.key for _, shown in LABELLED.values())


class RunMetrics:
    """The lines of a run, added up."""

    def __init__(self, lines: Path, *, run: str) -> None:
        self._path = lines
        self._run = run
        self._lock = Lock()
        self._forget()

    def text(self) -> str:
        """All metrics, in Prometheus' text format; of a run without steps there are none."""
        with self._lock:
            self._read()
            return "".join(self._written()) if self._last or self._sums else ""

    def _forget(self) -> None:
        self._inode, self._place = -1, 0
        self._last: Mapping[str, Any] = {}
        self._sums: Counter[str] = Counter()

    def _read(self) -> None:
        """Whole lines that are new; all of them, if the file is another one, as after a checkpoint was gone back to."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._place:
                self._forget()
                self._inode = found.st_ino
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._place += len(line)
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            step = {key: value for key, value in json.loads(line).items() if _is_shown(key) and value is not None}
        except (ValueError, AttributeError, RecursionError):
            step = None
        if not step or not all(isinstance(value, int | float) for value in step.values()):
            self._sums[COUNTERS["broken_lines"].key] += 1
            return
        self._last = step
        for key, value in step.items():
            if key in _SUMMED or key.startswith(_LABELS):
                self._sums[key] += value

    def _written(self) -> Iterator[str]:
        for name, shown in GAUGES.items():
            value = self._last.get(shown.key)
            if value is not None:
                yield from self._metric(name, "gauge", shown.text, {"": value})
        for name, shown in COUNTERS.items():
            if shown.key in self._sums:
                yield from self._metric(f"{name}_total", "counter", shown.text, {"": self._sums[shown.key]})
        for name, (label, shown) in LABELLED.items():
            by_label = {
                f',{label}="{_escaped(key.removeprefix(shown.key))}"': count
                for key, count in self._sums.items()
                if key.startswith(shown.key)
            }
            if by_label:
                yield from self._metric(f"{name}_total", "counter", shown.text, by_label)

    def _metric(self, name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
        yield f"# HELP {PREFIX}{name} {text}\n# TYPE {PREFIX}{name} {kind}\n"
        for labels, value in values.items():
            yield f'{PREFIX}{name}{{run="{_escaped(self._run)}"{labels}}} {value}\n'


def _is_shown(key: str) -> bool:
    return key in _SHOWN or key.startswith(_LABELS)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@contextmanager
def served(run: Path, lines: Path, *, host: str, port: int) -> Iterator[int]:
    """Answers `GET /metrics` for what `lines` of the run's folder say. Yields the port, which is another if it was 0.

    Raises `ConfigError` if the port cannot be had.
    """
    metrics = RunMetrics(lines, run=run.resolve().name)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = metrics.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            """Scrapes are not worth a line."""

    try:
        server = ThreadingHTTPServer((host, port), Answer)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error.strerror or error}") from None
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
