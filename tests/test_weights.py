"""What must be right about a folder of weights before an engine loads it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gym_capture import weights
from gym_capture.errors import ConfigError, WeightsRefusedError
from gym_capture.models import tiny_dir
from gym_capture.weights import MANIFEST, model_files, model_spec, payload_at, seal, tensors_in, verify
from tests.weight_folders import moved, tiny_tensors, weights_folder

NORM = "model.norm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def whole(folder: str, **options: bool) -> None:
    verify(payload_at(folder), model_spec(tiny_dir()), **options)


def test_a_sealed_folder_is_read_back_and_passes(tmp_path: Path) -> None:
    payload = weights_folder(tmp_path, 3)
    assert payload_at(payload.folder) == payload
    assert payload.version == 3
    whole(payload.folder)


def test_a_header_is_read_as_safetensors_wrote_it(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = tensors_in(tmp_path / "x.safetensors")
    assert {name: (spec.dtype, spec.shape) for name, spec in found.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("I64", (4,)),
    }
    assert {spec.end - spec.start for spec in found.values()} == {12, 32}


def test_equal_weights_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    one, same, other = (weights_folder(tmp_path / str(n), n, moved(seed)) for n, seed in ((1, 7), (2, 7), (3, 8)))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_single_value_that_is_not_finite_is_found(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors[DOWN][-1, -1] = value

    payload = weights_folder(tmp_path, 1, spoil=spoil)
    with pytest.raises(WeightsRefusedError, match=rf"{DOWN} has values that are NaN or infinite"):
        whole(payload.folder)
    whole(payload.folder, allow_non_finite=True)


def test_every_piece_of_a_tensor_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", 4096)
    rows = tiny_tensors()[DOWN].shape[0]
    for row in (0, rows // 2, rows - 1):

        def spoil(tensors: dict[str, Any], row: int = row) -> None:
            tensors[DOWN][row, row] = float("nan")

        with pytest.raises(WeightsRefusedError, match=rf"{DOWN} has values that are NaN"):
            whole(weights_folder(tmp_path, row + 1, spoil=spoil).folder)


def test_the_checksum_is_that_of_the_file_whatever_lies_between_its_tensors(tmp_path: Path) -> None:
    payload = weights_folder(tmp_path, 1)
    file = Path(payload.folder) / "model.safetensors"
    assert payload.files[file.name].sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    _describe_anew(file, lambda header: header.pop(DOWN))  # its bytes belong to no tensor now
    seal(file.parent, version=2)
    with pytest.raises(WeightsRefusedError, match=rf"it lacks {DOWN}"):
        whole(payload.folder)
    spec = model_spec(tiny_dir())
    verify(payload_at(payload.folder), replace(spec, tensors={n: t for n, t in spec.tensors.items() if n != DOWN}))


def test_tensors_that_lie_in_each_other_are_no_checkpoint(tmp_path: Path) -> None:
    payload = weights_folder(tmp_path, 1)
    file = Path(payload.folder) / "model.safetensors"

    def overlap(header: dict[str, Any]) -> None:
        first, second = sorted(header, key=lambda name: list(header[name]["data_offsets"]))[:2]
        start, end = header[second]["data_offsets"]
        moved_by = start - header[first]["data_offsets"][0]
        header[second]["data_offsets"] = [start - moved_by, end - moved_by]

    _describe_anew(file, overlap)
    seal(file.parent, version=2)
    with pytest.raises(WeightsRefusedError, match="lies in another tensor"):
        whole(payload.folder)


def test_of_several_files_each_is_read(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, tmp_path / f"{number:02d}.safetensors")
    seal(tmp_path, version=1)
    whole(str(tmp_path))
    for file in sorted(tmp_path.glob("*.safetensors")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(WeightsRefusedError, match=rf"{file.name} is not the file .* checksum differs"):
            whole(str(tmp_path))
        file.write_bytes(content)


def _describe_anew(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    change(header)
    described = json.dumps(header).encode()
    file.write_bytes(len(described).to_bytes(8, "little") + described + content[8 + length :])


def test_the_largest_numbers_are_finite(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        for name, dtype in ((NORM, torch.float16), (DOWN, torch.bfloat16)):
            tensors[name] = torch.full_like(tensors[name].to(dtype), torch.finfo(dtype).max)

    whole(weights_folder(tmp_path, 1, spoil=spoil).folder)


def rename(tensors: dict[str, Any]) -> None:
    tensors["model.norm.wieght"] = tensors.pop(NORM)


def reshape(tensors: dict[str, Any]) -> None:
    tensors[DOWN] = tensors[DOWN].T.contiguous()


def quantize(tensors: dict[str, Any]) -> None:
    tensors[DOWN] = tensors[DOWN].to(torch.int8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(rename, rf"it lacks {NORM}, and it has model.norm.wieght", id="name"),
        pytest.param(reshape, rf"{DOWN} has shape \[\d+, \d+\], but the model that is served has", id="shape"),
        pytest.param(quantize, rf"{DOWN} is I8, but the model that is served has F32", id="type"),
    ],
)
def test_weights_of_another_model_are_named(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    payload = weights_folder(tmp_path, 1, spoil=spoil)
    with pytest.raises(WeightsRefusedError, match=message):
        whole(payload.folder)


def test_a_tied_output_layer_may_come_along_or_not(tmp_path: Path) -> None:
    spec = model_spec(tiny_dir())
    assert spec.is_tied
    tied = dict(tiny_tensors())
    tied.setdefault("lm_head.weight", tied["model.embed_tokens.weight"].clone())
    whole(weights_folder(tmp_path, 1, tied).folder)
    del tied["lm_head.weight"]
    whole(weights_folder(tmp_path, 2, tied).folder)


def test_a_configuration_may_leave_out_that_its_output_layer_is_tied(tmp_path: Path) -> None:
    """As those of Gemma do, whose class has it as the default."""
    model = copy_of_tiny(tmp_path)
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    tied = dict(tiny_tensors())
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].clone()
    verify(weights_folder(tmp_path, 1, tied), model_spec(model))


def test_of_a_model_that_is_there_twice_the_files_of_its_index_count(tmp_path: Path) -> None:
    """As in Mistral's folders, beside `consolidated.safetensors`."""
    model = copy_of_tiny(tmp_path)
    file = (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    save_file({"norm.weight": tiny_tensors()[NORM]}, model / "consolidated.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: file.name}}))
    assert model_files(model) == [file]
    verify(weights_folder(tmp_path, 1), model_spec(model))
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"index.json cannot be read"):
        model_spec(model)


def copy_of_tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir(), tmp_path / "model"))


