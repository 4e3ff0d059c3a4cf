"""Weights of a version as a folder of safetensors files, and what must be right about one before an engine loads it.

Invariant: `verify` returns only for a folder that is whole - every file of its manifest is there, with its size and its
checksum - and whose tensors have the names, the shapes and a fitting type of those of the model. The manifest is
written last, so a folder without one is half a folder.

Flow: a trainer writes files and `seal`s the folder -> the graph is told where it is -> `payload_at` reads the manifest
-> each replica runs `verify` before anything changes -> the engine loads the files.

Nothing here needs torch: the headers of safetensors files are JSON, and whether a number is finite stands in its bits.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from gym_capture.durable_files import replace_file, sync_directory
from gym_capture.errors import ConfigError, WeightsRefusedError

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of calls under way: they end now, they run to their end first, they go on with other weights."""
PAUSE_MODES: Final[tuple[str, ...]] = get_args(PauseMode)

MANIFEST: Final = "gym_capture_weights.json"
_FORMAT: Final = 1
_SUFFIX: Final = ".safetensors"
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER_BYTES: Final = 100_000_000
"""As safetensors itself allows."""
_PIECE_BYTES: Final = 16 << 20
_FLOATS: Final[Mapping[str, tuple[str, int]]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Types that load into each other: unsigned numbers of their size, and the exponent of infinities and NaN."""
_TIED: Final = "lm_head.weight"
"""Where the output layer is the embedding, checkpoints may have it or not, and engines take it or leave it."""
_NAMED: Final = 3
"""How many tensors a message names."""


class TensorSpec(NamedTuple):
    """A tensor, as a header describes it."""

    dtype: str
    """In the names of safetensors: `F32`, `BF16`..."""
    shape: tuple[int, ...]
    start: int = 0
    end: int = 0
    """Where its bytes are, in its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which tensors a model has."""

    tensors: Mapping[str, TensorSpec]
    is_tied: bool
    """Its output layer is its embedding."""


class FileSum(NamedTuple):
    """What a manifest says of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The weights of one version, as the manifest of their folder describes them."""

    folder: str
    version: int
    files: Mapping[str, FileSum]

    @property
    def digest(self) -> str:
        """Of all files: the same weights have the same, wherever they are."""
        sums = sorted((name, *each) for name, each in self.files.items())
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    @property
    def paths(self) -> list[str]:
        return [str(Path(self.folder) / name) for name in sorted(self.files)]


def model_spec(folder: Path) -> ModelSpec:
    """The tensors of a model folder. Raises `ConfigError` if it has no safetensors files."""
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if not files:
        raise ConfigError(f"model: {folder} has no {_SUFFIX} files, so new weights cannot be compared with them")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = {name: spec for file in files for name, spec in tensors_in(file).items()}
    except (OSError, ValueError, WeightsRefusedError) as error:
        raise ConfigError(f"model: {folder} cannot be read: {error}") from error
    return ModelSpec(tensors=tensors, is_tied=bool(config.get("tie_word_embeddings", False)))


def tensors_in(file: Path) -> dict[str, TensorSpec]:
    """What the header of a safetensors file says. Raises `WeightsRefusedError` for a file that is none, or is cut."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_LONGEST_HEADER_BYTES, size):
                raise WeightsRefusedError(f"{file} is no safetensors file, or is cut")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        first = _LENGTH_BYTES + length
        tensors = {name: _spec(entry, first) for name, entry in header.items()}
    except OSError as error:
        raise WeightsRefusedError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsRefusedError(f"{file} is no safetensors file: its header cannot be read") from error
    if size != max((spec.end for spec in tensors.values()), default=first):
        raise WeightsRefusedError(f"{file} is cut, or goes on behind its tensors: {size:,} bytes")
    return tensors


def _spec(entry: Mapping[str, Any], first: int) -> TensorSpec:
    start, end = map(int, entry["data_offsets"])
    return TensorSpec(str(entry["dtype"]), tuple(map(int, entry["shape"])), first + start, first + end)


def seal(folder: Path, *, version: int) -> Payload:
    """Writes the manifest of a folder that has its files, durably. Raises `WeightsRefusedError`, or `OSError`."""
    names = sorted(file.name for file in folder.glob(f"*{_SUFFIX}"))
    if not names:
        raise WeightsRefusedError(f"{folder} has no {_SUFFIX} files")
    files = {name: FileSum((folder / name).stat().st_size, _sha256(folder / name)) for name in names}
    content = {"format": _FORMAT, "version": version, "files": {name: each._asdict() for name, each in files.items()}}
    replace_file(folder / MANIFEST, json.dumps(content, indent=1).encode())
    sync_directory(folder.parent)
    return Payload(folder=str(folder), version=version, files=files)


def payload_at(folder: str) -> Payload:
    """What the manifest of `folder` says. Raises `WeightsRefusedError` if there is none, or none that is understood."""
    path = Path(folder)
    if not path.is_absolute():
        raise WeightsRefusedError(f"the folder of weights must be a whole path, from `/`: got {folder[:200]!r}")
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        if content["format"] != _FORMAT:
            raise WeightsRefusedError(
                f"{path / MANIFEST} has format {content['format']!r}; this version reads {_FORMAT}"
            )
        files = {str(name): FileSum(int(e["size_bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        version = int(content["version"])
    except FileNotFoundError:
        raise WeightsRefusedError(
            f"{path} has no {MANIFEST}: it is not there whole, or not on storage that this replica sees"
        ) from None
    except OSError as error:
        raise WeightsRefusedError(f"{path / MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsRefusedError(f"{path / MANIFEST} is no manifest of weights") from error
    strange = [name for name in files if name != Path(name).name or not name.endswith(_SUFFIX)]
    if strange or not files:
        raise WeightsRefusedError(f"{path / MANIFEST} names {strange[0] if strange else 'no files'}")
    return Payload(folder=folder, version=version, files=files)


def verify(payload: Payload, model: ModelSpec, *, allow_non_finite: bool = False) -> None:
    """Reads the whole payload. Raises `WeightsRefusedError` that names what is wrong with it."""
    tensors: dict[str, TensorSpec] = {}
    for name, expected in payload.files.items():
        file = Path(payload.folder) / name
        found = tensors_in(file)
        twice = tensors.keys() & found.keys()
        if twice:
            raise WeightsRefusedError(f"{payload.folder} has {_few(twice)} twice")
        tensors |= found
        if file.stat().st_size != expected.size_bytes or _sha256(file) != expected.sha256:
            raise WeightsRefusedError(f"{file} is not the file that its manifest describes: its checksum differs")
        if not allow_non_finite:
            not_finite = _not_finite(file, found)
            if not_finite is not None:
                raise WeightsRefusedError(
                    f"{not_finite} has values that are NaN or infinite; `allow_non_finite` serves them all the same"
                )
    compare(tensors, model)


def compare(tensors: Mapping[str, TensorSpec], model: ModelSpec) -> None:
    """Raises `WeightsRefusedError` unless these are tensors of this model."""
    optional = {_TIED} if model.is_tied else set()
    missing = model.tensors.keys() - tensors.keys() - optional
    unknown = tensors.keys() - model.tensors.keys() - optional
    if missing or unknown:
        problems = [f"it lacks {_few(missing)}"] * bool(missing) + [f"it has {_few(unknown)}"] * bool(unknown)
        raise WeightsRefusedError(f"these are not weights of the model that is served: {', and '.join(problems)}")
    for name, spec in tensors.items():
        served = model.tensors.get(name)
        if served is None:
            continue
        if spec.shape != served.shape:
            raise WeightsRefusedError(
                f"{name} has shape {list(spec.shape)}, but the model that is served has {list(served.shape)}"
            )
        if spec.dtype != served.dtype and not {spec.dtype, served.dtype} <= _FLOATS.keys():
            raise WeightsRefusedError(f"{name} is {spec.dtype}, but the model that is served has {served.dtype}")


def _few(names: Set[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise WeightsRefusedError(f"{file} cannot be read: {error.strerror}") from error


def _not_finite(file: Path, tensors: Mapping[str, TensorSpec]) -> str | None:
    """The first tensor with a value that is no number, or without end."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for name, spec in tensors.items():
            if spec.dtype not in _FLOATS:
                continue
            kind, exponent = _FLOATS[spec.dtype]
            size = np.dtype(kind).itemsize
            for start in range(spec.start, spec.end, _PIECE_BYTES):
                count = (min(start + _PIECE_BYTES, spec.end) - start) // size
                # A copy: nothing may point into the mapping when it is closed.
                values = np.frombuffer(mapped[start : start + count * size], dtype=kind)
                if np.any((values & values.dtype.type(exponent)) == exponent):
                    return name
    return None
