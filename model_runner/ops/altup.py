"""Gemma 3n's parallel streams (AltUp) around each layer."""

# Shapes: T tokens, K values of a row.

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class AltUpWeights(NamedTuple):
    """Weights that mix the streams of one layer, float32 and contiguous.

    A mixture is made by the numbers tanh(router @ (x / rms(x))) of a token, one for each stream.

    Attributes:
        router: [S, K], with the weight of the norm in each row.
        predictions: [S * S, S].
        corrections: [S, S].
        output_scale: [K].
        active: the stream that the layer computes.
        eps: of the norm.
    """

    router: Tensor
    predictions: Tensor
    corrections: Tensor
    output_scale: Tensor
    active: int
    eps: float


class AltUpOps(Protocol):
    """Residual streams, [T, S, K] (Baykal et al. 2023, as in Gemma 3n); computed in float32, results are rounded."""

    def stack(self, x: Tensor, projected: Tensor) -> Tensor:
        """x [T, K] as the first stream, then each of [T, (S - 1) K], scaled to the root mean square of x."""
        ...

    def predict(self, streams: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        """Each stream j plus sum_i c[j, i] stream i, with c = predictions @ numbers of the active stream.

        Returns:
            [T, S, K], and the active one of them, [T, K].
        """
        ...

    def correct(self, predictions: Tensor, activated: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        """Add (1 + c[j]) (activated - active prediction) to each stream j, c = corrections @ numbers of `activated`.

        Both arguments may be overwritten; use the returned tensors.

        Returns:
            [T, S, K], and the active one of them times `output_scale`, [T, K].
        """
        ...

    def spread(self, x: Tensor, streams: Tensor) -> Tensor:
        """Add x [T, K] to all streams but the first; `streams` may be overwritten; use the returned tensor."""
        ...

    def add_matched(self, streams: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
        """total + x, scaled to the root mean square of the first stream; [T, K]. None: the total is that stream.

        `total` may be overwritten; use the returned tensor.
        """
        ...
