"""`QuantizedLinears`: choose for each quantized weight the kernel that can multiply with it on this machine.

Candidates are tried in order, as in `op_selection`, but per weight, because sizes matter, too. If no candidate fits,
the weight is dequantized into the serving dtype and takes the ordinary matmul of the operations.
"""

# Shapes: T tokens, K inputs, N outputs, G groups of inputs.

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..memory.huge_pages import WeightMemory
from ..ops.linear import LinearWeight, PackLinear
from .avoided import NOTHING_AVOIDED, AvoidedKernels
from .blocks.native_blocks import (
    TILES_FROM,
    BlocksSideBySide,
    NativeBlockLinear,
    reasons_against_native_blocks,
)
from .blocks.stored_rows import StoredRows, stack_rows
from .cpu.library import load_library
from .quantized_linear import Fp8Linear, Fp8WeightLinear, Int4Linear, SglMatmul, SideBySide, torch_matmul
from .quantized_weights import (
    BLOCK_SIZE,
    BlockWeight,
    Fp8Weight,
    IntWeight,
    NotFiniteError,
    stack_blocks,
    stack_fp8,
    stack_ints,
)
from .sgl import operators

logger = logging.getLogger(__name__)

QuantizedWeight = Fp8Weight | IntWeight | BlockWeight | StoredRows

Part = Tensor | QuantizedWeight
"""The weight of one module, or this rank's part of it: [N, K] in the serving dtype, or quantized."""

