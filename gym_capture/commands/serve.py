"""`gym-capture serve`: a graph that serves, on the Ray cluster that is there or on one of its own.

Invariant: when it says that it serves, the graph answers; however it ends, `serve run` and a Ray cluster that it
started end with it. What can be known to be wrong is said before anything is started, and nothing that runs is
replaced: it refuses to begin where Serve runs something, and what others deploy meanwhile outlives it.

Flow: a Serve config, or a model folder alone, and options over it -> checked -> a Ray cluster, with `cluster.env` ->
`serve run` as a process of its own -> URLs, once it is healthy -> waits for Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from gym_capture.auth import Keyring
from gym_capture.cluster.env import CLUSTER_ENV, OWN_CLUSTER_ENV
from gym_capture.commands.cluster import join_cluster
from gym_capture.commands.job_files import overridden
from gym_capture.commands.loading import explained, one_line
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.demo.graph import Served

_CPUS: Final = 8
"""Logical ones of a cluster of its own, at least: room for the engine and a data job."""
_STARTING: Final = "Ray Serve starts, vLLM loads the model: about a minute for a small one"
_POLL_S: Final = 0.5
_CPU_CACHE_GIB: Final = "1"
_SMALL: Final = ("smollm2", "tiny")
_CLAIM: Final = "gym-capture-serve"
_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def command(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A Serve config, as `serve run` takes it.", exists=True, dir_okay=False, show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model folder, or smollm2 or tiny: in place of the config's, or without a config."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where it listens: 0.0.0.0 for other machines, too.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default the config's, else 8000.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="How the model writes tool calls: vLLM's name of it.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="How the model thinks aloud: vLLM's name of it.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="A secret: then every route asks for a token.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any of the graph's arguments: engine_args.max_model_len=8192.", metavar="KEY=VALUE"
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="The Ray cluster: an address, auto, or local: a new one. By default auto, else local."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds until it must be healthy.")] = 900.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it serves as a line of JSON, once it does.")
    ] = False,
) -> None:
    """Serve a graph, and say where, once it is healthy. Ctrl-C ends it: calls under way are cut, records stay.

    Without a Ray cluster one is started on this machine, with the settings of cluster.env, and ends with the command.
    """
    overrides = {
        "model": model,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "secret_file": None if secret_file is None else str(secret_file.absolute()),
    }
    served = configured(config, overrides, set_ or (), host=host, port=port)
    _check_port(served)
    _check(served, by_hand=config is not None or bool(set_ or tool_parser or reasoning_parser))
    _serve(served, ray_address, timeout_s, fit=config is None, as_json=as_json)


# --- what is to be served ---------------------------------------------------------------------------------------------


def configured(
    file: Path | None,
    overrides: Mapping[str, str | None],
    settings: Sequence[str],
    *,
    host: str | None = None,
    port: int | None = None,
) -> dict[str, Any]:
    """The Serve config of a command line. `overrides`, `settings`: of the graph's arguments; those win.

    Raises `ConfigError` for what is wrong in it.
    """
    if file is None and overrides.get("model") is None:
        raise ConfigError("name a Serve config, or a model: --model FOLDER (or smollm2, a small one that comes along)")
    served = _quick(str(overrides["model"])) if file is None else read_config(file)
    args = _graph_args(served, file)
    for key, value in [*((key, value) for key, value in overrides.items() if value), *map(overridden, settings)]:
        _set(args, key, value)
    _check_model(args.get("model"))
    http = served.setdefault("http_options", {})
    http.update({key: value for key, value in (("host", host), ("port", port)) if value is not None})
    return served


def _check_model(model: object) -> None:
    """Raises `ConfigError` for what is no model folder. A small one is made when it is served."""
    if model in _SMALL or (Path(str(model)).expanduser() / "config.json").is_file():
        return
    of_hub = (
        f"; a hub's name? `hf download {model} --local-dir FOLDER` first" if _HUB_NAME.fullmatch(str(model)) else ""
    )
    raise ConfigError(
        f"--model {model}: is neither a model folder (with a config.json) nor {' or '.join(_SMALL)}{of_hub}"
    )


def _quick(model: str) -> dict[str, Any]:
    """A graph of a model folder alone. What depends on the machine, `_fitted` adds."""
    small = {"tool_parser": "hermes", "engine_args": {"max_model_len": 4096}} if model in _SMALL else {}
    args = {"model": model, "sampling_pin": {"temperature": 1.0}, "state": {"shards": 1}, **small}
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {
                "name": "gym-capture",
                "route_prefix": "/",
                "import_path": "gym_capture.serving.app:build_app",
                "args": args,
            }
        ],
    }


def read_config(file: Path) -> dict[str, Any]:
    """A Serve config as it stands in a file. Raises `ConfigError`."""
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    match data:
        case {"applications": [dict(), *_]}:
            found: dict[str, Any] = data
            return found
    raise ConfigError(f"{file} is no Serve config: it has no `applications`")


def _graph_args(served: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The arguments of the graph in a config, made if it has none. Raises `ConfigError` if it has no graph."""
    applications = served.get("applications")
    for application in applications if isinstance(applications, list) else ():
        if isinstance(application, dict) and application.get("import_path") == "gym_capture.serving.app:build_app":
            args = application.setdefault("args", {})
            if isinstance(args, dict):
                return args
    raise ConfigError(
        f"{file} serves no graph: it needs an application with import_path: gym_capture.serving.app:build_app, and args"
    )


