"""`peft_modules`: the adapted modules of a folder that peft's `save_pretrained` wrote.

`adapter_config.json` says how the tensors of `adapter_model.safetensors` are applied. What it asks for and the engine
does not compute is refused by name: an adapter that is applied in part gives wrong answers without an error.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...runtime.adapter_spec import WEIGHTS_FILE, AdapterModule
from ...runtime.errors import ConfigError
from ...runtime.text import counted
from ..fields import Fields
from ..model_files import read_json
from ..weight_files.safetensors_header import read_header
from ..weight_files.stored_forms import HeaderEntry
from .base_modules import (
    EMBEDDING,
    STACKS,
    BaseModule,
    Targets,
    check_shapes,
    compiled_patterns,
    pattern_value,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .base_modules import BaseModules

logger = logging.getLogger(__name__)

CONFIG_FILE: Final = "adapter_config.json"
DTYPES: Final = ("F32", "F16", "BF16")

_PREFIX: Final = "base_model.model."
_A_SUFFIXES: Final = (".lora_A.weight", ".lora_embedding_A")
_B_SUFFIXES: Final = (".lora_B.weight", ".lora_embedding_B")
_BASE_LAYER: Final = (".base_layer.weight", ".base_layer.bias")
"""Copies of the base model's own weights, which peft writes with adapters of the embedding and the head."""
_TIED_COPIES: Final = ("model.embed_tokens.weight", "lm_head.weight")
_STACK: Final = re.compile(r"((?:.*\.)?layers\.(\d+)\.(?:\w+\.)?experts)((?:\.base_layer)?)")
_MAX_RANK: Final = 1 << 16
_OFF: Final = "the engine does not compute this; use an adapter without it"
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": f"DoRA: {_OFF}, or merge it into the model",
    "use_qalora": f"QALoRA: {_OFF}",
    "lora_bias": f"biases of adapters: {_OFF}",
    "alora_invocation_tokens": f"activated LoRA: {_OFF}",
    "trainable_token_indices": f"trained tokens: {_OFF}",
    "layer_replication": f"repeated layers: {_OFF}",
    "use_bdlora": f"block-diagonal LoRA: {_OFF}",
    "arrow_config": f"Arrow routing: {_OFF}",
    "kasa_config": f"KaSA: {_OFF}",
    "monteclora_config": f"MonteCLoRA: {_OFF}",
    "velora_config": f"VeLoRA: {_OFF}",
    "ensure_weight_tying": f"one adapter for the embedding and a tied head: {_OFF}",
}
_CHANGES_BASE: Final = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")
"""Initializations after which the adapter fits only a base model with changed weights."""


def check_files(folder: Path) -> None:
    """Check that the folder has its two files.

    Raises:
        ConfigError: one is missing.
    """
    if not (folder / WEIGHTS_FILE).exists() and (folder / "adapter_model.bin").exists():
        raise ConfigError(
            f"{folder}: holds adapter_model.bin, which can run code when it is read; save the adapter again with "
            "safe_serialization=True"
        )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).exists():
            raise ConfigError(
                f"{folder}: there is no {name}; give a folder that peft's save_pretrained wrote"
            )


