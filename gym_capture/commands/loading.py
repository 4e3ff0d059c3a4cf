"""Loading what a person named - a model folder, a tokenizer, a device - through libraries that raise what they like.

Invariant: a folder that cannot be loaded ends a command with one line that names it and says what the library found,
never with a traceback of the library's insides. Errors of this package, Ctrl-C and the like pass through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gym_capture.errors import ConfigError, GymCaptureError
from gym_capture.extras import how_to_install
from gym_capture.printable import visible

_LONGEST: Final = 300


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Makes a `ConfigError` of an error that a library raises inside: `what`, and the library's own words."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    named = (
        *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError),
        *(SafetensorError, StrictDataclassError),
    )
    try:
        yield
    except GymCaptureError:
        raise
    except ModuleNotFoundError as error:
        if how_to_install(error) is not None:
            raise  # `cli.main` says it
        raise ConfigError(f"{what}: {error}") from error
    except BaseException as error:
        # `tokenizers` raises `Exception` itself, which no list of types can name without naming all of them.
        if type(error) is not Exception and not isinstance(error, named):
            raise
        raise ConfigError(f"{what}: {one_line(str(error)) or type(error).__name__}") from error


def one_line(text: str) -> str:
    """White space made one space, and an end that is too long cut off. Does nothing to a terminal."""
    words = visible(" ".join(text.split()))
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."
