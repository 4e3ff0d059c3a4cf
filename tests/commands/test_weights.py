"""`gym-capture weights` against a graph's weight plane."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gym_capture.cli import build_app
from gym_capture.errors import GymCaptureError, WeightsFailedError
from gym_capture.weights import MANIFEST
from tests.serving.weight_replicas import served
from tests.weight_folders import moved, weights_folder

Said = tuple[int, str, str]


async def test_weights_are_pushed_and_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(tmp_path, "a", "b") as (cluster, http):

        def run(*arguments: str | Path) -> Said:
            """As `main` does, which may run in the main thread only."""
            try:
                build_app(["weights"])(
                    ["weights", *map(str, arguments), "--url", str(http.base_url)], standalone_mode=False
                )
            except GymCaptureError as error:
                return 2, "", str(error)
            said = capsys.readouterr()
            return 0, said.out, said.err.replace("\n", " ")

        async def ran(*arguments: str | Path) -> Said:
            return await asyncio.to_thread(run, *arguments)

        new = weights_folder(tmp_path, 2, moved(2))
        code, _, said = await ran("push", new.folder)
        assert code == 0
        assert "version 2 is served by 2 replicas" in said
        await cluster.settled("2")
        code, out, _ = await ran("status", "--checksums", "--json")
        status = json.loads(out)
        assert (code, status["weight_version"], status["replicas"]) == (0, "2", ["a", "b"])
        assert status["checksums"] == {"weights": new.digest}

        old = weights_folder(tmp_path, 1, moved(1))
        newer = tmp_path / "newer"
        newer.mkdir()
        (newer / MANIFEST).write_text('{"format": 9}')
        for arguments, message in (
            (("push", old.folder), "does not follow version 2"),
            (("push", old.folder, "--version", "3"), "is sealed as version 1, not 3"),
            (("push", old.folder, "--mode", "later"), "--mode: must be keep, wait or abort"),
            (("push", tmp_path / "nowhere", "--version", "3"), "is no folder that is seen from here"),
            (("push", newer, "--version", "3"), "has format 9; this version reads 1"),
            (("push", tmp_path / "state"), "has no number yet: say --version"),
            (("push", tmp_path / "state", "--version", "3"), "has no .safetensors files"),
        ):
            code, _, said = await ran(*arguments)
            assert code == 2
            assert message in said
        assert (newer / MANIFEST).read_text() == '{"format": 9}'
        assert (await ran("push", old.folder, "--force"))[0] == 0
        await cluster.settled("1")

        assert "no update was under way" in (await ran("abort"))[2]
        await http.post("/start_weight_update")
        assert "the update was given up" in (await ran("abort"))[2]


async def test_a_graph_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    def run() -> None:
        folder = weights_folder(tmp_path, 1).folder
        build_app(["weights"])(["weights", "push", folder, "--url", "http://127.0.0.1:9"], standalone_mode=False)

    async with asyncio.timeout(60):
        with pytest.raises(WeightsFailedError, match="does not answer"):
            await asyncio.to_thread(run)
