"""`prepare`: turns a merged configuration into everything an engine needs to start: files, facts, no "auto" left.

Called by `engine serve` (before the supervisor starts processes) and `LLM` (before the engine thread starts). Takes
milliseconds once the model's files are on the disk; torch is not imported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from ...models.hub.pull import Progress
from ...models.source import ModelSource
from ...models.spec.model_spec import ModelSpec, with_quantization
from ...runtime.adapter_spec import LoadedAdapter
from ...runtime.config.config_fields import SECRETS, config_fields
from ...runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ...runtime.config.engine_config import EngineConfig
from ...runtime.config.presets import preset_reasons
from ...runtime.decision_calibration import read_calibration
from ...runtime.sampling_defaults import SamplingDefaults, effective_defaults
from .adapters import resolve_adapters
from .drafter import resolve_drafter
from .host_facts import HostFacts, read_host_facts
from .image_limits import part_scale, with_image_limits
from .kind_settings import pair_settings
from .model_resolution import find_model, read_model, text_only
from .mtp import with_mtp
from .resolve import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare`.

    Attributes:
        config: every value concrete.
        source: the model's files.
        spec: the model's architecture.
        notes: setting -> reason for its value, if it was computed or comes from a preset.
        adapters: those of `--lora`.
    """

    config: EngineConfig
    source: ModelSource
    spec: ModelSpec
    notes: Mapping[str, str]
    adapters: tuple[LoadedAdapter, ...] = ()

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters of requests without their own."""
        return effective_defaults(self.config.model.sampling_defaults, self.spec.sampling_defaults)

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.config.model.name_in_api(self.source.name)


def prepare(
    merged: MergedConfig,
    *,
    on_step: Callable[[str], None] | None = None,
    on_download: Progress | None = None,
    host: HostFacts | None = None,
) -> Prepared:
    """Find the model, download it if necessary, and resolve the configuration for it and for this machine.

    Args:
        merged: the user's configuration.
        on_step: called with the name of each step as it begins.
        on_download: called with the state of a download of model files.
        host: the facts of the machine, if the caller has read them already.

    Raises:
        ConfigError: no such model, a broken one, or settings that it cannot run with.
    """
    step = on_step or _no_step
    config = merged.config
    step("model files")
    source = find_model(config.model, progress=on_download)
    found = read_model(config.model, source)
    source, spec = found.source, found.spec
    if found.no_tower:
        logger.warning("serves only text: %s", found.no_tower)
    if what := text_only(spec, found.weights):
        logger.info("serves %s", what)
    adapters = resolve_adapters(config, spec, config.model.name_in_api(source.name))
    config, spec, draft_notes = resolve_drafter(config, source, spec, on_download)
    config = pair_settings(dataclasses.replace(config, adapters=adapters.config), spec)
    config, spec = with_mtp(config, source, spec)
    resolved = resolve(config, spec, host or read_host_facts())
    model = resolved.config.model
    assert model.num_threads != "auto", "the configuration is not resolved"
    scale = part_scale(model.device, model.num_threads)
    spec = with_image_limits(with_quantization(spec, model.quantization), resolved.config.media, scale)
    if (calibration := resolved.config.answers.decision_calibration) is not None:
        temperatures = spec.decision_temperatures | read_calibration(calibration)
        spec = structs.replace(spec, decision_temperatures=temperatures)
    notes = {
        **preset_reasons(config.scheduler.preset, merged.origins),
        **adapters.notes,
        **draft_notes,
        **resolved.notes,
    }
    if merged.config.scheduler.speculative == "auto" and config.scheduler.speculative == "mtp":
        notes["speculative"] = "the files have a layer that predicts further tokens"
    if model.served_model_name is None:
        notes["served_model_name"] = "the model's own name"
        model = dataclasses.replace(model, served_model_name=source.name)
    if model.load_format == "auto":
        notes["load_format"] = "the format of the model's files"
        model = dataclasses.replace(model, load_format="gguf" if source.kind == "gguf" else "safetensors")
    if model.sampling_defaults == "model":
        notes["sampling_defaults"] = spec.sampling_defaults.described()
    if model.quantization == "none" and "quantization" in notes:
        logger.info("weights are dequantized: %s", notes["quantization"])
    config = dataclasses.replace(resolved.config, model=model)
    return Prepared(config, source, spec, notes, adapters.adapters)


def log_config(prepared: Prepared, origins: Mapping[str, str]) -> None:
    """Log the settings that the user gave in one line; at DEBUG, all that differ from the defaults, with origins."""
    effective, given = {}, {}
    for field in config_fields().values():
        value = getattr(getattr(prepared.config, field.group), field.name)
        if value != field.default:
            effective[field.name] = "(hidden)" if field.name in SECRETS else value
            if origins[field.name] != DEFAULT_ORIGIN:
                given[field.name] = effective[field.name]
            logger.debug(
                "setting=%s reason=%r", field.name, prepared.notes.get(field.name, origins[field.name])
            )
    logger.info("settings %s", _listed(given) or "are the defaults")
    logger.debug("resolved %s", _listed(effective))
    logger.info("sampling defaults: %s", prepared.sampling_defaults.described())


def _listed(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _no_step(_name: str) -> None:
    return
