"""Weights of state layers as their kernels take them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class MambaWeights(NamedTuple):
    """The weights of a layer of Mamba 2 between its projections: H heads of P elements in G groups, N numbers of state.

    Attributes:
        taps: [L, K] in the dtype of the model, that of the newest token last; K = H * P + 2 * G * N channels.
        bias: [K] in that dtype; None: the convolution has none.
        decay: [H] float32, negative: -exp(A_log).
        dt_bias: [H] float32.
        skip: [H] float32: what of x each head returns beside its state's answer.
        norm: [H * P] float32, one norm over each group; None: the caller normalizes.
        eps: of that norm.
        num_groups: G; each is of H / G neighboring heads.
        least_step, most_step: bounds of a token's time step.
    """

    taps: Tensor
    bias: Tensor | None
    decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    eps: float
    num_groups: int
    least_step: float = 0.0
    most_step: float = math.inf


class DeltaWeights(NamedTuple):
    """The weights of a gated delta net between its projections: Hk key heads, H value heads, Dk and Dv elements each.

    Attributes:
        taps: [L, K] in the dtype of the model, that of the newest token last; K = 2 * Hk * Dk + H * Dv channels.
        decay: [H] float32, negative: -exp(A_log).
        dt_bias: [H] float32.
        norm: [Dv] float32, of what each head returns.
        eps: of that norm.
        num_key_heads: Hk; each is shared by H / Hk neighboring value heads.
    """

    taps: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    num_key_heads: int
