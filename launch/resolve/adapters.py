"""`resolve_adapters`: reads the adapters of `--lora`, and decides the memory for adapters, before anything loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...models.adapters.base_modules import BaseModules, target_of
from ...models.adapters.read_adapter import read_adapter
from ...runtime.adapter_spec import LoadedAdapter
from ...runtime.config.adapter_config import ALL_LINEAR
from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.adapter_config import AdapterConfig
    from ...runtime.config.engine_config import EngineConfig

_LEAST_RANK: Final = 16
"""If adapters of unknown rank can be loaded later; peft's and vLLM's usual ranks are 8 and 16."""


class ResolvedAdapters(NamedTuple):
    """The adapters of the start, and the settings with numbers.

    Attributes:
        adapters: in the order of `--lora`; equal ones share a store id.
        config: without "auto".
        notes: setting -> reason.
    """

    adapters: tuple[LoadedAdapter, ...]
    config: AdapterConfig
    notes: dict[str, str]


def resolve_adapters(config: EngineConfig, spec: ModelSpec, model_name: str = "") -> ResolvedAdapters:
    """Read the headers of all adapters, and check each against the model.

    Args:
        model_name: of the base model in the API, which no adapter may have.

    Raises:
        ConfigError: one is missing, broken, of another model, or above the largest rank; or the model has no adapters.
    """
    group = config.adapters
    if group.lora_root is not None and not Path(group.lora_root).expanduser().is_dir():
        raise ConfigError(f"lora_root is {group.lora_root!r}, but there is no such folder; create it first")
    if not group.is_enabled:
        return ResolvedAdapters((), group, {})
    if spec.encoder is not None:
        raise ConfigError(
            f"lora is set, but adapters of encoders ({spec.model_type}) are not supported; merge the adapter into the "
            "model (peft: merge_and_unload)"
        )
    max_rank = None if group.max_lora_rank == "auto" else group.max_lora_rank
    adapters: list[LoadedAdapter] = []
    store_ids: dict[str, int] = {}
    for name, path in group.named_paths:
        if name == model_name:
            raise ConfigError(
                f"lora names an adapter {name!r}, which is the name of the model; choose another one, or set "
                "served_model_name"
            )
        adapter = read_adapter(Path(path).expanduser(), name, spec, max_rank=max_rank)
        store_id = store_ids.setdefault(adapter.fingerprint, len(store_ids) + 1)
        adapters.append(LoadedAdapter(store_id, adapter, pinned=True))
    notes = {}
    if max_rank is None:
        ranks = [adapter.spec.rank for adapter in adapters]
        max_rank = max([*ranks, _LEAST_RANK] if group.can_load_more else ranks)
        notes["max_lora_rank"] = "the largest rank of the adapters" + (
            f", at least {_LEAST_RANK} for later ones" if group.can_load_more else ""
        )
    targets = group.lora_target_modules
    if not targets:
        found = sorted({target_of(module.name) for each in adapters for module in each.spec.modules})
        targets = (ALL_LINEAR, *found) if group.can_load_more else tuple(found)
        notes["lora_target_modules"] = "what the adapters change" + (
            ", and all linear layers for later ones" if group.can_load_more else ""
        )
    resolved = replace(group, max_lora_rank=max_rank, lora_target_modules=targets)
    _check_targets(adapters, adapted_names(resolved, spec))
    return ResolvedAdapters(tuple(adapters), resolved, notes)


def _check_targets(adapters: Iterable[LoadedAdapter], targets: frozenset[str]) -> None:
    for adapter in adapters:
        for module in adapter.spec.modules:
            if (last := target_of(module.name)) not in targets:
                raise ConfigError(
                    f"the adapter {adapter.spec.name!r} changes {module.name}, but lora_target_modules is "
                    f"{', '.join(sorted(targets))}; add {last}, or leave the setting out"
                )


def adapted_names(config: AdapterConfig, spec: ModelSpec) -> frozenset[str]:
    """Last parts of the names of the modules with memory for adapters, from resolved settings.

    Raises:
        ConfigError: a target is no module of the model.
    """
    modules = BaseModules(spec)
    linears = {target_of(name) for name in modules.linears()}
    known = {target_of(name) for name in modules.by_name}
    names: set[str] = set()
    for target in config.lora_target_modules:
        if target == ALL_LINEAR:
            names |= linears
        elif target in known:
            names.add(target)
        else:
            raise ConfigError(
                f"lora_target_modules has {target!r}, but the model has no such module; it has {ALL_LINEAR}, "
                f"{', '.join(sorted(known))}"
            )
    return frozenset(names)


def adapter_bytes(config: EngineConfig, spec: ModelSpec, dtype_bytes: int) -> int:
    """Memory of all slots; 0 without adapters."""
    group, num_slots = config.adapters, config.scheduler.max_loras_per_batch
    if not group.is_enabled:
        return 0
    assert group.max_lora_rank != "auto", "the adapters are not resolved"
    names = adapted_names(group, spec)
    widths = sum(
        module.inputs + module.outputs
        for module in BaseModules(spec).by_name.values()
        if target_of(module.name) in names
    )
    return num_slots * group.max_lora_rank * widths * dtype_bytes
