"""`InProcessBackend`: the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ...launch.startup_display import StartupDisplay
from ...models.hub.built_in.models import MINILM
from ...runtime.config.config_sources import MergedConfig, from_arguments
from ...runtime.errors import RequestError
from .backend import EmbedOptions, PartError, Scored, Vectors, in_options, parts_of

if TYPE_CHECKING:
    from ...launch.resolve.prepare import Prepared
    from ...offline.llm import LLM
    from ...tokenizer_manager.pooling.embedding import Want

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
