"""`load_transformers_model`: loads a model folder with transformers' own code, and refuses unsupported models."""

from __future__ import annotations

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
from .transformers_check import ModelCheck, check_forms
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

    The whole model is loaded into host memory first.

    Args:
        ops: replace modules by these kernels, see `swap`; None: no module is replaced.

    Raises:
        ConfigError: transformers is missing or does not know the architecture, the weights do not belong to it, or its
            attention is not what our backends compute.
    """
    _refuse_formats(config, source)
    transformers = _import_transformers()
    if spec.model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{source.path}: transformers {transformers.__version__} has no built-in model for model_type "
            f"{spec.model_type!r}, and code from a model's folder is never run; a newer transformers may know it: "
            "pip install -U transformers"
        )
    model_config = _read_config(transformers, source, spec)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{source.path}: the weights are quantized, but model_impl transformers computes with plain ones only; use "
            "the original weights or --model-impl engine"
        )
    _refuse_changing_rotary(source, model_config, spec, max_model_len)
    transformers.AttentionInterface.register(ATTENTION_NAME, attend)

    def load() -> Any:
        if config.load_format == "dummy":
            causal_lm = _from_config(transformers, source, model_config, dtype)
            _fill(causal_lm, DummyStore(config.seed))
        else:
            causal_lm = _from_files(transformers, source, spec, model_config, dtype)
        return causal_lm.eval().requires_grad_(False).to(device)

    causal_lm = load()
    class_name = type(causal_lm).__name__
    check = ModelCheck(causal_lm, spec, source.path)
    model = None if ops is None else _swapped(causal_lm, check, ops)
    if model is None:
        if ops is not None:
            del causal_lm  # some of its modules are replaced
            causal_lm = load()
        model = TransformersModel(causal_lm)
        check.compare(model)
    logger.info(
        "model_impl=transformers class=%s transformers=%s worst_relative_difference=%.1e",
        class_name,
        transformers.__version__,
        check.worst,
    )
    return model


def _swapped(causal_lm: Any, check: ModelCheck, ops: Ops) -> TransformersModel | None:
    """The model with the engine's kernels; None: it does not compute the same."""
    try:
        counts = swap_modules(causal_lm, ops)
        model = TransformersModel(causal_lm)
        check.compare(model)
    except Exception as error:  # any type: it is the code of some model
        name, kind = type(causal_lm).__name__, type(error).__name__
        message = "%s cannot run with the engine's kernels in it, so it runs more slowly: %s: %s"
        logger.warning(message, name, kind, error)
        return None
    logger.info(
        "swapped_modules=%s", ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts)) or "nothing"
    )
    return model


def check_architecture(source: ModelSource, spec: ModelSpec) -> None:
    """Check an architecture without its weights: what loading refuses for its kind of attention.

    Raises:
        ConfigError: transformers refuses the configuration, or our backends do not compute a layer's attention.
    """
    transformers = _import_transformers()
    model_config = _read_config(transformers, source, spec)
    with torch.device("meta"):
        causal_lm = _from_config(transformers, source, model_config, torch.bfloat16)
    check_forms(causal_lm.eval(), spec, source.path)


def _refuse_formats(config: ModelConfig, source: ModelSource) -> None:
    if source.kind != "hf" or config.load_format == "gguf":
        raise ConfigError(
            f"{source.path}: model_impl is transformers, which reads folders in Hugging Face layout, not GGUF files; "
            "use --model-impl engine, or the folder that the file was made from"
        )
    if config.quantization is not None:
        raise ConfigError(
            f"quantization is {config.quantization}, but model_impl transformers computes with plain weights only; "
            "drop --quantization or use --model-impl engine"
        )


def _import_transformers() -> Any:
    _keep_compiler_cache()
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model_impl is transformers, but that package cannot be imported ({error}); install it: "
            'pip install "transformers>=5.0"'
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"model_impl is transformers, but the installed version {transformers.__version__} is too old; install a "
            'newer one: pip install "transformers>=5.0"'
        )
    transformers.logging.disable_progress_bar()
    return transformers


def _keep_compiler_cache() -> None:
    """Set the cache folder of torch's compiler, which its models import; by default it is a temporary folder."""
    try:
        folder = cache_dir() / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):  # torch's default folder is used
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


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


def _from_config(transformers: Any, source: ModelSource, config: Any, dtype: torch.dtype) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    except (ImportError, ValueError, TypeError) as error:
        raise _not_loadable(source, config, error) from error


def _from_files(
    transformers: Any, source: ModelSource, spec: ModelSpec, config: Any, dtype: torch.dtype
) -> Any:
    options = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "eager",
        "output_loading_info": True,
    }
    try:
        if spec.files.language_of:
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            tensors = _language_tensors(source, spec, model_class.base_model_prefix, dtype)
            causal_lm, info = model_class.from_pretrained(None, state_dict=tensors, **options)
        else:
            causal_lm, info = transformers.AutoModelForCausalLM.from_pretrained(
                Path(source.path),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                **options,
            )
    except (ImportError, OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        raise _not_loadable(source, config, error) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"{source.path}: config.json says {config.model_type}, but {len(missing)} tensors of "
            f"{type(causal_lm).__name__} are missing, first {missing[0]!r}; download the model again, or use "
            "--load-format dummy for random weights"
        )
    return causal_lm


def _language_tensors(
    source: ModelSource, spec: ModelSpec, body: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a multimodal folder's language model, by the names of a class with this body."""
    store = SafetensorsStore(Path(source.path), spec)
    named = {name: store.mapped(name).to(dtype, copy=True) for name in store.names()}
    return {re.sub(r"^model\.", f"{body}.", name): tensor for name, tensor in named.items()}


def _not_loadable(source: ModelSource, config: Any, error: Exception) -> ConfigError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(f"{source.path}: transformers cannot load {config.model_type}: {lines[0]}")


@torch.no_grad()
def _fill(causal_lm: Any, weights: DummyStore) -> None:
    """Fill parameters with dummy weights by their names, except norms, which keep transformers' initial values."""
    for name, parameter in causal_lm.named_parameters():
        if parameter.ndim > 1:
            weights.read(name, parameter)
