"""`Backend`: the protocol of a model that makes vectors and scores for `engine embed` and `engine rerank`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ...runtime.errors import RequestError

Vectors = npt.NDArray[np.float32]

_FIXES: Final = {
    "send truncate_prompt_tokens": "pass --truncate",
    "raise max_model_len": "raise --max-model-len",
    "start the server with matryoshka": "pass --matryoshka",
    "serve a model for it, or start the server with": "name an embedder with --model, or pass",
    "serve a reranker": "name a reranker or an embedder with --model",
}
"""What the engine suggests to its clients -> what the user of a command does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """How vectors are made; None: as the model's files say."""

    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    truncate: bool = False

    def given(self) -> dict[str, Any]:
        """Those that were given, by the names of the API: other servers do not know all of them."""
        values = {
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "prompt_name": self.prompt_name,
            "input_type": self.input_type,
            "truncate_prompt_tokens": -1 if self.truncate else None,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Scored:
    """A document's relevance. `index`: its place among all documents."""

    index: int
    score: float


class PartError(RequestError):
    """A part of the texts is refused. `start`: the index of its first text, among all."""

    def __init__(self, error: RequestError, start: int) -> None:
        super().__init__(in_options(str(error)), param=error.param, code=error.code, status=error.status)
        self.start = start


class Backend(Protocol):
    """A model that makes vectors and scores.

    Attributes:
        model: its name.
        where: `in this process`, `at http://...`.
    """

    model: str
    where: str

    def embed(self, texts: Sequence[str], options: EmbedOptions) -> Iterator[Vectors]:
        """The vectors of the texts in their order: float32 [n, D] of some of them at a time.

        Raises:
            PartError: a text or an option is refused.
            EngineError: the engine or the server failed.
        """
        ...

    def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None, truncate: bool
    ) -> Iterator[list[Scored]]:
        """The relevance of some of the documents at a time.

        Raises:
            PartError: a text or an option is refused.
            EngineError: the engine or the server failed.
        """
        ...

    def close(self) -> None:
        """Release the backend."""
        ...


def parts_of(count: int, size: int) -> list[range]:
    """The indices of `count` texts in parts of at most `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def in_options(message: str) -> str:
    """An error of the engine, with its fix in terms of the command's options."""
    for before, after in _FIXES.items():
        message = message.replace(before, after)
    return message
