"""One suite that any store can be put through, whoever wrote it. (`lineage` has one for lineages, `engine`
one for engines.)

Invariant: a check is one sentence of the contract in `gym_capture.capture.protocols`; its docstring is that sentence,
its name says it in short. A check gets a store of its own that nothing was written to.

Flow: `run_conformance(factory)` -> one `Result` per check -> a test asserts on them, a command prints them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from gym_capture.conformance.checks import CHECKS as _OF_CALLS
from gym_capture.conformance.handing_on import CHECKS as _OF_HANDING_ON
from gym_capture.conformance.handing_on import DURABILITY_CHECKS as _OF_HANDING_ON_DURABLY
from gym_capture.conformance.outcomes import CHECKS as _OF_OUTCOMES
from gym_capture.conformance.outcomes import DURABILITY_CHECKS as _OF_OUTCOMES_DURABLY
from gym_capture.conformance.restarts import DURABILITY_CHECKS as _OF_CALLS_DURABLY
from gym_capture.conformance.support import (
    Check,
    ConformanceError,
    DurabilityCheck,
    Factory,
    Reopen,
    Store,
    sample_entry,
    sample_intent,
)

__all__ = [
    "CHECKS",
    "DURABILITY_CHECKS",
    "Check",
    "ConformanceError",
    "DurabilityCheck",
    "Factory",
    "Reopen",
    "Result",
    "Store",
    "contract_of",
    "run_check",
    "run_conformance",
    "run_one",
    "sample_entry",
    "sample_intent",
    "settled",
]


CHECKS: Final[Mapping[str, Check]] = {**_OF_CALLS, **_OF_OUTCOMES, **_OF_HANDING_ON}
"""The checks that every store is put through, by name."""
DURABILITY_CHECKS: Final[Mapping[str, DurabilityCheck]] = {
    **_OF_CALLS_DURABLY,
    **_OF_OUTCOMES_DURABLY,
    **_OF_HANDING_ON_DURABLY,
}
"""The checks of a store that survives a restart."""

_StoreT = TypeVar("_StoreT", bound=Store)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check."""

    name: str
    contract: str
    """The sentence that was checked."""
    failure: str | None
    """None: it holds."""

    @property
    def passed(self) -> bool:
        return self.failure is None


async def run_conformance(factory: Factory, *, reopen: Reopen | None = None, timeout_s: float = 60.0) -> list[Result]:
    """Puts stores that `factory` makes through every check, those about restarts only if there is a `reopen`."""
    results = [await run_one(name, check, factory, timeout_s) for name, check in CHECKS.items()]
    if reopen is not None:
        for name, durability_check in DURABILITY_CHECKS.items():
            results.append(await run_one(name, _with_reopen(durability_check, reopen), factory, timeout_s))
    return results


async def run_check(name: str, factory: Factory, *, reopen: Reopen | None = None, timeout_s: float = 60.0) -> Result:
    """One check by its name. Raises `KeyError` for a name that is in neither list."""
    if name in CHECKS:
        return await run_one(name, CHECKS[name], factory, timeout_s)
    check = DURABILITY_CHECKS[name]
    if reopen is None:
        return Result(name, contract_of(check), "needs a way to reopen the store")
    return await run_one(name, _with_reopen(check, reopen), factory, timeout_s)


async def run_one(
    name: str,
    check: Callable[[_StoreT], Awaitable[None]],
    factory: Callable[[], Awaitable[_StoreT]],
    timeout_s: float,
) -> Result:
    """Puts one store that `factory` makes through `check`. Whatever either raises is the result."""

    async def attempt() -> None:
        store = await factory()
        try:
            await check(store)
        finally:
            await store.close()

    return await settled(name, contract_of(check), attempt(), timeout_s)


async def settled(name: str, contract: str, attempt: Awaitable[None], timeout_s: float) -> Result:
    """The result of `attempt`. Whatever it raises is the result."""
    # Gathered, not awaited: whatever a foreign store raises is a result of the suite, not an end to it.
    (outcome,) = await asyncio.gather(asyncio.wait_for(attempt, timeout_s), return_exceptions=True)
    if outcome is None:
        return Result(name, contract, None)
    if isinstance(outcome, ConformanceError):
        return Result(name, contract, str(outcome))
    if isinstance(outcome, TimeoutError):
        return Result(name, contract, f"did not finish within {timeout_s:g} s")
    return Result(name, contract, f"raised {outcome!r}")


def _with_reopen(check: DurabilityCheck, reopen: Reopen) -> Check:
    async def run(store: Store) -> None:
        await check(store, reopen)

    run.__doc__ = check.__doc__
    return run


def contract_of(check: Callable[..., object]) -> str:
    """The sentence that a check checks: its docstring, on one line."""
    return " ".join((inspect.getdoc(check) or "").split())
