"""Layers that keep a state instead of KV: convolutions, delta rules, Mamba2."""

# Shapes: T tokens, S state slots, L taps, K channels, H heads, Dk, Dv dimensions of a delta head, N, P of a Mamba head.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ..states.state_runs import LayerStates, StateRuns
    from ..states.state_weights import DeltaWeights, MambaWeights


class ShortConvOp(Protocol):
    """The gated short convolution of a state layer: C * conv(B * x), over each request's tokens."""

    def __call__(
        self, bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns
    ) -> Tensor:
        """Convolve causally and move the states; returns [T, K].

        B * x is rounded, as it is kept in the states; the convolution and its product with C are rounded once, together
        with the bias. So the result does not depend on how tokens are divided among steps.

        Args:
            bcx: [T, 3K]: B, C and x.
            weight: [L, K]: the taps, that of the newest token last.
            bias: [K].
            slots: [S, L - 1, K] of the layer; all in one dtype.
            runs: of the step; they cover all T tokens.
        """
        ...


class GatedDeltaOp(Protocol):
    """A gated delta net between its projections (Yang et al. 2024), over each request's tokens."""

    def __call__(
        self, qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: LayerStates, runs: StateRuns
    ) -> Tensor:
        """Convolve q, k and v causally, correct the states of the heads and ask them; returns [T, H * Dv].

        After silu of the convolution, q and k of each head are divided by their lengths, q also by sqrt(Dk). With
        g = decay * softplus(a + dt_bias) and beta = sigmoid(b), each token takes the state S of a head to
        S' = exp(g) * S + k^T (beta * (v - exp(g) * k S)) and returns norm(q S') * silu(z). All of it is computed in
        float32 and rounded once at the end.

        Args:
            qkvz: [T, K + H * Dv]: q, k, v and z, each of all heads.
            ba: [T, 2 * H]: b and a.
            states: of the layer: `conv` [S, L - 1, K], `recurrent` [S, H, Dk, Dv] in float32.
            runs: of the step; they cover all T tokens.
        """
        ...


class Mamba2Op(Protocol):
    """A layer of Mamba 2 between its projections (Dao and Gu 2024), over each request's tokens."""

    def __call__(self, zxbcdt: Tensor, weights: MambaWeights, states: LayerStates, runs: StateRuns) -> Tensor:
        """Convolve x, B and C causally, add to the states of the heads and read them; returns [T, H * P].

        After silu of the convolution, with t = softplus(dt + dt_bias) within the bounds of time steps, each token takes
        the state S of a head to S' = exp(t * decay) * S + B^T (t * x) and returns norm((C S' + skip * x) * silu(z)).
        All of it is computed in float32 and rounded once at the end; without a norm the result is float32.

        Args:
            zxbcdt: [T, H * P + K + H]: z, the K channels x, B and C, and dt.
            states: of the layer: `conv` [S, L - 1, K], `recurrent` [S, H, N, P] in float32.
            runs: of the step; they cover all T tokens.
        """
        ...
