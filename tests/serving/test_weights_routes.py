"""vLLM's routes over the weight plane, by the clients that trainers have for them."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from accelerate import PartialState

from gym_capture.auth import Keyring
from gym_capture.errors import (
    AuthenticationError,
    EngineDeadError,
    WeightsBusyError,
    WeightsFailedError,
    WeightsRefusedError,
)
from gym_capture.models import tiny_dir
from gym_capture.serving import weights_agent
from tests.serving.trl_client import load
from tests.serving.weight_replicas import served
from tests.weight_folders import moved, tiny_tensors, weights_folder
from trainer_bridge import weight_client, weight_sync
from trainer_bridge.weight_client import Pushed, WeightClient
from trainer_bridge.weight_sync import WeightSync

PartialState(cpu=True)  # TRL logs by way of it
trl_weights = load("weight_transfer")
VLLMClient = trl_weights.VLLMClient

KEYRING = Keyring(b"a secret of tests")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_agent, "_TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(weight_client, "_TRY_AGAIN_S", 0.01)


def syncing(http: httpx.AsyncClient, directory: Path, **options: Any) -> WeightSync:
    client = WeightClient(str(http.base_url), patience_s=30, **options)
    return WeightSync(client, directory / "weights")


async def test_a_push_ends_with_all_replicas_on_the_new_weights(tmp_path: Path) -> None:
    async with served(tmp_path, "a", "b") as (cluster, http):
        sync = syncing(http, tmp_path)
        pushed = await asyncio.to_thread(sync.push, 1, moved(1))
        assert (pushed.version, pushed.replicas) == (1, 2)
        assert 0 < pushed.paused_s <= pushed.seconds
        await cluster.settled("1")
        assert await asyncio.to_thread(sync._client.checksums) == {"weights": cluster.replicas["a"].weights.loaded}
        again = await asyncio.to_thread(sync.push, 1, moved(1))
        assert (again.paused_s, again.folder) == (0.0, pushed.folder)


@pytest.mark.parametrize(("mode", "steps"), [("keep", []), ("wait", ["pause wait"]), ("abort", ["pause abort"])])
async def test_calls_under_way_are_treated_as_the_trainer_says(tmp_path: Path, mode: Any, steps: list[str]) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        await asyncio.to_thread(syncing(http, tmp_path).push, 1, moved(1), mode=mode)
        assert cluster.replicas["a"].weights.steps == ["label 0", "check 1", *steps, "apply 1", "resume"]


async def test_a_push_in_the_background_has_the_weights_of_when_it_was_called(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        sync = syncing(http, tmp_path)
        applies = cluster.replicas["a"].hold("apply")
        weights = moved(1)
        pushing = await asyncio.to_thread(sync.push_in_background, 1, weights)
        await applies.wait()
        assert not pushing.done()
        weights["model.norm.weight"].zero_()
        cluster.replicas["a"].gates["apply"].set()
        pushed: Pushed = await asyncio.wrap_future(pushing)
        same = weights_folder(tmp_path, 1, moved(1))
        assert torch.equal(_loaded(pushed.folder)["model.norm.weight"], _loaded(same.folder)["model.norm.weight"])
        await asyncio.to_thread(sync.close)


def _loaded(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def nan(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], float("nan"))}


async def test_what_cannot_be_served_is_refused_before_anything_changes(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        sync = syncing(http, tmp_path)

        async def refused(match: str, version: int, weights: Any, **options: bool) -> None:
            with pytest.raises(WeightsRefusedError, match=match):
                await asyncio.to_thread(sync.push, version, weights, **options)

        await refused("model.norm.weight has values that are NaN", 1, nan(moved(1)))
        lacking = {name: tensor for name, tensor in moved(1).items() if name != "model.norm.weight"}
        await refused("it lacks model.norm.weight", 1, lacking)
        await refused(r"model.norm.weight has shape \[1\]", 1, {**moved(1), "model.norm.weight": torch.zeros(1)})
        await refused("there are no weights", 1, {})
        await refused("is no tensor: int", 1, {"w": 3})
        half = weights_folder(tmp_path, 1)
        (Path(half.folder) / "model.safetensors").write_bytes(b"")
        await refused("is no safetensors file, or is cut", 1, Path(half.folder))
        assert not any(step.startswith(("apply", "pause")) for step in cluster.replicas["a"].weights.steps)
        await asyncio.to_thread(sync.push, 2, nan(moved(2)), allow_non_finite=True)
        await refused("does not follow version 2", 1, moved(1))
        await asyncio.to_thread(sync.push, 1, moved(1), force=True)
        await cluster.settled("1")


async def test_a_replica_that_dies_costs_a_try_and_nothing_else(tmp_path: Path) -> None:
    async with served(tmp_path, "a", "b") as (cluster, http):
        sync = syncing(http, tmp_path)
        loads = cluster.replicas["b"].hold("apply 1")
        pushing = asyncio.ensure_future(asyncio.to_thread(sync.push, 1, moved(1)))
        await loads.wait()
        await cluster.kill("b")
        assert (await pushing).version == 1
        await cluster.settled("1")


async def test_an_engine_that_dies_costs_a_try_and_nothing_else(tmp_path: Path) -> None:
    """Its replica lives on, until its health check fails."""
    async with served(tmp_path, "a", "b") as (cluster, http):
        bad = cluster.replicas["b"]
        bad.fails["apply"] = EngineDeadError("the engine process died")
        pushed = await asyncio.to_thread(syncing(http, tmp_path).push, 1, moved(1))
        assert (pushed.version, pushed.replicas) == (1, 1)
        with pytest.raises(EngineDeadError, match="this replica is replaced"):
            bad.agent.check_health()


async def test_a_coordinator_that_dies_costs_a_try_and_nothing_else(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        sync = syncing(http, tmp_path)
        loads = cluster.replicas["a"].hold("apply 1")
        pushing = asyncio.ensure_future(asyncio.to_thread(sync.push, 1, moved(1)))
        await loads.wait()
        cluster.kill_coordinator()
        cluster.start_coordinator()
        cluster.replicas["a"].gates.pop("apply 1").set()
        assert (await pushing).version == 1
        await cluster.settled("1")


async def test_an_update_that_another_has_begun_is_in_the_way_unless_it_is_taken_over(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        sync = syncing(http, tmp_path)
        assert (await http.post("/start_weight_update")).status_code == 200
        with pytest.raises(WeightsBusyError, match="another weight update is under way"):
            await asyncio.to_thread(sync.push, 1, moved(1))
        await asyncio.to_thread(sync.push, 1, moved(1), takeover=True)
        await cluster.settled("1")


async def test_who_takes_over_ends_a_pause_as_well(tmp_path: Path) -> None:
    """As a trainer leaves it that is killed between pause and resume."""
    async with served(tmp_path, "a") as (cluster, http):
        sync = syncing(http, tmp_path)
        await http.post("/start_weight_update")
        await http.post("/pause?mode=wait")
        await asyncio.to_thread(sync.push, 1, moved(1), takeover=True)
        assert cluster.paused == {"a": False}
        await http.post("/pause?mode=wait")
        assert await asyncio.to_thread(sync._client.abort)
        assert cluster.paused == {"a": False}
        assert not await asyncio.to_thread(sync._client.abort)


async def test_an_update_whose_beginning_was_not_heard_of_is_in_nobodys_way(tmp_path: Path) -> None:
    class Deaf(WeightClient):
        has_lost = False

        def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
            answer = super()._asked(method, path, body)
            if path == "/start_weight_update" and not self.has_lost:
                self.has_lost = True
                raise WeightsFailedError("the answer was lost", retryable=True)
            return answer

    async with served(tmp_path, "a") as (cluster, http):
        with Deaf(str(http.base_url), patience_s=30) as client:
            pushed = await asyncio.to_thread(client.push, weights_folder(tmp_path, 1))
        assert client.has_lost
        assert pushed.seconds < 30
        assert cluster.over == ["aborted", "applied"]


async def test_who_takes_over_waits_for_a_replica(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, http):
        sync = syncing(http, tmp_path)
        pushing = asyncio.ensure_future(asyncio.to_thread(sync.push, 1, moved(1), takeover=True))
        await asyncio.sleep(0.2)
        await cluster.start("a")
        assert (await pushing).replicas == 1


async def test_a_full_disk_of_the_trainers_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        sync = syncing(http, tmp_path)

        def full(tensors: Any, file: Path) -> None:
            file.write_bytes(b"the beginning")
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr(weight_sync, "save_file", full)
            with pytest.raises(WeightsFailedError, match="No space left on device"):
                await asyncio.to_thread(sync.push, 1, moved(1))
        assert list((tmp_path / "weights").iterdir()) == []
        (tmp_path / "weights" / ".weights-1-999").mkdir()  # ... of a trainer that was killed
        await asyncio.to_thread(sync.push, 1, moved(1))
        assert [folder.name[:16] for folder in (tmp_path / "weights").iterdir()] == ["weights-00000001"]
        await cluster.settled("1")


async def test_the_last_versions_are_kept_and_always_that_which_is_served(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (_, http):
        sync = syncing(http, tmp_path)
        for version in (1, 2, 3, 4):
            await asyncio.to_thread(sync.push, version, moved(version))
        kept = sorted(folder.name[8:16] for folder in (tmp_path / "weights").iterdir())
        assert kept == ["00000003", "00000004"]


async def test_a_folder_of_the_trainers_own_is_sealed_where_it_lies(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        folder = tmp_path / "checkpoint-7"
        folder.mkdir()
        shutil.copy(tiny_dir() / "model.safetensors", folder)
        pushed = await asyncio.to_thread(syncing(http, tmp_path).push, 7, folder)
        assert pushed.folder == str(folder)
        await cluster.settled("7")
        with pytest.raises(WeightsRefusedError, match="is sealed as version 7, not 8"):
            await asyncio.to_thread(syncing(http, tmp_path).push, 8, folder)


async def test_trls_own_client_drives_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order of requests, its bodies, its reading of the answers. Only the tensors take another way than NCCL."""
    sent: list[str] = []

    def broadcast(iterator: Iterable[tuple[str, torch.Tensor]], **_: object) -> None:
        sent.extend(name for name, _ in iterator)

    monkeypatch.setattr(trl_weights, "packed_nccl_broadcast_producer", broadcast)
    async with served(tmp_path, "a", "b") as (cluster, http):
        payload = weights_folder(tmp_path, 3)
        client = VLLMClient(str(http.base_url))
        transfer = trl_weights.WeightTransferClient(client, {"folder": payload.folder})
        transfer.model_update_group = object()

        def step() -> None:
            client.wait_for_server_ready()
            assert client.get_dtype() == "torch.float32"
            assert client.get_world_size() == 2
            transfer.pause()
            assert client_is_paused(http)
            transfer.send_weights(tiny_tensors().items())
            transfer.resume()

        await asyncio.to_thread(step)
        await cluster.settled("3")
        assert sent == list(tiny_tensors())
        steps = cluster.replicas["a"].weights.steps
        assert steps == ["label 0", "pause keep", "check 3", "apply 3", "resume"]


