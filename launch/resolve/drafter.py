"""`resolve_drafter`: the second model that drafts (`--speculative-model`), and whether it belongs to the first one.

A draft model is a decoder with the same vocabulary, an EAGLE-3 head a layer that was trained for the model. Their keys
and values are further tensors of the KV pool, in the pages of the same tokens, so the KV of a token grows.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Final, Literal, NamedTuple

from msgspec import structs

from ...models.eagle3_head import Eagle3Spec, is_eagle3_head, needed_tensors, read_eagle3_head
from ...models.hub.pull import Progress
from ...models.source import ModelSource, resolve_source
from ...models.spec.layer_form import LayerHeads
from ...models.spec.model_spec import DrafterSpec, ModelSpec
from ...models.spec.sizes import BYTES_OF_DTYPE
from ...models.tokenizer.tokenizer import load_tokenizer
from ...models.weight_files.weight_memory import weight_bytes
from ...runtime.config.engine_config import EngineConfig, ModelConfig
from ...runtime.errors import ConfigError
from .model_resolution import read_model

logger = logging.getLogger(__name__)

MAX_DRAFT_COST: Final = 0.2
"""Share of a step above which a draft does not pay, however often it is right: k drafts cost k shares, and to verify
them takes longer than a plain step."""
_MAX_PADDING: Final = 256
"""Most tokens that one vocabulary may have beyond the end of the other: files pad them differently."""


class DrafterFiles(NamedTuple):
    """A drafter's files, and its architecture: a model for `draft`, a head for `eagle3`."""

    method: Literal["draft", "eagle3"]
    source: ModelSource
    spec: ModelSpec | Eagle3Spec


def resolve_drafter(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    progress: Progress | None = None,
    *,
    fetch: bool = True,
) -> tuple[EngineConfig, ModelSpec, dict[str, str]]:
    """The configuration with method and path of the drafter, the model with its memory, and notes on settings.

    Args:
        config: with any `speculative`.
        source, spec: of the model.
        progress, fetch: see `resolve_source`.

    Raises:
        ConfigError: there is no such model or head, or it does not belong to the model.
    """
    path, asked = config.scheduler.speculative_model, config.scheduler.speculative
    if path is None:
        return config, spec, {}
    found = read_drafter(config, spec, progress, fetch=fetch)
    if isinstance(found.spec, ModelSpec) and config.model.load_format != "dummy":
        check_vocabulary(source, found.source)
    known = found.spec.known_positions if isinstance(found.spec, ModelSpec) else spec.known_positions
    is_short = known < spec.known_positions
    if is_short:
        logger.warning(
            "%s: knows %d positions, the model %d: nothing is drafted beyond",
            found.source.path,
            known,
            spec.known_positions,
        )
    notes = {"speculative": f"what {path} is"} if asked == "auto" else {}
    scheduler = dataclasses.replace(
        config.scheduler,
        speculative=found.method,
        speculative_model=found.source.path,
        speculative_len=known if is_short else None,
    )
    drafter = _memory(config, found.spec)
    cost = draft_cost(config, spec, drafter)
    if cost > MAX_DRAFT_COST:
        what = f"a draft of {found.source.path} costs about {cost:.0%} of a step, which does not pay"
        if asked == "auto":
            return _without(config), spec, {"speculative": what}
        logger.warning("%s; use a smaller model, or --speculative suffix", what)
    spec = structs.replace(spec, drafter=drafter)
    return dataclasses.replace(config, scheduler=scheduler), spec, notes


def draft_cost(config: EngineConfig, spec: ModelSpec, drafter: DrafterSpec) -> float:
    """A draft's share of the time of a step, estimated by the weights of both, which a decode reads and multiplies."""
    width = BYTES_OF_DTYPE["bfloat16" if config.model.dtype == "auto" else config.model.dtype]
    return drafter.weights_bytes / weight_bytes(spec, width, on_cpu=config.model.device != "cuda")


def _without(config: EngineConfig) -> EngineConfig:
    """The configuration as if no model was given."""
    scheduler = dataclasses.replace(config.scheduler, speculative="auto", speculative_model=None)
    return dataclasses.replace(config, scheduler=scheduler)


