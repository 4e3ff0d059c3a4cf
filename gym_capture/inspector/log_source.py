"""The logs of a graph, also while it writes them.

Invariant: as `stores.log_follower`: nothing is changed, no lock is taken. A shard that is new is found by the next
look, and one that cannot be read holds up no other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from gym_capture.capture.outcomes import Outcome
from gym_capture.capture.records import Snapshot
from gym_capture.data.advantages import reward_problems
from gym_capture.data.log_directories import holds_logs, log_directories
from gym_capture.errors import GymCaptureError
from gym_capture.inspector.from_records import see_records
from gym_capture.inspector.seen import SeenRollout
from gym_capture.inspector.source import NOTHING_KNOWN, Basics, Look, Options, Shows, Source, State
from gym_capture.reasons import MaskReason, join_reason
from gym_capture.stores.log_follower import Followed, LogFollower

_LOCK: Final = "lock"
_LOCKS: Final = Path("/proc/locks")
_INODE: Final = 5
"""The place of device and inode in a line of it."""
_MIB: Final = 2**20


class LogSource(Source):
    """A log directory, or a directory of some."""

    kind = "log"

    def __init__(self, directory: Path, options: Options = NOTHING_KNOWN) -> None:
        """Raises `ConfigError` if there is no log in it."""
        self.directory = directory
        self.title = str(directory)
        self.shows = Shows(records=True)
        self._options = options
        self._logs = [LogFollower(path) for path in log_directories(directory)]
        self._was_live = self.is_live

    @property
    def is_live(self) -> bool:
        return any(is_locked(log.directory) for log in self._logs)

    def found(self) -> str:
        logs = "1 log" if len(self._logs) == 1 else f"{len(self._logs)} logs"
        size = sum(log.size_bytes() for log in self._logs) / _MIB
        return f"{logs} of {size:,.1f} MiB in {self.directory}{', which a graph has open' if self.is_live else ''}"

    def look(self) -> Look:
        is_live = self.is_live
        # What was under way is not any more, or may be again.
        all_changed, self._was_live = is_live != self._was_live, is_live
        self._find_new()
        changed: list[Basics] = []
        gone: list[str] = []
        problem: str | None = None
        is_more = False
        for log in self._logs:
            try:
                is_more = log.advance() or is_more
            except GymCaptureError as error:
                problem = str(error)
            news = log.news()
            for rollout_id in dict.fromkeys([*news, *log.rollouts]) if all_changed else news:
                rollout = log.rollouts.get(rollout_id)
                if rollout is not None and (rollout.places or rollout.masking):
                    changed.append(_basics(rollout_id, rollout, is_live=is_live))
                else:
                    gone.append(rollout_id)
        return Look(changed=changed, gone=gone, is_more=is_more, problem=problem)

    def _find_new(self) -> None:
        assert self.directory is not None
        known = {log.directory for log in self._logs}
        self._logs += [LogFollower(path) for path in holds_logs(self.directory) if path not in known]

    def read(self, rollout_id: str) -> SeenRollout | None:
        for log in self._logs:
            frozen = log.read(rollout_id)
            if frozen is not None:
                registration = frozen.snapshot.registration
                masks = () if self._options.ends_elsewhere else masks_of(frozen.snapshot, may_grow=self._was_live)
                return see_records(
                    frozen.snapshot,
                    begun=frozen.begun,
                    extra_mask_reasons=masks,
                    special=self._options.special,
                    input_json=None if registration is None else registration.task,
                )
        return None


def _basics(rollout_id: str, rollout: Followed, *, is_live: bool) -> Basics:
    said, outcome = rollout.registration, rollout.outcome
    return Basics(
        rollout_id=rollout_id,
        group=None if said is None else said.group_id,
        sample=None if said is None else said.sample,
        state=state_of(outcome, may_grow=is_live),
        reward=None if outcome is None else outcome.reward,
        calls=rollout.calls,
        finished_at=rollout.last_at or None,
    )


def state_of(outcome: Outcome | None, *, may_grow: bool) -> State:
    """Nobody need say how a rollout ended: one that nobody can add to is over."""
    if outcome is not None:
        return State.FINISHED if outcome.failure is None else State.FAILED
    return State.LIVE if may_grow else State.FINISHED


def masks_of(snapshot: Snapshot, *, may_grow: bool) -> tuple[str, ...]:
    """Why a build masks a rollout over how it ended; nothing while it may still end otherwise."""
    outcome = snapshot.outcome
    if outcome is None and may_grow:
        return ()
    if outcome is not None and outcome.failure is not None:
        return (join_reason(MaskReason.INCOMPLETE, outcome.failure),)
    is_compared = snapshot.registration is not None
    return reward_problems(None if outcome is None else outcome.reward) if is_compared else ()


def is_locked(directory: Path) -> bool:
    """Whether a store has the directory open, as the system says it: to try the lock would be to take it."""
    try:
        found = (directory / _LOCK).stat()
        locks = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    held = "%02x:%02x:%d" % (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)  # noqa: UP031 - as the file has it
    return any(len(words) > _INODE and words[1] == "FLOCK" and words[_INODE] == held for words in map(str.split, locks))
