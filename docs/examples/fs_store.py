"""A store on anything that `pyarrow.fs` reaches: S3, GCS, Azure, HDFS, a local folder.

Invariant: a write is acknowledged when its object is whole in the file system, and a restart finds exactly what was
acknowledged, plus possibly some that was under way. Nothing is asked of the file system but to write, read, list and
delete whole objects: no append, no rename, no lock, no order of listing.

Flow: an operation is *decided* by `RolloutStates`, the state machine that every store of gym-capture shares -> the fact
that comes out becomes one object -> it is *applied*. Facts are a set: an object that is there twice, or listed late, or
that belongs to an attempt that is over, changes nothing. So opening is: list, read, apply.

    <rollout id>~<epoch>~<kind>~<hash of the call id or reason>        16 bytes of digest, then the fact

`Drop`, `Clear` and `Close` write a tombstone, which says that lower epochs do not count, and then delete their objects.
The tombstone stays; a lifecycle rule may expire it, because epochs start from the clock and are never given out again.

Configure it with `state.store: fs_store:open_store` and `state.store_kwargs: {uri: "s3://bucket/records"}`; check it
with `gym-capture conformance fs_store:open_store --durability`. One store at a time may have a folder open.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import pyarrow.fs

from gym_capture.capture.codec import decode_intent, decode_or_problem, peek_entry
from gym_capture.capture.facts import (
    Abandoned,
    Begun,
    Committed,
    Completed,
    DeliveryKnown,
    Event,
    HandedOn,
    MarkedIncomplete,
    ProblemFound,
    Registered,
    Replayed,
    Retired,
    WentOn,
)
from gym_capture.capture.operations import Operation
from gym_capture.capture.records import RecordProblem, Snapshot
from gym_capture.capture.snapshot_codec import with_delivery
from gym_capture.capture.suffixes import complete
from gym_capture.errors import RecordError, StoreUnavailableError
from gym_capture.stores.rollout_states import Prepared, RolloutStates, prepared

_T = TypeVar("_T")

_DIGEST_BYTES: Final = 16
_REQUESTS_AT_A_TIME: Final = 16


async def open_store(*, directory: str | Path, uri: str | None = None) -> FsStore:
    """The store of one shard.

    `directory` is the shard's own: its last part names the folder below `uri`; without a `uri` it is the folder.
    """
    if uri is None:
        return await FsStore.open(pyarrow.fs.LocalFileSystem(), str(directory))
    fs, root = pyarrow.fs.FileSystem.from_uri(uri)
    return await FsStore.open(fs, f"{root}/{Path(directory).name}")


class FsStore:
    """A `RecordStore` on one folder of objects. Made by `open`; lives on one event loop."""

    def __init__(self, objects: _Objects, threads: ThreadPoolExecutor, states: RolloutStates) -> None:
        self._objects = objects
        self._threads = threads
        self._states = states
        self._names: dict[str, set[_Name]] = {}
        """The objects of each rollout, those whose writing failed included: they may be there."""
        # A lock lives as long as somebody holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._under_way: set[asyncio.Future[int]] = set()
        self._is_closed = False

    @classmethod
    async def open(cls, fs: Any, root: str) -> FsStore:
        """Opens a folder, making it if it is not there, and reads it. `fs`: a `pyarrow.fs.FileSystem`."""
        threads = ThreadPoolExecutor(_REQUESTS_AT_A_TIME, thread_name_prefix="fs-store")
        # A clock, so that no epoch comes again even after all objects that tell of it were deleted.
        store = cls(_Objects(fs, root), threads, RolloutStates(next_epoch=time.time_ns()))
        await store._read_back()
        return store

    # writing

    async def write(self, operation: Operation) -> int:
        self._check_open()
        # A caller that goes away must not leave an object behind that the states do not know.
        writing = asyncio.ensure_future(self._settle(prepared(operation)))
        self._under_way.add(writing)
        writing.add_done_callback(self._under_way.discard)
        return await asyncio.shield(writing)

    # reading

    async def freeze(self, rollout_id: str) -> Snapshot:
        self._check_open()
        async with self._lock(rollout_id):
            snapshot, delivery = self._states.freeze(rollout_id)
            state = self._states.live(rollout_id)
            call_ids = sorted(state.of("committed")) if state is not None else []
            epoch = state.epoch if state is not None else 0
            names = [_Name.of(rollout_id, epoch, "entry", call_id) for call_id in call_ids]
            payloads = await asyncio.gather(*(self._run(self._objects.read, name) for name in names))
        read = [
            RecordProblem(reason="corrupt_object", call_id=call_id, field=None, detail=f"{name} cannot be read")
            if payload is None
            else decode_or_problem(payload, call_id=call_id)
            for name, call_id, payload in zip(names, call_ids, payloads, strict=True)
        ]
        records = (each for each in read if not isinstance(each, RecordProblem))
        entries, orphans = complete(with_delivery(records, delivery))
        return replace(
            snapshot,
            entries=entries,
            orphans=orphans,
            problems=(*snapshot.problems, *(each for each in read if isinstance(each, RecordProblem))),
        )

    async def rollout_ids(self) -> Sequence[str]:
        self._check_open()
        return self._states.live_ids()

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._threads.shutdown()

    # decide, make durable, apply

    async def _settle(self, write: Prepared) -> int:
        rollout_id = write.operation.rollout_id
        async with self._lock(rollout_id):
            event, error, epoch = self._states.decide(write)
            if event is not None:
                name, payload = _object_of(rollout_id, event, write.encoded)
                self._names.setdefault(rollout_id, set()).add(name)
                try:
                    await self._run(self._objects.write, name, payload)
                except StoreUnavailableError:
                    self._states.give_up(rollout_id)
                    raise
                self._states.apply(rollout_id, event)
                if isinstance(event, Retired):
                    await self._delete([old for old in self._names[rollout_id] if old.epoch < event.epoch])
            if error is not None:
                raise error
            return epoch

    async def _read_back(self) -> None:
        damaged: list[_Name] = []
        names: list[_Name] = await self._run(self._objects.list)
        payloads = await asyncio.gather(*(self._run(self._objects.read, name) for name in names))
        for name, payload in zip(names, payloads, strict=True):
            self._names.setdefault(name.rollout_id, set()).add(name)
            event = None if payload is None else _event_of(name, payload)
            if event is None:
                damaged.append(name)
            else:
                self._states.apply(name.rollout_id, event)
        for name in damaged:
            # Its writing was never finished, or it was damaged later: nobody knows which, so what it may belong to is
            # masked. A tombstone that cannot be read retires nothing.
            state = self._states.live(name.rollout_id)
            epoch = name.epoch if state is None or name.epoch < state.epoch else state.epoch
            problem = RecordProblem(reason="corrupt_object", call_id=None, field=None, detail=f"{name} cannot be read")
            self._states.apply(name.rollout_id, ProblemFound(epoch, problem))
        for rollout_id, of_rollout in self._names.items():
            state, tombstone = self._states.live(rollout_id), self._states.tombstone(rollout_id)
            current = max(each.epoch for each in (state, tombstone) if each is not None)
            await self._delete([name for name in of_rollout if name.epoch < current])

    async def _delete(self, names: Sequence[_Name]) -> None:
        """Gives back space. What cannot be deleted now is deleted when the store opens next."""
        for name in names:
            self._names[name.rollout_id].discard(name)
        await asyncio.gather(*(self._run(self._objects.delete, name) for name in names), return_exceptions=True)

    async def _run(self, request: Callable[..., _T], *args: object) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(request, *args))
        except OSError as error:
            raise StoreUnavailableError(f"the file system of the records does not answer: {error}") from error

    def _lock(self, rollout_id: str) -> asyncio.Lock:
        return self._locks.setdefault(rollout_id, asyncio.Lock())

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("this store is closed")


# --- objects -----------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """What an object is called. `~` stands in no rollout id."""

    rollout_id: str
    epoch: int
    kind: str
    subject: str

    @classmethod
    def of(cls, rollout_id: str, epoch: int, kind: str, subject: str) -> _Name:
        """`subject`: any text, of any length."""
        return cls(rollout_id, epoch, kind, _digest(subject.encode("utf-8", "surrogatepass")).hex())

    @classmethod
    def parse(cls, text: str) -> _Name | None:
        match text.split("~"):
            case [rollout_id, epoch, kind, subject] if epoch.isdecimal():
                return cls(rollout_id, int(epoch), kind, subject)
        return None

    def __str__(self) -> str:
        return f"{self.rollout_id}~{self.epoch:020}~{self.kind}~{self.subject}"


class _Objects:
    """Whole objects in one folder. Blocking."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root

    def list(self) -> list[_Name]:
        self._fs.create_dir(self._root, recursive=True)
        found = self._fs.get_file_info(pyarrow.fs.FileSelector(self._root))
        names = (_Name.parse(info.base_name) for info in found if info.type == pyarrow.fs.FileType.File)
        return [name for name in names if name is not None]

    def write(self, name: _Name, payload: bytes) -> None:
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            stream.write(_seal(name, payload) + payload)

    def read(self, name: _Name) -> bytes | None:
        """None if it is not there or not whole."""
        try:
            with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
                data: bytes = stream.read()
        except FileNotFoundError:
            return None
        payload = data[_DIGEST_BYTES:]
        return payload if data[:_DIGEST_BYTES] == _seal(name, payload) else None

    def delete(self, name: _Name) -> None:
        self._fs.delete_file(f"{self._root}/{name}")


