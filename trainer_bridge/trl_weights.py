"""New weights of TRL's `AsyncGRPOTrainer` for a graph, by way of a folder: its `WeightTransferProtocol`.

Invariant: when `send_weights` returns, every replica serves what the trainer has; when it raises, the graph serves what
it served before, and goes on. Versions of the graph only go up: a trainer that starts again, and counts from 0 again,
goes on from the version that is served.

Flow: TRL syncs its weights before its first step and after every `weight_sync_steps` -> `send_weights` -> `WeightSync`.

TRL pauses the server before it gathers its weights. Here that is left to the graph, which checks the folder while it
samples, and stops for no longer than it takes to load it; calls under way go on with the new weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from trainer_bridge.trl_worker import GroupWorker
from trainer_bridge.weight_client import WeightClient, version_of
from trainer_bridge.weight_sync import WeightSync

__all__ = ["GraphWeights"]


class GraphWeights:
    """TRL's `WeightTransferProtocol`, for one graph and one trainer."""

    def __init__(self, url: str, directory: Path, worker: GroupWorker, *, token: str | None = None, keep: int = 2):
        """`directory`: a folder that the trainer and all replicas see; `keep` versions stay in it. `worker`: the one
        that the trainer has, which is told how the graph's versions compare with the trainer's. `token`: of
        `gym-capture token --weights`.
        """
        self._client = WeightClient(url, token=token)
        self._sync = WeightSync(self._client, directory, keep=keep)
        self._worker = worker

    def init_weight_transfer(self) -> None:
        """Raises what `WeightClient.info` and `version_of` raise."""
        served = version_of(self._client.info())
        self._worker.versions_before = served - self._worker.model_version

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises what `WeightSync.push` raises."""
        # TRL counts on, and tells the worker, when this has returned.
        self._sync.push(self._worker.versions_before + self._worker.model_version + 1, iterator)

    def pause(self) -> None:
        """The graph pauses itself, in `send_weights`."""

    def resume(self) -> None:
        """It has gone on."""

    def destroy(self) -> None:
        self._sync.close()
        self._client.close()
