"""The deployment: one replica is one engine with its gateway.

Invariant: a replica that takes requests is ready: its engine runs with the weights that are current, and its state
actors have read their logs back. One that is to end has ended its calls, in order, by the time that it was given.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from gym_capture.auth import Keyring
from gym_capture.engines.base import EngineFactory
from gym_capture.imports import load
from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.serving.admission import Admission
from gym_capture.serving.call_service import CallService
from gym_capture.serving.config import GraphArgs, Limits
from gym_capture.serving.draining import ServeReplica, end_in_order
from gym_capture.serving.gateway import build_gateway
from gym_capture.serving.inspection import add_inspector
from gym_capture.serving.live import LiveCalls
from gym_capture.serving.state import connect, start_shards
from gym_capture.serving.weights_actor import CoordinatorClient, start_coordinator
from gym_capture.serving.weights_agent import WeightAgent
from gym_capture.serving.weights_routes import add_weight_routes


@serve.ingress()
class Policy:
    """A Serve replica: Serve builds its HTTP application once the constructor is done."""

    async def __init__(self, args: GraphArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._service: CallService | None = None
        self._weights: WeightAgent | None = None
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
        start_engine: EngineFactory = load(args.engine)
        engine = start_engine(
            model=args.model,
            name=args.model_name,
            tool_parser=args.tool_parser,
            reasoning_parser=args.reasoning_parser,
            engine_args=args.engine_args,
        )
        self._args = args
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._limits = Limits()
        self._admission = Admission(running=self._limits.running_calls, waiting=self._limits.waiting_calls)
        self._calls = LiveCalls(interval_s=args.stream_interval_s, admission=self._admission)
        self._ending = asyncio.create_task(end_in_order(ServeReplica(), self._calls, lambda: self._limits.drain_s))
        self._service = CallService(
            engine,
            state=state,
            fingerprinter=Fingerprinter(),
            prefix_supply=args.prefix_supply,
            sampling_pin=args.sampling_pin,
            session_cache=args.session_cache,
        )
        self._coordinator = CoordinatorClient(
            start_coordinator(
                namespace=args.state.namespace,
                directory=str(args.state.directory),
                trainer_timeout_s=args.weights.trainer_timeout_s,
                step_timeout_s=args.weights.step_timeout_s,
                replicas=args.state.replicas,
            ),
            replica=ray.get_runtime_context().current_actor,
        )
        if engine.weights is not None:
            self._weights = WeightAgent(
                self._coordinator,
                engine.weights,
                replica=uuid.uuid4().hex[:12],
                model=args.model,
                node=ray.get_runtime_context().get_node_id(),
                step_timeout_s=args.weights.step_timeout_s,
            )
            await self._weights.start()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve, at first and whenever `user_config` changes. Raises for what is no limit."""
        self._limits = Limits.model_validate(user_config)
        self._admission.limit(running=self._limits.running_calls, waiting=self._limits.waiting_calls)

    def __serve_build_asgi_app__(self) -> FastAPI:
        assert self._service is not None
        app = build_gateway(
            self._service,
            model_name=self._engine.model.name,
            max_model_len=self._engine.model.max_model_len,
            calls=self._calls,
            keep_alive_s=self._args.keep_alive_s,
            max_body_bytes=self._args.max_body_bytes,
            body_timeout_s=self._args.body_timeout_s,
            keyring=self._keyring,
        )
        if self._state is not None:
            add_inspector(
                app,
                self._state,
                model=self._args.model,
                model_name=self._engine.model.name,
                keyring=self._keyring,
                loop=self._loop,
            )
        if self._weights is not None:
            add_weight_routes(app, self._coordinator, check_health=self._service.check_health, keyring=self._keyring)
        return app

    async def check_health(self) -> None:
        """Called by Serve: raising makes it replace the replica."""
        assert self._service is not None
        await self._service.check_health()
        if self._weights is not None:
            self._weights.check_health()

    async def __del__(self) -> None:
        if self._service is not None:  # else its constructor has failed
            self._ending.cancel()
            if self._weights is not None:
                await self._weights.stop()
            await self._service.close()
