"""Files of one result that appear together, or not at all.

Invariant: a name that this gives to a file, it gives when all files of the result are whole and on their way out; what
was there under these names stays until then. Whatever ends the writing before - a full disk, Ctrl-C, an error of the
reader - leaves the directory as it was, or absent if it was made for this.

Flow: `staged_files(out, ...)` -> write to `path(name)` -> leaving the context removes the files that are replaced and
gives the new ones their names, in the order in which they were asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gym_capture.errors import ConfigError

_UNFINISHED: Final = ".unfinished"


class StagedFiles:
    """The files so far, under names that nobody reads."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._names: dict[str, None] = {}

    def path(self, name: str) -> Path:
        """Where to write the file that is to be called `name`."""
        self._names[name] = None
        return self.out / f".{name}{_UNFINISHED}"

    def publish(self, replaced: Sequence[Path]) -> None:
        for path in replaced:
            if path.name not in self._names:
                path.unlink()
        for name in self._names:
            self.path(name).replace(self.out / name)
        self._names.clear()

    def discard(self) -> None:
        for name in self._names:
            with suppress(OSError):
                self.path(name).unlink()


@contextmanager
def staged_files(out: Path, patterns: Sequence[str], *, what: str, overwrite: bool) -> Iterator[StagedFiles]:
    """Files in `out`, which is made if it is not there, in place of those that `patterns` name.

    Raises `ConfigError` if there are such files and `overwrite` is false, or if `out` cannot be written to. `what`
    names the result in messages.
    """
    try:
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        staged = StagedFiles(out)
        try:
            replaced = [path for pattern in patterns for path in sorted(out.glob(pattern))]
            if replaced and not overwrite:
                raise ConfigError(
                    f"{out} already holds {what} ({replaced[0].name}): choose another --out, or pass --overwrite"
                )
            for path in out.glob(f".*{_UNFINISHED}"):
                path.unlink()
            yield staged
            staged.publish(replaced)
        except BaseException:
            staged.discard()
            if made:
                with suppress(OSError):
                    out.rmdir()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {what} to {out}: {_one_line(error)}") from None


def _one_line(error: OSError) -> str:
    """What the system says. Arrow says it in many words."""
    return os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
