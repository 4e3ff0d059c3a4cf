"""Bearer tokens: who may call the model as which rollout, read records, register rollouts, and change the weights.

Invariant: every token is derived from one server secret and from what it is good for, so a token says nothing about
any other; a rollout's token calls the model as that rollout, says how it ended if that was left to it, and does
nothing else. Tokens are compared in constant time. Without a secret every route is open.

`token = hex(HMAC-SHA256(secret, purpose))`, with a purpose that no rollout id can spell for the other uses.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gym_capture.errors import AuthenticationError, ConfigError
from gym_capture.rollout_ids import check_rollout_id

__all__ = ["MIN_SECRET_BYTES", "Keyring"]

MIN_SECRET_BYTES: Final = 16


class Keyring:
    """Derives and checks the tokens of one server secret."""

    def __init__(self, secret: bytes) -> None:
        """Raises `ConfigError` for a secret that could be guessed."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed: "
                "`openssl rand -hex 32` makes a good one"
            )
        self._secret = secret

    @classmethod
    def from_file(cls, path: Path) -> Keyring:
        """The secret is what the file holds, without white space around it. Raises `ConfigError`."""
        try:
            return cls(path.expanduser().read_bytes().strip())
        except OSError as error:
            raise ConfigError(f"cannot read the secret {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from None

    def rollout_token(self, rollout_id: str) -> str:
        """Good for calling the model as this rollout. Raises `InvalidRolloutIdError`."""
        return self._token(f"rollout:{check_rollout_id(rollout_id)}")

    def untracked_token(self) -> str:
        """Good for calling the model without a rollout."""
        return self._token("untracked")

    def read_token(self) -> str:
        """Good for reading the records of every rollout."""
        return self._token("read")

    def admin_token(self) -> str:
        """Good for registering rollouts and for saying how they ended, and so for every rollout's own token."""
        return self._token("admin")

    def weights_token(self) -> str:
        """Good for pausing the engines and for giving them other weights."""
        return self._token("weights")

    def admit_call(self, headers: Mapping[str, str], rollout_id: str | None) -> None:
        """Raises `AuthenticationError` unless the request may call the model as this rollout.

        Raises `InvalidRolloutIdError` for an id that no rollout can have.
        """
        expected = self.untracked_token() if rollout_id is None else self.rollout_token(rollout_id)
        self._admit(headers, expected, "this rollout" if rollout_id is not None else "calls without a rollout")

    def admit_reader(self, headers: Mapping[str, str]) -> None:
        """Raises `AuthenticationError` unless the request may read records."""
        self._admit(headers, self.read_token(), "reading records")

    def admit_admin(self, headers: Mapping[str, str]) -> None:
        """Raises `AuthenticationError` unless the request may register rollouts."""
        self._admit(headers, self.admin_token(), "registering rollouts")

    def admit_trainer(self, headers: Mapping[str, str]) -> None:
        """Raises `AuthenticationError` unless the request may change the weights. The token may be a password, too:
        that is what a client makes of `http://anybody:TOKEN@host`, if a URL is all that it can be told.
        """
        found = {**headers, "x-api-key": _password(headers)} if _password(headers) else headers
        self._admit(found, self.weights_token(), "changing the weights")

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Whether the request may say how any rollout ended."""
        return _is_among(self.admin_token(), _presented(headers))

    def _admit(self, headers: Mapping[str, str], expected: str, purpose: str) -> None:
        presented = _presented(headers)
        if not presented:
            raise AuthenticationError(
                "a token is needed: send it as `Authorization: Bearer ...` or as `x-api-key`, "
                "which is what API clients do with their API key"
            )
        # Clients may send both headers, and one of them with a key of their own.
        if not _is_among(expected, presented):
            raise AuthenticationError(f"the token is not one for {purpose}", forbidden=True)

    def _token(self, purpose: str) -> str:
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()


def _is_among(expected: str, presented: Sequence[str]) -> bool:
    return any(hmac.compare_digest(token.encode(), expected.encode()) for token in presented)


def _presented(headers: Mapping[str, str]) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" else []
    found.append(headers.get("x-api-key", "").strip())
    return [token for token in found if token]


def _password(headers: Mapping[str, str]) -> str:
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[2]
    return ""
