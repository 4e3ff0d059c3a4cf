"""The inspector as a route of the graph: `/inspect/`, behind the read token.

Invariant: whoever may read records may look into them, and nobody else; the page itself is open, and asks for the
token. Nothing is asked of the state actors while nobody looks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from fastapi import FastAPI

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError
from gym_capture.inspector.app import build_inspector
from gym_capture.inspector.library import Library
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.source import Options
from gym_capture.inspector.state_source import GraphState, StateSource

PATH: Final = "/inspect"


def add_inspector(
    app: FastAPI,
    state: GraphState,
    *,
    model: str,
    model_name: str,
    keyring: Keyring | None,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Adds it to the application of a replica. `loop`: the one that `state` lives on; `model`: the model folder."""
    try:
        vocabulary = Vocabulary.of_folder(Path(model))
    except ConfigError:
        vocabulary = None  # ids are shown
    options = Options(special=frozenset() if vocabulary is None else vocabulary.special)
    library = Library(StateSource(state, loop, title=f"the graph that serves {model_name}", options=options))
    admit = (lambda headers: None) if keyring is None else keyring.admit_reader
    app.mount(PATH, build_inspector(library, vocabulary=vocabulary, admit=admit))
