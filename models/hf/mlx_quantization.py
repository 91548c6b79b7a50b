"""Reads the quantization of MLX folders (ml-explore/mlx-lm:mlx_lm/utils.py): `quantization` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..fields import Fields
from ..spec.quantization import QuantizationSpec, unnumbered

_BITS: Final = (2, 3, 4, 5, 6, 8)
_GROUPS: Final = (32, 64, 128)
_FLOATS: Final[Mapping[str, tuple[int, int]]] = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Modes without biases: their group and their bits, which the description may omit."""
_STACKED: Final = ".switch_mlp."


def read_mlx(config: Fields) -> QuantizationSpec:
    """The form of all modules, and of those that have another one.

    Raises:
        ConfigError: a mode, bits or a group that MLX does not have, or a damaged description.
    """
    value = config.get("quantization")
    if not isinstance(value, Mapping):
        raise config.error("quantization", value, "expected an object")
    found = _form(Fields(config.path, value, "quantization."))
    forms: list[QuantizationSpec] = []
    names: list[list[str]] = []
    plain = []
    for name, settings in value.items():
        usual = unnumbered(str(name).replace(_STACKED, ".experts."))
        if settings is False:
            plain.append(usual)
        elif isinstance(settings, Mapping):
            form = _form(Fields(config.path, settings, f"quantization.{name}."))
            if form not in forms:
                forms.append(form)
                names.append([])
            names[forms.index(form)].append(usual)
    return QuantizationSpec(
        method="mlx",
        bits=found.bits,
        group_size=found.group_size,
        symmetric=found.symmetric,
        parts=tuple((tuple(of_form), form) for of_form, form in zip(names, forms, strict=True)),
        plain_modules=tuple(plain),
    )


def _form(fields: Fields) -> QuantizationSpec:
    mode = fields.text("mode", default="affine")
    if mode in _FLOATS:
        group, bits = _FLOATS[mode]
        _one_of(fields, "group_size", (group,), default=group)
        _one_of(fields, "bits", (bits,), default=bits)
        return QuantizationSpec(method="mlx", bits=bits, group_size=group, symmetric=True)
    if mode != "affine":
        raise fields.error("mode", mode, f"supported of MLX are affine, {', '.join(_FLOATS)}")
    return QuantizationSpec(
        method="mlx",
        bits=_one_of(fields, "bits", _BITS),
        group_size=_one_of(fields, "group_size", _GROUPS),
    )


def _one_of(fields: Fields, name: str, values: tuple[int, ...], default: int | None = None) -> int:
    value = fields.integer(name, 1, 1 << 20, default=default)
    if value not in values:
        raise fields.error(name, value, f"supported are {', '.join(map(str, values))}")
    return value
