"""The engine seam: ids in, ids out, and text for the client.

Invariant: `GenerationChunk.token_ids` and `log_probs` are what the engine sampled, in order and complete: the
concatenation over a generation is what was generated. Text is for clients and never feeds back into ids.

An engine also parses its own model's output (`OutputParser`), since the format belongs to the model.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gym_capture.calls import ModelRequest, ReplyEvent, TokenLogProb
from gym_capture.capture.records import IdArray, LogProbArray, WeightSpan
from gym_capture.engines.weights import WeightControl
from gym_capture.splice.template import ChatTemplate

__all__ = ["Engine", "EngineFactory", "Generation", "GenerationChunk", "ModelInfo", "OutputParser", "reported_amiss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that an engine serves."""

    name: str
    """The name that clients use."""
    max_model_len: int
    """Longest prompt + generation, in ids."""
    vocab_size: int
    reads_reasoning: bool = False
    """Whether a parser tells thinking from text: it is told where the turn begins."""
    longest_token: int | None = None
    """Characters of the longest token: text of n characters has at least n / `longest_token` ids. None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationChunk:
    """The ids and the text that an engine has produced since the chunk before. G: new ids."""

    token_ids: IdArray
    """int32 [G]."""
    log_probs: LogProbArray
    """float32 [G]. From an engine whose output does not align: as many as it gave, NaN for an id that has none. Such a
    chunk is served, and no record is made of it."""
    text: str
    """New text; whole characters only."""
    prompt_token_ids: IdArray | None = None
    """int32 [P], the prompt as the engine ran it; on the first chunk. None if the engine does not say."""
    cached_tokens: int = 0
    """How many prompt ids came out of the prefix cache; on the last chunk."""
    finish_reason: str | None = None
    """stop | length | abort | error, on the last chunk."""
    stop_reason: str | None = None
    weight_versions: tuple[WeightSpan, ...] = ()
    """On the last chunk, over all generated ids."""
    shown_log_probs: tuple[TokenLogProb, ...] | None = None
    """For a client that asked; aligned with `token_ids`."""
    routed_experts: npt.NDArray[Any] | None = None
    """[P + all generated ids - 1 or more, layers, topk], on the last chunk: what each id was routed to. None: the
    engine does not say, or the model has no experts."""
    sampling_mask: npt.NDArray[np.int32] | None = None
    """int32 [G, ...], as `capture.sampling_masks`: the ids that each could have been. None: the engine does not say."""


def reported_amiss(chunks: Sequence[GenerationChunk]) -> tuple[str, str] | None:
    """Why no record can be made of a generation: the field, and what is wrong with what the engine says of it."""
    if chunks[0].prompt_token_ids is None:
        return "prompt_token_ids", "missing_prompt_ids: the engine did not report the prompt"
    for chunk in chunks:  # each by itself: one that has too many and one that has too few would add up
        if chunk.log_probs.shape != chunk.token_ids.shape:
            return "generation_log_probs", f"do not align: {chunk.log_probs.size} for {chunk.token_ids.size} ids"
    return None


class OutputParser(Protocol):
    """Turns one generation's text into reply events. One object per generation."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids that were fed are thinking."""
        ...

    def feed(self, chunk: GenerationChunk) -> Sequence[ReplyEvent]:
        """Events that `chunk` makes certain. The last chunk (with a finish reason) flushes what was held back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """One generation under way: iterate `chunks` to the end, with `abort()` meanwhile to have it end at once."""

    chunks: AsyncGenerator[GenerationChunk]
    """Closing it aborts, too, but then nobody learns what had been generated."""
    parser: OutputParser
    abort: Callable[[], Awaitable[None]]
    """Frees the engine's slot. The last of `chunks` then holds what had been generated beyond those before, with finish
    reason `abort`. Does nothing for a generation that the engine has not taken yet, or has ended."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters in force, for the record."""


class Engine(Protocol):
    """One policy replica."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def weights(self) -> WeightControl | None:
        """How it takes new weights. None: it takes none."""
        ...

    def generate(
        self,
        *,
        call_id: str,
        prompt_ids: IdArray,
        request: ModelRequest,
        max_tokens: int,
        stream: bool,
        turn_start: int | None = None,
    ) -> Generation:
        """Starts generating from exactly `prompt_ids`, in which the generation prompt begins at `turn_start`.

        What is before it says nothing of whether the model is thinking. None: it is not known where that is.

        `request.sampling` is taken as already pinned. Raises `InvalidRequestError` for parameters that the engine
        refuses; while iterating, `EngineDeadError` or another `EngineError`. Closing the iterator aborts the
        generation and frees its slot.
        """
        ...

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine cannot serve."""
        ...

    async def close(self) -> None: ...


class EngineFactory(Protocol):
    """Starts the engine of one replica; the graph's `engine` argument names it, as `module:factory`."""

    def __call__(
        self,
        *,
        model: str,
        name: str,
        tool_parser: str | None,
        reasoning_parser: str | None,
        engine_args: Mapping[str, Any],
    ) -> Engine:
        """Returns once the engine can serve; the replica takes no requests before.

        `model` is a folder, `name` what clients call it; the parsers are names that the engine knows. Raises
        `ConfigError`, naming the argument, for what cannot work.
        """
        ...
