"""The graph and plain vLLM, side by side on this machine, for the benchmarks that compare them.

Invariant: what is compared differs in nothing but what is measured. Both serve the same model folder under the name
`policy`, with the engine arguments of one mapping, the same KV cache, no log of requests and no statistics; rounds
alternate between them, and each round begins with another one.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import httpx
import yaml

from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import ChildProcesses, free_port
from gym_capture.serving.app import model_folder

_T = TypeVar("_T")

MODEL = "policy"
ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "enable_prefix_caching": True,
}
TOOL_PARSER = "hermes"
KV_CACHE_GIB = "2"
_SERVE_CONFIG = Path(__file__).parent.parent / "serve_configs" / "cpu_demo.yaml"
_NAMESPACE = "gym-capture-bench"
_START_WITHIN_S = 300
_CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Servers:
    """URLs, scheme to port."""

    vllm: str
    graph: str


@contextmanager
def both_servers(model: str) -> Iterator[Servers]:
    """Serves `model` (`smollm2`, `tiny` or a folder) by both, for the length of the block."""
    folder = model_folder(model)
    base = yaml.safe_load(_SERVE_CONFIG.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gym-capture-bench-")))
        children = stack.enter_context(ChildProcesses())
        vllm = stack.enter_context(_plain_vllm(children, folder, directory))
        address = stack.enter_context(private_ray(cpus=8, namespace=_NAMESPACE))
        (application,) = base["applications"]
        replica = application["args"]["ray_actor_options"]
        replica["runtime_env"]["env_vars"]["VLLM_CPU_KVCACHE_SPACE"] = KV_CACHE_GIB
        args = {
            "model": str(folder),
            "model_name": MODEL,
            "tool_parser": TOOL_PARSER,
            "engine_args": dict(ENGINE_ARGS),
            "ray_actor_options": replica,
            "state": {"shards": 1, "namespace": _NAMESPACE, "directory": str(directory / "records")},
        }
        graph = stack.enter_context(
            served_graph(children, base=base, args=args, address=address, directory=directory, on_wait=lambda _: None)
        )
        yield Servers(vllm=vllm, graph=graph)


@contextmanager
def _plain_vllm(children: ChildProcesses, model: Path, directory: Path) -> Iterator[str]:
    """vLLM's own OpenAI server."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += _flags(ENGINE_ARGS)
    command += ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER, "--enable-prompt-tokens-details"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    child = children.start(["env", f"VLLM_CPU_KVCACHE_SPACE={KV_CACHE_GIB}", *command], log=directory / "vllm.log")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_WITHIN_S
    while True:
        if child.ended() is not None or time.monotonic() > deadline:
            raise SystemExit(f"vLLM's server did not start; the end of its log:\n{child.log_tail()}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                break
        except httpx.HTTPError:
            pass  # not there yet
        time.sleep(0.5)
    try:
        yield url
    finally:
        child.stop()


def _flags(engine_args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line spells them."""
    named = [("--" + name.replace("_", "-"), value) for name, value in engine_args.items()]
    return [word for flag, value in named for word in ((flag,) if value is True else (flag, str(value)))]


def chat_url(server: str, *, rollout_id: str | None) -> str:
    """Where chat completions go: recorded under `rollout_id`, or, without one, not at all."""
    prefix = "" if rollout_id is None else f"/ng-rollout/{rollout_id}"
    return f"{server}{prefix}/v1/chat/completions"


def nonce() -> str:
    """A word that no other request begins with: put first in a conversation, so that it meets a cold cache."""
    return f"{random.getrandbits(60):015x}"


def client_session() -> aiohttp.ClientSession:
    """A client without a limit of its own on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
    )


async def refuse_errors(response: aiohttp.ClientResponse) -> None:
    """Ends the benchmark on anything but 200: figures of a load that was not carried out mean nothing."""
    if response.status != 200:
        raise SystemExit(f"{response.url} answered {response.status}: {(await response.text())[:300]}")


def alternate(
    sides: Mapping[str, Callable[[], _T]], *, rounds: int, warm_ups: Mapping[str, Callable[[], object]] | None = None
) -> dict[str, list[_T]]:
    """Runs every side `rounds` times, in turns, the first of a round being the second of the next.

    Before that each side's warm-up, or without them a round that is not kept.
    """
    kept: dict[str, list[_T]] = {name: [] for name in sides}
    for warm_up in (warm_ups or sides).values():
        warm_up()
    order = list(sides)
    for _ in range(rounds):
        order = [*order[1:], order[0]]
        for name in order:
            kept[name].append(sides[name]())
    return kept


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]
