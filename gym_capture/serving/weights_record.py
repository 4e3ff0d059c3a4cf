"""Which version a graph serves, on disk.

Invariant: a version is current from the moment at which it stands here, and a crash leaves either the one before or the
new one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from gym_capture.durable_files import replace_file
from gym_capture.errors import StoreError
from gym_capture.serving.weights_messages import Version

FILE: Final = "weights.json"


class WeightsRecord:
    """A small file in the folder of the state actors."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def read(self) -> Version | None:
        """None if there is none. Raises `StoreError` for one that is not understood."""
        try:
            return Version(**json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(
                f"{self._path} does not say which weights are served: {error}; if they are those of the model folder, "
                "remove it"
            ) from error

    def write(self, version: Version) -> None:
        """Durable when it returns. Raises `OSError`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, json.dumps(asdict(version), indent=1).encode())
