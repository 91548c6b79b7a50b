"""The operations in plain torch, on any device."""

# Shapes: T tokens, S streams, K hidden size.

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.altup import AltUpWeights

LEAST_MEAN_SQUARE: Final = 1e-5
"""Lower bound for the mean square of a projected stream that is scaled to the size of another."""


def gelu_times(x: Tensor, y: Tensor) -> Tensor:
    return (F.gelu(x.to(torch.float32), approximate="tanh") * y).to(x.dtype)


def sparse_gelu_and_mul(gate_up: Tensor, multiplier: float) -> Tensor:
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    deviation, mean = torch.std_mean(gate, dim=-1, correction=0, keepdim=True)
    return gelu_above(gate, mean + multiplier * deviation, up).to(gate_up.dtype)


def gelu_above(gate: Tensor, cutoff: Tensor, up: Tensor) -> Tensor:
    """gelu(max(gate - cutoff, 0)) * up, in float32."""
    return F.gelu(F.relu(gate - cutoff), approximate="tanh") * up


def ids_below(ids: Tensor, bound: int) -> Tensor:
    return ids.masked_fill(ids >= bound, 0)


class PlainAltUp:
    """See `AltUpOps`."""

    def stack(self, x: Tensor, projected: Tensor) -> Tensor:
        others = projected.view(len(x), -1, x.shape[1])
        return torch.cat((x.unsqueeze(1), _matched(others, x.unsqueeze(1)).to(x.dtype)), dim=1)

    def predict(self, streams: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        wide, num_streams = streams.to(torch.float32), streams.shape[1]
        coefs = F.linear(_numbers(wide[:, weights.active], weights), weights.predictions)
        predicted = torch.bmm(coefs.view(-1, num_streams, num_streams), wide).add_(wide).to(streams.dtype)
        return predicted, predicted[:, weights.active].contiguous()

    def correct(self, predictions: Tensor, activated: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        wide, new = predictions.to(torch.float32), activated.to(torch.float32)
        coefs = F.linear(_numbers(new, weights), weights.corrections) + 1.0
        innovation = new - wide[:, weights.active]
        corrected = (wide + coefs.unsqueeze(-1) * innovation.unsqueeze(1)).to(predictions.dtype)
        scaled = corrected[:, weights.active].to(torch.float32) * weights.output_scale
        return corrected, scaled.to(predictions.dtype)

    def spread(self, x: Tensor, streams: Tensor) -> Tensor:
        streams[:, 1:] += x.unsqueeze(1)
        return streams

    def add_matched(self, streams: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
        first = streams[:, 0]
        return ((first if total is None else total) + _matched(x, first)).to(x.dtype)


def _numbers(x: Tensor, weights: AltUpWeights) -> Tensor:
    factors = (x.square().mean(dim=-1, keepdim=True) + weights.eps).rsqrt()
    return F.linear(x * factors, weights.router).tanh()


def _matched(x: Tensor, like: Tensor) -> Tensor:
    """x with the root mean square of another tensor, in float32."""
    x = x.to(torch.float32)
    target = like.to(torch.float32).square().mean(dim=-1, keepdim=True).sqrt()
    return x * target / x.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_MEAN_SQUARE).sqrt()
