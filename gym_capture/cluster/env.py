"""The environment in which a Ray cluster serves the graph at full speed.

Ray reads these when its processes start, so they must be set before `ray start` or `serve run`:
`source serve_configs/cluster.env` says the same for a shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NO_SPLICING: Final = "no option splice-request"

CLUSTER_ENV: Final[Mapping[str, str]] = {
    # HAProxy in front, straight into the replicas, instead of Serve's Python proxy: a request costs about a fifth.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # One rollout on one replica (it has the KV cache): hash what stands third in /ng-rollout/<id>/..., consistently,
    # so that scaling up moves few rollouts. (It is the place in the list of replicas that is hashed over: one that is
    # gone moves up those behind it.) No replica gets more than 1.5 times its share, so that untracked requests, whose
    # third part is always the same, spread too.
    # Serve writes this value into the `defaults` of HAProxy's configuration, so what does not concern balancing can be
    # said in it, too: with the splicing that Serve turns on, HAProxy does not see that a client has gone.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": (
        f"hash path,field(3,/)\n    hash-type consistent\n    hash-balance-factor 150\n    {_NO_SPLICING}\n"
        # A node that is without power or network says nothing: its calls would hang until their clients give up. After
        # 25 s of silence below HTTP they are cut, and clients ask again. An engine that thinks does answer there.
        "    option srvtcpka\n    srvtcpka-idle 10s\n    srvtcpka-intvl 5s\n    srvtcpka-cnt 3"
    ),
    # Whenever replicas come or go, a new HAProxy takes over, and the old one lives on for the streams that it carries:
    # for so long at most, those of replicas that stay included. As long as a draining replica may have.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # Ray lowers the priority of its workers by default; on a machine that does anything else, the engine then waits.
    "RAY_worker_niceness": "0",
    # On a busy machine a proxy may need longer than the 5 s after which Serve gives it up.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

OWN_CLUSTER_ENV: Final[Mapping[str, str]] = {
    **CLUSTER_ENV,
    # Of a cluster that a command starts for itself: nothing routes here any more once it is asked to end, and Serve
    # would wait for half a minute that somebody in front of it hears of it, and then say that it took too long.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
}


def what_proxy_lacks(balance_algorithm: str) -> str | None:
    """The fault of a HAProxy that runs with this `RAY_SERVE_HAPROXY_BALANCE_ALGORITHM`."""
    if _NO_SPLICING in balance_algorithm:
        return None
    return (
        "HAProxy is in front of this graph (RAY_SERVE_ENABLE_HA_PROXY=1) without the settings that belong to it: many "
        "clients that leave will not be noticed - their calls are generated to the end for nobody, HAProxy spins on "
        "their connections - and rollouts do not stay on one replica. Source serve_configs/cluster.env before "
        f"`ray start` on every node, or have RAY_SERVE_HAPROXY_BALANCE_ALGORITHM say {_NO_SPLICING!r}, too"
    )


def private_cluster_env(
    *, metrics_port: int, stats_port: int, fallback_port: int, replica_ports: tuple[int, int], ha_proxy: bool = True
) -> dict[str, str]:
    """`OWN_CLUSTER_ENV` for a cluster beside others on one machine: no port of its own may be one of theirs.

    Otherwise requests are answered by another cluster's graph. `fallback_port`: of Serve's Python proxy, to which
    HAProxy sends what comes before a replica is there. `replica_ports`: the first and the last that a replica may take.
    """
    return {
        **OWN_CLUSTER_ENV,
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if ha_proxy else "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # There are not so many ports that each could rest for the hour for which an old HAProxy may know it.
        "RAY_SERVE_PORT_QUARANTINE_S": "150",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica_ports[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replica_ports[1]),
    }
