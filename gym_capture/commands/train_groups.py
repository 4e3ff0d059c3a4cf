"""Where `gym-capture train` has its groups from: files, files that a job still writes, or a job that it plays itself.

Invariant: a run goes on with the source that it was begun with. A stream's position is in the run's checkpoints, so no
group is trained twice and none is lost, however the run ends.

Flow: `Asked`, what a person says -> a stream (`opened`), or epochs over files (`epochs_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.data.group_stream import Play, Tell
    from gym_capture.rollouts.jobfile import JobFile
    from gym_capture.rollouts.progress import JobProgress
    from trainer_bridge.group_sources import Room
    from trainer_bridge.groups import GroupSource, GroupStream, Position, StreamOptions
    from trainer_bridge.stream import TrainRollout


class Stale(StrEnum):
    """What becomes of groups that are too old."""

    DROP = "drop"
    KEEP = "keep"


AHEAD: Final = 2


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options that say where groups come from."""

    data: str | None
    follow: bool
    play: Path | None
    settings: tuple[str, ...]
    ahead: int | None
    max_lag: int | None
    stale: Stale
    retire: bool
    epochs: int
    pushes: bool
    """Whether the run pushes its weights, so that its versions are those of the graph."""

    def check(self) -> None:
        """Raises `ConfigError` for what does not go together."""
        if (self.data is None) == (self.play is None):
            raise ConfigError("name what to train on: --data a folder of trajectories, or --play a job file")
        if self.play is not None and self.follow:
            raise ConfigError("--follow is for --data: what --play plays is followed anyway")
        streams = self.play is not None or self.follow
        for option, given in (("--ahead", self.ahead is not None), ("--max-lag", self.max_lag is not None)):
            if given and not streams:
                raise ConfigError(f"{option} is for groups that come while the run trains: --follow, or --play")
        if streams and self.epochs > 1:
            raise ConfigError("--epochs: groups that come while the run trains are trained once")
        if self.max_lag is not None and not self.pushes:
            raise ConfigError("--max-lag counts versions of the weights that this run pushes: say --push, and where to")
        for option, value in (("--set", self.settings), ("--retire", self.retire)):
            if value and self.play is None:
                raise ConfigError(f"{option} is for the job of --play")

    def begun_with(self, job: JobFile | None) -> dict[str, str]:
        """What a run's folder is of, beside the model."""
        if job is not None:
            return {"play": str(job.out.resolve())}
        return {"follow" if self.follow else "data": str(self.data)}

    @property
    def stream_options(self) -> StreamOptions:
        from trainer_bridge.groups import StreamOptions

        # A job that is played is held back by its `Room`, which counts what the trainer has not taken yet.
        ahead = 1 if self.play is not None else AHEAD if self.ahead is None else self.ahead
        return StreamOptions(ahead=ahead, max_lag=self.max_lag, stale=self.stale.value)


def epochs_of(data: str, epochs: int) -> Iterator[tuple[TrainRollout, ...]]:
    """The groups of a folder, epoch after epoch. Raises what reading them raises."""
    from trainer_bridge.stream import groups_of, parquet_batches, read_rollouts

    for _ in range(epochs):
        yield from groups_of(read_rollouts(parquet_batches(data)))


def job_of(path: Path, settings: tuple[str, ...]) -> JobFile:
    """The job to be played, on whose graph's cluster this process is from then on. Raises `ConfigError`."""
    from gym_capture.commands.cluster import join_cluster
    from gym_capture.commands.job_files import job_of_options
    from gym_capture.commands.playing import check_server

    job = job_of_options(path, {}, settings)
    check_server(job.endpoint.url)
    join_cluster(job.endpoint.ray_address, namespace=job.endpoint.namespace)  # by the main thread, which has signals
    return job


@contextmanager
def opened(
    asked: Asked,
    job: JobFile | None,
    *,
    position: Position | None,
    version: Callable[[], int],
    progress: JobProgress,
    note: Callable[[str], None],
) -> Iterator[GroupStream]:
    """The stream of groups that was asked for, for a run that goes on at `position`."""
    from trainer_bridge.group_sources import ParquetGroups
    from trainer_bridge.groups import GroupStream

    source: GroupSource
    if job is not None:
        source = _played(job, AHEAD if asked.ahead is None else asked.ahead, asked.retire, progress, note)
    else:
        assert asked.data is not None
        source = ParquetGroups(asked.data, follow=True)
    with GroupStream(source, asked.stream_options, position=position, version=version) as stream:
        yield stream


def _played(job: JobFile, ahead: int, retire: bool, progress: JobProgress, note: Callable[[str], None]) -> GroupSource:
    from gym_capture.commands.playing import records_of
    from trainer_bridge.group_sources import PlayedGroups, Room

    room = Room(ahead)
    return PlayedGroups(
        _play(job, room, progress, note),
        source=records_of(job.endpoint.namespace),
        group_size=job.samples,
        retire=retire,
        room=room,
    )


def _play(job: JobFile, room: Room, progress: JobProgress, note: Callable[[str], None]) -> Play:
    from gym_capture.commands.playing import On, playable

    async def play(tell: Tell) -> None:
        async with playable(job, On.HERE, progress=progress, note=note, may_begin=room.enter, joined=True) as ready:
            await ready.play(lambda row: tell({**asdict(row), "agent_name": job.harness.name}))

    return play
