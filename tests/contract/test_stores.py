"""The contract of sinks and sources, over every store of this package."""

import asyncio
from pathlib import Path

import pytest

from gym_capture.capture.operations import Begin, Commit, Operation
from gym_capture.capture.records import Snapshot
from gym_capture.conformance import CHECKS, DURABILITY_CHECKS, Result, Store, run_check, run_conformance
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.base import EncodedStore, MeasuredStore, StoreFactory
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore


@pytest.mark.parametrize("name", CHECKS)
async def test_memory_store_keeps_the_contract(name: str) -> None:
    _assert_passed(await run_check(name, MemoryStore.open))


@pytest.mark.parametrize("name", [*CHECKS, *DURABILITY_CHECKS])
@pytest.mark.parametrize("segment_bytes", [1, 64 << 20])
async def test_log_store_keeps_the_contract(name: str, segment_bytes: int, tmp_path: Path) -> None:
    async def open_log() -> LogStore:
        return await LogStore.open(tmp_path, segment_bytes=segment_bytes)

    async def reopen(store: Store) -> Store:
        await store.close()
        return await open_log()

    _assert_passed(await run_check(name, open_log, reopen=reopen))


async def test_suite_reports_what_a_store_does_wrong() -> None:
    class Forgetful(MemoryStore):
        """Acknowledges records that it does not keep, and loses its connection when it is read."""

        async def freeze(self, rollout_id: str) -> Snapshot:
            raise StoreUnavailableError("gone")

        async def write(self, operation: Operation) -> int:
            if isinstance(operation, Commit):
                return operation.epoch
            if isinstance(operation, Begin) and operation.rollout_id == "r0":
                await asyncio.Event().wait()
            return await super().write(operation)

    async def forgetful() -> Forgetful:
        return Forgetful()

    results = {result.name: result for result in await run_conformance(forgetful, timeout_s=0.2)}
    assert list(results) == list(CHECKS)
    assert results["rollout_ids_are_checked"].passed
    assert results["conflicting_put_is_refused"].failure == ("a conflicting put: got 1, expected ConflictingCallError")
    assert results["racing_drop_loses_nothing"].failure == "did not finish within 0.2 s"
    assert results["freeze_repeats"].failure == "raised StoreUnavailableError('gone')"
    assert results["freeze_repeats"].contract == "Freezing the same content gives the same snapshot id and version."


def _assert_passed(result: Result) -> None:
    assert result.passed, f"{result.contract}\n{result.failure}"


async def test_abilities_of_a_store_are_declared() -> None:
    assert StoreFactory.at("gym_capture.stores.log:open_log").takes_mirror
    plain = StoreFactory.at("gym_capture.stores.memory:MemoryStore.open")
    assert not plain.takes_mirror
    store = await plain.open()

    class LooksEncoded(MemoryStore):
        async def freeze_encoded(self, rollout_id: str) -> bytes:
            raise AssertionError("not declared, not called")

    assert not isinstance(store, EncodedStore | MeasuredStore)
    assert not isinstance(LooksEncoded(), EncodedStore)
    assert issubclass(LogStore, EncodedStore)
    assert issubclass(LogStore, MeasuredStore)
