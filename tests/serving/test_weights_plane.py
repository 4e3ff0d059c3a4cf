"""One version for all replicas, whatever happens on the way to it."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from gym_capture.errors import (
    EngineDeadError,
    EngineError,
    StoreError,
    StoreUnavailableError,
    WeightsBusyError,
    WeightsFailedError,
    WeightsRefusedError,
)
from gym_capture.serving import weights_agent, weights_record
from gym_capture.serving.weights_messages import Apply, Numbered, Resume, Version
from gym_capture.weights import Payload, payload_at, seal
from tests.serving.weight_replicas import MODEL, Cluster, Replica, cluster_of, eventually


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_agent, "_TRY_AGAIN_S", 0.01)


def folder(root: Path, version: int, content: bytes = b"") -> Payload:
    """A folder that is whole; nobody looks at its tensors here."""
    path = root / f"v{version}-{content.decode()}"
    path.mkdir()
    (path / "x.safetensors").write_bytes(content or str(version).encode())
    return seal(path, version=version)


async def test_all_replicas_get_the_new_version_and_go_on(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        one = folder(tmp_path, 1)
        outcome = await cluster.push(one)
        assert (outcome["weight_version"], outcome["replicas"]) == ("1", 2)
        await cluster.settled("1")
        for replica in cluster.replicas.values():
            assert replica.weights.steps == ["label 0", "check 1", "apply 1", "resume"]
        assert cluster.record.read() == Version(number=1, model=MODEL, folder=one.folder, digest=one.digest)
        info = await cluster.serving.info()
        assert (info["weight_version"], info["replicas"], info["is_updating"]) == ("1", ["a", "b"], False)


async def test_none_goes_on_before_all_have_loaded(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        slow = cluster.replicas["b"]
        applies = slow.hold("apply")
        pushing = asyncio.ensure_future(cluster.push(folder(tmp_path, 1)))
        await applies.wait()
        await asyncio.sleep(0.05)
        assert cluster.paused == {"a": True, "b": True}
        assert cluster.record.read() == Version(number=0, model=MODEL)
        slow.gates["apply"].set()
        await pushing
        await cluster.settled("1")


async def test_the_last_folder_of_an_update_counts_and_is_checked(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.serving.start()
        for payload in (folder(tmp_path, 1), folder(tmp_path, 2)):
            await cluster.serving.update({"folder": payload.folder})
        assert (await cluster.serving.finish(None))["weight_version"] == "2"
        assert [step for step in cluster.replicas["a"].weights.steps if step.startswith("check")] == [
            "check 1",
            "check 2",
        ]


async def test_weights_are_read_once_on_each_node_and_seen_by_every_replica(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        for name, node in (("a", "n1"), ("b", "n1"), ("c", "n2")):
            await cluster.start(name, node=node)
        await cluster.push(folder(tmp_path, 1))
        await cluster.settled("1")
        read = {name: "check 1" in replica.weights.steps for name, replica in cluster.replicas.items()}
        assert read.pop("c")
        assert sorted(read.values()) == [False, True]

        refused = folder(tmp_path, 2)
        await cluster.serving.start()
        await cluster.serving.update({"folder": refused.folder})
        await cluster.start("d", node="n2")
        (Path(refused.folder) / "x.safetensors").write_bytes(b"more than there was")
        with pytest.raises(WeightsRefusedError, match=r"replica d refuses .* its size differs"):
            await cluster.serving.finish(2)
        await cluster.settled("1")


@pytest.mark.parametrize("step", ["check", "apply"])
async def test_a_failure_on_one_replica_leaves_all_with_the_version_before(tmp_path: Path, step: str) -> None:
    async with cluster_of(tmp_path, "a", "b", "c") as cluster:
        await cluster.push(folder(tmp_path, 1))
        cluster.replicas["b"].fails[f"{step} 2"] = WeightsFailedError("no memory")
        with pytest.raises(WeightsFailedError, match=r"replica b .*no memory") as failed:
            await cluster.push(folder(tmp_path, 2))
        assert not failed.value.retryable
        if step == "apply":
            assert "all replicas serve version 1" in failed.value.message
        await cluster.settled("1")
        record = cluster.record.read()
        assert record is not None
        assert record.number == 1
        await cluster.push(folder(tmp_path, 3))  # ... and the next one comes through
        await cluster.settled("3")


async def test_weights_that_are_refused_change_nothing(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        cluster.replicas["a"].fails["check 1"] = WeightsRefusedError("w has shape [1], but ...")
        with pytest.raises(WeightsRefusedError, match=r"replica a refuses .*w has shape"):
            await cluster.push(folder(tmp_path, 1))
        assert not any("apply" in step or "pause" in step for step in cluster.replicas["b"].weights.steps)
        with pytest.raises(WeightsRefusedError, match="it is not there whole"):
            await cluster.push(Payload(folder=str(tmp_path / "nowhere"), version=1, files={}))
        with pytest.raises(WeightsRefusedError, match="no 'frce' beside"):
            await cluster.push(folder(tmp_path, 2), frce=True)


async def test_a_version_that_goes_back_is_refused_unless_told(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        two, one = folder(tmp_path, 2), folder(tmp_path, 1)
        await cluster.push(two)
        with pytest.raises(WeightsRefusedError, match="version 1 does not follow version 2"):
            await cluster.push(one)
        with pytest.raises(WeightsRefusedError, match="is served already, with other weights"):
            await cluster.push(folder(tmp_path, 2, b"other"))
        steps = len(cluster.replicas["a"].weights.steps)
        await cluster.push(two)  # the same again is no other
        assert not any("apply" in step for step in cluster.replicas["a"].weights.steps[steps:])
        await cluster.push(one, force=True)
        await cluster.settled("1")


async def test_a_second_update_while_one_runs_is_refused(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        applies = cluster.replicas["a"].hold("apply")
        pushing = asyncio.ensure_future(cluster.push(folder(tmp_path, 1)))
        await applies.wait()
        with pytest.raises(WeightsBusyError, match="another weight update is under way"):
            await cluster.push(folder(tmp_path, 2))
        cluster.replicas["a"].gates["apply"].set()
        await pushing
        await cluster.settled("1")


async def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        for step in (cluster.serving.finish(1), cluster.serving.update({"folder": "/x"})):
            with pytest.raises(WeightsBusyError, match="start_weight_update comes first"):
                await step
        await cluster.serving.start()
        with pytest.raises(WeightsBusyError, match="update_weights comes before"):
            await cluster.serving.finish(1)
        await cluster.serving.start()
        await cluster.serving.update({"folder": folder(tmp_path, 1).folder})
        with pytest.raises(WeightsRefusedError, match="holds version 1, and finish_weight_update says 2"):
            await cluster.serving.finish(2)
        assert cluster.versions == {"a": "0"}


async def test_without_a_replica_there_is_nothing_to_update(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        with pytest.raises(StoreUnavailableError, match="no replica of this graph is ready"):
            await cluster.serving.start()


@pytest.mark.parametrize("step", ["check", "apply"])
async def test_a_replica_that_is_killed_in_the_middle(tmp_path: Path, step: str) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        await cluster.push(folder(tmp_path, 1))
        reached = cluster.replicas["b"].hold(f"{step} 2")
        pushing = asyncio.ensure_future(cluster.push(folder(tmp_path, 2)))
        await reached.wait()
        await cluster.kill("b")
        with pytest.raises(WeightsFailedError, match=r"replica b .*it died") as failed:
            await pushing
        assert failed.value.retryable
        await cluster.settled("1")
        if step == "check":
            await cluster.serving.abort()
        again = folder(tmp_path, 3)
        await cluster.start("b2")
        assert cluster.versions == {"a": "1", "b2": "1"}
        await cluster.push(again)
        await cluster.settled("3")


async def test_a_replica_that_died_before_does_not_fail_the_next_update(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        await cluster.kill("b")
        await cluster.push(folder(tmp_path, 1))
        await cluster.settled("1")


async def test_a_replica_that_starts_has_the_current_version_before_it_serves(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.push(folder(tmp_path, 1))
        late = cluster.add("late")
        loads = late.hold("apply")
        starting = asyncio.ensure_future(late.agent.start())
        await loads.wait()
        assert not starting.done()
        late.gates["apply"].set()
        await starting
        assert (late.weights.version, late.weights.is_paused) == ("1", False)
        assert late.weights.steps[1] == "check 1"  # what was checked elsewhere may not be what is seen from here


async def test_a_replica_that_starts_during_an_update_gets_its_outcome(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        applies = cluster.replicas["a"].hold("apply")
        pushing = asyncio.ensure_future(cluster.push(folder(tmp_path, 1)))
        await applies.wait()
        starting = asyncio.ensure_future(cluster.start("late"))
        await asyncio.sleep(0.05)
        assert not starting.done()
        cluster.replicas["a"].gates["apply"].set()
        await pushing
        await starting
        await cluster.settled("1")


async def test_a_replica_that_comes_between_check_and_load_checks_first(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        one = folder(tmp_path, 1)
        await cluster.serving.start()
        await cluster.serving.update({"folder": one.folder})
        late = await cluster.start("late")
        await cluster.serving.finish(1)
        assert late.weights.steps == ["label 0", "check 1", "apply 1", "resume"]


@pytest.mark.parametrize("at", ["check 2", "apply 2", "resume"])
async def test_a_coordinator_that_is_killed_in_the_middle(tmp_path: Path, at: str) -> None:
    """Before the version is on record: all go back. Behind it: all have it."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        await cluster.push(folder(tmp_path, 1))
        reached = cluster.replicas["b"].hold(at)
        pushing = asyncio.ensure_future(cluster.push(folder(tmp_path, 2)))
        await reached.wait()
        cluster.kill_coordinator()
        with pytest.raises(StoreUnavailableError):
            await pushing
        await asyncio.sleep(0.05)
        cluster.replicas["b"].gates.pop(at).set()
        cluster.start_coordinator()
        expected = "2" if at == "resume" else "1"
        await cluster.settled(expected)
        assert (await cluster.serving.info())["weight_version"] == expected

        async def are_back() -> bool:
            return {"a", "b"} == set((await cluster.serving.info())["replicas"])  # type: ignore[call-overload]

        await eventually(are_back)
        await cluster.push(folder(tmp_path, 3))
        await cluster.settled("3")


