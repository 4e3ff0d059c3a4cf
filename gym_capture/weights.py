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
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from gym_capture.durable_files import replace_file, sync_directory
from gym_capture.errors import ConfigError, WeightsRefusedError

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of calls under way: they end now, they run to their end first, they go on with other weights."""
PAUSE_MODES: Final[tuple[str, ...]] = get_args(PauseMode)

LARGEST_VERSION: Final = 2**63 - 1
"""A whole number wherever versions are kept."""
MANIFEST: Final = "gym_capture_weights.json"
_FORMAT: Final = 1
_SUFFIX: Final = ".safetensors"
_INDEX: Final = "model.safetensors.index.json"
"""Of a model in several files: which of those in its folder are the model."""
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER_BYTES: Final = 100_000_000
"""As safetensors itself allows."""
_PIECE_BYTES: Final = 1 << 20
_MOST_READERS: Final = 8
_FLOATS: Final[Mapping[str, tuple[str, int]]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Types that load into each other: unsigned numbers of their size, and the exponent of infinities and NaN."""
_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Of one number, where they are whole."""
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
    files = model_files(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = {name: spec for file in files for name, spec in tensors_in(file).items()}
    except (OSError, ValueError, WeightsRefusedError) as error:
        raise ConfigError(f"model: {folder} cannot be read: {error}") from error
    # A configuration may leave out what is the default of its class, which is not the same for all of them.
    return ModelSpec(tensors=tensors, is_tied=bool(config.get("tie_word_embeddings", _TIED not in tensors)))


def model_files(folder: Path) -> list[Path]:
    """The files of a model, as vLLM takes them: those of its index, since others may hold the same weights once more.

    Raises `ConfigError` if there are none.
    """
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if not files:
        raise ConfigError(f"model: {folder} has no {_SUFFIX} files, so new weights cannot be compared with them")
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        named = set(index["weight_map"].values())
    except FileNotFoundError:
        return files
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"model: {folder / _INDEX} cannot be read: {error}") from error
    return [file for file in files if file.name in named]


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
    for name, spec in tensors.items():
        if spec.dtype in _BYTES and math.prod(spec.shape) * _BYTES[spec.dtype] != spec.end - spec.start:
            raise WeightsRefusedError(
                f"{file} is no safetensors file: {name} has {spec.end - spec.start:,} bytes, which is not its shape"
            )
    if size != max((spec.end for spec in tensors.values()), default=first):
        raise WeightsRefusedError(f"{file} is cut, or goes on behind its tensors: {size:,} bytes")
    return tensors


def _spec(entry: Mapping[str, Any], first: int) -> TensorSpec:
    start, end = map(int, entry["data_offsets"])
    return TensorSpec(str(entry["dtype"]), tuple(map(int, entry["shape"])), first + start, first + end)


def seal(folder: Path, *, version: int) -> Payload:
    """Writes the manifest of a folder that has its files, durably. Raises `WeightsRefusedError`, or `OSError`."""
    check_version(version)
    names = sorted(file.name for file in folder.glob(f"*{_SUFFIX}"))
    if not names:
        raise WeightsRefusedError(f"{folder} has no {_SUFFIX} files")
    read = _read_all(folder, {name: {} for name in names})
    files = {name: FileSum(each.size_bytes, each.sha256) for name, each in zip(names, read, strict=True)}
    content = {"format": _FORMAT, "version": version, "files": {name: each._asdict() for name, each in files.items()}}
    replace_file(folder / MANIFEST, json.dumps(content, indent=1).encode())
    sync_directory(folder.parent)
    return Payload(folder=str(folder), version=version, files=files)


def is_sealed(folder: Path) -> bool:
    """Whether there is a manifest, understood or not: what somebody has sealed is not sealed anew."""
    return (folder / MANIFEST).exists()


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
        version = content["version"]
    except FileNotFoundError:
        raise WeightsRefusedError(
            f"{path} has no {MANIFEST}: it is not there whole, or not on storage that this replica sees"
        ) from None
    except OSError as error:
        raise WeightsRefusedError(f"{path / MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsRefusedError(f"{path / MANIFEST} is no manifest of weights") from error
    strange = [name for name in files if name != Path(name).name or not name.endswith(_SUFFIX)]
    check_version(version)
    if strange or not files:
        raise WeightsRefusedError(f"{path / MANIFEST} names {strange[0] if strange else 'no files'}")
    return Payload(folder=folder, version=version, files=files)


def check_version(version: object) -> None:
    """Raises `WeightsRefusedError` for what is no number that versions are counted with."""
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= LARGEST_VERSION:
        raise WeightsRefusedError(
            f"a version must be a whole number from 0 to {LARGEST_VERSION}, so that versions have an order: "
            f"got {str(version)[:50]!r}"
        )


def verify(payload: Payload, model: ModelSpec, *, allow_non_finite: bool = False) -> None:
    """Reads the payload, its headers first, all else once. Raises `WeightsRefusedError` that names what is wrong."""
    found = {name: tensors_in(Path(payload.folder) / name) for name in payload.files}
    tensors: dict[str, TensorSpec] = {}
    for each in found.values():
        twice = tensors.keys() & each.keys()
        if twice:
            raise WeightsRefusedError(f"{payload.folder} has {_few(twice)} twice")
        tensors |= each
    compare(tensors, model)
    for (name, expected), read in zip(payload.files.items(), _read_all(Path(payload.folder), found), strict=True):
        if (read.size_bytes, read.sha256) != expected:
            raise WeightsRefusedError(
                f"{Path(payload.folder) / name} is not the file that its manifest describes: its checksum differs"
            )
        if read.not_finite is not None and not allow_non_finite:
            raise WeightsRefusedError(
                f"{read.not_finite} has values that are NaN or infinite; `allow_non_finite` serves them all the same"
            )


def look_at(payload: Payload) -> None:
    """Whether the files are there as a whole, unread. Raises `WeightsRefusedError`."""
    for name, expected in payload.files.items():
        file = Path(payload.folder) / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise WeightsRefusedError(f"{file} cannot be read: {error.strerror}") from error
        if size != expected.size_bytes:
            raise WeightsRefusedError(f"{file} is not the file that its manifest describes: its size differs")


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


class _Read(NamedTuple):
    """What reading a file says of it."""

    size_bytes: int
    sha256: str
    not_finite: str | None
    """The first tensor with a value that is no number, or without end."""


def _read_all(folder: Path, files: Mapping[str, Mapping[str, TensorSpec]]) -> Iterable[_Read]:
    """Files of `folder`, with the tensors that their headers describe. Several are read at a time."""
    with ThreadPoolExecutor(_readers(), thread_name_prefix="read-weights") as pool:
        return list(pool.map(lambda name: _read(folder / name, files[name]), files))


def _readers() -> int:
    """Checksums are slower than disks. Half of the processors at most: others compute here, too."""
    return max(1, min(_MOST_READERS, (os.cpu_count() or 1) // 2))


def _read(file: Path, tensors: Mapping[str, TensorSpec]) -> _Read:
    """One pass for all: a piece is looked at for what is not finite while the processor has it in its cache.

    Read, not mapped: where a disk fails, or a file is cut meanwhile, that is an error and not the end of the process.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE_BYTES))
    size, not_finite = 0, None
    try:
        with file.open("rb") as opened:
            for name, dtype, end in _spans(file, tensors):
                while size < end and (count := opened.readinto(buffer[: min(_PIECE_BYTES, end - size)])):
                    piece = buffer[:count]
                    digest.update(piece)
                    if not_finite is None and dtype in _FLOATS and not _is_finite(piece, dtype):
                        not_finite = name
                    size += count
            while count := opened.readinto(buffer):
                digest.update(buffer[:count])
                size += count
    except OSError as error:
        raise WeightsRefusedError(f"{file} cannot be read: {error.strerror}") from error
    return _Read(size, digest.hexdigest(), not_finite)


def _spans(file: Path, tensors: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str, int]]:
    """A file from its beginning to the end of its last tensor, cut where tensors begin and end: whose each span is, its
    type - of what is between tensors, none -, and where it ends.
    """
    end = 0
    for name, spec in sorted(tensors.items(), key=lambda each: each[1].start):
        if spec.start < end:
            raise WeightsRefusedError(f"{file} is no safetensors file: {name} lies in another tensor")
        yield "", "", spec.start
        yield name, spec.dtype, spec.end
        end = spec.end


def _is_finite(piece: memoryview, dtype: str) -> bool:
    kind, exponent = _FLOATS[dtype]
    values = np.frombuffer(piece, dtype=kind, count=len(piece) // np.dtype(kind).itemsize)
    return values.size == 0 or int((values & values.dtype.type(exponent)).max()) != exponent
