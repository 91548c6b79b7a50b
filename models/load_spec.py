"""`load_spec`: reads a model's `ModelSpec` with the reader for its kind of files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ..runtime.config.model_choice import NO_CHOICE, TaskChoice
from ..runtime.errors import ConfigError
from .hub.built_in.models import DEFAULT_MODEL
from .source import ModelSource
from .spec.encoder_spec import PoolingSpec
from .spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from .gguf.gguf_file import GGUFFile

logger = logging.getLogger(__name__)


def load_spec(source: ModelSource, file: GGUFFile | None = None, choice: TaskChoice = NO_CHOICE) -> ModelSpec:
    """Read the architecture from a model's files.

    Args:
        source: the files.
        file: the GGUF file, if the caller has opened it already.
        choice: the task that the user asks for.

    Raises:
        ConfigError: the files are broken, or the model needs something that is not implemented.
    """
    if source.kind == "gguf":  # imported here: GGUF needs numpy, a folder does not
        from .gguf.gguf_file import GGUFFile
        from .gguf_config import read_gguf_spec

        spec = read_gguf_spec(file or GGUFFile(source.path))
        if (
            source.name == DEFAULT_MODEL.name
            and DEFAULT_MODEL.sampling
            and not spec.sampling_defaults.values()
        ):
            spec = structs.replace(spec, sampling_defaults=DEFAULT_MODEL.sampling)
        return _with_task(source, spec, choice)
    from .hf.hf_config import read_hf_spec

    return read_hf_spec(Path(source.path), choice, source.name)


def _with_task(source: ModelSource, spec: ModelSpec, choice: TaskChoice) -> ModelSpec:
    """The architecture of a GGUF file, which says nothing about pooling; it generates text unless the user asks."""
    if choice.task == "score":
        raise ConfigError(
            f"{source.path}: the task is score, but rerankers are read from folders only; use the folder that the file "
            "was made from"
        )
    if choice.task != "embed":
        if choice.pooling is not None:
            raise ConfigError(
                f"pooling is {choice.pooling}, but the task is generate; pooling is chosen for --task embed only"
            )
        return spec
    pooling = PoolingSpec(
        task="embed",
        pooling=choice.pooling or "last",
        size=spec.hidden_size,
        normalize=True,
        any_dimensions=choice.any_dimensions,
        reason=f"--task embed on a GGUF file; {choice.pooling or 'last'} pooling, and the vectors have length 1",
    )
    logger.warning("%s: %s; check that this is how the model was trained", source.path, pooling.reason)
    return structs.replace(spec, pooling=pooling)
