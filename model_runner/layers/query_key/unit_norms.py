"""`unit_norms`: heads of q and k divided by their root mean squares, as in Llama 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...ops.rotation import HeadNorms

if TYPE_CHECKING:
    from ...model_context import ModelContext


def unit_norms(context: ModelContext) -> HeadNorms:
    """Norms with weights of one.

    Llama 4 normalizes after rotary, which does not change a root mean square: the two commute if whole heads rotate and
    cos and sin have no factor.
    """
    ones = torch.ones(context.spec.head_dim, dtype=context.dtype, device=context.device)
    return HeadNorms(ones, ones, context.spec.rms_norm_eps)
