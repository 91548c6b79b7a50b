"""The operations of state layers in plain torch, on any device."""

# Shapes: see `ops.ShortConvOp`.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .state_runs import StateRuns


def short_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns) -> Tensor:
    gate_in, gate_out, x = bcx.chunk(3, dim=-1)
    inputs = gate_in * x
    out = torch.empty_like(inputs)
    num_kept, taps = slots.shape[1], weight.float()
    for load, first, last, store in runs.on_host():
        whole = torch.cat((slots[load], inputs[first:last]))
        if last > first:
            # [tokens, K, L] windows times [K, L]
            sums = (whole.float().unfold(0, num_kept + 1, 1) * taps.T).sum(dim=-1)
            if bias is not None:
                sums += bias
            out[first:last] = sums * gate_out[first:last]
        slots[store] = whole[len(whole) - num_kept :]
    return out
