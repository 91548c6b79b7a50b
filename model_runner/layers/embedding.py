"""Token embedding and the output head, which may share their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear import LinearInto, LinearToFloat32, LinearWithRows
from ..weights.reader import ModuleWeight, Slice
from .spans import padded_span

if TYPE_CHECKING:
    from ..adapter_runs import AdapterRuns
    from ..model_context import ModelContext
    from ..ops.deltas import LowRankDelta
    from ..ops.elementwise import TakeRows
    from ..ops.linear import LinearWeight


class Embedding:
    """Token ids to vectors. Each rank looks up the tokens in its rows of the table; an all-reduce combines them."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        vocab_size: int,
        size: int,
        scale: float | None = None,
        *,
        has_head: bool = True,
    ) -> None:
        """Take the table from a checkpoint; pack it for a tied head.

        Args:
            scale: a factor of the looked-up vectors. The table itself is not scaled, because a tied head shares it.
            has_head: the head may be tied to this table. If not, or if the head is on another pipeline stage, the
                table may stay in blocks; also a table of its own that is quantized in the files.
        """
        table = functools.cache(lambda: vocabulary_rows(context, f"{name}.weight", vocab_size, size))
        self.head: LinearWeight | None = None
        blocks: LinearWithRows | None = None
        is_tied, quantization = context.spec.tie_word_embeddings, context.spec.quantization
        is_quantized = not is_tied and quantization is not None and quantization.has_tables
        if not has_head or is_quantized or (is_tied and not context.stage.is_last):
            rows = range(*padded_span(vocab_size, context.group))
            blocks = context.linear_format.table(
                ModuleWeight(context.weights, name, (vocab_size, size)), rows
            )
        elif is_tied:
            self.head = head_weight(context, name, size, table)
            blocks = self.head if isinstance(self.head, LinearWithRows) else None
        self._take: Callable[[Tensor], Tensor]
        if blocks is not None:
            self._take = functools.partial(blocks.rows, scale=scale)
        else:
            self._take = functools.partial(_take_scaled, context.ops.take_rows, table(), scale)
        self._group = context.group
        self._span = padded_span(vocab_size, context.group)
        self.delta: LowRankDelta | None = None
        if context.adapters is not None and has_head:
            self.delta = context.adapters.embedding(context.ops.deltas, name, vocab_size, size, scale)

    def __call__(self, token_ids: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T] int64 -> [T, size]; `adapters`: see `Linear`."""
        vectors = self._look_up(token_ids)
        if adapters is None or self.delta is None:
            return vectors
        return self.delta.add(token_ids, vectors, adapters)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._take(token_ids)
        rows = token_ids - self._span.start
        elsewhere = (rows < 0) | (rows >= len(self._span))
        vectors = self._take(rows.masked_fill_(elsewhere, 0))
        # Exact: all but one rank add zeros.
        return self._group.all_reduce(vectors.masked_fill_(elsewhere[:, None], 0.0))


class OutputHead:
    """Hidden states to logits. Each rank computes the logits of its vocabulary rows; an all-gather combines them.

    A head tied to the embedding is packed for the matmul. Our own kernels look up embedding rows in the packed weight.
    For other kernels it is a copy of the table: 57 MB for SmolLM2-135M in bfloat16, which makes a decode step of one
    token 0.8 ms (of 10) shorter.

    Attributes:
        dtype: of the logits: float32; on a GPU the serving dtype, if the head's product is rounded to it and is the
            result. The sampler's kernels widen it in registers: the numbers are the same, and 256 rows of 152k logits
            are 78 MB instead of 156.
    """

    def __init__(self, context: ModelContext, weight: LinearWeight) -> None:
        """Take the packed weight, see `head_weight`."""
        self.weight = weight
        self._all_gather = context.group.all_gather
        self._vocab_size = context.spec.vocab_size
        self._cap, self._soft_cap = context.spec.form.logits_cap, context.ops.soft_cap
        self._to_float32 = context.ops.to_float32
        self._scale = context.ops.scale
        self._factor = context.spec.form.logits_scale
        self.bias = _head_bias(context) if context.spec.form.head_bias else None
        self._float32_product: Callable[[Tensor, Tensor | None], Tensor] | None = None
        if context.group.size == 1 and isinstance(weight, LinearToFloat32):
            self._float32_product = weight.to_float32
        is_rounded = self._cap is None and self._float32_product is None
        self.dtype = context.dtype if is_rounded and context.device.type != "cpu" else torch.float32
        self._write: Callable[[Tensor, Tensor | None, Tensor], None] | None = None
        if context.group.size == 1 and is_rounded and isinstance(weight, LinearInto):
            self._write = weight.write
        self.delta: LowRankDelta | None = None
        if context.adapters is not None:
            size, rows = context.spec.hidden_size, None
            if context.group.size > 1:
                rows = [padded_span(self._vocab_size, context.group)]
            self.delta = context.adapters.linear(
                context.ops.deltas, ["lm_head"], size, [self._vocab_size], rows=rows
            )

    def __call__(self, hidden: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[n, size] -> [n, vocab] in `dtype`; `adapters`: see `Linear`."""
        logits = self._uncapped(hidden, adapters)
        return logits if self._cap is None else self._soft_cap(logits, self._cap)

    def write(self, hidden: Tensor, adapters: AdapterRuns | None, out: Tensor) -> None:
        """The result of a call, into `out`: [n, vocab] in `dtype`, contiguous."""
        is_plain = adapters is None or self.delta is None
        if self._write is None or not is_plain or out.dtype != hidden.dtype:
            out.copy_(self(hidden, adapters))
            return
        self._write(hidden if self._factor == 1.0 else self._scale(hidden, self._factor), self.bias, out)

    def _uncapped(self, hidden: Tensor, adapters: AdapterRuns | None) -> Tensor:
        delta = None if adapters is None else self.delta
        if self._factor != 1.0:
            hidden = self._scale(hidden, self._factor)
        if self._float32_product is not None:
            logits = self._float32_product(hidden, self.bias)
            return logits if delta is None or adapters is None else delta.add(hidden, logits, adapters)
        logits = self.weight(hidden, self.bias)
        if delta is not None and adapters is not None:
            logits = delta.add(hidden, logits, adapters)
        # Gathered in the serving dtype, half the bytes of float32; then the padding is cut off.
        logits = self._all_gather(logits)[:, : self._vocab_size]
        return self._to_float32(logits) if self.dtype == torch.float32 else logits