FP8_CAPABILITY: Final = (8, 9)
"""Ada and Hopper: the first GPUs that multiply 8-bit floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantTarget:
    """The device and dtype that kernels are chosen for.

    Attributes:
        dtype: dtype of the activations.
        capability: compute capability of the GPU, (0, 0) without one.
        triton_reason: why the Triton kernels cannot run; empty: they can.
        sgl_reason: the same for sgl_kernel.
        tiles_from: number of tokens from which block-quantized weights may take another kernel (`native_blocks`).
        memory: for the packed weights of a model on a CPU.
        avoid: the components to do without.
    """

    device: torch.device
    dtype: torch.dtype
    capability: tuple[int, int]
    triton_reason: str
    sgl_reason: str
    tiles_from: int = TILES_FROM
    memory: WeightMemory = field(default_factory=WeightMemory, compare=False)
    avoid: AvoidedKernels = NOTHING_AVOIDED


class LinearProvider(NamedTuple):
    """One way to multiply with a weight: the reasons against it, and the function that makes the `LinearWeight`.

    Attributes:
        name: in the log: the package, and after a comma what distinguishes it.
    """

    name: str
    reasons_against: Callable[[QuantTarget, Any], list[str]]
    make: Callable[[QuantTarget, Any], LinearWeight]


# ---------------------------------------------------------------- 8-bit floats


def _make_fp8_weight(target: QuantTarget, weight: Fp8Weight) -> LinearWeight:
    from .triton.split_k import num_sms_of

    return Fp8WeightLinear(weight, num_sms_of(target.device))


def _make_fp8_triton(target: QuantTarget, weight: Fp8Weight) -> LinearWeight:
    from .triton.fp8_gemm import fp8_gemm
    from .triton.split_k import num_sms_of

    num_sms = num_sms_of(target.device)

    def product(
        x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return fp8_gemm(x, x_scales, weight, scales, bias, dtype, num_sms)

    return Fp8Linear(weight, product)


def _make_fp8_sgl(_target: QuantTarget, weight: Fp8Weight) -> LinearWeight:
    return Fp8Linear(weight, SglMatmul(operators()))


def _against_fp8(target: QuantTarget, weight: Fp8Weight) -> list[str]:
    """Reasons against all FP8 matmuls: they need Triton to quantize the activations."""
    if target.device.type != "cuda":
        return [f"multiplies on GPUs only, not on {target.device.type}"]
    reasons = []
    if weight.weights_only:
        reasons.append("quantizes activations, and the checkpoint says that only weights are quantized")
    if target.capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (target.capability, FP8_CAPABILITY))
        reasons.append(f"the GPU has compute capability {have}, 8-bit floats need {need}")
    avoided = target.avoid.reasons(*names_of("triton", "fp8"))
    if avoided or target.triton_reason:
        reasons += [
            f"activations are quantized by Triton: {why}" for why in avoided or [target.triton_reason]
        ]
    return reasons


def _against_row_products(target: QuantTarget, weight: Fp8Weight) -> list[str]:
    """Reasons against libraries that support only one scale per row of each operand."""
    reasons = _against_fp8(target, weight)
    rows, columns = weight.shape
    if weight.scales.shape[1] > 1:
        reasons.append(f"supports one scale per output, this weight has one per {weight.group_size} inputs")
    if rows % 16 or columns % 16:
        reasons.append(f"takes sizes in multiples of 16, not {rows} x {columns}")
    if target.dtype != torch.bfloat16:
        reasons.append(f"returns bfloat16, not {target.dtype}")
    return reasons


def _against_fp8_sgl(target: QuantTarget, weight: Fp8Weight) -> list[str]:
    return ([target.sgl_reason] if target.sgl_reason else []) + _against_row_products(target, weight)


def _against_fp8_triton(target: QuantTarget, weight: Fp8Weight) -> list[str]:
    reasons = _against_fp8(target, weight)
    if weight.scales.shape[1] > 1 and weight.group_size != 128:
        reasons.append(f"supports groups of 128 inputs, not of {weight.group_size}")
    if weight.shape[1] % 16:
        reasons.append(f"reads inputs in multiples of 16, not {weight.shape[1]}")
    return reasons


def _against_fp8_weight(target: QuantTarget, weight: Fp8Weight) -> list[str]:
    if target.device.type != "cuda":
        return [f"multiplies on GPUs only, not on {target.device.type}"]
    reasons = [target.triton_reason] if target.triton_reason else []
    if weight.scales.shape[1] > 1 and weight.group_size % 64:
        reasons.append(f"supports groups of multiples of 64 inputs, not of {weight.group_size}")
    return reasons


# ---------------------------------------------------------------- 4 bits


def _against_int4_triton(target: QuantTarget, weight: IntWeight) -> list[str]:
    if target.device.type != "cuda":
        return [f"multiplies on GPUs only, not on {target.device.type}"]
    reasons = [target.triton_reason] if target.triton_reason else []
    if weight.bits != 4:
        reasons.append(f"supports 4 bits, not {weight.bits}")
    size = weight.group_size
    if weight.scales.shape[0] > 1 and size not in (16, 32, 64) and size % 128:
        reasons.append(f"supports groups of 16, 32, 64 and multiples of 128 inputs, not of {size}")
    return reasons


def _make_int4_triton(target: QuantTarget, weight: IntWeight) -> LinearWeight:
    from .triton.split_k import num_sms_of

    return Int4Linear(weight, num_sms_of(target.device))


# ---------------------------------------------------------------- blocks of 4 or 8 bits


def _against_blocks_native(target: QuantTarget, weight: BlockWeight | StoredRows) -> list[str]:
    return reasons_against_native_blocks(target.device, target.dtype, weight.shape)


def _make_blocks_native(target: QuantTarget, weight: BlockWeight | StoredRows) -> LinearWeight:
    return NativeBlockLinear(load_library(), weight, target.tiles_from, target.memory)


# ---------------------------------------------------------------- choice

FP8_PROVIDERS: Final[Sequence[LinearProvider]] = (
    LinearProvider("sgl-kernel", _against_fp8_sgl, _make_fp8_sgl),
    LinearProvider(
        "torch._scaled_mm", _against_row_products, lambda _target, weight: Fp8Linear(weight, torch_matmul)
    ),
    LinearProvider("triton", _against_fp8_triton, _make_fp8_triton),
    LinearProvider("triton, weights only", _against_fp8_weight, _make_fp8_weight),
)
INT4_PROVIDERS: Final[Sequence[LinearProvider]] = (
    LinearProvider("triton", _against_int4_triton, _make_int4_triton),
)
BLOCK_PROVIDERS: Final[Sequence[LinearProvider]] = (
    LinearProvider("native", _against_blocks_native, _make_blocks_native),
)


class _Kind(NamedTuple):
    """One format of weights: its name in the log, its candidate kernels, and how several weights are stacked."""

    name: str
    providers: Sequence[LinearProvider]
    stack: Callable[[Sequence[Any]], QuantizedWeight]


KINDS: Final[Mapping[type[QuantizedWeight], _Kind]] = {
    Fp8Weight: _Kind("fp8", FP8_PROVIDERS, stack_fp8),
    IntWeight: _Kind("int4", INT4_PROVIDERS, stack_ints),
    BlockWeight: _Kind("blocks", BLOCK_PROVIDERS, stack_blocks),
    StoredRows: _Kind("blocks", BLOCK_PROVIDERS, stack_rows),
}


def names_of(provider: str, kind: str) -> tuple[str, str]:
    """The names of a product in `--avoid-kernels`: its package, and the product of these weights."""
    package = provider.partition(",")[0]
    return package, f"{package}:linear_{kind}"


def choose_provider(target: QuantTarget, weight: QuantizedWeight) -> tuple[LinearProvider | None, str]:
    """The first candidate that can take this weight, and the reasons against the earlier ones; None: no candidate."""
    passed_over: list[str] = []
    kind = KINDS[type(weight)]
    for provider in kind.providers:
        reasons = target.avoid.reasons(*names_of(provider.name, kind.name))
        reasons = reasons or provider.reasons_against(target, weight)
        if not reasons:
            return provider, "; ".join(passed_over)
        passed_over.append(f"{provider.name}: {', '.join(reasons)}")
    return None, "; ".join(passed_over)


def reasons_against_blocks(target: QuantTarget) -> list[str]:
    """Why block-quantized weights have no kernel here, whatever their size."""
    avoided = target.avoid.reasons(*names_of("native", "blocks"))
    return [f"is {reason}" for reason in avoided] or reasons_against_native_blocks(
        target.device, target.dtype, (BLOCK_SIZE, BLOCK_SIZE)
    )


class QuantizedLinears:
    """Makes `LinearWeight`s, and logs each different choice once."""

    def __init__(self, target: QuantTarget, pack_plain: PackLinear, *, keep: bool = True) -> None:
        """`keep=False`: dequantize every weight."""
        self._target = target
        self._pack_plain = pack_plain
        self._keep = keep
        self._logged: set[tuple[str, ...]] = set()

    def pack(self, parts: Sequence[Part], *, as_one: bool = False) -> LinearWeight:
        """One layer's weight from those of the modules whose outputs are stacked, in as few matmuls as possible.

        Args:
            as_one: stack parts also if that takes more memory: kernels of experts know only whole weights.

        Raises:
            NotFiniteError: rows of a GGUF file have values that are not finite.
        """
        parts = [self._computable(part) for part in parts]
        runs: list[list[Part]] = []
        for part in parts:
            if runs and _stack(runs[-1][-1], part, as_one=as_one):
                runs[-1].append(part)
            else:
                runs.append([part])
        weights = [self._pack_run(run) for run in runs]
        if len(weights) == 1:
            return weights[0]
        blocks = [weight for weight in weights if isinstance(weight, NativeBlockLinear)]
        if len(blocks) == len(weights):
            return BlocksSideBySide(blocks)
        return SideBySide(weights, [sum(part.shape[0] for part in run) for run in runs])

    def _computable(self, part: Part) -> Part:
        """The part as it is if it has a kernel, else in blocks if those have one, else in the serving dtype."""
        if isinstance(part, Tensor) or self._choose(part)[0] is not None:
            return part
        if isinstance(part, IntWeight) and not reasons_against_blocks(self._target) and self._keep:
            return part.as_blocks() or self._dequantized(part)
        return self._dequantized(part)

    def _choose(self, weight: QuantizedWeight) -> tuple[LinearProvider | None, str]:
        return choose_provider(self._target, weight) if self._keep else (None, "quantization is none")

    def _pack_run(self, run: Sequence[Part]) -> LinearWeight:
        weight = stacked(run)
        if isinstance(weight, Tensor):
            return self._pack_plain(weight)
        provider, why = self._choose(weight)
        if provider is None:
            return self._pack_plain(self._dequantized(weight))
        self._log(weight, provider.name, why)
        made = provider.make(self._target, weight)
        _release(weight)
        return made

    def _dequantized(self, weight: QuantizedWeight) -> Tensor:
        if isinstance(weight, StoredRows) and not weight.is_finite:
            raise NotFiniteError
        plain = weight.dequantized(self._target.dtype)
        _release(weight)
        # The format already logs what the CPU has no kernels for; a GPU without a kernel is unexpected.
        level = logging.WARNING if self._target.device.type == "cuda" and self._keep else logging.INFO
        cost = f"dequantized while loading ({plain.nbytes / weight.num_bytes:.1f} times the memory)"
        self._log(weight, cost, self._choose(weight)[1], level)
        return plain

    def _log(self, weight: QuantizedWeight, provider: str, why: str, level: int = logging.INFO) -> None:
        kind = KINDS[type(weight)].name
        if (kind, provider, why) in self._logged:
            return
        self._logged.add((kind, provider, why))
        logger.log(level, "op=linear_%s provider=%s%s", kind, provider, f" passed over: {why}" if why else "")


def stacked(parts: Sequence[Part]) -> Part:
    """Stack several weights into one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)]) if len(parts) > 1 else first
    return KINDS[type(first)].stack(parts)


def _release(weight: QuantizedWeight) -> None:
    if isinstance(weight, StoredRows):
        weight.release()


def dequantized(part: Part, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, from any format."""
    return part if isinstance(part, Tensor) else part.dequantized(dtype)


def _stack(one: Part, other: Part, *, as_one: bool) -> bool:
    if isinstance(one, Fp8Weight) and isinstance(other, Fp8Weight):
        return one.stacks_with(other)
    if isinstance(one, IntWeight) and isinstance(other, IntWeight):
        return one.stacks_with(other)
    if isinstance(one, BlockWeight) and isinstance(other, BlockWeight):
        return one.stacks_with(other)
    if isinstance(one, StoredRows) and isinstance(other, StoredRows):
        return one.stacks_with(other) and (as_one or one.is_held_like(other))
    return isinstance(one, Tensor) and isinstance(other, Tensor)