def test_a_tensor_without_the_bytes_of_its_shape_is_refused(tmp_path: Path) -> None:
    payload = weights_folder(tmp_path, 1)
    (path,) = payload.paths
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [0, 0]
    claims = json.dumps(header).encode()
    Path(path).write_bytes(len(claims).to_bytes(8, "little") + claims)
    with pytest.raises(WeightsRefusedError, match="has 0 bytes, which is not its shape"):
        verify(seal(Path(payload.folder), version=1), model_spec(tiny_dir()))


@pytest.mark.parametrize("version", ["1e400", "1.5", "true", '"7"', "-1", "9223372036854775808"])
def test_a_version_is_a_number_that_others_can_count_with(tmp_path: Path, version: str) -> None:
    payload = weights_folder(tmp_path, 1)
    manifest = Path(payload.folder) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"version": 1,', f'"version": {version},'))
    with pytest.raises(WeightsRefusedError, match="a version must be a whole number from 0 to"):
        payload_at(payload.folder)
    with pytest.raises(WeightsRefusedError, match="a version must be a whole number from 0 to"):
        seal(Path(payload.folder), version=json.loads(version))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)


def swap(folder: Path) -> None:
    save_file(moved(99), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(
            lambda folder: (folder / MANIFEST).unlink(), f"has no {MANIFEST}: it is not there whole", id="half"
        ),
        pytest.param(lambda folder: (folder / "model.safetensors").unlink(), "cannot be read: No such file", id="file"),
        pytest.param(cut, "is cut", id="cut"),
        pytest.param(flip, "its checksum differs", id="bit"),
        pytest.param(swap, "its checksum differs", id="other"),
        pytest.param(lambda folder: (folder / MANIFEST).write_text("{}"), "is no manifest", id="empty"),
        pytest.param(lambda folder: (folder / MANIFEST).write_text('{"format": 9}'), "has format 9", id="newer"),
        pytest.param(lambda folder: shutil.rmtree(folder), "not on storage that this replica sees", id="gone"),
        pytest.param(
            lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "no safetensors file", id="noise"
        ),
    ],
)
def test_half_a_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    payload = weights_folder(tmp_path, 1)
    damage(Path(payload.folder))
    with pytest.raises(WeightsRefusedError, match=message):
        whole(payload.folder)


def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    payload = weights_folder(tmp_path, 1)
    manifest = Path(payload.folder) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"model.safetensors"', '"../x/model.safetensors"'))
    with pytest.raises(WeightsRefusedError, match=r"names [.][.]/x/model[.]safetensors"):
        whole(payload.folder)


def test_a_path_that_is_not_whole_means_something_else_to_every_process() -> None:
    with pytest.raises(WeightsRefusedError, match="whole path"):
        payload_at("weights-1")


def test_a_folder_without_weights_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefusedError, match=r"has no [.]safetensors files"):
        seal(tmp_path, version=1)
    with pytest.raises(ConfigError, match=r"has no [.]safetensors files"):
        model_spec(tmp_path)
