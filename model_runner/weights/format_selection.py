"""`make_linear_format`: chooses how a model's linear layers are loaded on this machine, and logs the memory effect."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...models.spec.model_spec import with_quantization
from ...models.spec.quantization import BLOCK_METHODS, FP4_METHODS
from ...models.weight_files.weight_memory import rounded_bytes, tied_head_bytes, weight_bytes
from ...runtime.errors import ConfigError
from ..kernels import probe
from ..kernels.avoided import NOTHING_AVOIDED, AvoidedKernels
from ..kernels.blocks.native_blocks import TILES_FROM
from ..kernels.quantized import QuantizedLinears, QuantTarget, reasons_against_blocks
from .bitsandbytes_format import BitsAndBytesParts
from .block_format import BlockFormat
from .fp4_format import Fp4Parts
from .fp8_format import Fp8Parts, MadeFp8Parts
from .int_format import AwqParts, CompressedIntParts, GptqParts, TorchAoParts
from .linear_format import (
    FiniteScales,
    InputFactors,
    LinearFormat,
    MixedParts,
    PartReader,
    PlainFormat,
    QuantizedFormat,
)

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...models.spec.quantization import QuantizationSpec
    from ...runtime.config.model_choice import Quantization
    from ..ops.ops import Ops

logger = logging.getLogger(__name__)


def make_linear_format(
    quantization: Quantization | None,
    spec: ModelSpec,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    tiles_from: int = TILES_FROM,
    avoid: AvoidedKernels = NOTHING_AVOIDED,
) -> LinearFormat:
    """Choose how this model's linear layers are read, and which kernels multiply with them.

    Args:
        quantization: the user's setting; None: as the checkpoint says.
        tiles_from: number of tokens from which block weights may use the tiled kernels (`native_blocks`).
        avoid: the components to do without.

    Raises:
        ConfigError: setting and checkpoint contradict each other, or no kernel here multiplies the weights to be made.
    """
    spec = with_quantization(spec, quantization)
    found = spec.quantization
    target = replace(quant_target(device, dtype), tiles_from=tiles_from, avoid=avoid)
    if found is None:
        return PlainFormat(ops.pack_linear)
    linears = QuantizedLinears(target, ops.pack_linear, keep=found.kept)
    if found.method not in BLOCK_METHODS:
        if not found.kept:
            _log_cost(spec, target, "quantization is none")
        elif found.is_in_blocks and not reasons_against_blocks(target):
            _log_kept(spec, target)
        elif target.device.type != "cuda" or target.triton_reason or found.method in FP4_METHODS:
            _log_cost(spec, target, "for which there is no kernel here")
        return QuantizedFormat(_part_reader(found), linears, may_have_head=found.may_have_head)
    reasons = (
        ["has no kernel for these"]
        if not (found.kept and found.is_in_blocks)
        else reasons_against_blocks(target)
    )
    if reasons:
        if not found.stored:  # rounding would lose precision and save no memory
            raise ConfigError(
                f"quantization is {found.method}, but the product {', '.join(reasons)}; use --quantization none"
            )
        _log_cost(spec, target, f"and the product {', '.join(reasons)}")
        return PlainFormat(ops.pack_linear)  # the store dequantizes
    _log_kept(spec, target)
    return BlockFormat(found, linears)


def quant_target(device: torch.device, dtype: torch.dtype) -> QuantTarget:
    """Find the formats that this machine can run. GPU kernels are probed only if the model runs on a GPU."""
    if device.type != "cuda":
        reason = f"runs on GPUs only, not on {device.type}"
        return QuantTarget(
            device=device, dtype=dtype, capability=(0, 0), triton_reason=reason, sgl_reason=reason
        )
    works = probe.probe_kernels()
    return QuantTarget(
        device=device,
        dtype=dtype,
        capability=works.capability,
        triton_reason=works.triton.reason if works.triton.version is None else "",
        sgl_reason=works.sgl_kernel.reason if works.sgl_kernel.version is None else "",
    )


def _part_reader(found: QuantizationSpec) -> PartReader:
    parts = FiniteScales(_parts_of_method(found))
    return InputFactors(parts) if found.scales_inputs else parts


def _parts_of_method(found: QuantizationSpec) -> PartReader:
    match found.method:
        case "fp8":
            return Fp8Parts(found) if found.stored else MadeFp8Parts(found)
        case "awq":
            return AwqParts(found)
        case "gptq":
            return GptqParts(found)
        case "compressed-tensors":
            return CompressedIntParts(found)
        case "bitsandbytes":
            return BitsAndBytesParts(found)
        case "torchao":
            return TorchAoParts(found)
        case "nvfp4" | "mxfp4":
            return Fp4Parts(found)
        case "mixed":
            return MixedParts(found, _part_reader)
        case _:
            raise AssertionError(f"{found.method} is read by `BlockFormat`")


def _log_cost(spec: ModelSpec, target: QuantTarget, why: str) -> None:
    """Log the memory of quantized weights that are kept in the serving dtype."""
    assert spec.quantization is not None
    logger.warning(
        "weights are %s, %s: they are kept as %s, weights_mib=%d instead of %d",
        _method(spec.quantization),
        why,
        str(target.dtype).removeprefix("torch."),
        _weights_mib(spec, target, dequantized=True),
        _weights_mib(spec, target),
    )


def _log_kept(spec: ModelSpec, target: QuantTarget) -> None:
    """Log the form in which the weights are kept and the memory that this saves."""
    assert spec.quantization is not None
    logger.info(
        "weights are kept as %s, weights_mib=%d instead of %d as %s%s",
        _method(spec.quantization),
        _weights_mib(spec, target),
        _weights_mib(spec, target, dequantized=True),
        str(target.dtype).removeprefix("torch."),
        _rounded(spec),
    )


def _method(quantization: QuantizationSpec) -> str:
    """The method, and the formats of a GGUF file with their numbers of modules, or those of a mixed one."""
    if quantization.method == "mixed":
        return f"mixed ({', '.join(dict.fromkeys(form.method for _, form in quantization.parts))})"
    types = Counter(quantization.types.values())
    counts = ", ".join(f"{name} x {count}" for name, count in types.most_common())
    return f"{quantization.method} ({counts})" if counts else quantization.method


def _rounded(spec: ModelSpec) -> str:
    """The formats of a GGUF file without a kernel, and their memory."""
    rounded = rounded_bytes(spec)
    if not rounded:
        return ""
    held, stored = (sum(num_bytes) >> 20 for num_bytes in zip(*rounded.values(), strict=True))
    return f"; {', '.join(rounded)}: no kernel, rounded to 8 bits, mib={held}, in the file {stored}"


def _weights_mib(spec: ModelSpec, target: QuantTarget, *, dequantized: bool = False) -> int:
    """MiB of all ranks together. A plain head tied to the embedding counts once, although some kernels copy it."""
    width = target.dtype.itemsize
    on_cpu = target.device.type == "cpu"
    num_bytes = weight_bytes(spec, width, dequantized=dequantized, on_cpu=on_cpu)
    if on_cpu and not dequantized:
        num_bytes += tied_head_bytes(spec, width)
    return num_bytes >> 20