def peft_modules(folder: Path, base: BaseModules) -> tuple[AdapterModule, ...]:
    """Read and check the configuration and the header.

    Raises:
        ConfigError: see `read_adapter`.
    """
    fields = Fields(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE))
    _check_kind(fields)
    path = folder / WEIGHTS_FILE
    entries = {_canonical(name): (name, entry) for name, entry in read_header(path).entries.items()}
    targets, ranks = Targets(fields, base), compiled_patterns(fields, "rank_pattern")
    alphas = compiled_patterns(fields, "alpha_pattern")
    rank, alpha = fields.integer("r", 1, _MAX_RANK, 8), fields.number("lora_alpha", 0.0, 1e9, 8.0)
    by_sqrt = fields.boolean("use_rslora", False)

    modules, left, num_of_towers = [], set(entries), 0
    for name, (a_stored, a_entry) in entries.items():
        suffix = next((suffix for suffix in _A_SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            continue
        called = name.removesuffix(suffix)
        b_name = called + _B_SUFFIXES[_A_SUFFIXES.index(suffix)]
        if b_name not in entries:
            raise ConfigError(f"{path}: {a_stored!r} is without its B, {b_name!r}; the file is incomplete")
        b_stored, b_entry = entries[b_name]
        left -= {name, b_name}
        if base.is_of_tower(called):
            num_of_towers += 1
            continue
        if (stack := _STACK.fullmatch(called)) is not None:
            parameter = _parameter_of(fields, path, entries, stack)
            strength = _strength(f"{stack[1]}.{parameter}", ranks, rank, alphas, alpha, by_sqrt)
            pair = (a_stored, a_entry), (b_stored, b_entry)
            modules += _stack_modules(path, base, stack, parameter, strength, pair)
            continue
        module = base.find(called)
        if module is None:
            raise ConfigError(f"{path}: tensor {a_stored!r}: {base.reason_against(called)}")
        if suffix.endswith("embedding_A") != (module.name == EMBEDDING):
            raise ConfigError(f"{path}: tensor {a_stored!r} is of another kind of layer than {module.name}")
        if not targets.include(called):
            logger.warning(
                "%s: %s has tensors, but the configuration does not select it: ignored", path, called
            )
            continue
        mine, scale = _strength(called, ranks, rank, alphas, alpha, by_sqrt)
        for stored, entry in ((a_stored, a_entry), (b_stored, b_entry)):
            _check_dtype(path, stored, entry)
        check_shapes(path, module, (a_stored, a_entry.shape), (b_stored, b_entry.shape), mine)
        modules.append(AdapterModule(module.name, mine, scale, a_stored, b_stored))
    _check_rest(path, left, entries, base)
    if num_of_towers and base.has_tower:
        raise ConfigError(
            f"{path}: changes {counted(num_of_towers, 'module')} of the model's tower, to which adapters do not apply, "
            "so images would be seen as by the base model; train it for the language model alone, or serve text with "
            "--language-model-only"
        )
    if num_of_towers:
        logger.info(
            "%s: %d modules of towers are ignored: only the text of the model is served", path, num_of_towers
        )
    if not modules:
        raise ConfigError(
            f"{path}: holds no LoRA tensors for this model; check that the adapter belongs to it"
        )
    return tuple(sorted(modules, key=lambda module: module.name))


def _strength(
    called: str,
    ranks: Sequence[tuple[re.Pattern[str], float]],
    rank: int,
    alphas: Sequence[tuple[re.Pattern[str], float]],
    alpha: float,
    by_sqrt: bool,
) -> tuple[int, float]:
    """Rank and scale of a module; `rank`, `alpha`: where no pattern matches."""
    mine = int(pattern_value(ranks, called, rank))
    return mine, pattern_value(alphas, called, alpha) / (math.sqrt(mine) if by_sqrt else mine)


def _stack_modules(
    path: Path,
    base: BaseModules,
    stack: re.Match[str],
    parameter: str,
    strength: tuple[int, float],
    pair: tuple[tuple[str, HeaderEntry], tuple[str, HeaderEntry]],
) -> list[AdapterModule]:
    """The modules of the experts of a layer that a stack changes.

    Args:
        strength: rank and scale.
        pair: name and entry of A and of B.
    """
    (a_stored, a_entry), (b_stored, b_entry) = pair
    parts = base.expert_parts(int(stack[2]), is_down=parameter.endswith(STACKS[1]))
    if not parts:
        raise ConfigError(f"{path}: tensor {a_stored!r}: {base.reason_against(stack[0])}")
    whole = BaseModule(stack[0], sum(module.outputs for module, _ in parts), parts[0][0].inputs)
    num, is_swapped = base.num_experts, base.are_stacks_transposed
    if is_swapped:
        whole = whole._replace(outputs=whole.inputs, inputs=whole.outputs)
    for stored, entry in pair:
        _check_dtype(path, stored, entry)
    rank, scale = strength
    check_shapes(path, whole, (a_stored, a_entry.shape), (b_stored, b_entry.shape), rank * num)
    a, b = (b_stored, a_stored) if is_swapped else (a_stored, b_stored)
    return [AdapterModule(module.name, rank, scale, a, b, 0, is_swapped, num, rows) for module, rows in parts]


def _parameter_of(
    fields: Fields, path: Path, entries: Mapping[str, tuple[str, HeaderEntry]], stack: re.Match[str]
) -> str:
    """The parameter that the tensors of a stack change; peft nests the adapters of several, the first one inside.

    Raises:
        ConfigError: the configuration names others, or none that there can be.
    """
    named = fields.get("target_parameters")
    names = [str(one) for one in named] if isinstance(named, list) else []
    if any(".experts." not in f".{one}" or not one.endswith(STACKS) for one in names):
        raise fields.error(
            "target_parameters", named, f"only {' and '.join(STACKS)} of experts are supported"
        )
    both = [[one.rpartition(".")[2] for one in names if one.endswith(end)] for end in STACKS]
    nested = f"{stack[1]}.base_layer{_A_SUFFIXES[0]}" in entries
    given = [found[0] for found in both if found]
    if len(given) != 1 + nested:
        raise ConfigError(
            f"{path}: {stack[0]!r} has not the adapters of target_parameters, {named}; the file is incomplete"
        )
    return given[0] if stack[3] or not nested else given[1]


def _canonical(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _check_kind(fields: Fields) -> None:
    if (kind := fields.text("peft_type", "LORA").upper()) != "LORA":
        raise fields.error("peft_type", kind, "only LORA is supported; merge other adapters into the model")
    if (bias := fields.get("bias")) not in (None, "none"):
        raise fields.error("bias", bias, f'expected "none": biases of the base model are trained: {_OFF}')
    for name, reason in _REFUSED.items():
        if value := fields.get(name):
            raise fields.error(name, value, reason)
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise fields.error(
            "init_lora_weights",
            init,
            "the adapter fits a base model with changed weights; convert it to a plain one with peft's "
            "path_initial_model_for_weight_conversion",
        )
    saved = fields.get("modules_to_save")
    if saved:
        raise fields.error(
            "modules_to_save",
            saved,
            "whole trained modules are not supported; use an adapter with low ranks only",
        )


def _check_dtype(path: Path, name: str, entry: HeaderEntry) -> None:
    if entry.dtype_name not in DTYPES:
        raise ConfigError(
            f"{path}: tensor {name!r} has the dtype {entry.dtype_name}, expected one of {', '.join(DTYPES)}; "
            "save the adapter in one of them"
        )


def _check_rest(
    path: Path, left: set[str], entries: dict[str, tuple[str, HeaderEntry]], base: BaseModules
) -> None:
    """Check that the tensors besides A and B change nothing."""
    for name in sorted(left):
        stored = entries[name][0]
        if name.endswith(_BASE_LAYER) or name in _TIED_COPIES:
            continue
        if name.endswith("lora_magnitude_vector") or ".lora_magnitude_vector." in name:
            raise ConfigError(f"{path}: tensor {stored!r} is of DoRA: {_OFF}, or merge it into the model")
        if name.endswith(_B_SUFFIXES):
            raise ConfigError(f"{path}: {stored!r} is without its A; the file is incomplete")
        raise ConfigError(
            f"{path}: tensor {stored!r} is no part of a LoRA adapter ({len(left)} such tensors); {_OFF}"
        )
