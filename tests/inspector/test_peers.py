"""What one user looks into, another user of the same machine does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gym_capture.inspector import peers
from gym_capture.inspector.peers import _is_admitted as is_admitted

ANOTHER = 65534
CONNECT = """
import os, socket, sys
import encodings.idna  # where another user cannot read Python's library
os.setuid(int(sys.argv[1]))
with socket.socket(int(sys.argv[2])) as client:
    client.connect((sys.argv[3], int(sys.argv[4])))
    print(flush=True)
    sys.stdin.readline()
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")


@contextmanager
def connected(user: int, family: int = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """The server's end of a connection that another process holds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", CONNECT, str(user), str(int(family)), host, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            accepted, _ = listener.accept()
            process.stdout.readline()
            with accepted:
                yield accepted
            process.communicate(b"\n")


def admitted(connection: socket.socket) -> bool:
    return is_admitted(connection.getpeername(), connection.getsockname())


WAYS = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")]


@pytest.mark.parametrize(("family", "host"), WAYS)
def test_the_own_user_is_answered(family: int, host: str) -> None:
    with connected(os.getuid(), family, host) as connection:
        assert admitted(connection)


@needs_root
@pytest.mark.parametrize(("family", "host"), WAYS)
def test_another_user_is_not(family: int, host: str) -> None:
    with connected(ANOTHER, family, host) as connection:
        assert not admitted(connection)


def test_an_end_that_is_closed_belongs_to_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert admitted(accepted)
            client.close()
            assert accepted.recv(1) == b""
            assert not admitted(accepted)


def test_where_nobody_can_tell_and_from_elsewhere_all_are_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with connected(os.getuid()) as connection:
        monkeypatch.setattr(peers, "_TABLES", (tmp_path / "none",))
        assert admitted(connection)
    assert is_admitted(("192.0.2.1", 1), ("192.0.2.2", 2))
    assert is_admitted(None, None)
