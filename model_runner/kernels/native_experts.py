"""`NativeExperts`: the experts of a layer, by the C++ kernels (`kernels/cpu/experts.cpp`); `route`: the router.

Each expert's weights are packed on their own (`native_matmul`), in any form. One call multiplies with the weights of
all experts; the threads divide its work as that of a single matmul.
"""

# Shapes: T tokens, K inputs, E experts, k active experts of a token, R = T * k rows, N width of an expert.

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from ...models.spec.experts_spec import SCORES
from .blocks.native_blocks import NO_TILES, NativeBlockLinear
from .native_matmul import NativeMatmul

if TYPE_CHECKING:
    from ...models.spec.experts_spec import ClampedSwiGLU, ExpertActivation, Routing
    from ..ops.deltas import ExpertChanges

_NO_CLAMP: Final = (1.0, math.inf, math.inf, 0.0)
_SQUARED_RELU: Final = 3  # of `Activation` in `kernels/cpu/activations.h`
_WEIGHT: Final = np.dtype(
    [
        ("packed", np.uint64),
        ("kind", np.int32),
        ("bits", np.int32),
        ("zero", np.int32),
        ("has_minima", np.int32),
        ("scale_len", np.int32),
        ("factor", np.float32),
        ("table", np.uint64),
    ]
)
"""`ExpertWeight` of experts.cpp, as bytes."""