def client_is_paused(http: httpx.AsyncClient) -> bool:
    answer: bool = httpx.get(f"{http.base_url}/is_paused", trust_env=False).json()["is_paused"]
    return answer


async def test_a_transfer_as_trl_makes_it_reaches_every_replica(tmp_path: Path) -> None:
    async with served(tmp_path, "a", "b") as (cluster, http):
        client = VLLMClient(str(http.base_url))

        def step() -> None:
            info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
            client.init_weight_transfer_engine(info)
            client.pause()
            client.start_weight_update()
            client.update_weights({"names": [], "dtype_names": [], "shapes": []})
            client.finish_weight_update()
            client.resume()

        await asyncio.to_thread(step)
        await cluster.settled("1")
        assert (await http.get("/weight_info")).json()["weight_version"] == "1"


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (("POST", "/pause?mode=later", None), 400, "mode must be one of abort, wait, keep"),
        (("POST", "/pause?clear_cache=maybe", None), 400, "clear_cache must be true or false"),
        (("POST", "/update_weights", {"update_info": {"folder": "/x"}}), 409, "start_weight_update comes first"),
        (("POST", "/update_weights", {}), 400, "update_info must be in the body"),
        (("POST", "/finish_weight_update", {"weight_version": "step-3"}), 400, "must be a whole number"),
        (("POST", "/finish_weight_update", {"weight_version": "9" * 5000}), 400, "must be a whole number"),
        (("POST", "/finish_weight_update", {"weight_version": 2**63}), 400, "weight_version: a version must"),
        (("POST", "/start_weight_update", {"owner": 7}), 400, "owner must be a text"),
        (("POST", "/init_weight_transfer_engine", {"init_info": {"rank_offset": "a"}}), 400, "must be a whole number"),
        (("POST", "/init_weight_transfer_engine", {"init_info": {"rank_offset": None}}), 400, "must be a whole number"),
        (("POST", "/init_weight_transfer_engine", {"init_info": []}), 400, "init_info must be in the body"),
        (("POST", "/weight_checker", {"action": "reset"}), 400, "action must be checksum or compare"),
        (("POST", "/start_weight_update", b"{"), 400, "the body is not JSON"),
        (("POST", "/start_weight_update", b"[]"), 400, "must be a JSON object"),
    ],
)
async def test_bad_requests_get_one_line(
    tmp_path: Path, request_: tuple[str, str, Any], status: int, message: str
) -> None:
    method, path, body = request_
    async with served(tmp_path, "a") as (cluster, http):
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        response = await http.request(method, path, **sent)
        assert response.status_code == status
        assert message in response.json()["error"]
        assert cluster.replicas["a"].weights.steps == ["label 0"]


