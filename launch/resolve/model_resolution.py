"""`find_model` and `read_model`: from the settings of a model to what will run, or to the refusal.

`engine serve`, `LLM` and `engine doctor` all take a model through these two functions, so that they give one verdict.
They read headers and configuration, take milliseconds, and need neither torch nor transformers. The values of weights
are read later, by the process that loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from ...models.families.registry import FAMILIES
from ...models.hub.pull import Progress
from ...models.load_spec import load_spec
from ...models.source import ModelSource, asked_tower, found_tower, resolve_source
from ...models.spec.model_spec import ModelSpec, with_quantization
from ...models.weight_files.check_weights import WeightsSummary, check_folder_weights, check_gguf_weights
from ...runtime.config.engine_config import ModelConfig
from ...runtime.errors import ConfigError
from ...runtime.text import counted
from .memory_budget import size_text
from .transformers_support import find_transformers, why_no_package, why_not_transformers


class WeightsError(ConfigError):
    """The configuration is valid, and the weight files are not."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model to run, with its files.

    Attributes:
        source: the files.
        spec: the architecture, with the quantization that the settings select.
        weights: of the files; None: random weights are asked for.
        no_tower: why the tower beside a GGUF model is not used; "": it has none, or it is used.
    """

    source: ModelSource
    spec: ModelSpec
    weights: WeightsSummary | None
    no_tower: str = ""


def find_model(config: ModelConfig, *, fetch: bool = True, progress: Progress | None = None) -> ModelSource:
    """The files of a model, downloaded if necessary.

    Args:
        config: which model, and how its weights are loaded.
        fetch: False: a model that is not on this machine is an error; no network is used.
        progress: called with the state of a download.

    Raises:
        ConfigError: no files, or none that the engine reads.
    """
    need_weights = config.load_format != "dummy"
    finds_tower = config.mmproj is None and not config.language_model_only and config.task != "embed"
    source = resolve_source(
        config.model, need_weights=need_weights, need_tower=finds_tower, progress=progress, fetch=fetch
    )
    if config.mmproj is not None:
        return structs.replace(source, tower=str(asked_tower(source, config.mmproj, config.task)))
    if source.kind != "gguf" or not finds_tower:
        return source
    return structs.replace(source, tower=found_tower(source))


def read_model(config: ModelConfig, source: ModelSource) -> ResolvedModel:
    """The architecture of a model, and what the headers of its files show of the weights.

    Raises:
        WeightsError: the weight files are damaged, or do not belong to the configuration.
        ConfigError: the configuration is damaged, or of a model that cannot run here.
    """
    summary: WeightsSummary | None
    no_tower = ""
    if source.kind == "gguf":  # imported here: GGUF needs numpy, a folder does not
        from ...models.gguf.gguf_file import GGUFFile
        from ...models.gguf_vision import with_tower

        file = GGUFFile(source.path)
        spec = load_spec(source, file, config.task_choice)
        check_implementation(config, source, spec)
        if source.tower:
            try:
                spec = with_tower(file, spec, Path(source.tower))
            except ConfigError as error:
                if config.mmproj is not None:
                    raise
                source, no_tower = structs.replace(source, tower=""), str(error)
        spec, summary = _checked(config, spec, lambda: (spec, check_gguf_weights(file, spec)))
    else:
        spec = load_spec(source, choice=config.task_choice)
        check_implementation(config, source, spec)
        if spec.vision is not None and runs_in_transformers(config, spec):
            spec = structs.replace(spec, vision=None)  # its code is called for text only
        spec, summary = _checked(config, spec, lambda: check_folder_weights(Path(source.path), spec))
    return ResolvedModel(source, with_quantization(spec, config.quantization), summary, no_tower)


def runs_in_transformers(config: ModelConfig, spec: ModelSpec) -> bool:
    """Whether transformers' code computes this architecture."""
    is_known = spec.model_type in FAMILIES
    return config.model_impl == "transformers" or (config.model_impl == "auto" and not is_known)


def text_only(spec: ModelSpec, weights: WeightsSummary | None) -> str:
    """Describe the served part of a multimodal folder, for messages; "" for any other model."""
    if not spec.files.language_of or spec.vision is not None:
        return ""
    text = f"only the text of this {spec.files.language_of} model"
    if weights is None:
        return text
    size = size_text(weights.ignored_bytes)
    return f"{text}; {counted(weights.num_ignored, 'tensor')} of its towers, {size}, are not read"


def check_implementation(config: ModelConfig, source: ModelSource, spec: ModelSpec) -> None:
    """Check that the engine or transformers can compute the architecture.

    Raises:
        ConfigError: neither can, or not in this form.
    """
    if config.load_format == "gguf" and source.kind != "gguf":
        raise ConfigError(
            f"{source.path}: load_format is gguf, but this is a folder; give the path of the .gguf file as the model"
        )
    if config.load_format == "safetensors" and source.kind != "hf":
        raise ConfigError(
            f"{source.path}: load_format is safetensors, but this is a GGUF file; use --load-format gguf or auto"
        )
    is_known = spec.model_type in FAMILIES
    if spec.encoder is not None or not runs_in_transformers(config, spec):
        return  # `resolve` refuses the implementation that there is not
    asked = (
        "model_impl is transformers"
        if is_known
        else f"the engine has no model for {spec.model_type} of its own"
    )
    if source.kind != "hf":
        raise ConfigError(
            f"{source.path}: {asked}, which reads folders in Hugging Face layout, not GGUF files; use --model-impl "
            "engine, or the folder that the file was made from"
        )
    installed = find_transformers()
    if (reason := why_not_transformers(spec.model_type, installed)) is not None:
        raise ConfigError(f"{source.path}: {asked}, and transformers cannot compute it: {reason}")
    if spec.quantization is not None and spec.quantization.stored:
        way_out = " or --model-impl engine" if is_known else ""
        raise ConfigError(
            f"{source.path}: {asked}; the weights are quantized ({spec.quantization.method}), but transformers "
            f"computes with plain ones only; use the original weights{way_out}"
        )
    if config.quantization is not None:
        raise ConfigError(
            f"quantization is {config.quantization}, but {asked}, and transformers computes with plain weights only; "
            "drop --quantization" + (" or use --model-impl engine" if is_known else "")
        )
    # Last: an installation of the package must not lead to another refusal.
    if (reason := why_no_package(installed)) is not None:
        raise ConfigError(f"{source.path}: {asked}, and transformers cannot compute it: {reason}")


def _checked(
    config: ModelConfig, spec: ModelSpec, check: Callable[[], tuple[ModelSpec, WeightsSummary]]
) -> tuple[ModelSpec, WeightsSummary | None]:
    if config.load_format == "dummy":
        return spec, None
    try:
        return check()
    except ConfigError as error:
        raise WeightsError(str(error)) from error
