"""Reads the quantization of torchao (pytorch/ao; transformers' TorchAoConfig): one config for all linear layers.

Its tensor classes have the layouts of other methods: `Int8Tensor` and `IntxUnpackedToInt8Tensor` that of integers in
bytes of compressed-tensors, `Float8Tensor` that of fp8. `Int4Tensor` has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..fields import Fields
from ..spec.quantization import QuantizationSpec
from .compressed_tensors import module_names

_INT8: Final = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_INTX: Final = {"IntxWeightOnlyConfig": "", "Int8DynamicActivationIntxWeightConfig": "weight_"}
"""Configs of integers with any bits, with what their fields for weights begin with."""
_FLOAT8: Final = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_INT4: Final = "Int4WeightOnlyConfig"
_SUPPORTED: Final = (_INT4, *_INT8, *_INTX, *_FLOAT8)


def read_torchao(fields: Fields) -> QuantizationSpec:
    """The form of all linear layers; those without scales are plain.

    Raises:
        ConfigError: a config or a layout that is not read, or a damaged description.
    """
    kinds = fields.get("quant_type")
    config = kinds.get("default") if isinstance(kinds, Mapping) else None
    if not isinstance(kinds, Mapping) or not isinstance(config, Mapping) or len(kinds) > 1:
        raise fields.error("quant_type", kinds, "expected one config for all modules, as `default`")
    if fields.boolean("include_input_output_embeddings", default=False):
        raise fields.error(
            "include_input_output_embeddings", True, "quantized embeddings of torchao are not supported"
        )
    within = Fields(fields.path, config, "quantization_config.quant_type.default.")
    kind = within.text("_type")
    if kind not in _SUPPORTED:
        raise within.error("_type", kind, f"supported are {', '.join(_SUPPORTED)}")
    if within.integer("_version", 0, 1 << 10, default=1) < 2:
        raise within.error(
            "_version", config.get("_version"), "only version 2 is stored in safetensors files"
        )
    data = config.get("_data") or {}
    if not isinstance(data, Mapping):
        raise within.error("_data", data, "expected an object")
    plain = module_names(fields, "modules_to_not_convert")
    settings = Fields(fields.path, data, "quantization_config.quant_type.default._data.")
    if kind in _FLOAT8:
        return QuantizationSpec(method="fp8", weights_only="Dynamic" not in kind, plain_modules=plain)
    if kind == _INT4:
        layout = str(_data(data.get("int4_packing_format")) or "plain").lower()
        if layout != "plain":
            rule = "which only kernels for one device read; supported is plain"
            raise settings.error("int4_packing_format", layout, rule)
        size = settings.integer("group_size", 1, 1 << 20, default=128)
        if size % 32:
            raise settings.error("group_size", size, "multiples of 32 are supported")
        return QuantizationSpec(method="torchao", group_size=size, plain_modules=plain)
    prefix = _INTX.get(kind, "")
    bits = 8 if kind in _INT8 else _int_bits(settings, f"{prefix}dtype" if prefix else "weight_dtype")
    packing = _data(data.get("intx_packing_format")) or "UNPACKED_TO_INT8"
    if packing != "UNPACKED_TO_INT8":
        raise settings.error("intx_packing_format", packing, "only UNPACKED_TO_INT8 is supported")
    return QuantizationSpec(
        method="compressed-tensors",
        bits=4 if bits <= 4 else 8,
        group_size=_group_size(settings, data, f"{prefix}granularity"),
        packed=False,
        plain_modules=plain,
    )


def _data(value: object) -> object:
    """The value of an encoded enumeration."""
    return value.get("_data") if isinstance(value, Mapping) else value


def _int_bits(settings: Fields, name: str) -> int:
    dtype = str(_data(settings.get(name)))
    digits = dtype.removeprefix("torch.").removeprefix("int")
    if not digits.isdigit() or not 1 <= int(digits) <= 8:
        raise settings.error(name, dtype, "integers of 1 to 8 bits are supported")
    return int(digits)


def _group_size(settings: Fields, data: Mapping[str, object], name: str) -> int:
    """Inputs of a group, 0 for all."""
    granularity = data.get(name)
    kind = granularity.get("_type") if isinstance(granularity, Mapping) else None
    if kind in (None, "PerRow", "PerAxis"):
        return 0 if data.get("group_size") is None else settings.integer("group_size", 1, 1 << 20)
    assert isinstance(granularity, Mapping)
    if kind != "PerGroup":
        raise settings.error(name, kind, "only PerRow, PerAxis and PerGroup are supported")
    within = granularity.get("_data")
    return Fields(settings.path, within if isinstance(within, Mapping) else {}, f"{name}.").integer(
        "group_size", 1, 1 << 20
    )
