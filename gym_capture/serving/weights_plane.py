"""The coordinator of the weight plane: one version for all replicas of a graph.

Invariant: a version is current once it is in the record, and it gets there only after every replica has loaded it,
while all of them are paused. If anything fails before, all load the version before it again, and only then go on; one
that cannot is dismissed, and Serve replaces it. A replica joins - at its start, or when the coordinator has started
anew - only with the current version. So what is sampled is sampled from the current version, on every replica.

Flow of an update: `start` -> `update`: every replica checks the payload, nothing changes -> `finish`: all pause and
load, the record is written, all go on. The trainer may `pause` before and `resume` after. By a transfer (the engine's
own backend) the weights come with `update`, so replicas pause then.

A trainer that begins and is not heard of again is given up after `trainer_timeout_s`: all go on with what they had.

Nothing here knows of Ray: `weights_actor` runs it in an actor, `weights_agent` is the replica's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from gym_capture.errors import (
    GymCaptureError,
    StoreError,
    StoreUnavailableError,
    WeightsBusyError,
    WeightsFailedError,
    WeightsRefusedError,
)
from gym_capture.serving.weights_members import Answer, Gone, Member, Members, are_lost, demand, failed, named
from gym_capture.serving.weights_messages import (
    Apply,
    Check,
    Checksums,
    Label,
    Later,
    Load,
    Numbered,
    Order,
    Pause,
    Rejoin,
    Report,
    Resume,
    Seat,
    Transfer,
    Version,
    Welcome,
)
from gym_capture.serving.weights_record import Copies, WeightsRecord
from gym_capture.serving.weights_update import Outcome, Update, check_folder_info, outcome_of
from gym_capture.weights import PauseMode, Payload

logger = logging.getLogger(__name__)

TRAINER_TIMEOUT_S: Final = 600.0
STEP_TIMEOUT_S: Final = 1800.0


class WeightPlane:
    """Runs in one event loop. Methods raise a `WeightsError`, or `StoreUnavailableError` while there is no replica."""

    def __init__(
        self,
        record: WeightsRecord,
        *,
        trainer_timeout_s: float = TRAINER_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        on_over: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """Opens the record, which blocks. Raises what `WeightsRecord.open` does. `on_over`: what became of an update is
        told once, when it ends."""
        self._record = record
        self._current = record.open()
        self._is_record_lost = self._current is None
        """...or there never was one: whoever joins with a higher version knows better."""
        self._trainer_timeout_s = trainer_timeout_s
        self._step_timeout_s = step_timeout_s
        self._members = Members()
        self._update: Update | None = None
        self._on_over = on_over
        self._paused_by_trainer = False
        self._broken: str | None = None
        """Why all stay paused: what replicas hold is no version, and there is none to go back to."""
        self._group: tuple[str, ...] = ()
        """The replicas that a transfer group was made of."""
        self._one_at_a_time = asyncio.Lock()
        self._heard = time.monotonic()

    def configure(self, *, trainer_timeout_s: float, step_timeout_s: float) -> None:
        """Other timeouts from now on."""
        self._trainer_timeout_s, self._step_timeout_s = trainer_timeout_s, step_timeout_s

    # ---- replicas

    async def join(self, seat: Seat, gone: Gone) -> Welcome | Load | Later:
        """A replica that would like to serve. Waits while others change their weights."""
        async with self._one_at_a_time:
            if self._update is not None and self._update.has_transfer:
                if self._members:
                    return Later()
                self._over(Outcome.FAILED)  # nobody is left who has a part of it
            current = await self._current_for(seat)
            has_it = seat.is_sound and seat.version.is_same(current)
            if not has_it and current.can_be_loaded and seat.cannot_load != current.digest:
                return Load(current)
            if not has_it:
                logger.error(
                    "replica %s cannot have weights %d before the next update, and serves nothing until then",
                    seat.replica,
                    current.number,
                )
            must_answer = not has_it and not any(member.is_current for member in self._members)
            self._members.add(Member(seat, gone, is_current=has_it))
            return Welcome(self._paused_by_trainer or not has_it, has_it, must_answer)

    async def _current_for(self, seat: Seat) -> Version:
        """The version that a replica must have to join."""
        current = self._current
        if current is not None and current.model != seat.version.model:
            logger.warning("another model is served now: %s", seat.version.model)
            for member in self._members:
                self._members.dismiss(member, "another model is served", must_end=False)
            current = None
        if current is None:
            current = seat.version if seat.is_sound else Version(number=0, model=seat.version.model)
            await self._keep(current)
        elif self._is_record_lost and seat.is_sound and seat.version.number > current.number:
            await self._keep(seat.version)
            current = seat.version
            await self._settle(await self._all(Apply(current)), current)
        return current

    async def _keep(self, version: Version) -> None:
        try:
            await asyncio.to_thread(self._record.write, version)
        except OSError as error:
            raise StoreUnavailableError(f"which weights are served cannot be written down: {error}") from error
        self._current = version

    async def keep_copied(self, copies: Copies | None) -> None:
        """Makes another copy of the record if the one that was there is lost, or there is to be one now."""
        try:
            await asyncio.to_thread(self._record.keep_copied, copies)
        except (OSError, StoreError) as error:
            logger.error("the record of the weights has no copy: %s", error)

    async def exchange(self, replica: str, report: Report | None) -> Numbered:
        """What a member is to do next."""
        member = self._members.find(replica)
        return Numbered(0, Rejoin()) if member is None else await member.next_order(report)

    async def leave(self, replica: str) -> None:
        """A replica that ends."""
        self._members.remove(replica)

    # ---- the trainer

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """No token is sampled from when it returns, until `resume`."""
        async with self._operation():
            self._paused_by_trainer = True
            demand(await self._all(Pause(mode, clear_cache)), "could not pause")

    async def resume(self) -> None:
        async with self._operation():
            if self._broken is not None:
                raise WeightsBusyError(f"there is nothing to go on with: {self._broken}; push weights first")
            if self._update is not None and self._update.has_transfer:
                raise WeightsBusyError("weights are on their way: finish the update first, or abort it")
            self._paused_by_trainer = False
            await self._go_on()

    async def init(self, info: Mapping[str, Any]) -> None:
        """Makes a transfer group of the trainer and all replicas, which get their ranks one after another."""
        async with self._operation():
            rank = info.get("rank_offset", 1)
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise WeightsRefusedError(f"init_info: rank_offset must be a whole number: got {str(rank)[:50]!r}")
            work = []
            for member in self._members:
                own = {**info, "rank_offset": rank} if "rank_offset" in info else info
                work.append((member, Transfer("init", own)))
                rank += member.seat.world_size
            self._group = self._members.names
            demand(await self._members.ask(work, within_s=self._step_timeout_s), "could not join the transfer group")

    async def shut_down(self) -> None:
        """Ends the transfer group."""
        async with self._operation():
            self._group = ()
            demand(await self._all(Transfer("shutdown", {})), "could not leave the transfer group")

    async def start(self, owner: str | None = None) -> None:
        """`owner`: a name by which whoever begins the update may give it up, and no other."""
        if self._update is not None:
            raise WeightsBusyError("another weight update is under way: finish it, or abort it, before the next one")
        async with self._operation():
            if self._update is not None:
                raise WeightsBusyError("another weight update is under way: wait until it is over")
            self._update = Update(owner=owner)
            self._is_record_lost = False  # what a replica has from now on may be half of an update

    async def update(self, info: Mapping[str, Any] | list[Any]) -> Payload | None:
        """Checks a folder on every replica (`{"folder": ...}`), or receives weights by a transfer."""
        async with self._operation():
            update = self._under_way()
            if isinstance(info, list) or "folder" not in info:
                await self._receive(update, info)
                return None
            check_folder_info(info)
            update.may_go_back = info.get("force") is True
            update.allow_non_finite = info.get("allow_non_finite") is True
            update.payload = None  # of a folder before this one nothing counts
            update.checked.clear()
            update.read_on.clear()
            try:
                update.payload = await self._checked(update, str(info["folder"]))
                self._forward(update.payload.version, update.payload.digest, may_go_back=update.may_go_back)
            except GymCaptureError as error:
                self._over(outcome_of(error))  # nothing was changed, and the next one may come
                raise
            return update.payload

    async def finish(self, version: int | None) -> dict[str, object]:
        """Makes what was sent the current version on all replicas. Returns what it took."""
        async with self._operation():
            update = self._under_way()
            try:
                done = await self._finished(update, version)
            except BaseException as error:
                self._over(outcome_of(error))
                raise
            self._over(Outcome.APPLIED)
            return done

    async def abort(self, outcome: Outcome = Outcome.ABORTED, *, owner: str | None = None) -> bool:
        """Gives up the update under way, and goes on with what is current. False if there was none, or not of `owner`,
        if one is named."""
        async with self._operation():
            update = self._update
            if update is not None and owner not in (None, update.owner):
                return False
            self._over(outcome)
            if update is not None and update.has_transfer:
                await self._drop_transfer("the update was aborted", list(self._members))
            return update is not None

    async def world_size(self) -> int:
        async with self._operation():
            return sum(member.seat.world_size for member in self._members)

    async def is_paused(self) -> bool:
        return self._paused_by_trainer or self._broken is not None

    async def info(self) -> dict[str, object]:
        """What is served. Answers also while replicas change their weights."""
        current = self._current
        return {
            "weight_version": None if current is None else str(current.number),
            "folder": None if current is None else current.folder,
            "digest": None if current is None else current.digest,
            "is_paused": await self.is_paused(),
            "is_updating": self._update is not None,
            "replicas": [member.replica for member in self._members if member.is_current],
            "waiting_replicas": [member.replica for member in self._members if not member.is_current],
            "dtype": next((member.seat.dtype for member in self._members), None),
            "problem": self._broken,
        }

    async def checksums(self) -> dict[str, str]:
        """Of the tensors in the engines. Raises `WeightsFailedError` if those of two replicas differ."""
        async with self._operation():
            answers = await self._all(Checksums())
            demand(answers, "could not read its weights")
            first, *others = answers
            for other in others:
                if other.value != first.value:
                    raise WeightsFailedError(
                        f"replicas {first.member.replica} and {other.member.replica} hold different weights"
                    )
            return dict(first.value)  # type: ignore[call-overload, no-any-return]  # as the seam says

    async def give_up_if_silent(self) -> bool:
        """Ends what a trainer has begun that is not heard of any more. Returns whether there was anything."""
        if not (self._paused_by_trainer or self._update is not None) or self._one_at_a_time.locked():
            return False
        silent_s = time.monotonic() - self._heard
        if silent_s < self._trainer_timeout_s:
            return False
        logger.error(
            "the trainer has not been heard of for %.0f s: going on with the weights that are served", silent_s
        )
        self._paused_by_trainer = False
        with contextlib.suppress(StoreUnavailableError):  # no replica: nothing to go on
            await self.abort(Outcome.GIVEN_UP)
            if self._broken is None:
                async with self._operation():
                    await self._go_on()
        return True

    # ---- how

    @contextlib.asynccontextmanager
    async def _operation(self) -> AsyncGenerator[None]:
        """One operation of a trainer."""
        async with self._one_at_a_time:
            self._heard = time.monotonic()
            if not self._members:
                raise StoreUnavailableError("no replica of this graph is ready yet; try again later")
            try:
                yield
            finally:
                self._heard = time.monotonic()

    def _over(self, outcome: Outcome) -> None:
        if self._update is not None:
            self._update = None
            self._on_over(outcome)

    def _under_way(self) -> Update:
        if self._update is None:
            raise WeightsBusyError("no weight update is under way: start_weight_update comes first")
        return self._update

    def _forward(self, number: int, digest: str, *, may_go_back: bool) -> None:
        """Raises `WeightsRefusedError` for a version that is not ahead of the current one."""
        current = self._now()
        is_same = (number, digest) == (current.number, current.digest)
        if number <= current.number and not is_same and not may_go_back:
            what = "is served already, with other weights" if number == current.number else "is behind it"
            raise WeightsRefusedError(
                f"version {number} does not follow version {current.number}, which is served: it {what}; "
                "`force` serves it all the same"
            )

    def _now(self) -> Version:
        assert self._current is not None, "members have joined with it"
        return self._current

    async def _checked(self, update: Update, folder: str) -> Payload:
        """One replica of each node reads the folder, then the others there see whether it is the same for them."""
        unchecked = [member for member in self._members if member.replica not in update.checked]
        readers = {member.seat.node: member for member in unchecked if member.seat.node not in update.read_on}
        answers = await self._all(Check(folder, update.allow_non_finite), readers.values())
        demand(answers, f"refuses {folder}")
        update.read_on |= readers.keys()
        others = [member for member in unchecked if member not in readers.values()]
        answers += await self._all(Check(folder, update.allow_non_finite, was_read=True), others)
        demand(answers, f"refuses {folder}")
        payloads = [answer.value for answer in answers] + ([] if update.payload is None else [update.payload])
        if any(payload != payloads[0] for payload in payloads):
            raise WeightsRefusedError(f"replicas see different weights at {folder}: it must be on shared storage")
        update.checked |= {member.replica for member in unchecked}
        assert isinstance(payloads[0], Payload)
        return payloads[0]

    async def _finished(self, update: Update, number: int | None) -> dict[str, object]:
        before = self._now()
        if update.has_transfer:
            return await self._finished_transfer(number, before)
        if update.payload is None:
            raise WeightsBusyError("no weights were sent: update_weights comes before finish_weight_update")
        payload = update.payload
        if number is not None and number != payload.version:
            raise WeightsRefusedError(
                f"{payload.folder} holds version {payload.version}, and finish_weight_update says {number}"
            )
        if set(self._members.names) - update.checked:  # some have come since
            await self._checked(update, payload.folder)
        new = Version(number=payload.version, model=before.model, folder=payload.folder, digest=payload.digest)
        if new.is_same(before) and self._broken is None and all(member.is_current for member in self._members):
            if new != before:  # they are elsewhere now, and where they were they may not be any more
                await self._keep(new)
            return self._outcome(new, paused_s=0.0)
        began = time.monotonic()
        await self._settle(await self._all(Apply(new)), new)
        return self._outcome(new, paused_s=time.monotonic() - began)

    async def _settle(self, answers: Sequence[Answer], new: Version) -> None:
        """All have loaded `new`, or not. Afterwards all have it, and it is on record; or all have the one before."""
        failures = failed(answers)
        if failures:
            why = named(failures, f"could not load version {new.number}")
            await self._go_back(why, [answer.member for answer in answers])
            raise WeightsFailedError(f"{why}; {self._left_with()}", retryable=are_lost(failures))
        try:
            await asyncio.to_thread(self._record.write, new)
        except OSError as error:
            why = f"which weights are served cannot be written down: {error.strerror}"
            await self._go_back(why, [answer.member for answer in answers])
            raise WeightsFailedError(f"{why}; {self._left_with()}") from error
        self._current, self._broken, self._is_record_lost = new, None, False
        for answer in answers:
            answer.member.is_current = True
        await self._go_on()

    async def _go_back(self, why: str, members: Iterable[Member]) -> None:
        """All load the current version again, and go on; if that is nowhere, all stay paused."""
        current = self._now()
        left = [member for member in members if member.replica in self._members.names]
        if not current.can_be_loaded:
            self._broken = f"{why}, and version {current.number} came by a transfer, so nobody can load it again"
            logger.error("all replicas are paused: %s", self._broken)
            return
        for answer in await self._all(Apply(current), left):
            if answer.error is None:
                answer.member.is_current = True
            else:
                self._members.dismiss(
                    answer.member, f"it could not load version {current.number} again: {answer.error}"
                )
        await self._go_on()

    async def _go_on(self) -> None:
        """Those that may serve do, unless the trainer has paused them."""
        if self._paused_by_trainer:
            return
        current = [member for member in self._members if member.is_current]
        for answer in await self._all(Resume(), current):
            if answer.error is not None:
                self._members.dismiss(answer.member, f"it could not resume: {answer.error}")

    def _left_with(self) -> str:
        if self._broken is not None:
            return "all replicas are paused until weights are pushed"
        return f"all replicas serve version {self._now().number}"

    def _outcome(self, version: Version, *, paused_s: float) -> dict[str, object]:
        return {"weight_version": str(version.number), "paused_s": paused_s, "replicas": len(self._members)}

    # ---- transfers

    async def _receive(self, update: Update, info: Mapping[str, Any] | list[Any]) -> None:
        members = list(self._members)
        if not update.has_transfer:
            if update.payload is not None:
                raise WeightsBusyError("this update has a folder already: a transfer takes an update of its own")
            try:
                ranks = sum(member.seat.world_size for member in members)
                if isinstance(info, list) and len(info) != ranks:
                    raise WeightsRefusedError(f"update_info has {len(info)} entries, but there are {ranks} ranks")
                demand(await self._all(Transfer("check", info)), "refuses the transfer")
                if self._members.names != self._group:
                    raise WeightsBusyError(
                        "other replicas serve than those of the transfer group: init_weight_transfer_engine comes first"
                    )
            except GymCaptureError as error:
                self._over(outcome_of(error))
                raise
            update.has_transfer = True
            await self._or_back(await self._all(Pause("keep", True)), "could not pause")
            await self._or_back(await self._all(Transfer("start", {})), "could not start the transfer")
        work: list[tuple[Member, Order]] = []
        first = 0
        for member in members:  # a list has one entry for each rank
            end = first + member.seat.world_size
            work.append((member, Transfer("update", info[first:end] if isinstance(info, list) else info)))
            first = end
        await self._or_back(await self._members.ask(work, within_s=self._step_timeout_s), "failed in the transfer")

    async def _or_back(self, answers: Sequence[Answer], what: str) -> None:
        failures = failed(answers)
        if not failures:
            return
        self._over(Outcome.FAILED)
        why = named(failures, what)
        await self._drop_transfer(why, [answer.member for answer in answers if answer.error is None])
        raise WeightsFailedError(f"{why}; {self._left_with()}")

    async def _drop_transfer(self, why: str, waiting: Sequence[Member]) -> None:
        """`waiting`: those that wait for more still; that must end before anything else is loaded."""
        await self._all(Transfer("finish", {}), waiting)
        await self._go_back(why, list(self._members))

    async def _finished_transfer(self, number: int | None, before: Version) -> dict[str, object]:
        number = before.number + 1 if number is None else number
        if number <= before.number:
            await self._drop_transfer(f"version {number} goes back", list(self._members))
            raise WeightsRefusedError(
                f"version {number} does not follow version {before.number}, which is served; {self._left_with()}"
            )
        new = Version(number=number, model=before.model, digest=uuid.uuid4().hex)
        began = time.monotonic()
        await self._or_back(await self._all(Transfer("finish", {})), "could not finish the transfer")
        await self._settle(await self._all(Label(new)), new)
        return self._outcome(new, paused_s=time.monotonic() - began)

    # ---- asking replicas

    async def _all(self, order: Order, members: Iterable[Member] | None = None) -> list[Answer]:
        asked = self._members if members is None else members
        return await self._members.ask([(member, order) for member in asked], within_s=self._step_timeout_s)
