"""A process that writes to a log until it is killed, and says on its standard output what was acknowledged.

python -m tests.stores.crash_writer DIRECTORY GENERATION
"""

import asyncio
import os
import sys

from gym_capture.capture.operations import Begin, Commit, Drop
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.stores.log import LogStore

WORKERS = 24


async def work(store: LogStore, generation: str, worker: int) -> None:
    for turn in range(1_000_000):
        rollout_id = f"g{generation}w{worker}r{turn // 5}"
        call_id = f"c{turn % 5}"
        epoch = await store.write(Begin(sample_intent(rollout_id, call_id)))
        acknowledged("begun", rollout_id, call_id)
        await store.write(Commit(sample_entry(rollout_id, call_id, generation=range(1 + turn % 50)), epoch=epoch))
        acknowledged("put", rollout_id, call_id)
        if turn % 10 == 9:
            snapshot = await store.freeze(rollout_id)
            acknowledged("dropping", rollout_id, "-")
            await store.write(Drop(rollout_id, snapshot.snapshot_id, snapshot.version))
            acknowledged("dropped", rollout_id, "-")


def acknowledged(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


async def main(directory: str, generation: str) -> None:
    store = await LogStore.open(directory, segment_bytes=30_000)
    await asyncio.gather(*(work(store, generation, worker) for worker in range(WORKERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
