"""Attention over gathered keys and values: the arithmetic of `torch_native`, without pages.

The fastest method is used. SDPA is flash attention on GPUs and on the CPU. Extends in bfloat16 on the CPU use matmuls
block by block: SDPA's CPU kernel multiplies bfloat16 at the speed of float32, and oneDNN's matmuls are 3.3 times as
fast on CPUs with bfloat16 instructions (512 tokens, 9 heads: 1.2 ms instead of 3.8). Scores are then rounded to
bfloat16, as in transformers' eager attention. The loss against float32 is small, because q and k are rounded already:
mean error of log-probabilities 0.0397 instead of 0.0391, SmolLM2-135M.
"""

# Shapes: n requests or queries, H KV heads, G query heads per KV head, D head dim, P keys.

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Int64s = npt.NDArray[np.int64]

_SDPA_BLOCK: Final = 256
_PRODUCT_BLOCK: Final = 64
"""Queries at a time: scores of 9 heads x 64 x 1024 keys just fit into the L2 cache."""


class ScoreForm(NamedTuple):
    """Scores from products of queries and keys: cap * tanh(product * scale / cap).

    `cap`: None: product * scale.
    """

    scale: float
    cap: float | None = None


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: ScoreForm, sinks: Tensor | None = None
) -> Tensor:
    """Attend with one query per request; the heads of a group are the rows of one small matrix.

    Args:
        q: [n, H, G, D].
        k, v: [n, P, H, D].
        mask: [n, 1, G, P] of 0 and -inf, or None.
        sinks: [H, G] float32, see `AttentionForm`; None: there are none.

    Returns:
        [n, H, G, D].
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if form.cap is not None or sinks is not None:
        return _capped(q, k, v, mask, form, None if sinks is None else sinks.unsqueeze(-1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=form.scale)


class ExtendAttention:
    """Causal attention of the last n of P tokens, in blocks of queries; keys that a block cannot see are skipped.

    With a window a token attends to itself and the window - 1 tokens before it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        form: ScoreForm,
        window: int | None = None,
        *,
        chunked: bool = False,
    ) -> None:
        """`chunked`: the window is a chunk, see `AttentionForm`; the first of the P tokens begins one."""
        self._form = form
        self._chunk = window if chunked else None
        window = None if chunked else window
        self._by_products = dtype == torch.bfloat16 and device.type == "cpu"
        block = _PRODUCT_BLOCK if self._by_products else _SDPA_BLOCK
        self._mask = CausalMask(block, dtype, device)
        self._band = None if window is None else BandMask(block, window, dtype, device)
        self._window = window
        self._block = block

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        sees_to: Int64s | None = None,
    ) -> None:
        """Compute attention into `out`.

        Args:
            q: [n, H, G, D].
            k, v: [P, H, D].
            out: [n, H, G, D], filled by the call.
            sinks: [H, G] float32, see `AttentionForm`; None: there are none.
            sees_to: [n] end of the P tokens to which a query attends; None: its own is the last.
        """
        form = self._form
        is_plain = form.cap is None and sinks is None
        num_queries, prefix_len = q.shape[0], k.shape[0] - q.shape[0]
        q, out = q.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        reach = self._window or self._chunk
        cut = reach is not None and k.shape[1] > reach
        by_products = self._by_products and is_plain and sees_to is None
        if prefix_len == 0 and not self._by_products and not cut and is_plain and sees_to is None:
            out.copy_(_sdpa(q, k, v, None, form.scale))
            return
        for start, stop in self._blocks(prefix_len, num_queries):
            first, last = self._first_key(prefix_len + start), prefix_len + stop
            if sees_to is not None:
                last = max(last, int(sees_to[stop - 1]))
            queries, keys, values = q[:, :, start:stop], k[:, first:last], v[:, first:last]
            if sees_to is not None:
                mask = self._mask_of_images(q, prefix_len + start, first, last, sees_to[start:stop])
            elif self._band is not None and last > self._band.window:
                mask = self._band.get(stop - start, last - first)
            else:
                mask = self._mask.get(stop - start, stop - start if by_products else last - first)
            if not is_plain:
                of_heads = None if sinks is None else sinks[:, :, None, None]
                attended = _capped(queries, keys.unsqueeze(1), values.unsqueeze(1), mask, form, of_heads)
            elif by_products:
                attended = _products(queries, keys, values, mask, form.scale)
            else:
                attended = _sdpa(queries, keys, values, mask, form.scale)
            out[:, :, start:stop].copy_(attended)

    def _blocks(self, prefix_len: int, num_queries: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of each block of queries; none has queries of two chunks."""
        start = 0
        while start < num_queries:
            stop = min(start + self._block, num_queries)
            if self._chunk is not None:
                stop = min(stop, start + self._chunk - (prefix_len + start) % self._chunk)
            yield start, stop
            start = stop

    def _mask_of_images(self, q: Tensor, query: int, first: int, last: int, sees_to: Int64s) -> Tensor:
        """[n, last - first] the mask of n queries, of which `query` is the first, with these ends."""
        queries, keys = np.arange(query, query + len(sees_to))[:, None], np.arange(first, last)
        hidden = keys >= np.maximum(sees_to[:, None], queries + 1)
        if self._window is not None:
            hidden |= keys <= queries - self._window
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(q.device), -torch.inf)

    def _first_key(self, query: int) -> int:
        """Index of the first of the P tokens to which this query attends."""
        if self._chunk is not None:
            return query // self._chunk * self._chunk
        return 0 if self._window is None else max(0, query - self._window + 1)


class EncoderAttention:
    """Attention of all n tokens of a text to each other, in blocks of queries.

    With a window a token attends to itself, the window / 2 tokens before it and as many after it.
    """

    def __init__(self, scale: float, window: int | None = None) -> None:
        self._scale = scale
        self._reach = None if window is None else window // 2

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        sees_to: Int64s | None = None,
    ) -> None:
        """Compute attention into `out`; shapes as in `ExtendAttention`, with P = n. Encoders have no sinks."""
        assert sinks is None and sees_to is None
        num_tokens, reach = q.shape[0], self._reach
        q, out = q.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if reach is None or num_tokens <= reach + 1:
            out.copy_(_sdpa(q, k, v, None, self._scale, causal=False))
            return
        for start in range(0, num_tokens, _SDPA_BLOCK):
            stop = min(start + _SDPA_BLOCK, num_tokens)
            first, last = max(0, start - reach), min(stop + reach, num_tokens)
            queries = torch.arange(start, stop, device=q.device)[:, None]
            keys = torch.arange(first, last, device=q.device)
            mask = (queries - keys).abs() <= reach
            attended = _sdpa(q[:, :, start:stop], k[:, first:last], v[:, first:last], mask, self._scale)
            out[:, :, start:stop].copy_(attended)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = True
) -> Tensor:
    """SDPA with the KV heads as batch; all heads of a group read the same keys with stride 0: [H, G, n, D].

    `causal`: where there is no mask.
    """
    group = q.shape[1]
    k, v = k.unsqueeze(1).expand(-1, group, -1, -1), v.unsqueeze(1).expand(-1, group, -1, -1)
    is_causal = causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k * scale) v, with the heads of a group stacked as rows of one matmul: [H, G, n, D].

    Args:
        mask: [n, m], for the last m keys. Without a window these are the block's own keys: only these can lie after a
            query.
    """
    num_kv_heads, group, num_queries, head_dim = q.shape
    rows = q.reshape(num_kv_heads, group * num_queries, head_dim)
    scores = torch.baddbmm(q.new_empty(()), rows, k.transpose(1, 2), beta=0, alpha=scale)
    scores.view(num_kv_heads, group, num_queries, -1)[..., -mask.shape[1] :].add_(mask)
    return torch.bmm(scores.softmax(dim=-1), v).view(q.shape)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: ScoreForm, sinks: Tensor | None
) -> Tensor:
    """Attention with a score cap, sinks, or both, in float32: [..., n, D].

    Args:
        q: [..., n, D].
        k, v: [..., P, D], where the other axes are those of q, or 1.
        mask: 0 and -inf, broadcast to the scores [..., n, P].
        sinks: broadcast to [..., n, 1].
    """
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * form.scale
    if form.cap is not None:
        scores = scores.div_(form.cap).tanh_().mul_(form.cap)
    if mask is not None:
        scores += mask
    top = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - top)
    return (torch.matmul(weights, v.float()) / total).to(q.dtype)


