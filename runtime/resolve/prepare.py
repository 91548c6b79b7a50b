"""`prepare`: from a merged configuration to all that an engine needs to start: files, facts, no "auto" left.

Shared by `engine serve` (before the supervisor starts processes) and `LLM` (before the engine thread starts). Takes
milliseconds once the model's files are on the disk; torch is not imported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config.config_fields import SECRETS, config_fields
from ..config.config_sources import MergedConfig
from ..config.engine_config import EngineConfig
from ..config.presets import preset_reasons
from ..model_files.load_spec import load_spec
from ..model_files.model_spec import ModelSpec
from ..model_files.quantization_choice import with_quantisation
from ..model_files.source import ModelSource, resolve_source
from .host_facts import HostFacts, read_host_facts
from .resolve import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A start that should work.

    Attributes:
        config: every value concrete.
        source: the model's files.
        spec: the model's architecture.
        notes: setting -> why it has its value, where that was computed or is a preset's.
    """

    config: EngineConfig
    source: ModelSource
    spec: ModelSpec
    notes: Mapping[str, str]

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.config.model.served_model_name or self.source.name


def prepare(
    merged: MergedConfig,
    *,
    on_step: Callable[[str], None] | None = None,
    on_download: Callable[[int, int], None] | None = None,
    host: HostFacts | None = None,
) -> Prepared:
    """Find the model, fetching it if need be, and resolve the configuration for it and for this machine.

    Args:
        merged: what the user wants.
        on_step: told the name of each step as it begins.
        on_download: told (bytes so far, bytes in all) while the default model is fetched.
        host: what the machine is like, if the caller has looked already.

    Raises:
        ConfigError: no such model, a broken one, or settings it cannot run with.
    """
    step = on_step or _no_step
    config = merged.config
    step("model files")
    source = resolve_source(
        config.model.model, need_weights=config.model.load_format != "dummy", progress=on_download
    )
    spec = with_quantisation(load_spec(source), config.model.quantization)
    resolved = resolve(config, spec, host or read_host_facts())
    model = resolved.config.model
    spec = with_quantisation(spec, model.quantization)
    notes = {**preset_reasons(config.scheduler.preset, merged.origins), **resolved.notes}
    if model.served_model_name is None:
        notes["served_model_name"] = "the model's own name"
        model = dataclasses.replace(model, served_model_name=source.name)
    if model.load_format == "auto":
        notes["load_format"] = "what the model's files are"
        model = dataclasses.replace(model, load_format="gguf" if source.kind == "gguf" else "safetensors")
    if model.quantization == "none" and "quantization" in notes:
        logger.info("weights are dequantised: %s", notes["quantization"])
    return Prepared(dataclasses.replace(resolved.config, model=model), source, spec, notes)


def log_config(prepared: Prepared, origins: Mapping[str, str]) -> None:
    """Log the settings that are not plain defaults in one line; at DEBUG, where each comes from."""
    effective = {}
    for field in config_fields().values():
        value = getattr(getattr(prepared.config, field.group), field.name)
        if value != field.default:
            effective[field.name] = "(hidden)" if field.name in SECRETS else value
            logger.debug(
                "setting=%s reason=%r", field.name, prepared.notes.get(field.name, origins[field.name])
            )
    logger.info("resolved %s", " ".join(f"{name}={value}" for name, value in effective.items()))


def _no_step(_name: str) -> None:
    return
