"""The operations of state layers by the C++ kernels for the CPU (`kernels/cpu`).

The bits of a token's result do not depend on the other tokens of the batch, nor on how tokens are divided among steps.
"""

# Shapes: see `ops`.

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from .cpu.library import load_library

if TYPE_CHECKING:
    from ..states.state_runs import LayerStates, StateRuns
    from ..states.state_weights import DeltaWeights, MambaWeights

_DTYPES: Final = (torch.bfloat16, torch.float32)


class NativeStateOps:
    """The operations, bound to a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def short_conv(
        self, bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns
    ) -> Tensor:
        bcx = bcx.contiguous()
        (num_taps, size), dtype = weight.shape, bcx.dtype
        assert dtype in _DTYPES and weight.dtype == slots.dtype == dtype, (dtype, weight.dtype, slots.dtype)
        assert bcx.shape[1] == 3 * size and slots.shape[1:] == (num_taps - 1, size), (bcx.shape, slots.shape)
        assert weight.is_contiguous() and slots.is_contiguous()
        assert bias is None or (bias.dtype == dtype and bias.shape == (size,)), bias
        _check_plan(runs)
        out = bcx.new_empty((bcx.shape[0], size))
        self._library.short_conv(
            bcx.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            slots.data_ptr(),
            runs.plan.data_ptr(),
            out.data_ptr(),
            bcx.shape[0],
            size,
            num_taps,
            dtype == torch.bfloat16,
        )
        return out

    def gated_delta(
        self, qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: LayerStates, runs: StateRuns
    ) -> Tensor:
        qkvz, ba, recurrent = qkvz.contiguous(), ba.contiguous(), states.recurrent
        assert recurrent is not None and recurrent.dtype == torch.float32 and recurrent.is_contiguous()
        num_tokens, dtype, conv = len(qkvz), qkvz.dtype, states.conv
        num_taps, conv_size = weights.taps.shape
        num_heads, key_dim, value_dim = recurrent.shape[1:]
        value_size = num_heads * value_dim
        assert dtype in _DTYPES and ba.dtype == weights.taps.dtype == conv.dtype == dtype, (dtype, ba.dtype)
        assert conv_size == 2 * weights.num_key_heads * key_dim + value_size, weights.taps.shape
        assert qkvz.shape[1] == conv_size + value_size and ba.shape == (num_tokens, 2 * num_heads), qkvz.shape
        assert conv.shape[1:] == (num_taps - 1, conv_size) and 2 <= num_taps <= 64, conv.shape
        assert weights.taps.is_contiguous() and conv.is_contiguous()
        _check_vectors(num_heads, weights.decay, weights.dt_bias)
        _check_vectors(value_dim, weights.norm)
        _check_plan(runs)
        workspace = qkvz.new_empty((num_tokens, conv_size + 5 * num_heads), dtype=torch.float32)
        out = qkvz.new_empty((num_tokens, value_size))
        self._library.gated_delta(
            qkvz.data_ptr(),
            ba.data_ptr(),
            weights.taps.data_ptr(),
            weights.decay.data_ptr(),
            weights.dt_bias.data_ptr(),
            weights.norm.data_ptr(),
            conv.data_ptr(),
            recurrent.data_ptr(),
            runs.plan.data_ptr(),
            workspace.data_ptr(),
            out.data_ptr(),
            num_tokens,
            weights.num_key_heads,
            num_heads,
            key_dim,
            value_dim,
            num_taps,
            weights.eps,
            dtype == torch.bfloat16,
        )
        return out

    def mamba2(self, zxbcdt: Tensor, weights: MambaWeights, states: LayerStates, runs: StateRuns) -> Tensor:
        zxbcdt, recurrent, conv = zxbcdt.contiguous(), states.recurrent, states.conv
        assert recurrent is not None and recurrent.dtype == torch.float32 and recurrent.is_contiguous()
        num_tokens, dtype, norm, bias = len(zxbcdt), zxbcdt.dtype, weights.norm, weights.bias
        num_taps, conv_size = weights.taps.shape
        num_heads, state_dim, head_dim = recurrent.shape[1:]
        inner = num_heads * head_dim
        assert dtype in _DTYPES and weights.taps.dtype == conv.dtype == dtype, (dtype, conv.dtype)
        assert conv_size == inner + 2 * weights.num_groups * state_dim, weights.taps.shape
        assert num_heads % weights.num_groups == 0, weights.num_groups
        assert zxbcdt.shape[1] == inner + conv_size + num_heads, zxbcdt.shape
        assert conv.shape[1:] == (num_taps - 1, conv_size) and 2 <= num_taps <= 64, conv.shape
        assert weights.taps.is_contiguous() and conv.is_contiguous()
        assert bias is None or (bias.dtype == dtype and bias.shape == (conv_size,) and bias.is_contiguous())
        _check_vectors(num_heads, weights.decay, weights.dt_bias, weights.skip)
        if norm is not None:
            _check_vectors(inner, norm)
        _check_plan(runs)
        workspace = zxbcdt.new_empty((num_tokens, conv_size + 2 * num_heads), dtype=torch.float32)
        out = zxbcdt.new_empty((num_tokens, inner), dtype=torch.float32 if norm is None else dtype)
        self._library.mamba2(
            zxbcdt.data_ptr(),
            weights.taps.data_ptr(),
            None if bias is None else bias.data_ptr(),
            weights.decay.data_ptr(),
            weights.dt_bias.data_ptr(),
            weights.skip.data_ptr(),
            None if norm is None else norm.data_ptr(),
            conv.data_ptr(),
            recurrent.data_ptr(),
            runs.plan.data_ptr(),
            workspace.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_heads,
            head_dim,
            weights.num_groups,
            state_dim,
            num_taps,
            weights.eps,
            weights.least_step,
            weights.most_step,
            dtype == torch.bfloat16,
        )
        return out


def _check_vectors(size: int, *vectors: Tensor) -> None:
    for vector in vectors:
        assert vector.dtype == torch.float32 and vector.shape == (size,) and vector.is_contiguous()


def _check_plan(runs: StateRuns) -> None:
    assert runs.plan.dtype == torch.int64 and runs.plan.is_contiguous(), runs.plan.dtype


def native_state_ops() -> NativeStateOps:
    """The operations for this CPU. Call only if `reasons_against_native` is empty."""
    return NativeStateOps(load_library())
