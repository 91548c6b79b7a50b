"""Sparse latent attention on the CPU: a token attends to the earlier tokens with the best index scores.

A request with at most `IndexSpec.top_k` tokens attends to all of them, by the backend that this one is made around. The
tokens of longer requests are computed here, in plain torch, with an exact choice: index scores of all earlier tokens
in float32, then attention over the chosen rows only.
"""

# Shapes: T new tokens in the batch, t of them of one request or of a part of it, S tokens of the request, Hq query
# heads, D size of a row, Hi index heads, Di size of an index key, N tokens that are chosen.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import AttentionBackend, BatchLayout, result_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...models.spec.layer_form import IndexSpec
    from ...models.spec.model_spec import ModelSpec
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from .backend import StepAttention

_MOST_NUMBERS: Final = 1 << 23
"""Numbers of the largest temporary tensor, if one token does not need more."""


def indexed_backend(dense: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend with this name that is `dense` for requests with few tokens."""
    return cast(
        "type[AttentionBackend]", type("Indexed", (Indexed,), {"name": dense.name, "dense_type": dense})
    )


class Indexed(AttentionBackend):
    """Attention backend of models with an indexer; `indexed_backend` sets the class attributes."""

    name: ClassVar[str]
    dense_type: ClassVar[type[AttentionBackend]]

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        assert spec.latent is not None and spec.latent.index is not None
        self._index, self._scale = spec.latent.index, spec.score_scale
        self._kv_pool, self._req_to_token = kv_pool, req_to_token
        self._dense = self.dense_type(spec, kv_pool, req_to_token, buffers)

    @property
    def gathered_token_bytes(self) -> int:
        """Bytes of the other backend, of an index key in float32 and of its copy."""
        return self._dense.gathered_token_bytes + 2 * 4 * self._index.head_dim

    def plan_step(self, layout: BatchLayout) -> IndexedStep:
        is_long = layout.prefix_lens + layout.extend_lens > self._index.top_k
        ends = np.cumsum(layout.extend_lens)
        requests = [
            _Request(
                slice(int(ends[idx] - layout.extend_lens[idx]), int(ends[idx])),
                int(layout.prefix_lens[idx]),
                self._req_to_token[
                    int(layout.rows[idx]), : int(layout.prefix_lens[idx] + layout.extend_lens[idx])
                ],
            )
            for idx in np.flatnonzero(is_long)
        ]
        dense, tokens = None, None
        if not requests:
            dense = self._dense.plan_step(layout)
        elif not is_long.all():
            dense = self._dense.plan_step(_part(layout, ~is_long))
            tokens = torch.from_numpy(np.flatnonzero(np.repeat(~is_long, layout.extend_lens)))
        return IndexedStep(self._kv_pool, self._index, self._scale, dense, tokens, requests)


def _part(layout: BatchLayout, requests: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> BatchLayout:
    return BatchLayout(
        layout.rows[requests],
        layout.prefix_lens[requests],
        layout.extend_lens[requests],
        int(requests[: layout.num_extends].sum()),
        None if layout.num_drafts is None else layout.num_drafts[requests],
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """A request with more tokens than are chosen.

    Attributes:
        tokens: its new tokens in the batch.
        prefix_len: tokens before the first new one.
        slots: [S] int32, of all its tokens.
    """

    tokens: slice
    prefix_len: int
    slots: Tensor

    def parts(self, width: int) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the new tokens that need about `_MOST_NUMBERS` for `width` numbers each, with [t, 1] positions."""
        num, step = self.tokens.stop - self.tokens.start, max(1, _MOST_NUMBERS // width)
        for first in range(0, num, step):
            end = min(first + step, num)
            positions = torch.arange(self.prefix_len + first, self.prefix_len + end).unsqueeze(1)
            yield slice(self.tokens.start + first, self.tokens.start + end), positions


@dataclass(frozen=True, slots=True)
class IndexedStep:
    """The attention of one step; layers choose and attend in turn.

    Attributes:
        dense: attention of the requests with few tokens; None: there are none.
        dense_tokens: [t] int64, their tokens in the batch; None: all.
        long: the other requests.
        chosen: for each long request [t, N] int64, the tokens that the last layer with an indexer chose, by their
            positions in the request. A token with fewer earlier tokens has later ones, too, which are masked.
    """

    kv_pool: KVPool
    index: IndexSpec
    scale: float
    dense: StepAttention | None
    dense_tokens: Tensor | None
    long: list[_Request]
    chosen: list[Tensor] = field(default_factory=list)

    def choose(self, layer_id: int, q: Tensor, head_weights: Tensor) -> None:
        """Choose tokens by the index keys in the pool.

        Args:
            q: [T, Hi, Di] index queries, rotated. Positive factors of the scores do not change a choice.
            head_weights: [T, Hi] float32.
        """
        rows = self.kv_pool.layer(layer_id).k.flatten(1)
        self.chosen[:] = [self._choose(request, rows, q, head_weights) for request in self.long]

    def _choose(self, request: _Request, rows: Tensor, q: Tensor, head_weights: Tensor) -> Tensor:
        keys = rows[:, rows.shape[1] - self.index.head_dim :].index_select(0, request.slots)
        keys = keys.to(torch.float32).T.contiguous()
        num_tokens = len(request.slots)
        chosen = []
        for part, positions in request.parts(self.index.num_heads * num_tokens):
            scores = (q[part].to(torch.float32).flatten(0, 1) @ keys).relu_()
            scores = scores.view(len(positions), self.index.num_heads, num_tokens)
            summed = torch.bmm(head_weights[part].unsqueeze(1), scores).squeeze(1)
            summed.masked_fill_(torch.arange(num_tokens) > positions, -torch.inf)
            chosen.append(summed.topk(self.index.top_k, dim=-1, sorted=False).indices)
        return torch.cat(chosen)

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `StepAttention`."""
        if self.dense is not None and not self.long:
            return self.dense.forward(layer_id, q, sinks, out)
        if out is None:
            out = result_of(q)
        if self.dense is not None and self.dense_tokens is not None:
            out[self.dense_tokens] = self.dense.forward(layer_id, q[self.dense_tokens])
        rows = self.kv_pool.layer(layer_id).k.flatten(1)
        for request, chosen in zip(self.long, self.chosen, strict=True):
            for part, positions in request.parts(chosen.shape[1] * rows.shape[1]):
                self._attend(q[part], rows, request, chosen[_within(part, request)], positions, out[part])
        return out

    def _attend(
        self, q: Tensor, rows: Tensor, request: _Request, chosen: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        """Fill `out` [t, Hq * D] from q [t, Hq, D] and the rows of the chosen tokens [t, N]."""
        keys = rows.index_select(0, request.slots[chosen.flatten()]).view(len(q), 1, -1, q.shape[2])
        mask = None
        if int(positions[0]) < chosen.shape[1]:
            mask = (chosen <= positions).view(len(q), 1, 1, -1)
        attended = F.scaled_dot_product_attention(q.unsqueeze(1), keys, keys, mask, scale=self.scale)
        out.copy_(attended.reshape(out.shape))


def _within(part: slice, request: _Request) -> slice:
    return slice(part.start - request.tokens.start, part.stop - request.tokens.start)