def head_weight(
    context: ModelContext, name: str, size: int, plain_rows: Callable[[], Tensor]
) -> LinearWeight:
    """This rank's rows of an output head, packed for the matmul.

    Args:
        name: name of the module with the weight, which may be the embedding.
        plain_rows: reads the rows as `vocabulary_rows` does.
    """
    vocab_size = context.spec.vocab_size
    if context.spec.form.unit_head:
        unit = F.normalize(plain_rows().to(torch.float32)).to(context.dtype)
        return context.ops.pack_linear(unit)
    rows = padded_span(vocab_size, context.group)
    module = ModuleWeight(context.weights, name, (vocab_size, size))
    return context.linear_format.head(module, range(*rows), plain_rows)


def _head_bias(context: ModelContext) -> Tensor:
    """This rank's numbers of the head's bias, zeros beyond its end."""
    vocab_size, span = context.spec.vocab_size, padded_span(context.spec.vocab_size, context.group)
    bias = context.weights.tensor("lm_head.bias", (vocab_size,))
    return F.pad(bias, (0, max(span.stop - vocab_size, 0)))[span.start : span.stop].contiguous()


def vocabulary_rows(context: ModelContext, name: str, vocab_size: int, size: int) -> Tensor:
    """This rank's rows of a weight [vocab_size, size]; rows beyond its end are zeros."""
    weights, span = context.weights, padded_span(vocab_size, context.group)
    stop = min(span.stop, vocab_size)
    if span.start >= stop:  # a tiny vocabulary on many ranks
        weights.ignore(name)
        return torch.zeros((len(span), size), dtype=context.dtype, device=context.device)
    rows = weights.stacked([name], [(vocab_size, size)], slices=[Slice(0, span.start, stop)])
    return F.pad(rows, (0, 0, 0, span.stop - stop)) if span.stop > stop else rows


def _take_scaled(take_rows: TakeRows, table: Tensor, scale: float | None, ids: Tensor) -> Tensor:
    return take_rows(table, ids, scale)
