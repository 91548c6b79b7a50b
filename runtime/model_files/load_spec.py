"""`load_spec`: reads a model's `ModelSpec` with the reader for its kind of files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from .default_model import DEFAULT_MODEL_NAME, DEFAULT_MODEL_SAMPLING
from .model_spec import ModelSpec
from .source import ModelSource

if TYPE_CHECKING:
    from .gguf.gguf_file import GGUFFile


def load_spec(source: ModelSource, file: GGUFFile | None = None) -> ModelSpec:
    """Read the architecture from a model's files.

    Args:
        source: the files.
        file: the GGUF file, if the caller has opened it already.

    Raises:
        ConfigError: the files are broken, or the model needs something that is not implemented.
    """
    if source.kind == "gguf":  # imported here: GGUF needs numpy, a folder does not
        from .gguf.gguf_config import read_gguf_spec
        from .gguf.gguf_file import GGUFFile

        spec = read_gguf_spec(file or GGUFFile(source.path))
        if source.name == DEFAULT_MODEL_NAME and not spec.sampling_defaults.values():
            return structs.replace(spec, sampling_defaults=DEFAULT_MODEL_SAMPLING)
        return spec
    from .hf.hf_config import read_hf_spec

    return read_hf_spec(Path(source.path))
