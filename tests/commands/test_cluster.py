"""Joining a cluster that does not take this process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
import ray

from gym_capture.cluster import reach
from gym_capture.cluster.reach import check_reachable
from gym_capture.commands.cluster import join_cluster
from gym_capture.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "variable", "named"),
    [
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", None, "auto"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2"),
    ],
)
def test_the_error_names_the_cluster_and_what_ray_may_want(
    address: str, variable: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr("gym_capture.cluster.reach.check_reachable", lambda address: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at '{named}.*RAY_AUTH_MODE=token"):
        join_cluster(address, namespace="n")


@pytest.mark.parametrize("address", ["auto", None])
def test_where_nobody_listens_is_known_without_asking_ray(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which asks for two minutes, and in that time neither Ctrl-C nor SIGTERM ends it."""

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("Ray was asked")

    monkeypatch.setattr(ray, "init", asked)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{unheard.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", nowhere)
        with pytest.raises(
            ConfigError, match=r"no Ray cluster at '127.0.0.1:\d+': nothing answers at \S+ \(Connection"
        ):
            join_cluster(address, namespace="n")


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Somewhere to connect to, that says this to the first who does, and hangs up. Yields its address."""
    with socket.create_server(("0.0.0.0", 0)) as heard:  # Ray takes 127.0.0.1 for the address of this node

        def answering() -> None:
            connection, _ = heard.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = Thread(target=answering)
        thread.start()
        yield f"127.0.0.1:{heard.getsockname()[1]}"
        thread.join()


def test_where_somebody_listens_ray_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with listener(bytes(9)) as address:
        check_reachable(address)
    check_reachable("ray://nowhere:1")


@pytest.mark.parametrize("address", ["x y:[", "[::1", "host:99999", "host:port", "a" * 300 + ":1", "\x00:1"])
def test_what_is_no_address_is_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConnectionError):
        check_reachable(address)


def test_somebody_who_listens_and_says_nothing_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped, or hangs: Ray would wait for it where no signal ends it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with listener(b"") as address, pytest.raises(ConnectionError, match="hangs up"):
        check_reachable(address)
    monkeypatch.setattr(reach, "_ANSWERS_WITHIN_S", 0.05)
    with socket.create_server(("0.0.0.0", 0)) as heard, pytest.raises(ConnectionError, match="timed out"):
        check_reachable(f"127.0.0.1:{heard.getsockname()[1]}")


def test_terminated_while_it_joins_a_command_unwinds(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []

    def terminated(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("gym_capture.cluster.reach.check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "init", terminated)
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(SystemExit):
            join_cluster("auto", namespace="n")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_command_that_has_joined_still_unwinds_when_it_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: object) -> None:
        """The command line's."""

    def joined(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does

    monkeypatch.setattr("gym_capture.cluster.reach.check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "init", joined)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        join_cluster("auto", namespace="n")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ray_writes_past_python_while_it_starts_is_kept_back_and_nothing_after(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def joined(**_: object) -> None:
        os.write(2, b"gcs_client.cc:210: Failed to get cluster ID")
        raise ConnectionError("no cluster")

    monkeypatch.setattr("gym_capture.cluster.reach.check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "init", joined)
    with pytest.raises(ConfigError, match="no cluster"):
        join_cluster("auto", namespace="n")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"
