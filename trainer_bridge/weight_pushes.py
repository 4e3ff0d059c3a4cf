"""The weights of a training run on their way to a graph, step after step, while the run goes on.

Invariant: versions only go up, over restarts of the run too, and one push is under way at most. What a checkpoint keeps
of it (`state`) says which folder belongs to its weights, so a run that is started again pushes nothing if the graph
serves exactly that, and its own weights if it serves anything else: what a life that was killed had pushed behind its
last checkpoint is none of this one's.

Flow: `begin` -> each step: `finished`, which waits for the push before -> `push` -> in the end `finished`, `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from gym_capture.errors import ConfigError, GymCaptureError
from trainer_bridge.weight_client import Pushed, WeightClient, version_of
from trainer_bridge.weight_sync import Weights, WeightSync

__all__ = ["WeightPushes"]


class WeightPushes:
    """Every so many steps the weights, as the next version."""

    def __init__(self, client: WeightClient, directory: Path, *, every: int = 1, keep: int = 2) -> None:
        """`directory`: the trainer and all replicas see it. `every`: steps. `keep`: versions that stay in it."""
        if every < 1:
            raise ConfigError(f"every must be at least 1 step: got {every}")
        self._client = client
        self._sync = WeightSync(client, directory, keep=keep)
        self._every = every
        self._under_way: Future[Pushed] | None = None
        self.version: int | None = None
        """That of the run's weights as they were pushed last; None before `begin`."""
        self.state: Mapping[str, Any] | None = None
        """For the checkpoint: `begin` of a later life takes it."""

    def begin(self, weights: Weights, state: Mapping[str, Any] | None, *, again: bool = False) -> Pushed | None:
        """Has the graph serve the weights of the run. `state`: that of the checkpoint they are from, None at the start
        of a run, whose weights are those of the model folder: version 0. `again`: an earlier life of the run may have
        left an update behind, which is given up. Returns None if they are served already. Raises `WeightsError`."""
        served = self._client.info()
        number = version_of(served)
        own = number == 0 if state is None else (number, served["folder"]) == (state["version"], state["folder"])
        if own and not served["is_updating"]:
            self.version, self.state = number, state
            return None
        self.version = number if state is None else max(number, state["version"])
        self._push(weights, takeover=again)
        return self.finished()

    def push(self, step: int, weights: Weights) -> None:
        """Behind a step: the weights are on disk when it returns, and are pushed in the background. Call `finished`
        before. Raises `WeightsError` if they cannot be written."""
        if step % self._every == 0:
            self._push(weights)

    def finished(self) -> Pushed | None:
        """Waits for the push under way; None: there was none. Raises `WeightsError` if it failed, once."""
        waiting, self._under_way = self._under_way, None
        try:
            return None if waiting is None else waiting.result()
        except GymCaptureError:
            self.state = self._none_that_is_served()
            raise

    def give_up(self) -> None:
        """Tries nothing again from now on. May be called by a signal's handler, and by another thread."""
        self._client.give_up()

    def close(self) -> None:
        """Waits for what is on its way, which is not tried again."""
        self.give_up()
        self._sync.close()

    def _push(self, weights: Weights, *, takeover: bool = False) -> None:
        assert self.version is not None, "`begin` comes first"
        version = self.version + 1
        self.state = self._none_that_is_served()
        payload, pushing = self._sync.begin_push(version, weights, takeover=takeover)
        self.version, self._under_way = version, pushing
        self.state = {"version": version, "folder": payload.folder}

    def _none_that_is_served(self) -> Mapping[str, Any]:
        """Of weights that are in no folder: whoever goes on with them pushes them."""
        return {"version": self.version, "folder": ""}
