"""Joining a cluster that does not take this process."""

from __future__ import annotations

import signal
import socket
import sys

import pytest
import ray

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


def test_where_somebody_listens_ray_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as heard:  # Ray takes 127.0.0.1 for the address of this node
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        check_reachable(f"127.0.0.1:{heard.getsockname()[1]}")
    check_reachable("ray://nowhere:1")


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