async def test_the_tensors_of_all_replicas_are_compared(tmp_path: Path) -> None:
    async with served(tmp_path, "a", "b") as (cluster, http):
        found = (await http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
        same = {"action": "compare", "baseline": found}
        assert (await http.post("/weight_checker", json=same)).json() == {"match": True, "mismatches": []}
        other = {"action": "compare", "baseline": {"weights": "x"}}
        assert (await http.post("/weight_checker", json=other)).json() == {"match": False, "mismatches": ["weights"]}
        cluster.replicas["b"].weights.loaded = "drifted"
        response = await http.post("/weight_checker", json={"action": "checksum"})
        assert response.status_code == 500
        assert response.json()["error"] == "replicas a and b hold different weights"


async def test_a_token_of_its_own_opens_the_routes(tmp_path: Path) -> None:
    async with served(tmp_path, "a", keyring=KEYRING) as (_, http):
        token = KEYRING.weights_token()
        assert (await http.get("/weight_info")).status_code == 401
        wrong = {"authorization": f"Bearer {KEYRING.admin_token()}"}
        assert (await http.post("/pause", headers=wrong)).status_code == 403
        assert (await http.get("/weight_info", headers={"x-api-key": token})).status_code == 200
        # TRL's client can be told nothing but a URL.
        url = str(http.base_url).replace("//", f"//trainer:{token}@")
        assert await asyncio.to_thread(VLLMClient(url).get_world_size) == 1
        assert (await http.get("/health")).status_code == 200
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(syncing(http, tmp_path).push, 1, moved(1))
        await asyncio.to_thread(syncing(http, tmp_path, token=token).push, 1, moved(1))


async def test_health_is_that_of_the_replica(tmp_path: Path) -> None:
    async with served(tmp_path, "a") as (cluster, http):
        cluster.replicas["a"].agent._dismissed = "replaced"
        response = await http.get("/health")
        assert (response.status_code, response.json()["error"]) == (503, "replaced")
        with pytest.raises(EngineDeadError):
            cluster.replicas["a"].agent.check_health()


def test_a_graph_that_is_gone_is_said() -> None:
    with (
        WeightClient("http://127.0.0.1:9", patience_s=0) as client,
        pytest.raises(WeightsFailedError, match="does not answer"),
    ):
        client.info()
