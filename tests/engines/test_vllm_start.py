"""What vLLM is started with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gym_capture.engines import vllm
from gym_capture.errors import ConfigError
from gym_capture.models import tiny_dir


class StartedError(Exception):
    pass


@pytest.mark.parametrize("reasoning_parser", [None, "qwen3"])
def test_ST_12_the_engine_knows_the_parser_of_thinking(
    monkeypatch: pytest.MonkeyPatch, reasoning_parser: str | None
) -> None:
    found: list[Any] = []

    def from_engine_args(args: Any, **keywords: Any) -> None:
        found.append(args)
        raise StartedError

    monkeypatch.setattr(vllm, "start_guard", lambda title: None)
    monkeypatch.setattr(vllm.AsyncLLM, "from_engine_args", from_engine_args)
    asked: dict[str, Any] = {"model": str(tiny_dir()), "name": "m", "tool_parser": None}
    with pytest.raises(StartedError):
        vllm.VllmEngine.start(**asked, reasoning_parser=reasoning_parser, engine_args={})
    assert found[0].reasoning_parser == (reasoning_parser or "")
    if reasoning_parser is not None:
        with pytest.raises(ConfigError, match="reasoning_parser"):
            vllm.VllmEngine.start(**asked, reasoning_parser=reasoning_parser, engine_args={"reasoning_parser": "olmo3"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU gives them: test_vllm_gpu.py")
@pytest.mark.parametrize("asked", ["enable_return_routed_experts", "return_sampling_mask"])
def test_what_this_machine_s_engine_cannot_give_is_refused_before_it_starts(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"engine_args: {asked}: the engine cannot do this here: .*Model Runner V2"):
        vllm.VllmEngine.start(
            model=str(tiny_dir()), name="m", tool_parser=None, reasoning_parser=None, engine_args={asked: True}
        )
