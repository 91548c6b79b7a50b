"""`Backend`: the protocol of a model that makes vectors and scores for `engine embed` and `engine rerank`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ...launch.startup_display import StartupDisplay
from ...models.hub.built_in.models import MINILM
from ...runtime.config.config_sources import MergedConfig, from_arguments
from ...runtime.errors import RequestError

if TYPE_CHECKING:
    from ...launch.resolve.prepare import Prepared
    from ...offline.llm import LLM
    from ...tokenizer_manager.pooling.embedding import Want

Vectors = npt.NDArray[np.float32]

_FIXES: Final = {
    "send truncate_prompt_tokens": "pass --truncate",
    "raise max_model_len": "raise --max-model-len",
    "start the server with matryoshka": "pass --matryoshka",
    "serve a model for it, or start the server with": "name an embedder with --model, or pass",
    "serve a reranker": "name a reranker or an embedder with --model",
}
"""Advice of the engine to API clients -> the option of the command that does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """Options of vectors; None: as the model's files say."""

    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    truncate: bool = False

    def given(self) -> dict[str, Any]:
        """Return the given options by their API names: other servers do not know all of them."""
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


BASE_SETTINGS: Final = from_arguments({"model": MINILM.short_names[0]})

_TEXTS_AT_ONCE: Final = 1024
"""Vectors of so many are written at a time. The engine is idle for a moment between them."""


class InProcessBackend:
    """A backend over `LLM`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.model = llm.model_name
        self.where = "in this process"

    @classmethod
    def start(cls, merged: MergedConfig, display: StartupDisplay, wanted: Want) -> InProcessBackend:
        """Load the model; one that cannot do what is wanted is refused before its weights are read.

        Raises:
            ConfigError: the model cannot run on this machine.
            RequestError: it cannot do it.
        """
        display.step("import the engine")
        from ...offline.llm import LLM
        from ...tokenizer_manager.pooling.embedding import check_task

        def check(prepared: Prepared) -> None:
            try:
                check_task(prepared.spec, wanted)
            except RequestError as error:
                raise RequestError(
                    f"{prepared.model_name}: {in_options(str(error))}", code=error.code
                ) from None

        llm = LLM.from_config(
            merged,
            on_step=display.step,
            on_download=display.download,
            check=check,
        )
        return cls(llm)

    def embed(self, texts: Sequence[str], options: EmbedOptions) -> Iterator[Vectors]:
        for part in parts_of(len(texts), _TEXTS_AT_ONCE):
            try:
                yield self._llm.embed(
                    [texts[n] for n in part],
                    dimensions=options.dimensions,
                    normalize=options.normalize,
                    prompt_name=options.prompt_name,
                    input_type=options.input_type,
                    truncate=options.truncate,
                )
            except RequestError as error:
                raise PartError(error, part.start) from None

    def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None, truncate: bool
    ) -> Iterator[list[Scored]]:
        for part in parts_of(len(documents), _TEXTS_AT_ONCE):
            try:
                ranked = self._llm.rerank(
                    query, [documents[n] for n in part], instruction=instruction, truncate=truncate
                )
            except RequestError as error:
                raise PartError(error, part.start) from None
            yield [Scored(part.start + document.index, document.score) for document in ranked]

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()
