"""`DraftMemory`: what the pages of a KV pool hold for a drafter that reads features.

The keys and values of the drafter's layer are in the same slots as the model's. Slot j holds those of the pair (feature
of token j - 1, token j), which depends on tokens up to j only, so a page can be shared like the model's part of it:

    tokens      t0    t1        t2        t3        t4
    model       kv0   kv1       kv2       kv3       kv4
    drafter     -     (f0, t1)  (f1, t2)  (f2, t3)  (f3, t4)

Who starts with a cached prefix of n tokens needs the feature of token n - 1 for its first pair. Each page has the
feature of the last of its tokens that was computed, and the position of this token. Prefixes end with a page, or are
copies of a row's pages; in a copy of another row's pages that row may have gone on, and the first pair is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..memory.kv_pool import KVPool

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.feasibility import Capacity


class DraftMemory:
    """See the module.

    Attributes:
        kv: of the drafter's layers.
        page_size: of the model's pool.
        features: [pages, F] of the last computed token of each page.
        positions: [pages, 1] int64, the position of this token.
        views: all of it, [pages, ...] each.
    """

    def __init__(
        self,
        own_spec: ModelSpec,
        capacity: Capacity,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve the memory.

        Args:
            own_spec: this rank's part of the drafter's layer, as a model of its own; F is its hidden size.
            dtype: of the features.
        """
        self.page_size = capacity.page_size
        self.kv = KVPool(
            num_layers=own_spec.num_kv_layers,
            num_pages=capacity.num_pages,
            page_size=capacity.page_size,
            num_kv_heads=own_spec.num_kv_heads,
            head_dim=own_spec.head_dim,
            dtype=kv_dtype,
            device=device,
            keys_hold_values=own_spec.latent is not None,
        )
        num_pages = capacity.num_pages + 1
        self.features = torch.zeros((num_pages, own_spec.hidden_size), dtype=dtype, device=device)
        self.positions = torch.full((num_pages, 1), -1, dtype=torch.int64, device=device)
        self.views: list[Tensor] = [*self.kv.views, self.features, self.positions]
        # The drafter's positions begin with the second token of a request, so its pages begin in the middle of pages.
        self.kv.page_size = 1
