"""`experts`, a section of `bench.py`: the products of a mixture's experts, by tile, in the shapes of Qwen3-30B-A3B.

Decides the tile of `model_runner/kernels/triton/experts.py` for many rows per expert, and whether torch's grouped
product is faster there. "best" is the time of the arithmetic alone, or of reading the weights once, if that is longer.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.attention import time_of
from benchmarks.gpu.sections import Figure, Report
from engine.model_runner.kernels.triton import experts


class Shape(NamedTuple):
    """Experts, those of a token, width of the model, width of an expert."""

    num_experts: int
    num_active: int
    width: int
    inner: int


SHAPE: Final = Shape(128, 8, 2048, 768)
TINY_SHAPE: Final = Shape(4, 2, 32, 16)
TOKENS: Final = (64, 512, 2048, 8192)
TILES: Final = (
    experts._HIGH,
    experts._HIGH._replace(outputs=128),
    experts._HIGH._replace(outputs=256),
    experts._HIGH._replace(rows=64, outputs=128, num_warps=4),
)


def bench_experts(report: Report, bytes_per_s: float, flops: float) -> None:
    """See the module."""
    device = torch.device(report.device)
    shape, tokens = (TINY_SHAPE, TOKENS[:1]) if report.tiny else (SHAPE, TOKENS)
    num_experts, num_active, width, inner = shape
    dtype = torch.bfloat16
    gate_up = torch.randn(num_experts, 2 * inner, width, device=device).to(dtype) / width**0.5
    down = torch.randn(num_experts, width, inner, device=device).to(dtype) / inner**0.5
    layer = experts.TritonExperts(gate_up, down)
    weight_bytes = gate_up.nbytes + down.nbytes
    for num_tokens in tokens:
        x = torch.randn(num_tokens, width, device=device).to(dtype)
        order = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)
        ids, shares = order[:, :num_active].contiguous(), torch.rand(num_tokens, num_active, device=device)
        work = 6 * num_tokens * num_active * width * inner
        best_us = 1e6 * max(work / flops, weight_bytes / bytes_per_s)
        for tile in TILES:
            name = f"experts, {num_tokens} tokens, tile {tile.rows}x{tile.outputs}x{tile.inputs}"
            with report.part(name), mock.patch.object(experts, "_tile", lambda *_, tile=tile: tile):
                seconds = time_of(partial(layer, x, shares, ids), device)
                report.figure(Figure(name, 1e6 * seconds, "us", best_us))
        if device.type == "cuda":
            name = f"experts, {num_tokens} tokens, torch's grouped products alone"
            with report.part(name):
                report.figure(Figure(name, 1e6 * _grouped(x, ids, gate_up, down), "us", best_us))


def _grouped(x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> float:
    """Seconds of the two products on rows that are sorted by expert; sorting and combining come on top."""
    grouped: Any = torch._grouped_mm
    flat = ids.flatten()
    rows = x[flat.argsort() // ids.shape[1]].contiguous()
    ends = torch.bincount(flat, minlength=len(down)).cumsum(0).to(torch.int32)

    def products() -> torch.Tensor:
        hidden = grouped(rows, gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        result: torch.Tensor = grouped(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        return result

    return time_of(products, x.device)
