"""The state actors of a graph: starting them, and finding them from anywhere in the cluster.

Invariant: a namespace has one set of state actors, whoever starts them first, and they outlive whoever did.

What an actor promises stands in `state_shard`, how a process reaches it in `state_client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_capture.cluster.replies import answer
from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.serving.mirror import alive_nodes
from gym_capture.serving.state_client import ANSWER_WITHIN_S, StateClient
from gym_capture.serving.state_shard import LINEAGE_BYTES, WAITING_BYTES, StateShard
from gym_capture.serving.stats import ShardStats
from gym_capture.serving.weights_actor import ACTOR as WEIGHTS

__all__ = [
    "LINEAGE_BYTES",
    "WAITING_BYTES",
    "ShardStats",
    "StateClient",
    "StateShard",
    "connect",
    "start_shards",
    "stop_shards",
]

_STATE: Final = "state-"
_MIRROR: Final = "mirror-"


def start_shards(
    *,
    namespace: str,
    shards: int,
    store: str,
    store_kwargs: Mapping[str, Any],
    directory: str,
    lineage_bytes: int = LINEAGE_BYTES,
    waiting_bytes: int = WAITING_BYTES,
    max_idle_s: float | None = None,
    replicas: int = 1,
) -> None:
    """Makes sure that the state actors of `namespace` run and have read their logs back.

    Those that run already are kept, with their records. Raises `ConfigError` if they were started with other arguments,
    or if none run yet and the cluster has too few nodes to keep `replicas` copies of each log. Once they run, a replica
    of the graph may start although a node was lost.

    Shards are dealt out to the nodes in turn. One that dies starts again on its node, where its log is, unless that
    node is lost.
    """
    if not isinstance(shards, int) or shards < 1:
        raise ConfigError(f"state.shards: must be a whole number, at least 1: got {shards!r}")
    directory = str(Path(directory).expanduser())
    nodes = alive_nodes()
    named = ray.util.list_named_actors(all_namespaces=True)
    is_new = {"name": _actor_name(0), "namespace": namespace} not in named
    if is_new and (replicas not in (1, 2) or replicas > len(nodes)):
        raise ConfigError(
            f"state.replicas: must be 1, or 2 on a cluster of two nodes or more; it is {replicas} on {len(nodes)}"
        )
    actor_class = ray.remote(StateShard)

    def start(index: int) -> ActorHandle[Any]:
        return actor_class.options(
            name=_actor_name(index),
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            memory=1,  # byte: Ray heeds the strategy only of actors that need something
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=True),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=10_000,
        ).remote(
            index=index,
            shards=shards,
            store=store,
            store_kwargs=store_kwargs,
            directory=directory,
            lineage_bytes=lineage_bytes,
            waiting_bytes=waiting_bytes,
            max_idle_s=max_idle_s,
            replicas=replicas,
            namespace=namespace,
        )

    # The first says whether it is what is asked for, before there are others.
    first = start(0)
    running = answer(first.setup.remote())
    asked = {
        "shards": shards,
        "store": store,
        "store_kwargs": dict(store_kwargs),
        "directory": directory,
        "replicas": replicas,
        "lineage_bytes": lineage_bytes,
        "waiting_bytes": waiting_bytes,
        "max_idle_s": max_idle_s,
    }
    for name, value in asked.items():
        if running[name] != value:
            raise ConfigError(
                f"state.{name}: the state actors of namespace {namespace!r} already run with {running[name]!r}, "
                f"not {value!r}; use that, or another namespace, or end them with `gym-capture state stop`"
            )
    answer(first.describe.remote())
    answer([start(index).describe.remote() for index in range(1, shards)])


def connect(*, namespace: str = "gym-capture") -> StateClient:
    """A client of the state actors of `namespace`, from anywhere in the cluster.

    Raises `StoreUnavailableError` if there are none, or they do not answer.
    """
    try:
        first = ray.get_actor(_actor_name(0), namespace=namespace)
        shards = answer(first.describe.remote(), within_s=ANSWER_WITHIN_S)
        return StateClient([ray.get_actor(_actor_name(index), namespace=namespace) for index in range(shards)])
    except ValueError as error:
        raise StoreUnavailableError(
            f"no state actors in Ray namespace {namespace!r} of the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}: is the graph running on another one (--ray-address)? "
            "What a graph that has ended recorded is in its log (`gym-capture build-job --records DIRECTORY`)"
        ) from error


def stop_shards(*, namespace: str) -> int:
    """Ends the state actors of `namespace`, with their mirrors and the coordinator of the weights; what they have on
    disk stays. Returns how many state actors and mirrors there were.
    """
    names = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace and (actor["name"].startswith((_STATE, _MIRROR)) or actor["name"] == WEIGHTS)
    ]
    for name in names:
        ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
    return sum(name != WEIGHTS for name in names)


def _actor_name(index: int) -> str:
    return f"{_STATE}{index}"
