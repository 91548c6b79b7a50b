"""`with_mtp`: whether the layer that predicts further tokens is read, which decides the memory of tokens."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ...models.spec.sizes import BYTES_OF_DTYPE
from ...models.weight_files.check_weights import check_folder_weights, check_gguf_weights
from ...runtime.errors import ConfigError
from .model_resolution import runs_in_transformers

if TYPE_CHECKING:
    from ...models.source import ModelSource
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import EngineConfig


def with_mtp(config: EngineConfig, source: ModelSource, spec: ModelSpec) -> tuple[EngineConfig, ModelSpec]:
    """The settings and the model; it uses its `MTPSpec` if `--speculative` is mtp, or auto and nothing is against it.

    Raises:
        ConfigError: speculative is mtp and the model cannot draft so; or tensors of the layer are missing or of other
            shapes.
    """
    scheduler = config.scheduler
    if scheduler.speculative not in ("mtp", "auto"):
        return config, spec
    reason = _reason_against(config, spec)
    if reason and scheduler.speculative == "mtp":
        raise ConfigError(f"speculative is mtp, but {reason}; use --speculative suffix or auto")
    if reason or spec.mtp is None:
        return config, spec
    # In float32, because the dtype may not be known yet; and the position of the token.
    feature_bytes = math.ceil((spec.hidden_size * BYTES_OF_DTYPE["float32"] + 8) / config.cache.page_size)
    spec = structs.replace(
        spec, mtp=structs.replace(spec.mtp, is_used=True, feature_token_bytes=feature_bytes)
    )
    if config.model.load_format != "dummy":
        _check_weights(source, spec)
    config = dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, speculative="mtp"))
    return config, spec


def _check_weights(source: ModelSource, spec: ModelSpec) -> None:
    if source.kind != "gguf":
        check_folder_weights(Path(source.path), spec)
        return
    from ...models.gguf.gguf_file import GGUFFile  # GGUF needs numpy, a folder does not

    file = GGUFFile(source.path, with_lists=False)
    if source.tower:
        file.add_tower(GGUFFile(source.tower, with_lists=False))
    check_gguf_weights(file, spec)


def _reason_against(config: EngineConfig, spec: ModelSpec) -> str:
    """Why this model does not draft with its own layer; empty: it can."""
    if runs_in_transformers(config.model, spec):
        return "transformers' code computes the model"
    if spec.mtp is None:
        return f"the files of this {spec.model_type} model have no layer that predicts further tokens"
    if config.parallel.pp > 1:
        return f"pp is {config.parallel.pp}, and stages need several steps in flight"
    return ""
