"""`difference_of`: the first difference beyond rounding between two results of an operator, in words."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_TOLERANCES: Final = {torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 2e-2}
"""Shares of a value and of the root mean square of all: Triton may multiply in TF32, torch rounds attention scores."""


class Slots:
    """Some rows of a pool."""

    def __init__(self, pool: Tensor, loc: Tensor) -> None:
        self.pool, self.loc = pool, loc

    @property
    def values(self) -> Tensor:
        pool = self.pool
        if pool.dtype.itemsize == 1:  # torch cannot index 8-bit floats on every device
            return pool.view(torch.uint8).index_select(0, self.loc).view(pool.dtype)
        return pool.index_select(0, self.loc)

    def copy_(self, other: Slots) -> None:
        self.pool.view(torch.uint8).index_copy_(0, self.loc, other.values.view(torch.uint8))


def cloned(value: Any) -> Any:
    """A copy of each tensor in tuples and lists, with its strides."""
    return tree_map(_clone, value)


def _clone(each: Any) -> Any:
    if not isinstance(each, Tensor):
        return each
    if each.is_contiguous():
        return each.clone()
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(each)


def difference_of(found: Any, expected: Any) -> str:
    """The first difference beyond rounding in two structures of tensors; empty if there is none."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    for n, (ours, theirs) in enumerate(pairs):
        if isinstance(ours, Slots):
            ours, theirs = ours.values, theirs.values
        if isinstance(ours, Tensor) and (reason := _difference(ours, theirs)):
            return f"result {n}: {reason}"
    return ""


def _difference(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    if ours.numel() == 0:
        return ""
    if not ours.is_floating_point():
        wrong = ours != theirs
        if not bool(wrong.any()):
            return ""
        at = int(wrong.flatten().to(torch.uint8).argmax())
        values = f"{ours.flatten()[at].item()}, not {theirs.flatten()[at].item()}"
        return f"{int(wrong.sum())} of {wrong.numel()} differ, the first at {_index(at, ours)}: {values}"
    tolerance = _TOLERANCES.get(min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize), 0.1)
    a, b = ours.double().flatten(), theirs.double().flatten()
    finite = torch.where(b.isfinite(), b, 0.0)
    size = finite.square().mean().sqrt()
    same = (a == b) | (a.isnan() & b.isnan())
    errors = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    ratios = errors / (tolerance * (finite.abs() + size) + 1e-12)
    at = int(ratios.argmax())
    if not float(ratios[at]) > 1.0:
        return ""
    values = f"{float(a[at]):.6g}, not {float(b[at]):.6g}"
    num_wrong = int((ratios > 1.0).sum())
    return (
        f"{num_wrong} of {a.numel()} differ, most at {_index(at, ours)}: {values} (error {float(errors[at]):.3g}, "
        f"{tolerance:g} of size {float(size):.3g} is rounding)"
    )


def _index(flat: int, tensor: Tensor) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(flat, tensor.shape)))