def _set(args: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    here = args
    for section in sections:
        here = here.setdefault(section, {})
        if not isinstance(here, dict):
            raise ConfigError(f"--set {key}: {section} is {here!r}, which has no {name!r}")
    here[name] = value


def _check(served: Mapping[str, Any], *, by_hand: bool) -> None:
    """Raises `ConfigError` with all that `check-configs` would find."""
    from gym_capture.commands import graph_rules
    from gym_capture.commands.check_configs import AppModels, check_config
    from gym_capture.serving.config import APP_IMPORT_PATH, DEPLOYMENT, GraphArgs, Limits

    models = {APP_IMPORT_PATH: AppModels(GraphArgs, {DEPLOYMENT: Limits})}
    args = _graph_args(dict(served), None)
    problems = check_config(yaml.safe_dump(dict(served)), models)
    if isinstance(args.get("secret_file"), str):
        Keyring.from_file(Path(args["secret_file"]))
    if by_hand and not problems:
        problems = graph_rules.check(args, ("args",)).problems
    if problems:
        raise ConfigError("; ".join(problems))


def _check_port(served: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if something listens there: its answers would be taken for the graph's."""
    http = served["http_options"]
    host, port = str(http.get("host", "127.0.0.1")), int(http.get("port", 8000))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there ({error}): end what does, or name another port"
            ) from None


# --- serving ----------------------------------------------------------------------------------------------------------


def _serve(served: dict[str, Any], ray_address: str | None, timeout_s: float, *, fit: bool, as_json: bool) -> None:
    from gym_capture.demo.graph import serving
    from gym_capture.demo.processes import ChildProcesses
    from gym_capture.demo.progress import Phases

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="gym-capture-serve-"))
    children = ChildProcesses()
    with children, _cluster(ray_address, console) as address:
        if fit:
            _fit(_graph_args(served, None))
        _check_idle()
        claim = _claimed()
        _check_idle()  # what another one deployed before it was told
        phases = Phases(console)
        console.print(f"all that Ray and the engine say: {directory}/serve.log")
        with ExitStack() as stack:
            with (
                phases,
                phases.phase("serve", _STARTING) as phase,
            ):
                graph = serving(
                    *(children, served),
                    address=address,
                    directory=directory,
                    on_wait=phase.note,
                    on_failure=lambda text: console.print(
                        f"[yellow]warning:[/] it failed to start, and Serve tries again: {escape(one_line(text))} "
                        f"({directory}/serve.log; Ctrl-C ends it)"
                    ),
                    timeout_s=timeout_s,
                    is_shared=True,
                )
                running = stack.enter_context(graph)
            where = _where(served, running.url, address)
            if as_json:
                typer.echo(json.dumps(where | {"log": str(running.child.log)}))
            else:
                _say(where, console)
            try:
                _wait(running)
            finally:
                console.print("ending: half a minute at most; the records stay")
        del claim


def _wait(running: Served) -> None:
    while running.child.ended() is None:
        time.sleep(_POLL_S)
    raise ConfigError(f"serve run ended; the end of {running.child.log}:\n{running.child.log_tail()}")


