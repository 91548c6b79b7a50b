"""`load_transformers_model`: loads a model folder with transformers' own code, and refuses unsupported models."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...models.hf.language_part import find_language_part
from ...models.model_files import read_json
from ...runtime.errors import ConfigError
from ...runtime.installation import cache_dir
from ..weights.dummy import DummyStore
from ..weights.safetensors import SafetensorsStore
from .swap import swap_modules
from .transformers_check import ModelCheck
from .transformers_model import ATTENTION_NAME, TransformersModel, attend

if TYPE_CHECKING:
    from ...models.source import ModelSource
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import ModelConfig
    from ..ops.ops import Ops

logger = logging.getLogger(__name__)


def load_transformers_model(
    config: ModelConfig,
    source: ModelSource,
    spec: ModelSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops | None = None,
) -> TransformersModel:
    """Load a folder in Hugging Face layout with transformers' own code, and compare our attention with the model's.

    The whole model is loaded into host memory first. `check_implementation` has refused other formats, quantized
    weights and architectures that transformers does not have.

    Args:
        ops: replace modules by these kernels, see `swap`; None: no module is replaced.

    Raises:
        ConfigError: the weights do not belong to the architecture, or its attention is not what our backends compute.
    """
    transformers = _import_transformers()
    model_config = _read_config(transformers, source, spec)
    _refuse_changing_rotary(source, model_config, spec, max_model_len)
    transformers.AttentionInterface.register(ATTENTION_NAME, attend)
    is_dummy = config.load_format == "dummy"
    causal_lm = _load(transformers, source, spec, model_config, dtype, with_weights=not is_dummy)
    causal_lm = causal_lm.eval().requires_grad_(False)
    if is_dummy:
        weights = DummyStore(config.seed)
        for name, parameter in causal_lm.named_parameters():
            if parameter.ndim > 1:  # norms keep transformers' initial values
                weights.read(name, parameter)
    causal_lm = causal_lm.to(device)
    name = type(causal_lm).__name__
    check = ModelCheck(causal_lm, spec, source.path)
    check.check_layers()
    model = None
    try:
        swapped = {} if ops is None else swap_modules(causal_lm, ops)
        model = TransformersModel(causal_lm)
        check.compare(model)
    except Exception as error:  # any type: it is the code of some model
        if ops is None:
            raise
        message = "%s cannot run with the engine's kernels in it, so it runs more slowly: %s: %s"
        logger.warning(message, name, type(error).__name__, error)
    else:
        logger.info(
            "model_impl=transformers class=%s transformers=%s worst_relative_difference=%.1e swapped_modules=%s",
            name,
            transformers.__version__,
            check.worst,
            ", ".join(f"{swapped[kind]} {kind}" for kind in sorted(swapped)) or "nothing",
        )
        return model
    del causal_lm, check, model  # some of its modules are replaced
    return load_transformers_model(
        config, source, spec, max_model_len=max_model_len, dtype=dtype, device=device
    )


def check_architecture(source: ModelSource, spec: ModelSpec) -> None:
    """Refuse an architecture whose attention our backends do not compute, without its weights."""
    transformers = _import_transformers()
    model_config = _read_config(transformers, source, spec)
    with torch.device("meta"):
        causal_lm = _load(transformers, source, spec, model_config, torch.bfloat16, with_weights=False)
    ModelCheck(causal_lm.eval(), spec, source.path).check_forms()


def _import_transformers() -> Any:
    with contextlib.suppress(ConfigError, OSError):  # else the default of torch, a temporary folder
        folder = cache_dir() / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))  # its compiler is imported by models
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model_impl is transformers, but that package cannot be imported ({error}); install it: "
            'pip install "transformers>=5.0"'
        ) from error
    transformers.logging.disable_progress_bar()
    return transformers


def _read_config(transformers: Any, source: ModelSource, spec: ModelSpec) -> Any:
    """transformers' configuration, of a multimodal folder that of its language model."""
    try:
        if spec.files.language_of:
            path = Path(source.path) / "config.json"
            part = find_language_part(path, read_json(path))
            assert part is not None, "the same file gave the spec"
            return transformers.CONFIG_MAPPING[spec.model_type].from_dict(dict(part.config))
        return transformers.AutoConfig.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # any type: configuration classes raise many kinds of errors
        raise ConfigError(f"{source.path}: transformers refuses config.json: {error}") from error


def _refuse_changing_rotary(source: ModelSource, config: Any, spec: ModelSpec, max_model_len: int) -> None:
    """Refuse rotary angles that depend on the longest sequence of a batch: cached keys have other angles."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    for kind in kinds:
        name = kind.get("rope_type", "default")
        original = (
            kind.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or spec.max_position_embeddings
        )
        if name == "dynamic" or (name == "longrope" and max_model_len > original):
            way_out = f"; use --max-model-len {original}" if name == "longrope" else ""
            raise ConfigError(
                f"{source.path}: {config.model_type} has rope_type {name!r}; in transformers its angles depend on the "
                f"longest sequence of a batch, so cached keys would not fit{way_out}"
            )


def _load(
    transformers: Any,
    source: ModelSource,
    spec: ModelSpec,
    config: Any,
    dtype: torch.dtype,
    *,
    with_weights: bool,
) -> Any:
    options = {"config": config, "dtype": dtype, "attn_implementation": "eager"}
    try:
        if not with_weights:
            return transformers.AutoModelForCausalLM.from_config(trust_remote_code=False, **options)
        options |= {"output_loading_info": True}
        if spec.files.language_of:
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            store, prefix = SafetensorsStore(Path(source.path), spec), f"{model_class.base_model_prefix}."
            tensors = {
                re.sub(r"^model\.", prefix, name): store.mapped(name).to(dtype, copy=True)
                for name in store.names()
            }
            causal_lm, info = model_class.from_pretrained(None, state_dict=tensors, **options)
        else:
            options |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
            causal_lm, info = transformers.AutoModelForCausalLM.from_pretrained(Path(source.path), **options)
    except (ImportError, OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"transformers cannot load {config.model_type}: {lines[0]}"
        raise ConfigError(f"{source.path}: {reason}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"{source.path}: config.json says {config.model_type}, but {len(missing)} tensors of "
            f"{type(causal_lm).__name__} are missing, first {missing[0]!r}; download the model again, or use "
            "--load-format dummy for random weights"
        )
    return causal_lm
