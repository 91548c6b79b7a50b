"""Rotary scaling of a GGUF file: one part is in the metadata, the other in tensors of frequency divisors."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import structs

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..gguf.gguf_file import GGUFFile
from ..spec.layer_form import RopeScaling
from .gguf_readers import yarn_scaling

_LLAMA3: Final = "rope_freqs.weight"
_HIGH_FACTORS: Final = (4.0, 1.0)
"""`high_freq_factor` of Llama 3 and of Llama 4."""
_STILL: Final = 1e20
"""A frequency with a larger divisor does not turn."""
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def read_gguf_rope_scaling(
    file: GGUFFile, fields: Fields, arch: str, rotary_dim: int, rope_theta: float
) -> RopeScaling:
    """The scaling of the layers that are scaled.

    Raises:
        ConfigError: it is broken or not implemented.
    """
    key = f"{arch}.rope.scaling"
    if _LONG in file.tensors or _SHORT in file.tensors:
        return _longrope_scaling(file, fields, arch, rotary_dim)
    kind = fields.text(f"{key}.type", default="none")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number(f"{key}.factor", 1.0, 1e6))
    if kind == "yarn":
        return yarn_scaling(fields, arch)
    if kind != "none":
        rule = "which is not supported; supported are: none, linear, yarn, and longrope by its tensors"
        raise fields.error(f"{key}.type", kind, rule)
    if _LLAMA3 in file.tensors:
        return _llama3_scaling(file, rotary_dim, rope_theta)
    return RopeScaling()


def read_proportional(file: GGUFFile, rotary_dim: int) -> RopeScaling:
    """The scaling of Gemma 4: divisors that are equal for the leading pairs, and so large that the others do not turn.

    Raises:
        ConfigError: there are other divisors.
    """
    if _LLAMA3 not in file.tensors:
        return RopeScaling()
    divisors = _divisors(file, _LLAMA3, rotary_dim // 2)
    turning = divisors < _STILL
    num_turning = int(turning.sum())
    if not turning[:num_turning].all() or len(np.unique(divisors[turning])) != 1:
        raise ConfigError(
            f"{file.path}: tensor {_LLAMA3!r} must hold one divisor, then divisors above {_STILL:g}; other "
            "per-frequency scalings are not supported"
        )
    return RopeScaling(
        kind="proportional", factor=round(float(divisors[0]), 6), turning_part=2 * num_turning / rotary_dim
    )


def read_divisors(file: GGUFFile, rotary_dim: int, head_dim: int) -> RopeScaling:
    """The scaling of Step-3.7: divisors for whole heads, of which those of the rotating part are used.

    Raises:
        ConfigError: the tensor has another size.
    """
    if _LLAMA3 not in file.tensors:
        return RopeScaling()
    divisors = tuple(_divisors(file, _LLAMA3, head_dim // 2)[: rotary_dim // 2].tolist())
    return RopeScaling(kind="longrope", short_factor=divisors, long_factor=divisors)


def _longrope_scaling(file: GGUFFile, fields: Fields, arch: str, rotary_dim: int) -> RopeScaling:
    original = fields.integer(f"{arch}.rope.scaling.original_context_length", 2, 1 << 30)
    factor = fields.integer(f"{arch}.context_length", 1, 1 << 30) / original
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=fields.number(f"{arch}.rope.scaling.attn_factor", 1e-6, 1e6, default=default),
        short_factor=tuple(_divisors(file, _SHORT, rotary_dim // 2).tolist()),
        long_factor=tuple(_divisors(file, _LONG, rotary_dim // 2).tolist()),
    )


def _divisors(file: GGUFFile, name: str, count: int) -> npt.NDArray[np.float32]:
    """A tensor of frequency divisors; a tensor of another size is not read.

    Raises:
        ConfigError: it is missing, of another size, or has values that are not finite and positive.
    """
    info = file.tensors.get(name)
    divisors = file.read(name) if info is None or math.prod(info.shape) == count else np.empty(0, np.float32)
    if not (divisors.size == count and np.isfinite(divisors).all() and (divisors > 0).all()):
        raise ConfigError(f"{file.path}: tensor {name!r} must hold {count} divisors above 0")
    return divisors.flatten()


def _llama3_scaling(file: GGUFFile, rotary_dim: int, rope_theta: float) -> RopeScaling:
    """Recognize Llama 3 scaling by the tensor of frequency divisors, the only sign of it in GGUF.

    The largest divisor is `factor`; all Llama 3 models share the other constants, and Llama 4 has one that differs,
    which is verified by computing the whole tensor from them.
    """
    divisors = _divisors(file, _LLAMA3, rotary_dim // 2)
    if divisors.max(initial=0.0) < 1:
        raise ConfigError(f"{file.path}: tensor {_LLAMA3!r} must hold {rotary_dim // 2} divisors >= 1")
    scaling = RopeScaling(
        kind="llama3", factor=round(float(divisors.max()), 6), low_freq_factor=1.0, original_max_position=8192
    )
    if scaling.factor == 1.0:
        return RopeScaling()
    for high in _HIGH_FACTORS:
        scaling = structs.replace(scaling, high_freq_factor=high)
        if np.allclose(divisors, _llama3_divisors(scaling, rotary_dim, rope_theta), rtol=1e-3):
            return scaling
    raise ConfigError(
        f"{file.path}: tensor 'rope_freqs.weight' is not the rope scaling of Llama 3; "
        "other per-frequency scalings are not supported"
    )


def _llama3_divisors(scaling: RopeScaling, rotary_dim: int, rope_theta: float) -> npt.NDArray[np.float64]:
    """The divisor of each rotary frequency, [rotary_dim / 2]; the formula is in `RopeScaling`."""
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position / wavelengths
    smooth = (
        np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(np.float64)
    )
    divisors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return divisors
