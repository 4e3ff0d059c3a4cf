"""Builds the graph: `serve run gym_capture.serving.app:build_app model=...`, or `import_path` in a Serve config."""

# No `from __future__ import annotations` here: Serve reads the annotation of `args` to validate it.

import logging
from pathlib import Path
from typing import Final

from ray import serve
from ray.serve import Application
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_HAPROXY_BALANCE_ALGORITHM
from ray.serve.config import BackpressureConfig, RequestRouterConfig

from gym_capture import models
from gym_capture.auth import Keyring
from gym_capture.cluster.env import what_proxy_lacks
from gym_capture.errors import ConfigError
from gym_capture.serving.config import DEPLOYMENT, LONGEST_DRAIN_S, GraphArgs, Limits
from gym_capture.serving.policy import Policy
from gym_capture.stores.base import StoreFactory

__all__ = ["build_app"]

logger = logging.getLogger(__name__)

_ANY_NUMBER: Final = 100_000
_WAITING_FOR_A_REPLICA: Final = 10_000
"""In one proxy of Serve's."""
_RETRY_AFTER_S: Final = 5.0
_TO_END_S: Final = 60.0


def build_app(args: GraphArgs) -> Application:
    """The Serve application. Raises `ConfigError`, naming the key, for what cannot work."""
    args = args.model_copy(update={"model": str(model_folder(args.model))})
    if args.state.replicas > 1 and not StoreFactory.at(args.state.store).takes_mirror:
        raise ConfigError(
            f"state.replicas: {args.state.replicas} needs a store that takes a mirror; {args.state.store} does not "
            "say that it does (`StoreFactory.takes_mirror`)"
        )
    if args.secret_file is not None:
        Keyring.from_file(args.secret_file)
    deployment = serve.deployment(
        Policy,
        name=DEPLOYMENT,
        # The replica's own limits are the ones that are met (`Limits`): it refuses in the client's dialect, and ends
        # what runs too long in order. Serve's are for what happens where no replica of ours can say anything.
        user_config=Limits().model_dump(),
        max_ongoing_requests=_ANY_NUMBER,
        max_queued_requests=_WAITING_FOR_A_REPLICA,
        backpressure_config=BackpressureConfig(retry_after_s=_RETRY_AFTER_S),
        graceful_shutdown_timeout_s=LONGEST_DRAIN_S + _TO_END_S,
        ray_actor_options=args.ray_actor_options or {"num_cpus": 1},
        health_check_timeout_s=60,
    )
    if RAY_SERVE_ENABLE_HA_PROXY:
        lacks = what_proxy_lacks(RAY_SERVE_HAPROXY_BALANCE_ALGORITHM)
        if lacks is not None:
            logger.warning(lacks)
    else:
        # With HAProxy in front, requests reach replicas directly and HAProxy itself hashes the rollout id in the path.
        deployment = deployment.options(
            request_router_config=RequestRouterConfig(
                request_router_class="gym_capture.serving.router:RolloutAffinityRouter"
            )
        )
    return deployment.bind(args)


def model_folder(model: str) -> Path:
    """The folder of `model`, made first if it is one of the small ones. Raises `ConfigError`."""
    if model == "smollm2":
        return models.smollm2_dir()
    if model == "tiny":
        return models.tiny_dir()
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {model!r} is neither a model folder (with a config.json) nor 'smollm2' or 'tiny'")
    return folder