class CausalMask:
    """The causal mask of a block of queries after its visible keys; every block uses a view of one buffer.

        keys  0 ........... visible-1
    query 0   0 0 0 0 0 0 | 0 - -        - is -inf
    query 1   0 0 0 0 0 0 | 0 0 -
    query 2   0 0 0 0 0 0 | 0 0 0
    """

    def __init__(self, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block = block
        self._mask = torch.empty(0, dtype=dtype, device=device)
        self._width = -1  # number of keys before the block for which the buffer is large enough

    def get(self, num_queries: int, visible: int) -> Tensor:
        """[num_queries, visible], for num_queries up to the block."""
        prefix_len = visible - num_queries
        if prefix_len > self._width:
            self._width = max(prefix_len, 2 * self._width)
            mask = self._mask.new_full((self._block, self._width + self._block), -torch.inf)
            self._mask = mask.triu_(self._width + 1)
        return self._mask[:num_queries, self._width - prefix_len : self._width + num_queries]


class BandMask:
    """The mask of a block of queries with a window of W tokens; every block uses a view of one buffer.

        keys  0 ...  W-1 .........          W = 3: three zeros in each row
    query 0   0 0 0 | - -                   - is -inf
    query 1   - 0 0 | 0 -                   the last key is the last query's own
    query 2   - - 0 | 0 0

    A block near the start of its sequence has fewer keys before it: its view lacks the first columns.
    """

    def __init__(self, block: int, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window = window
        self._block = block
        self._mask = torch.empty(
            0, dtype=dtype, device=device
        )  # made when a sequence is longer than the window

    def get(self, num_queries: int, visible: int) -> Tensor:
        """[num_queries, visible]: keys that the first query attends to, and the own keys of the other queries."""
        if self._mask.numel() == 0:
            shape = (self._block, self.window - 1 + self._block)
            hidden = torch.ones(shape, dtype=torch.bool, device=self._mask.device)
            hidden = hidden.triu_(self.window) | ~hidden.new_ones(shape).triu_()
            self._mask = self._mask.new_zeros(shape).masked_fill_(hidden, -torch.inf)
        missing = self.window - 1 + num_queries - visible
        return self._mask[:num_queries, missing : missing + visible]
