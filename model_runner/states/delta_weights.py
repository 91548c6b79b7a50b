"""`DeltaWeights`: the weights of a gated delta net between its projections."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
