"""The arguments of the graph, as a user writes them in a Serve config or on the `serve run` command line.

Invariant: a misspelt key is an error that names it, never a silent default.

Two places, since Serve starts every engine anew when a single argument changes: `args` say what an engine is
(`GraphArgs`). What may change while engines run - how many there are, what they take on - are options of the
deployment, Serve's own and `user_config` (`Limits`), which Serve hands to replicas that run.
"""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gym_capture.dialects import fields
from gym_capture.errors import InvalidRequestError
from gym_capture.serving.state import LINEAGE_BYTES, WAITING_BYTES
from gym_capture.serving.weights_plane import STEP_TIMEOUT_S, TRAINER_TIMEOUT_S
from gym_capture.stores import DEFAULT_DIRECTORY

__all__ = ["APP_IMPORT_PATH", "DEPLOYMENT", "GraphArgs", "Limits", "StateArgs", "WeightsArgs"]


def _json_if_string(value: object) -> object:
    """`serve run module:build_app key=value` passes strings; let objects be written as JSON there."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value


Object = Annotated[dict[str, Any], BeforeValidator(_json_if_string)]


def _known_sampling(pin: dict[str, Any]) -> dict[str, Any]:
    """A misspelt pin would pin nothing, and nobody would notice before training."""
    for name in pin:
        if name not in fields.SAMPLING:
            near = difflib.get_close_matches(name, fields.SAMPLING, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(fields.SAMPLING)}"
            raise ValueError(f"there is no sampling parameter {name!r}; {hint}")
    try:
        fields.sampling(pin)
    except InvalidRequestError as error:
        raise ValueError(error.message) from None
    return pin


class StateArgs(BaseModel):
    """Where calls are recorded: the state actors and the store that each of them hosts."""

    model_config = ConfigDict(extra="forbid")

    shards: PositiveInt = 2
    """How many state actors share the rollouts; one serves about 1,000 durable puts per second."""
    namespace: str = "gym-capture"
    """Ray namespace of the state actors: graphs that name the same one share their records."""
    store: str = "gym_capture.stores.log:open_log"
    """Import path `module:factory` of the store that a shard hosts (`stores.base.StoreFactory`)."""
    store_kwargs: Object = Field(default_factory=dict)
    """What the factory of the store takes beside its directory."""
    directory: Path = DEFAULT_DIRECTORY
    """Where the shards keep their logs: with one replica, on storage that outlives the node."""
    replicas: Literal[1, 2] = 1
    """2: each shard's log has a second copy on another node, written before anything is acknowledged."""
    lineage_bytes: PositiveInt = LINEAGE_BYTES
    """Memory of a shard for lineage; rollouts that were not used lately are read from the store again when they are."""
    waiting_bytes: PositiveInt = WAITING_BYTES
    """While records of this size wait to become durable, a shard refuses to begin calls: clients get 503."""
    max_idle_s: PositiveFloat | None = None
    """A live rollout that nothing was written to or read from for so long is retired: its records are lost to whoever
    has not fetched them. By default none is; make it longer than calls, pauses of agents and waits for a build."""


class WeightsArgs(BaseModel):
    """How new weights come into the engines while they serve."""

    model_config = ConfigDict(extra="forbid")

    trainer_timeout_s: PositiveFloat = TRAINER_TIMEOUT_S
    """A trainer that has paused the graph, or begun an update, and is not heard of for so long is given up: the graph
    goes on with the weights that it serves."""
    step_timeout_s: PositiveFloat = STEP_TIMEOUT_S
    """A replica that needs longer to check weights, to load them or to pause fails the update."""


APP_IMPORT_PATH: Final = "gym_capture.serving.app:build_app"
"""The import path by which an application of a Serve config is this graph."""

DEPLOYMENT: Final = "Policy"
"""The name of the deployment, in a Serve config and in Serve's status."""

LONGEST_DRAIN_S: Final = 3600.0