def _seal(name: _Name, payload: bytes) -> bytes:
    """Tells a whole object from one that was cut, damaged, or copied to another name."""
    return _digest(str(name).encode() + b"\0" + payload)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


# --- facts -------------------------------------------------------------------------------------------------------

_PLAIN: Final[dict[str, type[Event]]] = {
    "abandoned": Abandoned,
    "incomplete": MarkedIncomplete,
    "delivery": DeliveryKnown,
    "registered": Registered,
    "completed": Completed,
    "handed_on": HandedOn,
    "went_on": WentOn,
    "replayed": Replayed,
    "retired": Retired,
}
"""The kinds whose objects are just their fields, behind the epoch."""


def _object_of(rollout_id: str, event: Event, encoded: bytes) -> tuple[_Name, bytes]:
    """`encoded`: the intent or the entry of an event that has one."""
    values: list[object]
    match event:
        case Begun(epoch, intent):
            return _Name.of(rollout_id, epoch, "intent", intent.model_call_id), encoded
        case Committed(epoch, call_id):
            return _Name.of(rollout_id, epoch, "entry", call_id), encoded
        case ProblemFound(_, problem):
            kind, values = "problem", [problem.reason, problem.call_id, problem.field, problem.detail]
        case _:
            kind = next(name for name, plain in _PLAIN.items() if isinstance(event, plain))
            values = [getattr(event, each.name) for each in fields(event) if each.name != "epoch"]
    payload = json.dumps(values)
    return _Name.of(rollout_id, event.epoch, kind, payload), payload.encode()


def _event_of(name: _Name, payload: bytes) -> Event | None:
    """None if the object holds nothing that this version reads."""
    try:
        match name.kind:
            case "intent":
                return Begun(name.epoch, decode_intent(payload))
            case "entry":
                key = peek_entry(payload)
                return Committed(name.epoch, key.call_id, key.payload_digest, key.counts)
            case "problem":
                reason, call_id, field, detail = json.loads(payload)
                return ProblemFound(
                    name.epoch, RecordProblem(reason=reason, call_id=call_id, field=field, detail=detail)
                )
            case kind if kind in _PLAIN:
                return _PLAIN[kind](name.epoch, *json.loads(payload))
    except (RecordError, ValueError, TypeError):
        return None
    return None
