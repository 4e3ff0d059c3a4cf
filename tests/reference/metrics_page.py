"""docs/metrics.md, written from what the code exports.

python -m tests.reference.metrics_page > docs/metrics.md      `make reference`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gym_capture.rollouts import metrics as jobs
from gym_capture.serving import metrics as state
from gym_capture.serving import weights_metrics as weights
from trainer_bridge import run_metrics as runs

_RAYS: Final = "ray_gym_capture_"

_INTRODUCTION: Final = """\
# Metrics

Names are as Prometheus gets them, and as [its conventions](https://prometheus.io/docs/practices/naming/) have them:
counters end in `_total`, units are seconds and bytes and stand behind the name. Labels have few values: no rollout and
no call is one. `make reference` writes this file from the code, and tests compare it with the dashboard and with
what a running cluster exports.

[grafana/gym-capture.json](grafana/gym-capture.json) is a dashboard of all of them: import it, choose the data source.

**Where to scrape.** The graph, its weights and rollout jobs export through Ray: each node has a metrics port
(`ray start --metrics-export-port=8080`), and Ray's head node writes a file for Prometheus' service discovery,
`/tmp/ray/prom_metrics_service_discovery.json`. Serve's own metrics (`ray_serve_...`: requests, queues, replicas) are at
the same place. A training run is scraped from the trainer: `gym-capture train --metrics-port 9464`, at `127.0.0.1`
unless `--metrics-host` says otherwise. Neither asks for a token: keep these ports inside of your network
([security](security.md)).

```yaml
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files: [/tmp/ray/prom_metrics_service_discovery.json]
  - job_name: trainer
    static_configs:
      - targets: ["trainer-host:9464"]
```

What to be woken up by is in [operations](operations.md#what-to-watch).
"""


def document() -> str:
    return "\n".join(
        [
            _INTRODUCTION,
            *_section("The graph", "From its state actors; labels `namespace`, `shard`.", _of_state()),
            *_section("Weights", "From the coordinator of the weights; label `namespace`.", _of_weights()),
            *_section(
                "Rollout jobs", "From the process that runs the job; labels `namespace`, `rollout_job`.", _jobs()
            ),
            *_section("Training runs", "From `gym-capture train`; label `run`, the name of its folder.", _of_runs()),
        ]
    )


def _section(title: str, where: str, rows: Iterator[tuple[str, str]]) -> list[str]:
    lines = [f"| `{name}` | {text} |" for name, text in rows]
    return [f"## {title}", "", where, "", "| metric | what it is |", "|---|---|", *lines, ""]


def _of_state() -> Iterator[tuple[str, str]]:
    yield from ((f"{_RAYS}{name}_total", text) for name, text in state.COUNTERS.items())
    for name, (label, text) in state.LABELLED.items():
        yield f"{_RAYS}{name}_total", f"{text}; label `{label}`"
    yield from ((f"{_RAYS}{name}", text) for name, text in state.GAUGES.items())
    yield f"{_RAYS}{state.PUT_LATENCY}", "From a record's arrival until it is durable: a histogram"


def _of_weights() -> Iterator[tuple[str, str]]:
    for name, (label, text) in weights.COUNTERS.items():
        yield f"{_RAYS}{name}_total", text + (f"; label `{label}`" if label else "")
    yield from ((f"{_RAYS}{name}", text) for name, text in weights.GAUGES.items())


def _jobs() -> Iterator[tuple[str, str]]:
    yield from ((f"{_RAYS}{name}_total", text) for name, text in jobs.COUNTERS.items())
    yield f"{_RAYS}{jobs.FAILED_ATTEMPTS}_total", "Attempts that failed; label `reason`"
    yield from ((f"{_RAYS}{name}", text) for name, text in jobs.GAUGES.items())
    yield f"{_RAYS}{jobs.ROLLOUTS}", "Rollouts; label `state`: waiting, running, finished, failed"


def _of_runs() -> Iterator[tuple[str, str]]:
    yield from ((f"{runs.PREFIX}{name}", shown.text) for name, shown in runs.GAUGES.items())
    yield from ((f"{runs.PREFIX}{name}_total", shown.text) for name, shown in runs.COUNTERS.items())
    for name, (label, shown) in runs.LABELLED.items():
        yield f"{runs.PREFIX}{name}_total", f"{shown.text}; label `{label}`"


if __name__ == "__main__":
    print(document(), end="")
