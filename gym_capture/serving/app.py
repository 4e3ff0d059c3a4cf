"""Builds the graph: `serve run gym_capture.serving.app:build_app model=...`, or `import_path` in a Serve config."""

# No `from __future__ import annotations` here: Serve reads the annotation of `args` to validate it.

import inspect
import logging
from pathlib import Path

from ray import serve
from ray.serve import Application
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_HAPROXY_BALANCE_ALGORITHM
from ray.serve.config import RequestRouterConfig

from gym_capture import models
from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError
from gym_capture.imports import load
from gym_capture.serving.cluster_env import what_proxy_lacks
from gym_capture.serving.config import GraphArgs
from gym_capture.serving.policy import Policy

logger = logging.getLogger(__name__)


def build_app(args: GraphArgs) -> Application:
    """The Serve application. Raises `ConfigError`, naming the key, for what cannot work."""
    args = args.model_copy(update={"model": str(model_folder(args.model))})
    if args.state.replicas > 1 and "mirror" not in inspect.signature(load(args.state.store)).parameters:
        raise ConfigError(
            f"state.replicas: {args.state.replicas} needs a store that takes `mirror=`, and {args.state.store} does not"
        )
    if args.secret_file is not None:
        Keyring.from_file(args.secret_file)
    if args.num_replicas == "auto" and args.autoscaling_config is None:
        raise ConfigError("num_replicas: 'auto' needs autoscaling_config (min_replicas, max_replicas...)")
    if args.num_replicas != "auto" and args.autoscaling_config is not None:
        raise ConfigError("autoscaling_config: needs num_replicas: auto")
    deployment = serve.deployment(
        Policy,
        name="Policy",
        num_replicas=args.num_replicas,
        max_ongoing_requests=args.max_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
        autoscaling_config=args.autoscaling_config,
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