_OPTIONS_OF_THE_DEPLOYMENT: Final = {
    "num_replicas": "num_replicas: ...",
    "autoscaling_config": "num_replicas: auto, autoscaling_config: {...}",
    "max_ongoing_requests": "user_config: {running_calls: ...}",
    "max_queued_requests": "user_config: {waiting_calls: ...}",
    "graceful_shutdown_timeout_s": "user_config: {drain_s: ...}",
    **{name: f"user_config: {{{name}: ...}}" for name in ("running_calls", "waiting_calls", "drain_s")},
}


class Limits(BaseModel):
    """The `user_config` of the deployment: limits of each replica, which change without new engines."""

    model_config = ConfigDict(extra="forbid")

    running_calls: PositiveInt = 256
    """How many calls one replica works on at a time."""
    waiting_calls: NonNegativeInt = 1024
    """How many more wait in it; others are refused, with the time after which it is worth asking again."""
    drain_s: Annotated[NonNegativeFloat, Field(le=LONGEST_DRAIN_S)] = 600.0
    """How long the calls of a replica that is to end - fewer replicas, another version - may run on. Those that run
    still are ended then, with an error that clients try again. The default is as long as client libraries wait."""


class GraphArgs(BaseModel):
    """Everything that `build_app` takes: what an engine is. Another value of any of it means new engines."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    """A model folder, or `smollm2` or `tiny`: small models that are made from a package, without a hub."""
    model_name: str = "policy"
    """The name by which clients ask for the model."""
    engine: str = "gym_capture.engines.vllm:VllmEngine.start"
    """Import path `module:factory` of the engine (`engines.base.EngineFactory`)."""
    engine_args: Object = Field(default_factory=dict)
    """Arguments of vLLM's `AsyncEngineArgs`, by their names there."""
    tool_parser: str | None = None
    """Name of vLLM's tool call parser for this model, e.g. `hermes`."""
    reasoning_parser: str | None = None
    """Name of vLLM's reasoning parser for this model, e.g. `qwen3`."""
    capture: bool = True
    """Record the calls of rollouts. Off: the graph only serves."""
    prefix_supply: bool = True
    """Make the prompt of a call start with its parent's exact ids. Off: the template renders the whole conversation."""
    sampling_pin: Annotated[Object, AfterValidator(_known_sampling)] = Field(default_factory=dict)
    """Sampling parameters forced on every call, whatever the client asks, e.g. `{temperature: 1.0}`.

    A pin pins everything that shapes the distribution: what it does not name is neutral (`fields.NEUTRAL`), whatever
    the client or the model's own defaults say. `null` leaves a parameter to them.
    """
    stream_interval_s: NonNegativeFloat = 0.02
    """Streamed text leaves at most this often, and what came meanwhile leaves together; the first text never waits."""
    keep_alive_s: PositiveFloat = 10.0
    """A stream that has nothing to say for this long says that it lives."""
    max_body_bytes: PositiveInt = 32 * 2**20
    """Larger request bodies get 413."""
    body_timeout_s: PositiveFloat = 60.0
    """Request bodies that are not whole by then get 408."""
    secret_file: Path | None = None
    """A file with the secret that tokens are derived from (`gym-capture token`). Unset: every route is open."""
    state: StateArgs = Field(default_factory=StateArgs)
    weights: WeightsArgs = Field(default_factory=WeightsArgs)
    ray_actor_options: Object = Field(default_factory=dict)
    """Ray's options of a replica: `num_cpus`, `num_gpus`, `runtime_env`..."""
    session_cache: PositiveInt = 4096
    """For how many rollouts a replica remembers the last request's fingerprint, to hash only what is new."""

    @model_validator(mode="before")
    @classmethod
    def _say_where_options_stand(cls, data: Any) -> Any:
        """As an argument, each would cut every stream whenever it is changed."""
        for name in _OPTIONS_OF_THE_DEPLOYMENT if isinstance(data, dict) else ():
            if name in data:
                raise ValueError(
                    f"{name} is no argument, since all engines start anew when one of those changes; write it beside "
                    f"`args`: `deployments: [{{name: {DEPLOYMENT}, {_OPTIONS_OF_THE_DEPLOYMENT[name]}}}]`"
                )
        return data
