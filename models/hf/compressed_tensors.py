"""Reads the quantization of compressed-tensors (vllm-project/compressed-tensors, llm-compressor).

Each group of `config_groups` describes the weights of some modules: floats of 4 or 8 bits, or integers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from ...runtime.config.model_choice import QuantMethod
from ..fields import Fields
from ..spec.quantization import QuantizationSpec, compiled

_FP8_LAYOUTS: Final = ("float-quantized", "naive-quantized")
_INT_LAYOUTS: Final = ("pack-quantized", "int-quantized", "naive-quantized")
_FP4_LAYOUTS: Final[Mapping[str, tuple[QuantMethod, str, int]]] = {
    "nvfp4-pack-quantized": ("nvfp4", "tensor_group", 16),
    "mxfp4-pack-quantized": ("mxfp4", "group", 32),
}
"""Layouts of 4-bit floats: the method, and the strategy and the group size that it has."""
_MXFP8: Final = "mxfp8-quantized"
_LAYOUTS: Final = (*_INT_LAYOUTS, "float-quantized", *_FP4_LAYOUTS, _MXFP8, "mixed-precision")
_REORDERED: Final = (True, "group", "dynamic")
"""The values of `actorder` with which the groups of a checkpoint are not neighboring inputs."""
_ALL_LINEAR: Final = "Linear"
"""The target of a group of compressed-tensors that stands for all linear layers."""
_COMPRESSED_TENSORS: Final = (
    *("quant_method", "format", "config_groups", "ignore", "sparsity_config", "transform_config"),
    # Without effect on the values of weights and activations:
    *("version", "quantization_status", "global_compression_ratio", "kv_cache_scheme"),
)
"""Fields of compressed-tensors that are read, or change nothing. Any other one may change what is computed."""


def read_compressed_tensors(fields: Fields) -> QuantizationSpec:
    """The quantization that a description declares.

    Raises:
        ConfigError: the form is not supported, or the description is damaged.
    """
    layout = fields.text("format")
    if layout not in _LAYOUTS:
        raise fields.error("format", layout, f"supported are {', '.join(_LAYOUTS)}")
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise fields.error("sparsity_config", sparsity, "sparse weights are not supported")
    transform = fields.get("transform_config")
    if isinstance(transform, Mapping) and not any(transform.values()):
        transform = None
    if transform:
        raise fields.error("transform_config", transform, "inputs that are transformed are not supported")
    for name in fields:
        if name not in _COMPRESSED_TENSORS and fields.get(name):
            raise fields.error(name, fields.get(name), "this setting is not known; use the original weights")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups", groups, "expected at least one group")
    read = [_read_group(fields, name, group, layout) for name, group in groups.items()]
    plain = module_names(fields, "ignore")
    if len(read) == 1 and not read[0][0]:
        return structs.replace(read[0][1], plain_modules=plain)
    if sum(not modules for modules, _ in read) > 1:
        raise fields.error("config_groups", groups, "only one group can be for all linear layers")
    parts = tuple(sorted(read, key=lambda part: not part[0]))  # those for named modules first
    return QuantizationSpec(method="mixed", parts=parts, plain_modules=plain)


def _read_group(
    fields: Fields, name: str, group: Any, layout: str
) -> tuple[tuple[str, ...], QuantizationSpec]:
    """The modules of a group of `config_groups` and their form; no modules: all linear layers.

    Activations may be quantized, too; they are multiplied here as if they were not, or in 8 bits.

    Args:
        layout: of groups that name none.
    """
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise fields.error(f"config_groups.{name}", group, "expected a group with `weights`")
    within = Fields(fields.path, group, f"quantization_config.config_groups.{name}.")
    if group.get("output_activations"):
        raise within.error(
            "output_activations", group["output_activations"], "quantized outputs are not supported"
        )
    layout = within.text("format", default=layout)
    weights = Fields(fields.path, group["weights"], f"quantization_config.config_groups.{name}.weights.")
    targets = module_names(within, "targets")
    for target in targets:
        if target != _ALL_LINEAR and target.isalnum() and target[0].isupper():
            raise within.error("targets", list(targets), f"of classes only {_ALL_LINEAR} is supported")
    if not targets:
        raise within.error("targets", list(targets), "expected the modules of the group")
    read = _read_ints if weights.text("type") == "int" else _read_floats
    return () if _ALL_LINEAR in targets else targets, read(within, weights, layout)


def _read_floats(group: Fields, weights: Fields, layout: str) -> QuantizationSpec:
    layouts = (*_FP8_LAYOUTS, *_FP4_LAYOUTS, _MXFP8)
    if layout not in layouts:
        raise group.error("format", layout, f"floats are supported in the layouts {', '.join(layouts)}")
    _must_be(weights, "type", weights.text("type"), "float")
    bits = weights.integer("num_bits", 1, 64)
    if not weights.boolean("symmetric", default=True):
        raise weights.error("symmetric", False, "only symmetric floats are supported")
    strategy = weights.text("strategy")
    if layout in _FP4_LAYOUTS:
        method, usual, size = _FP4_LAYOUTS[layout]
        _must_be(weights, "num_bits", bits, 4)
        _must_be(weights, "strategy", strategy, usual)
        _must_be(weights, "group_size", weights.integer("group_size", 1, 1 << 20), size)
        return QuantizationSpec(method=method)
    if bits != 8:
        raise weights.error("num_bits", bits, f"only 8-bit float weights are supported in {layout}")
    weights_only = group.get("input_activations") is None
    if layout == _MXFP8:
        _must_be(weights, "strategy", strategy, "group")
        _must_be(weights, "group_size", weights.integer("group_size", 1, 1 << 20), 32)
        return QuantizationSpec(method="fp8", block=(1, 32), weights_only=weights_only)
    if strategy not in ("tensor", "channel", "block"):
        raise weights.error("strategy", strategy, "only tensor, channel and block are supported")
    return QuantizationSpec(
        method="fp8",
        block=block_sizes(weights, "block_structure") if strategy == "block" else None,
        weights_only=weights_only,
    )


def _read_ints(group: Fields, weights: Fields, layout: str) -> QuantizationSpec:
    if layout not in _INT_LAYOUTS:
        raise group.error(
            "format", layout, f"integers are supported in the layouts {', '.join(_INT_LAYOUTS)}"
        )
    bits = weights.integer("num_bits", 1, 64)
    if bits not in (4, 8):
        raise weights.error("num_bits", bits, "integers of 4 and 8 bits are supported")
    strategy = weights.text("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise weights.error("strategy", strategy, "only tensor, channel and group are supported")
    return QuantizationSpec(
        method="compressed-tensors",
        bits=8 if bits == 8 else 4,
        group_size=weights.integer("group_size", 1, 1 << 20) if strategy == "group" else 0,
        symmetric=weights.boolean("symmetric", default=True),
        packed=layout == "pack-quantized",
        reordered=weights.get("actorder") in _REORDERED,
    )


def _must_be(weights: Fields, name: str, value: object, only: object) -> None:
    if value != only:
        raise weights.error(name, value, f"only {only!r} is supported in this layout")


def block_sizes(fields: Fields, name: str) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None if missing."""
    sizes = fields.integers(name, 1, 1 << 20)
    if not sizes:
        return None
    if len(sizes) != 2:
        raise fields.error(name, list(sizes), "expected two whole numbers")
    return sizes[0], sizes[1]


def module_names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of modules; empty if missing."""
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or any(not isinstance(item, str) or not item for item in value):
        raise fields.error(name, value, "expected a list of module names")
    return checked_names(fields, name, value)


def checked_names(fields: Fields, name: str, modules: Sequence[str]) -> tuple[str, ...]:
    """Names of modules and patterns, see `QuantizationSpec.plain_modules`; `name`: the field that has them."""
    try:
        compiled(tuple(modules))
    except re.error as error:
        raise fields.error(
            name, fields.get(name), f"holds a regular expression that cannot be read: {error}"
        ) from None
    return tuple(modules)
