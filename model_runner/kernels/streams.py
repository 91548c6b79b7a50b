"""Operations of several residual streams (AltUp), by the C++ kernels for the CPU and in plain torch.

The kernels are `kernels/cpu/streams.cpp`; the bits of a token's result do not depend on the other tokens of the batch.
"""

# Shapes: T tokens, S streams, K hidden size.

from __future__ import annotations

import ctypes
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.altup import AltUpWeights
from .cpu.library import load_library

_DTYPES: Final = (torch.bfloat16, torch.float32)
_MOST_STREAMS: Final = 16


class NativeStreamOps:
    """The operations, bound to a loaded library; the object is also the `AltUpOps`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def altup(self) -> NativeStreamOps:
        return self

    def gelu_times(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype in _DTYPES and x.shape == y.shape and y.stride(1) == 1, (x.dtype, y.dtype)
        x = x.contiguous()
        rows, size = x.shape
        self._library.gelu_times(
            x.data_ptr(), y.data_ptr(), y.stride(0), rows, size, x.dtype == torch.bfloat16
        )
        return x

    def sparse_gelu_and_mul(self, gate_up: Tensor, multiplier: float) -> Tensor:
        assert gate_up.dtype in _DTYPES, gate_up.dtype
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._library.sparse_gelu_and_mul(
            gate_up.data_ptr(), out.data_ptr(), rows, size, multiplier, out.dtype == torch.bfloat16
        )
        return out

    def ids_below(self, ids: Tensor, bound: int) -> Tensor:
        assert ids.dtype == torch.int64 and ids.is_contiguous(), ids.dtype
        out = torch.empty_like(ids)
        self._library.ids_below(ids.data_ptr(), out.data_ptr(), bound, len(ids))
        return out

    def stack(self, x: Tensor, projected: Tensor) -> Tensor:
        x, projected = x.contiguous(), projected.contiguous()
        num_tokens, size = x.shape
        streams = 1 + projected.shape[1] // size
        assert x.dtype == projected.dtype in _DTYPES, (x.dtype, projected.dtype)
        assert projected.shape == (num_tokens, (streams - 1) * size), projected.shape
        out = x.new_empty((num_tokens, streams, size))
        self._library.altup_stack(
            x.data_ptr(),
            projected.data_ptr(),
            out.data_ptr(),
            num_tokens,
            streams,
            size,
            x.dtype == torch.bfloat16,
        )
        return out

    def predict(self, streams: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        streams = streams.contiguous()
        num_tokens, num_streams, size = _check(streams, weights)
        out = streams.new_empty(streams.shape)
        active = streams.new_empty((num_tokens, size))
        self._library.altup_predict(
            streams.data_ptr(),
            weights.router.data_ptr(),
            weights.predictions.data_ptr(),
            out.data_ptr(),
            active.data_ptr(),
            num_tokens,
            num_streams,
            size,
            weights.active,
            weights.eps,
            streams.dtype == torch.bfloat16,
        )
        return out, active

    def correct(self, predictions: Tensor, activated: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        predictions, activated = predictions.contiguous(), activated.contiguous()
        num_tokens, num_streams, size = _check(predictions, weights)
        assert activated.dtype == predictions.dtype and activated.shape == (num_tokens, size), activated.shape
        self._library.altup_correct(
            predictions.data_ptr(),
            activated.data_ptr(),
            weights.router.data_ptr(),
            weights.corrections.data_ptr(),
            weights.output_scale.data_ptr(),
            num_tokens,
            num_streams,
            size,
            weights.active,
            weights.eps,
            predictions.dtype == torch.bfloat16,
        )
        return predictions, activated

    def spread(self, x: Tensor, streams: Tensor) -> Tensor:
        x, streams = x.contiguous(), streams.contiguous()
        num_tokens, num_streams, size = streams.shape
        assert x.dtype == streams.dtype in _DTYPES and x.shape == (num_tokens, size), (x.dtype, x.shape)
        self._library.altup_spread(
            x.data_ptr(), streams.data_ptr(), num_tokens, num_streams, size, x.dtype == torch.bfloat16
        )
        return streams

    def add_matched(self, streams: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
        streams, x = streams.contiguous(), x.contiguous()
        num_tokens, num_streams, size = streams.shape
        assert x.dtype == streams.dtype in _DTYPES and x.shape == (num_tokens, size), (x.dtype, x.shape)
        out = x.new_empty(x.shape) if total is None else total.contiguous()
        assert out.dtype == x.dtype and out.shape == x.shape, (out.dtype, out.shape)
        self._library.altup_add(
            streams.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_streams,
            size,
            total is None,
            x.dtype == torch.bfloat16,
        )
        return out


def _check(streams: Tensor, weights: AltUpWeights) -> tuple[int, int, int]:
    """Check what the kernels rely on; returns T, S and K."""
    num_tokens, num_streams, size = streams.shape
    assert streams.dtype in _DTYPES and num_streams <= _MOST_STREAMS, (streams.dtype, num_streams)
    shapes = ((num_streams, size), (num_streams**2, num_streams), (num_streams, num_streams), (size,))
    parts = weights.router, weights.predictions, weights.corrections, weights.output_scale
    for part, shape in zip(parts, shapes, strict=True):
        assert part.dtype == torch.float32 and part.is_contiguous() and part.shape == shape, part.shape
    assert 0 <= weights.active < num_streams
    return num_tokens, num_streams, size


def native_stream_ops() -> NativeStreamOps:
    """The operations for this CPU. Call only if `reasons_against_native` is empty."""
    return NativeStreamOps(load_library())


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