def route(
    library: ctypes.CDLL, logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Among equals the expert with the smaller index comes first."""
    assert logits.dtype in (torch.bfloat16, torch.float32), logits.dtype
    num_tokens, num_experts = logits.shape
    num_active = routing.num_active
    assert num_active > 0 and routing.contradiction(num_experts) is None, (routing, num_experts)
    if bias is not None:
        assert bias.dtype == torch.float32 and bias.is_contiguous(), bias.dtype
        assert bias.shape == (num_experts,), bias.shape
    logits = logits.contiguous()
    shares = logits.new_empty((num_tokens, num_active), dtype=torch.float32)
    ids = logits.new_empty((num_tokens, num_active), dtype=torch.int64)
    library.route(
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        ids.data_ptr(),
        shares.data_ptr(),
        num_tokens,
        num_experts,
        num_active,
        routing.num_groups,
        routing.num_active_groups,
        routing.group_best,
        SCORES.index(routing.scores),
        routing.normalize,
        routing.scale,
        routing.mixer_tolerance,
        logits.dtype == torch.bfloat16,
    )
    return shares, ids


class NativeExperts:
    """`ExpertWeights`. The bits of a token's result depend on the form of its weights, not on the other tokens."""

    def __init__(
        self,
        library: ctypes.CDLL,
        gate_up: Sequence[NativeMatmul],
        down: Sequence[NativeMatmul],
        clamp: ClampedSwiGLU | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        *,
        scales_inputs: bool = False,
        gated: bool = True,
        activation: ExpertActivation = "silu",
        fuses: bool = True,
    ) -> None:
        """Take the packed weights of each expert, [2N, K] and [K, N]. `gate_up` must not be shared: it is modified.

        Args:
            clamp: see `ExpertSource`.
            biases: see `ExpertSource`.
            scales_inputs: see `ExpertSource`.
            gated: see `ExpertSource`; if not, `gate_up` is [N, K].
            activation: see `ExpertSource`; other than silu only without biases.
            fuses: the first product may apply the activation; then adapters cannot change it.
        """
        self._has_gelu = activation == "gelu_tanh"
        assert not self._has_gelu or (gated and clamp is None and biases is None)
        self._library = library
        self._clamp = clamp
        self._scales_inputs = scales_inputs
        self._gate_up_bias: Tensor | None = None
        self._down_bias: Tensor | None = None
        if biases is not None:
            self._gate_up_bias, self._down_bias = biases
        for bias in biases or ():
            assert bias.dtype == torch.bfloat16 and bias.is_contiguous(), bias.dtype
        can_fuse = fuses and gated and clamp is None and biases is None and not self._has_gelu
        for one in gate_up if can_fuse else ():
            one.fuse_silu_and_mul()
        self._has_gates = gated
        self._is_gated = gate_up[0].fuses_silu_and_mul  # the same for all experts: their shapes are equal
        self._gate_up = _Weights(library, gate_up)
        self._down = _Weights(library, down)
        self._num_experts = len(gate_up)

    def __call__(
        self, x: Tensor, shares: Tensor, expert_ids: Tensor, changes: ExpertChanges | None = None
    ) -> Tensor:
        num_tokens, num_active = expert_ids.shape
        size, num_rows, num_experts = self._gate_up.inputs, num_tokens * num_active, self._num_experts
        assert x.dtype == torch.bfloat16 and x.shape == (num_tokens, size), (x.dtype, x.shape)
        assert expert_ids.dtype == torch.int64 and expert_ids.is_contiguous(), expert_ids.dtype
        assert shares.dtype == torch.float32 and shares.is_contiguous(), shares.dtype
        assert shares.shape == expert_ids.shape, (shares.shape, expert_ids.shape)
        if x.stride(1) != 1:
            x = x.contiguous()
        library = self._library
        groups = torch.empty(library.token_groups_bytes(num_rows, num_experts), dtype=torch.uint8)
        library.group_tokens(expert_ids.data_ptr(), groups.data_ptr(), num_rows, num_experts)
        rows = x.new_empty((num_rows, size))
        library.take_tokens(
            x.data_ptr(),
            x.stride(0),
            shares.data_ptr() if self._scales_inputs else None,
            groups.data_ptr(),
            rows.data_ptr(),
            num_rows,
            num_experts,
            num_active,
            size,
        )
        hidden = self._gate_up.multiply(rows, groups)
        if changes is not None:
            assert not self._is_gated, "the experts are not those of an adapted layer"
            hidden = changes.gate_up.add(rows, hidden, changes.runs)
        if not self._is_gated:
            hidden = self._activated(hidden, groups)
        rows = self._down.multiply(hidden, groups)
        if changes is not None:
            rows = changes.down.add(hidden, rows, changes.runs)
        out = x.new_empty((num_tokens, size))
        library.add_shares(
            rows.data_ptr(),
            None if self._scales_inputs else shares.data_ptr(),
            None if self._down_bias is None else self._down_bias.data_ptr(),
            groups.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_experts,
            num_active,
            size,
        )
        return out

    def _activated(self, hidden: Tensor, groups: Tensor) -> Tensor:
        """[R, 2N] (or [R, N] without gates) -> [R, N]."""
        if not self._has_gates:
            self._library.activate(hidden.data_ptr(), hidden.numel(), _SQUARED_RELU, True)
            return hidden
        num_rows, inner = hidden.shape[0], hidden.shape[1] // 2
        out = hidden.new_empty((num_rows, inner))
        if self._has_gelu:
            self._library.gelu_and_mul(hidden.data_ptr(), out.data_ptr(), num_rows, inner, True)
            return out
        clamp, bias = self._clamp, self._gate_up_bias
        self._library.activate_experts(
            hidden.data_ptr(),
            None if bias is None else bias.data_ptr(),
            groups.data_ptr(),
            out.data_ptr(),
            num_rows,
            self._num_experts,
            inner,
            *_NO_CLAMP if clamp is None else (clamp.alpha, clamp.limit, clamp.gate_limit, clamp.offset),
        )
        return out


class _Weights:
    """One weight [N, K] of each expert, and its matmul with rows [R, K]."""

    def __init__(self, library: ctypes.CDLL, weights: Sequence[NativeMatmul]) -> None:
        self._library = library
        self._weights = list(weights)  # keeps the memory alive to which the table points
        self._table = np.array([one.as_expert() for one in weights], dtype=_WEIGHT)
        first = weights[0]
        self.outputs, self.inputs = first.shape
        self._form, self._width = first.form, first.width
        assert all((one.shape, one.form) == (first.shape, first.form) for one in weights), "shapes differ"
        borders = [one.tiles_from for one in weights if isinstance(one, NativeBlockLinear)]
        self._has_blocks, self._tiles_from = bool(borders), min(borders, default=NO_TILES)

    def multiply(self, rows: Tensor, groups: Tensor) -> Tensor:
        """Multiply each row with the weight of its expert: [R, width]."""
        out = rows.new_empty((len(rows), self._width))
        workspace = None
        if self._has_blocks:
            num_bytes = self._library.blocks_workspace_bytes(len(rows), self.inputs, NO_TILES)
            workspace = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.multiply_experts(
            self._table.ctypes.data,
            groups.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            None if workspace is None else workspace.data_ptr(),
            len(rows),
            len(self._weights),
            self.inputs,
            self.outputs,
            self._form,
            self._tiles_from,
        )
        return out
