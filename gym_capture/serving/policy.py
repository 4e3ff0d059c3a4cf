"""The deployment: one replica is one engine with its gateway.

Invariant: a replica that takes requests is ready: its engine runs, and its state actors have read their logs back.
"""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve

from gym_capture.auth import Keyring
from gym_capture.engines.base import Engine
from gym_capture.fingerprint import Fingerprinter
from gym_capture.imports import load
from gym_capture.serving.call import CallService
from gym_capture.serving.config import GraphArgs
from gym_capture.serving.gateway import build_gateway
from gym_capture.serving.state import connect, start_shards


@serve.ingress()
class Policy:
    """A Serve replica: Serve builds its HTTP application once the constructor is done."""

    async def __init__(self, args: GraphArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._service: CallService | None = None
        self._keyring = None if args.secret_file is None else Keyring.from_file(args.secret_file)
        state = None
        if args.capture:
            start_shards(
                namespace=args.state.namespace,
                shards=args.state.shards,
                store=args.state.store,
                store_kwargs=args.state.store_kwargs,
                directory=str(args.state.directory),
                replicas=args.state.replicas,
                lineage_bytes=args.state.lineage_bytes,
                waiting_bytes=args.state.waiting_bytes,
                max_idle_s=args.state.max_idle_s,
            )
            state = connect(namespace=args.state.namespace)
        engine: Engine = load(args.engine)(
            model=args.model,
            name=args.model_name,
            tool_parser=args.tool_parser,
            reasoning_parser=args.reasoning_parser,
            engine_args=args.engine_args,
        )
        self._args = args
        self._engine = engine
        self._service = CallService(
            engine,
            state=state,
            fingerprinter=Fingerprinter(),
            prefix_supply=args.prefix_supply,
            sampling_pin=args.sampling_pin,
            session_cache=args.session_cache,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        assert self._service is not None
        return build_gateway(
            self._service,
            model_name=self._engine.model.name,
            max_model_len=self._engine.model.max_model_len,
            stream_interval_s=self._args.stream_interval_s,
            keep_alive_s=self._args.keep_alive_s,
            max_body_bytes=self._args.max_body_bytes,
            keyring=self._keyring,
        )

    async def check_health(self) -> None:
        """Called by Serve: raising makes it replace the replica."""
        assert self._service is not None
        await self._service.check_health()

    async def __del__(self) -> None:
        if self._service is not None:  # else its constructor has failed
            await self._service.close()
