"""What `--deterministic` asks of the kernels: sums in one order, whatever else is in the batch.

`runtime.determinism` says what is promised and why it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..runtime.errors import ConfigError
from .attention.cpu_native import CpuNativeAttention
from .kernels import native
from .kernels.native_experts import NativeExperts
from .kernels.native_product import NativeMatmul
from .op_selection import MAKERS, Maker, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ..runtime.model_files.model_spec import ModelSpec
    from .ops import ExpertSource, ExpertWeights, LinearWeight


def check_fixed_order(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Check that our kernels can compute this model here.

    Raises:
        ConfigError: they cannot; with all reasons.
    """
    reasons = [f"operations: {reason}" for reason in native.reasons_against_native(device, dtype)]
    reasons += [
        f"attention: {reason}" for reason in CpuNativeAttention.reasons_against(spec, device, dtype, kv_dtype)
    ]
    if reasons:
        raise ConfigError(
            f"deterministic is on, but the engine's own kernels, which alone keep one order of sums, cannot run here: "
            f"{'; '.join(reasons)}; leave --deterministic away"
        )


def pack_linear(weight: Tensor) -> LinearWeight:
    """See `PackLinear`: our product, also where another is faster for many tokens.

    Raises:
        ConfigError: it cannot have this weight.
    """
    packed = native.native_ops().pack_linear(weight)
    if not isinstance(packed, NativeMatmul):
        outputs, inputs = weight.shape
        raise ConfigError(
            f"deterministic is on, but a weight of {outputs} x {inputs} in {weight.dtype} is not multiplied by the "
            "engine's own kernel, which takes bfloat16 with an even number of inputs; leave --deterministic away"
        )
    return packed


def pack_experts(experts: ExpertSource) -> ExpertWeights:
    """See `PackExperts`: ours.

    Raises:
        ConfigError: they cannot be.
    """
    packed = native.native_ops().pack_experts(experts)
    if not isinstance(packed, NativeExperts):
        raise ConfigError(
            "deterministic is on, but a layer's experts are not multiplied by the engine's own kernel, which takes "
            "gates and ups that are stored in one way and have an even number of inputs; leave --deterministic away, "
            "or try --quantization none"
        )
    return packed


def _only_native(op: str, makers: Sequence[Maker]) -> Sequence[Maker]:
    if op == "pack_linear":
        return (Maker("native", _nothing, lambda _target: pack_linear),)
    if op == "pack_experts":
        return (Maker("native", _nothing, lambda _target: pack_experts),)
    return [maker for maker in makers if maker.name == "native"]


def _nothing(_target: Target) -> list[str]:
    return []


MAKERS_IN_FIXED_ORDER: Final[Mapping[str, Sequence[Maker]]] = {
    op: _only_native(op, makers) for op, makers in MAKERS.items()
}
"""For `select_ops`, after `check_fixed_order`."""