@contextmanager
def _cluster(address: str | None, console: Console) -> Iterator[str]:
    """A Ray cluster for the length of the block, with this process as a driver. Yields its address."""
    import ray

    from gym_capture.cluster.reach import check_reachable

    if address is None and "RAY_ADDRESS" not in os.environ:
        try:
            check_reachable("auto")
        except ConnectionError:
            address = "local"
    terminated = signal.getsignal(signal.SIGTERM)
    if address == "local":
        # What a person has set for a machine of theirs stays.
        os.environ.update({name: value for name, value in OWN_CLUSTER_ENV.items() if name not in os.environ})
        cpus = max(_CPUS, os.cpu_count() or 1)
        with explained("Ray does not start here"):
            ray.init(
                address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="error"
            )
        signal.signal(signal.SIGTERM, terminated)  # Ray puts its own there
        console.print("no Ray cluster runs here: started one, which ends with this command")
    else:
        join_cluster(address or "auto", namespace=None)
        for line in _lacking():
            console.print(f"[yellow]warning:[/] {escape(line)}")
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def _lacking() -> Iterator[str]:
    """What the Ray cluster lacks of cluster.env, as its processes have it."""
    import ray

    def settings(names: Sequence[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    found = ray.get(ray.remote(settings).options(num_cpus=0).remote(list(CLUSTER_ENV)))
    missing = [
        name for name, value, wanted in zip(CLUSTER_ENV, found, CLUSTER_ENV.values(), strict=True) if value != wanted
    ]
    if missing:
        yield (
            f"this Ray cluster runs without {', '.join(missing)} of cluster.env: it serves slower, and may not notice "
            "clients that leave. `source serve_configs/cluster.env` before `ray start`, on every node"
        )


def _check_idle() -> None:
    """Raises `ConfigError` if Serve runs something on the cluster: deploying a config ends what is not in it."""
    from ray import serve

    if there := sorted(serve.status().applications):
        raise ConfigError(
            f"Serve runs {', '.join(there)} on this Ray cluster, and would end it for this one: `serve shutdown -y` "
            "first"
        )


def _claimed() -> object:
    """The right to deploy on this cluster, as long as the result and this process live: of two commands that find
    nothing there at the same moment one goes on. Raises `ConfigError` for the other."""
    import ray

    class Claim:
        pass

    try:
        return ray.remote(num_cpus=0)(Claim).options(name=_CLAIM, namespace=_CLAIM).remote()
    except ValueError:
        raise ConfigError(
            "another `gym-capture serve` has begun on this Ray cluster: wait for it, or name another --ray-address"
        ) from None


def _fit(args: dict[str, Any]) -> None:
    """What a graph of a model folder alone needs of the machine: a GPU, if the cluster has one, or else CPUs."""
    import ray

    if ray.cluster_resources().get("GPU"):
        args.setdefault("ray_actor_options", {"num_cpus": 1, "num_gpus": 1})
        return
    engine = args.setdefault("engine_args", {})
    for key, value in {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 32}.items():
        engine.setdefault(key, value)
    environment = {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": _CPU_CACHE_GIB}}
    args.setdefault("ray_actor_options", {"num_cpus": 2, "runtime_env": environment})


def _where(served: Mapping[str, Any], url: str, address: str) -> dict[str, Any]:
    """Where everything is, for programs."""
    from gym_capture.serving.config import GraphArgs

    args = GraphArgs.model_validate(_graph_args(dict(served), None))
    return {
        "url": url,
        "openai": f"{url}/ng-rollout/ROLLOUT_ID/v1",
        "anthropic": f"{url}/ng-rollout/ROLLOUT_ID",
        "model": args.model_name,
        "records": str(args.state.directory.expanduser()),
        "namespace": args.state.namespace,
        "ray_address": address,
        "needs_token": args.secret_file is not None,
    }


def _say(where: Mapping[str, Any], console: Console) -> None:
    token = "of `gym-capture token ROLLOUT_ID`" if where["needs_token"] else "any"
    secret = " --secret-file FILE" if where["needs_token"] else ""
    lines = {
        "OpenAI": f"base URL {where['openai']}",
        "Anthropic": f"base URL {where['anthropic']}",
        "model": where["model"],
        "API key": token,
        "look": f"{where['url']}/inspect/ in a browser, `gym-capture inspect ROLLOUT_ID {where['url']}{secret}` here",
        "what it does": f"{where['url']}/stats",
        "records": where["records"],
        "Ray": f"{where['ray_address']}: `rollouts run` and `build-job` find it on this machine",
    }
    console.print(f"[green]serving[/] at {where['url']}. ROLLOUT_ID is a name of your choice; Ctrl-C ends it.")
    for name, text in lines.items():
        console.print(f"  {name:<14}{escape(text)}")