def read_drafter(
    config: EngineConfig, spec: ModelSpec, progress: Progress | None = None, *, fetch: bool = True
) -> DrafterFiles:
    """Read the headers of a drafter's files.

    Raises:
        ConfigError: as for `resolve_drafter`, but for the vocabulary.
    """
    name, asked = config.scheduler.speculative_model, config.scheduler.speculative
    assert name is not None, "no model drafts"
    need_weights = config.model.load_format != "dummy"
    source = resolve_source(name, need_weights=need_weights, need_tower=False, progress=progress, fetch=fetch)
    if spec.latent is not None or spec.encoder is not None or spec.pooling is not None:
        what = "has latent attention" if spec.latent is not None else "generates no text"
        raise ConfigError(
            f"speculative_model is {name}, but the model ({spec.model_type}) {what}; omit --speculative-model"
        )
    is_head = source.kind == "hf" and is_eagle3_head(Path(source.path))
    if asked == "draft" and is_head:
        raise ConfigError(f"{source.path}: is an EAGLE-3 head, not a model; use --speculative eagle3")
    if asked == "eagle3" or is_head:
        if source.kind != "hf":
            raise ConfigError(
                f"{source.path}: is a GGUF file, and EAGLE-3 heads are read from folders; give the folder of the head, "
                "or use --speculative draft for a model"
            )
        return DrafterFiles("eagle3", source, read_eagle3_head(Path(source.path), spec))
    found = read_model(draft_config(config.model, source), source).spec
    if reason := _reason_against(found):
        raise ConfigError(f"{source.path}: {reason}; use another draft model, or --speculative suffix")
    return DrafterFiles("draft", source, found)


def draft_config(model: ModelConfig, source: ModelSource) -> ModelConfig:
    """The settings of a draft model: those of the model, but for what belongs to its files."""
    return dataclasses.replace(
        model,
        model=source.path,
        load_format="dummy" if model.load_format == "dummy" else "auto",
        quantization=None,
        task="generate",
        pooling=None,
        model_impl="engine",
        chat_template=None,
    )


def check_vocabulary(source: ModelSource, draft: ModelSource) -> None:
    """Check that two models have the same tokens.

    Raises:
        ConfigError: they do not; with the sizes and the first token that differs.
    """
    own, theirs = load_tokenizer(source), load_tokenizer(draft)
    sizes = f"the model has {own.vocab_size} tokens, the draft model {theirs.vocab_size}"
    differing = own.first_difference(theirs)
    if differing is not None:
        raise ConfigError(
            f"{draft.path}: {sizes}, and token {differing} is {own.token(differing)!r} in one and "
            f"{theirs.token(differing)!r} in the other; use a draft model with the same vocabulary"
        )
    if abs(own.vocab_size - theirs.vocab_size) > _MAX_PADDING:
        raise ConfigError(f"{draft.path}: {sizes}; use a draft model with the same vocabulary")


def _reason_against(spec: ModelSpec) -> str:
    """Why a model cannot draft, or ""."""
    if not spec.causal or spec.pooling is not None:
        return f"{spec.model_type} generates no text"
    if spec.state is not None:
        return f"{spec.model_type} has state layers, whose states cannot go back to an earlier token"
    if spec.latent is not None:
        return f"{spec.model_type} has latent attention, whose keys have no place in the KV pool of the model"
    if spec.streams.kv_sources:
        return f"{spec.model_type} has layers that share keys and values, which is not supported"
    return ""


def _memory(config: EngineConfig, found: ModelSpec | Eagle3Spec) -> DrafterSpec:
    dtype = config.model.dtype
    width = BYTES_OF_DTYPE["bfloat16" if dtype == "auto" else dtype]
    if isinstance(found, Eagle3Spec):
        layer = found.layer
        numbers = sum(math.prod(shape) for _, (shape, _) in needed_tensors(found))
        heads = (LayerHeads(head_dim=layer.head_dim, num_kv_heads=layer.num_kv_heads),)
        size = layer.hidden_size
        # In float32, because the dtype may not be known yet; and the position of the token.
        page_bytes = size * BYTES_OF_DTYPE["float32"] + 8
        return DrafterSpec(
            heads=heads,
            weights_bytes=numbers * width,
            state_size=size,
            state_token_bytes=math.ceil(page_bytes / config.cache.page_size),
        )
    on_cpu = config.model.device != "cuda"
    return DrafterSpec(
        heads=tuple(found.heads_of(layer_id) for layer_id in found.kv_layers),
        weights_bytes=weight_bytes(found, width, dequantized=False, on_cpu=on_cpu),
    )
