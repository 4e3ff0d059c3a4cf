"""Stores of captured calls, and where they keep them unless a graph names another place."""

from pathlib import Path
from typing import Final

DEFAULT_DIRECTORY: Final = Path("~/.cache/gym-capture/records")