async def test_everything_is_killed_and_starts_with_the_version_on_record(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.push(folder(tmp_path, 1))
    async with cluster_of(tmp_path, "b") as cluster:
        assert cluster.versions == {"b": "1"}


async def test_a_lost_record_is_known_from_the_replicas(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.push(folder(tmp_path, 1))
        cluster.kill_coordinator()
        (tmp_path / weights_record.FILE).unlink()
        cluster.start_coordinator()
        await cluster.start("fresh")
        await cluster.settled("1")


async def test_a_record_that_is_damaged_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / weights_record.FILE).write_text("{")
    with pytest.raises(StoreError, match="does not say which weights are served"):
        Cluster(tmp_path)


async def test_a_full_disk_leaves_all_with_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        await cluster.push(folder(tmp_path, 1))

        def full(path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr(weights_record, "replace_file", full)
            with pytest.raises(WeightsFailedError, match="No space left on device; all replicas serve version 1"):
                await cluster.push(folder(tmp_path, 2))
        await cluster.settled("1")
        assert json.loads((tmp_path / weights_record.FILE).read_text())["number"] == 1


async def test_a_trainer_that_is_not_heard_of_any_more_is_given_up(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", trainer_timeout_s=0.05, step_timeout_s=30.0) as cluster:
        await cluster.serving.pause("keep", clear_cache=True)
        await cluster.serving.start()
        await cluster.serving.update({"folder": folder(tmp_path, 1).folder})
        assert not await cluster.serving.give_up_if_silent()
        assert cluster.paused == {"a": True}
        await eventually(cluster.serving.give_up_if_silent)
        await cluster.settled("0")
        await cluster.push(folder(tmp_path, 2))  # a trainer that starts again is not in its own way
        await cluster.settled("2")


async def test_who_pauses_resumes(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.serving.pause("keep", clear_cache=True)
        await cluster.push(folder(tmp_path, 1))
        assert cluster.paused == {"a": True}
        late = await cluster.start("late")
        assert late.weights.is_paused
        await cluster.serving.resume()
        await cluster.settled("1")


async def test_a_replica_that_cannot_go_back_is_replaced(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        bad = cluster.replicas["b"]
        bad.fails |= {"apply 1": EngineError("broken"), "apply 0": EngineError("still broken")}
        with pytest.raises(WeightsFailedError, match="replica b could not load version 1: broken"):
            await cluster.push(folder(tmp_path, 1))
        following = bad.agent._following
        assert following is not None
        await following
        with pytest.raises(EngineDeadError, match="still broken"):
            bad.agent.check_health()
        assert bad.weights.is_paused  # it never samples from weights that are not whole
        assert not cluster.replicas["a"].weights.is_paused


async def test_a_replica_that_hangs_fails_the_update_and_comes_back(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b", trainer_timeout_s=600.0, step_timeout_s=0.2) as cluster:
        cluster.replicas["b"].hold("apply 1")
        with pytest.raises(WeightsFailedError, match=r"replica b .*has not answered"):
            await cluster.push(folder(tmp_path, 1))
        assert not cluster.replicas["a"].weights.is_paused
        await eventually(lambda: _is_unwell(cluster.replicas["b"], "this replica hangs: Apply for 0.2 s"))
        cluster.replicas["b"].gates.pop("apply 1").set()
        await cluster.settled("0")


async def test_a_replica_that_hangs_in_a_check_does_not_serve_the_old_version_for_ever(tmp_path: Path) -> None:
    """Nothing has paused it, and the others go on without it."""
    async with cluster_of(tmp_path, "a", "b", trainer_timeout_s=600.0, step_timeout_s=0.2) as cluster:
        cluster.replicas["b"].hold("check")
        with pytest.raises(WeightsFailedError, match=r"replica b .*has not answered"):
            await cluster.push(folder(tmp_path, 1))
        assert (await cluster.push(folder(tmp_path, 2)))["replicas"] == 1
        await eventually(lambda: _is_unwell(cluster.replicas["b"], "this replica hangs: Check for 0.2 s"))
        cluster.replicas["a"].agent.check_health()


async def _is_unwell(replica: Replica, why: str) -> bool:
    try:
        replica.agent.check_health()
    except EngineDeadError as error:
        return error.message == why
    return False


async def test_weights_that_are_gone_are_waited_for(tmp_path: Path) -> None:
    """Nobody can load the current version any more: a replica that starts serves nothing until the next one."""
    async with cluster_of(tmp_path, "a") as cluster:
        one = folder(tmp_path, 1)
        await cluster.push(one)
        for file in Path(one.folder).iterdir():
            file.unlink()
        late = cluster.add("late")
        starting = asyncio.ensure_future(late.agent.start())
        await cluster.until_waiting("late")
        assert not starting.done()
        await cluster.push(folder(tmp_path, 2))
        await starting
        await cluster.settled("2")


async def test_where_nobody_can_have_the_weights_the_next_ones_can_be_pushed(tmp_path: Path) -> None:
    """A replica that has not started has no routes: if none starts, no trainer reaches the graph."""
    one = folder(tmp_path, 1)
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.push(one)
    for file in Path(one.folder).iterdir():
        file.unlink()
    async with asyncio.timeout(20), cluster_of(tmp_path, "b", "c") as cluster:
        assert cluster.paused == {"b": True, "c": True}
        await cluster.push(folder(tmp_path, 2))
        await cluster.settled("2")


async def test_weights_that_have_moved_are_served_from_where_they_are_now(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        one = folder(tmp_path, 1)
        await cluster.push(one)
        elsewhere = payload_at(str(Path(one.folder).rename(tmp_path / "elsewhere")))
        late = cluster.add("late")
        starting = asyncio.ensure_future(late.agent.start())
        await cluster.until_waiting("late")
        await cluster.push(elsewhere)
        async with asyncio.timeout(10):
            await starting
        await cluster.settled("1")
        again = payload_at(str(Path(elsewhere.folder).rename(tmp_path / "again")))
        assert (await cluster.push(again))["paused_s"] == 0
        assert cluster.record.read() == Version(number=1, model=MODEL, folder=again.folder, digest=one.digest)
        steps = list(late.weights.steps)
        cluster.kill_coordinator()
        cluster.start_coordinator()
        await eventually(lambda: _are_serving(cluster, 2))
        assert late.weights.steps == steps  # it has them: where they are is all the same to it


async def _are_serving(cluster: Cluster, replicas: int) -> bool:
    return len((await cluster.serving.info())["replicas"]) == replicas  # type: ignore[arg-type]


async def test_an_owner_gives_up_what_is_its_own_and_nothing_else(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.serving.start("one")
        assert not await cluster.serving.abort(owner="other")
        assert (await cluster.serving.info())["is_updating"]
        assert await cluster.serving.abort(owner="one")
        assert not (await cluster.serving.info())["is_updating"]
        await cluster.serving.start("one")
        assert await cluster.serving.abort()
        assert cluster.over == ["aborted", "aborted"]


async def test_a_transfer_has_an_entry_for_each_rank(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        await cluster.serving.init({})
        for entries in ([], [{}], [{}, {}, {}]):
            await cluster.serving.start()
            with pytest.raises(WeightsRefusedError, match=rf"has {len(entries)} entries, but there are 2 ranks"):
                await cluster.serving.update(entries)
        await cluster.serving.start()
        await cluster.serving.update([{"names": ["x"]}, {"names": ["y"]}])
        await cluster.serving.finish(1)
        await cluster.settled("1")


async def test_another_model_begins_at_its_own_weights(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "old") as cluster:
        await cluster.push(folder(tmp_path, 1))
        await cluster.start("new", model="/models/other")
        assert cluster.replicas["new"].weights.version == "0"
        assert (await cluster.serving.info())["replicas"] == ["new"]


async def test_transfers_go_to_all_replicas_with_ranks_of_their_own(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        assert await cluster.serving.world_size() == 2
        await cluster.serving.init({"master_port": 1, "rank_offset": 1})
        await cluster.serving.pause("keep", clear_cache=True)
        await cluster.serving.start()
        await cluster.serving.update({"names": ["w"]})
        assert await cluster.serving.finish(None) | {"paused_s": 0} == {
            "weight_version": "1",
            "paused_s": 0,
            "replicas": 2,
        }
        assert cluster.paused == {"a": True, "b": True}
        await cluster.serving.resume()
        await cluster.settled("1")
        ranks = [replica.weights.steps[1] for replica in cluster.replicas.values()]
        assert [step.partition("'rank_offset': ")[2][0] for step in ranks] == ["1", "2"]
        steps = [step.split()[0] for step in cluster.replicas["a"].weights.steps]
        assert steps[2:] == ["pause", "check", "pause", "start", "update", "finish", "label", "resume"]


async def test_a_transfer_that_fails_goes_back_to_what_can_be_loaded(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        await cluster.push(folder(tmp_path, 1))
        await cluster.serving.init({})
        cluster.replicas["b"].fails["update"] = WeightsFailedError("cut off")
        await cluster.serving.start()
        with pytest.raises(WeightsFailedError, match="replica b failed in the transfer: cut off; all replicas serve"):
            await cluster.serving.update({"names": []})
        await cluster.settled("1")
        assert "finish" in cluster.replicas["a"].weights.steps[-3]


async def test_after_transfers_there_may_be_nothing_to_go_back_to(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.serving.init({})
        await cluster.serving.start()
        await cluster.serving.update({})
        await cluster.serving.finish(5)
        await cluster.settled("5")
        late = cluster.add("late")
        starting = asyncio.ensure_future(late.agent.start())
        await cluster.until_waiting("late")
        await cluster.serving.start()
        with pytest.raises(WeightsBusyError, match="init_weight_transfer_engine comes first"):
            await cluster.serving.update({})  # the group knows nothing of the new replica
        await cluster.serving.init({})
        cluster.replicas["a"].fails["update"] = WeightsFailedError("cut off")
        await cluster.serving.start()
        with pytest.raises(WeightsFailedError, match="all replicas are paused until weights are pushed"):
            await cluster.serving.update({})
        with pytest.raises(WeightsBusyError, match="push weights first"):
            await cluster.serving.resume()
        del cluster.replicas["a"].fails["update"]
        await cluster.push(folder(tmp_path, 6))
        await starting
        await cluster.settled("6")


async def test_a_transfer_that_nobody_is_left_of_is_in_no_replicas_way(tmp_path: Path) -> None:
    """Its only replica dies between two messages, when nobody waits for an answer of it."""
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.push(folder(tmp_path, 1))
        await cluster.serving.init({})
        await cluster.serving.start()
        await cluster.serving.update({"names": []})
        await cluster.kill("a")
        async with asyncio.timeout(10):
            await cluster.start("b")
        await cluster.settled("1")
        assert cluster.over == ["applied", "failed"]
        await cluster.push(folder(tmp_path, 2))


async def test_nobody_makes_an_engine_sample_from_weights_that_are_not_whole(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        replica = cluster.replicas["a"]
        replica.fails["apply"] = EngineError("broken")
        assert (await replica.agent._obeyed(1, Apply(Version(number=0, model=MODEL)))).error is not None
        report = await replica.agent._obeyed(2, Resume())
        assert isinstance(report.error, WeightsFailedError)
        assert replica.weights.is_paused


async def test_a_replica_that_cannot_follow_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error that nobody expects: what it serves would be old weights, for good."""

    async def odd(*_: object) -> Numbered:
        raise RuntimeError("the reply cannot be read")

    async with cluster_of(tmp_path, "a") as cluster:
        agent = cluster.add("b").agent
        monkeypatch.setattr(cluster.replicas["b"], "exchange", odd)
        with pytest.raises(EngineDeadError, match=r"cannot follow .*the reply cannot be read"):
            await agent.start()
        with pytest.raises(EngineDeadError):
            agent.check_health()


async def test_what_became_of_an_update_is_told_once(tmp_path: Path) -> None:
    """A request that is refused, and tried again, is none."""
    async with cluster_of(tmp_path, trainer_timeout_s=0) as cluster:
        plane = cluster.serving
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                await plane.start()
        await cluster.start("a")
        with pytest.raises(WeightsBusyError):
            await plane.finish(1)
        await plane.start()
        for _ in range(3):
            with pytest.raises(WeightsBusyError):
                await plane.start()
        with pytest.raises(WeightsRefusedError, match="there is no 'misspelt'"):
            await plane.update({"folder": "x", "misspelt": 1})
        with pytest.raises(WeightsRefusedError, match="force must be true or false: got 'yes'"):
            await plane.update({"folder": "x", "force": "yes"})
        assert cluster.over == []
        assert await plane.abort()
        assert cluster.over.pop() == "aborted"

        await cluster.push(folder(tmp_path, 2))
        assert cluster.over.pop() == "applied"
        with pytest.raises(WeightsRefusedError, match="is behind it"):
            await cluster.push(folder(tmp_path, 1))
        assert not await plane.abort()
        assert cluster.over.pop() == "refused"
        await plane.start()
        with pytest.raises(WeightsBusyError, match="other replicas serve than those of the transfer group"):
            await plane.update([{}])
        assert not await plane.abort()
        assert cluster.over.pop() == "refused"
        cluster.replicas["a"].fails["apply 3"] = WeightsFailedError("no memory")
        with pytest.raises(WeightsFailedError):
            await cluster.push(folder(tmp_path, 3))
        assert not await plane.abort()
        assert cluster.over.pop() == "failed"
        await plane.start()
        await eventually(plane.give_up_if_silent)
        assert cluster.over == ["given_up"]
