"""Tells a graph over HTTP which weights to serve; needs no torch.

Invariant: when `push` returns, every replica serves the folder's version, and one that starts later does. When it
raises, what is served is what the error says, or what was served before. What happened to a request whose answer was
lost is asked, not guessed.

The routes are vLLM's own (docs/weights.md).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import httpx

from gym_capture.errors import (
    AuthenticationError,
    InvalidRequestError,
    WeightsBusyError,
    WeightsError,
    WeightsFailedError,
    WeightsRefusedError,
)
from gym_capture.weights import PauseMode, Payload

__all__ = ["Pushed", "WeightClient"]

_TRY_AGAIN_S: Final = 1.0
_RETRYABLE: Final = (502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """An update that went through."""

    version: int
    folder: str
    seconds: float
    """From the first request to the last answer, checks included."""
    paused_s: float
    """For how long nothing was sampled, at most. 0: the version was served already."""
    replicas: int


class WeightClient:
    """The weight plane of one graph. Close it, or use it as a context."""

    def __init__(
        self, url: str, *, token: str | None = None, patience_s: float = 300.0, timeout_s: float = 1800.0
    ) -> None:
        """`token`: of `gym-capture token --weights`. `patience_s`: for how long to try again what may pass by itself, a
        replica that died or none that is ready. `timeout_s`: for one request, in which replicas may read all weights.
        """
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)
        self._patience_s = patience_s
        self._given_up = threading.Event()

    def __enter__(self) -> WeightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def give_up(self) -> None:
        """Nothing is tried again from now on, as if patience were over. For other threads, and handlers of signals."""
        self._given_up.set()

    def push(
        self,
        payload: Payload,
        *,
        mode: PauseMode = "keep",
        force: bool = False,
        allow_non_finite: bool = False,
        takeover: bool = False,
    ) -> Pushed:
        """Has all replicas serve the weights of a sealed folder.

        mode: of calls under way. `keep`: they go on with the new weights, after a pause as long as loading takes.
        `wait`: they end first, and no other begins. `abort`: they end now, and clients are told to ask again.
        force: also if the version goes back.
        allow_non_finite: also if values are NaN or infinite.
        takeover: gives up an update, or a pause, that another trainer, or an earlier life of this one, has begun.

        Raises `WeightsRefusedError` for weights that cannot be served, `WeightsBusyError` if another update runs,
        `WeightsFailedError`, or `AuthenticationError`.
        """
        began = time.monotonic()
        owner = uuid.uuid4().hex
        options = {"force": force, "allow_non_finite": allow_non_finite}
        update = {"folder": payload.folder, **{name: True for name, value in options.items() if value}}
        while True:
            try:
                if takeover:
                    self.abort()
                    takeover = False
                outcome = self._once(payload, update, mode, owner)
            except WeightsFailedError as error:
                if not error.retryable:
                    raise
                if self._serves(payload, owner):
                    outcome = {}
                    if mode != "keep":  # it may be the answer to this that was lost, or the question
                        self._asked("POST", "/resume")
                elif time.monotonic() - began > self._patience_s or self._given_up.wait(_TRY_AGAIN_S):
                    raise
                else:
                    continue
            return Pushed(
                version=payload.version,
                folder=payload.folder,
                seconds=time.monotonic() - began,
                paused_s=float(outcome.get("paused_s", 0.0)),
                replicas=int(outcome.get("replicas", 0)),
            )

    def info(self) -> Mapping[str, Any]:
        """What the graph serves: `/weight_info`."""
        return self._asked("GET", "/weight_info")

    def checksums(self) -> Mapping[str, str]:
        """Of the tensors in the engines. Raises `WeightsFailedError` if those of two replicas differ."""
        found: Mapping[str, str] = self._asked("POST", "/weight_checker", {"action": "checksum"})["checksums"]
        return found

    def abort(self) -> bool:
        """Gives up the update under way, and a pause: the graph goes on. False if there was neither."""
        was_there = bool(self._asked("POST", "/abort_weight_update")["was_under_way"])
        info = self.info()
        if info["is_paused"] and info["problem"] is None:
            self._asked("POST", "/resume")
            return True
        return was_there

    def _once(self, payload: Payload, update: Mapping[str, Any], mode: PauseMode, owner: str) -> Mapping[str, Any]:
        try:
            self._asked("POST", "/start_weight_update", {"owner": owner})
            self._asked("POST", "/update_weights", {"update_info": update})
            if mode == "keep":
                return self._finished(payload)
            try:
                self._asked("POST", f"/pause?mode={mode}")
                return self._finished(payload)
            finally:
                self._asked("POST", "/resume")
        except WeightsBusyError:
            raise  # what is under way is another's
        except WeightsError:
            self._abort_quietly(owner)  # the next one must not find it
            raise

    def _finished(self, payload: Payload) -> Mapping[str, Any]:
        return self._asked("POST", "/finish_weight_update", {"weight_version": str(payload.version)})

    def _abort_quietly(self, owner: str) -> None:
        """Ends the update of this push, if it has begun and is not over: of a start, too, the answer may be lost."""
        try:
            self._asked("POST", "/abort_weight_update", {"owner": owner})
        except WeightsError:
            return  # what is wrong there is on its way to the caller

    def _serves(self, payload: Payload, owner: str) -> bool:
        """Whether the graph serves it by now; an update that is still under way is waited for."""
        ends = time.monotonic() + self._patience_s
        while time.monotonic() < ends:
            try:
                info = self.info()
            except WeightsFailedError:
                if self._given_up.wait(_TRY_AGAIN_S):
                    break
                continue
            if not info["is_updating"]:
                return bool((info["weight_version"], info["digest"]) == (str(payload.version), payload.digest))
            self._abort_quietly(owner)
            if self._given_up.wait(_TRY_AGAIN_S):
                break
        return False

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise WeightsFailedError(f"{self._http.base_url} does not answer: {error!r}", retryable=True) from error
        if response.status_code != 200:
            raise _error(response)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WeightsFailedError(f"what answers at {response.url} is no graph: {response.text[:200]!r}")
        return answer


def version_of(info: Mapping[str, Any]) -> int:
    """The version that `WeightClient.info` says. Raises `WeightsFailedError` if the graph does not know it yet."""
    version = info["weight_version"]
    if version is None:
        raise WeightsFailedError("the graph does not know yet which weights it serves: try again", retryable=True)
    return int(version)


def _error(response: httpx.Response) -> Exception:
    status = response.status_code
    try:
        said = response.json()["error"]
        message = said if isinstance(said, str) else str(said["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answers {status}: {response.text[:200]}"
    match status:
        case 401 | 403:
            return AuthenticationError(message, forbidden=status == 403)
        case 400:
            return WeightsRefusedError(message)
        case 404:
            return InvalidRequestError(f"{message}; is this a graph whose engine takes weights?")
        case 409:
            return WeightsBusyError(message)
        case _:
            return WeightsFailedError(message, retryable=status in _RETRYABLE)
