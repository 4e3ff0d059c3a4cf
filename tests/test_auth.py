"""A token is good for what it was derived for, and for nothing else."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.auth import Keyring
from gym_capture.errors import AuthenticationError, ConfigError, InvalidRolloutIdError

SECRET = b"0123456789abcdef0123456789abcdef"
KEYS = Keyring(SECRET)
ROLLOUT_IDS = st.from_regex(r"\A[A-Za-z0-9_.-]{1,128}\Z").filter(lambda text: text not in (".", ".."))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_is_the_hmac_of_its_purpose() -> None:
    assert KEYS.rollout_token("r1") == hmac.new(SECRET, b"rollout:r1", hashlib.sha256).hexdigest()


@given(mine=ROLLOUT_IDS, other=ROLLOUT_IDS)
def test_a_rollouts_token_calls_as_that_rollout_only(mine: str, other: str) -> None:
    token = KEYS.rollout_token(mine)
    KEYS.admit_call(bearer(token), mine)
    with pytest.raises(AuthenticationError) as error:
        KEYS.admit_reader(bearer(token))
    assert error.value.forbidden
    with pytest.raises(AuthenticationError):
        KEYS.admit_call(bearer(token), None)
    if other != mine:
        with pytest.raises(AuthenticationError):
            KEYS.admit_call(bearer(token), other)


@given(rollout_id=ROLLOUT_IDS)
def test_the_read_token_and_the_untracked_token_do_not_call_as_a_rollout(rollout_id: str) -> None:
    KEYS.admit_reader(bearer(KEYS.read_token()))
    KEYS.admit_call(bearer(KEYS.untracked_token()), None)
    for token in (KEYS.read_token(), KEYS.untracked_token()):
        with pytest.raises(AuthenticationError):
            KEYS.admit_call(bearer(token), rollout_id)
    with pytest.raises(AuthenticationError):
        KEYS.admit_reader(bearer(KEYS.untracked_token()))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer {token}"},
        {"authorization": "bearer   {token} "},
        {"x-api-key": "{token}"},
        {"x-api-key": "{token}", "authorization": "Bearer of-another-service"},
        {"x-api-key": "a-key-of-another-service", "authorization": "Bearer {token}"},
    ],
)
def test_clients_send_it_either_way(headers: dict[str, str]) -> None:
    KEYS.admit_call({name: value.format(token=KEYS.rollout_token("r1")) for name, value in headers.items()}, "r1")


@pytest.mark.parametrize(
    ("headers", "forbidden"),
    [
        ({}, False),
        ({"authorization": ""}, False),
        ({"authorization": "Basic dXNlcjpwYXNz"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Bearer wrong"}, True),
        ({"x-api-key": "wr\u00f6ng"}, True),
    ],
)
def test_none_is_told_from_a_wrong_one(headers: dict[str, str], forbidden: bool) -> None:
    with pytest.raises(AuthenticationError) as error:
        KEYS.admit_call(headers, "r1")
    assert error.value.forbidden is forbidden
    assert KEYS.rollout_token("r1") not in error.value.message


def test_another_secret_gives_other_tokens() -> None:
    other = Keyring(b"another secret of enough bytes")
    assert other.rollout_token("r1") != KEYS.rollout_token("r1")
    assert len({KEYS.rollout_token("read"), KEYS.read_token(), KEYS.untracked_token()}) == 3


def test_tokens_of_ids_that_cannot_be_are_refused() -> None:
    for rollout_id in ("../r1", "", "r\ud83d", "r" * 129):
        with pytest.raises(InvalidRolloutIdError):
            KEYS.rollout_token(rollout_id)
        with pytest.raises(InvalidRolloutIdError):
            KEYS.admit_call(bearer(KEYS.untracked_token()), rollout_id)


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert Keyring.from_file(path).read_token() == KEYS.read_token()
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="secret has 5 bytes"):
        Keyring.from_file(path)
    with pytest.raises(ConfigError, match="nowhere"):
        Keyring.from_file(tmp_path / "nowhere")
