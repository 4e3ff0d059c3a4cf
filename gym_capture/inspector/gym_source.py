"""A directory of NeMo Gym's captures."""

from __future__ import annotations

import os
from pathlib import Path

from gym_capture.data.nemo_gym import RECORDS_SUFFIX, compressed_files, read_rollout, rollout_sizes
from gym_capture.inspector.from_records import see_records
from gym_capture.inspector.log_source import state_of
from gym_capture.inspector.seen import SeenRollout
from gym_capture.inspector.source import NOTHING_KNOWN, Basics, Look, Options, Shows, Source


class GymSource(Source):
    """What somebody still writes to it is seen at the next look."""

    kind = "nemo-gym"

    def __init__(self, directory: Path, options: Options = NOTHING_KNOWN) -> None:
        self.directory = directory
        self.title = str(directory)
        self.shows = Shows(records=True)
        self._options = options
        self._sizes: dict[str, int] = {}

    def found(self) -> str:
        found = f"{len(rollout_sizes(self._directory)):,} rollouts that NeMo Gym captured, in {self.directory}"
        left = len(compressed_files(self._directory))
        return f"{found}; {left:,} files are compressed, and not read: gunzip *{RECORDS_SUFFIX}.gz" if left else found

    @property
    def _directory(self) -> Path:
        assert self.directory is not None
        return self.directory

    def look(self) -> Look:
        sizes = rollout_sizes(self._directory)
        changed = [name for name, size in sizes.items() if self._sizes.get(name) != size]
        gone = list(self._sizes.keys() - sizes.keys())
        self._sizes = sizes
        return Look(changed=[self._basics(name) for name in changed], gone=gone)

    def _basics(self, rollout_id: str) -> Basics:
        try:
            changed_at = os.stat(self._directory / f"{rollout_id}{RECORDS_SUFFIX}").st_mtime
        except OSError:
            changed_at = None
        return Basics(rollout_id=rollout_id, state=state_of(None, may_grow=False), finished_at=changed_at)

    def read(self, rollout_id: str) -> SeenRollout | None:
        if rollout_id not in self._sizes:  # an id from a URL is no path
            return None
        return see_records(read_rollout(self._directory, rollout_id), special=self._options.special)
