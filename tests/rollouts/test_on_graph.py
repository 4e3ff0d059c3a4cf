"""The job that `gym-capture rollouts run` plays: where its calls go, and whose token they carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_capture.auth import Keyring
from gym_capture.rollouts.environment import Register
from gym_capture.rollouts.harnesses.tool_loop import tool_loop
from gym_capture.rollouts.job import JobOptions
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.on_graph import play_on_graph
from tests.rollouts.scripted_server import serving, solve

KEYS = Keyring(b"0123456789abcdef0123456789abcdef")


async def nothing(rollout_id: str) -> None:
    """To clear, or to close."""


@pytest.mark.parametrize("keyring", [KEYS, None], ids=["secret", "open"])
async def test_each_rollout_calls_with_its_own_token(tmp_path: Path, keyring: Keyring | None) -> None:
    rows: list[RolloutRow] = []
    async with serving(solve) as server:
        summary = await play_on_graph(
            url=server.url,
            tasks=Register.tasks(2),
            make_environment=Register,
            options=JobOptions(job_id="job", samples=2),
            harness=tool_loop(model="policy"),
            settings={},
            clear=nothing,
            close=nothing,
            directory=tmp_path,
            on_row=rows.append,
            keyring=keyring,
        )
    assert (summary.failed, len(rows)) == (0, 4)
    called = {call.rollout_id: call.token for call in server.calls}
    assert called.keys() == {row.rollout_id for row in rows}
    for rollout_id, token in called.items():
        assert token == ("unused" if keyring is None else keyring.rollout_token(rollout_id))
