"""The kernels for `--deterministic`: sums in one order, independent of the other requests in the batch.

`runtime.determinism` documents the promise and why it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..runtime.errors import ConfigError
from .attention.cpu_native import CpuNativeAttention
from .kernels import latent, native
from .kernels.native_experts import NativeExperts
from .kernels.native_matmul import NativeMatmul
from .op_selection import PROVIDERS, Provider, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ..models.spec.model_spec import ModelSpec
    from .ops.experts import ExpertSource, ExpertWeights
    from .ops.linear import HeadMatmul, LinearWeight


def check_fixed_order(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Check that our kernels can compute this model here.

    Raises:
        ConfigError: they cannot; the message has all reasons.
    """
    reasons = [f"operations: {reason}" for reason in native.reasons_against_native(device, dtype)]
    reasons += [
        f"attention: {reason}" for reason in CpuNativeAttention.reasons_against(spec, device, dtype, kv_dtype)
    ]
    if reasons:
        raise ConfigError(
            f"deterministic is on, but only the engine's own kernels keep one order of sums, and they cannot run here: "
            f"{'; '.join(reasons)}; omit --deterministic"
        )


def pack_linear(weight: Tensor) -> LinearWeight:
    """Our matmul, also if another one is faster for many tokens.

    Raises:
        ConfigError: our matmul does not support this weight.
    """
    packed = native.native_ops().pack_linear(weight)
    if not isinstance(packed, NativeMatmul):
        outputs, inputs = weight.shape
        raise ConfigError(
            f"deterministic is on, but a weight of {outputs} x {inputs} in {weight.dtype} is not multiplied by the "
            "engine's own kernel, which takes bfloat16 with an even number of inputs; omit --deterministic"
        )
    return packed


def pack_experts(experts: ExpertSource) -> ExpertWeights:
    """Our kernels.

    Raises:
        ConfigError: our kernels do not support these weights.
    """
    packed = native.native_ops().pack_experts(experts)
    if not isinstance(packed, NativeExperts):
        raise ConfigError(
            "deterministic is on, but a layer's experts are not multiplied by the engine's own kernel, which takes "
            "gates and ups in one format and with an even number of inputs; omit --deterministic, or try "
            "--quantization none"
        )
    return packed


def pack_heads(weight: Tensor) -> HeadMatmul:
    """Our kernel.

    Raises:
        ConfigError: our kernel does not support these weights.
    """
    packed = latent.native_latent_ops().pack_heads(weight)
    if not isinstance(packed, latent.NativeHeadMatmul):
        raise ConfigError(
            f"deterministic is on, but the heads' matrices of {weight.shape[1]} x {weight.shape[2]} are not multiplied "
            "by the engine's own kernel, which takes an even number of inputs; omit --deterministic"
        )
    return packed


def _only_native(op: str, providers: Sequence[Provider]) -> Sequence[Provider]:
    if op == "pack_linear":
        return (Provider("native", _nothing, lambda _target: pack_linear),)
    if op == "pack_experts":
        return (Provider("native", _nothing, lambda _target: pack_experts),)
    if op == "pack_heads":
        return (Provider("native", _nothing, lambda _target: pack_heads),)
    return [provider for provider in providers if provider.name == "native"]


def _nothing(_target: Target) -> list[str]:
    return []


PROVIDERS_IN_FIXED_ORDER: Final[Mapping[str, Sequence[Provider]]] = {
    op: _only_native(op, providers) for op, providers in PROVIDERS.items()
}
"""The providers for `select_ops`, after `check_fixed_order`."""
