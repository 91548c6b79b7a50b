"""`Pooler`: the results of a step's pooling requests, from the hidden states of their prompts.

A prompt can be computed in several chunks. Its sum (mean) or first hidden state (cls) is kept by pool row until the
chunk that ends it. A retracted request starts again with its first chunk.
"""

# Shapes: W tokens that need logits or hidden states, K hidden size, C chunks, n of them end their prompts, D numbers
# of a result, see `InputBatch`.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...runtime.pooling import PoolingKind, PoolingParams

if TYPE_CHECKING:
    from ...runtime.config.model_choice import PoolingType
    from ..adapter_runs import AdapterRuns
    from ..structures.causal_lm import CausalLM


class PooledChunk(NamedTuple):
    """The tokens of a chunk that a pooling request needs.

    Attributes:
        batch_idx: the request's index in the batch.
        row: its pool row.
        start: index, among the W, of the first token that it needs; the others follow one by one.
        num_tokens: all tokens of the chunk, or (`PoolingParams.all_tokens` is False) the last one of the prompt.
        prompt_len: tokens of the prompt.
        begins, ends: whether the chunk has the first and the last token of the prompt.
        params: what to compute.
    """

    batch_idx: int
    row: int
    start: int
    num_tokens: int
    prompt_len: int
    begins: bool
    ends: bool
    params: PoolingParams


_TINY: Final = 1e-12
"""The least length by which a vector is divided; as in torch's `normalize`."""


def _no_adapters(rows: Sequence[int]) -> AdapterRuns | None:
    return None


class PooledRows(NamedTuple):
    """Results of the same width, still on their way to the host: row i is that of `chunks[i]`.

    Attributes:
        chunks: [n] each ends its prompt.
        values: [n, D] float32.
    """

    chunks: Sequence[PooledChunk]
    values: Tensor

    def results(self) -> list[tuple[int, bytes | None]]:
        """Batch index and result of each request, when the values are on the host; None: it is not finite."""
        values = self.values.numpy()
        return [
            (chunk.batch_idx, _finished(row, chunk.params))
            for chunk, row in zip(self.chunks, values, strict=True)
        ]


@dataclass(slots=True, eq=False)
class Pooler:
    """See the module. One for each model runner; it holds the state of prompts that are not complete.

    Attributes:
        model: gives final hidden states, and logits for labels.
        pooling: which hidden states make a vector.
        head: the layers after pooling, [n, K] float32 -> [n, D] float32; None: there are none.
        put: uploads an array to the device of the hidden states, without waiting for it; see `InputBuffers`.
        adapters_of: the adapters of pool rows, for `CausalLM.logits`.
    """

    model: CausalLM
    pooling: PoolingType
    head: Callable[[Tensor], Tensor] | None
    put: Callable[[npt.NDArray[Any]], Tensor]
    adapters_of: Callable[[Sequence[int]], AdapterRuns | None] = _no_adapters
    _partial: dict[int, Tensor] = field(init=False, default_factory=dict)

    def pool(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> list[PooledRows]:
        """Take a step's hidden states, [W, K]; return the results of the prompts that end in it, by width."""
        vectors = [chunk for chunk in chunks if chunk.params.kind is not PoolingKind.LABELS]
        labels = [chunk for chunk in chunks if chunk.params.kind is PoolingKind.LABELS and chunk.ends]
        results = []
        if vectors and (rows := self._vectors(hidden, vectors)) is not None:
            results.append(rows)
        results += self._labels(hidden, labels)
        return results

    def _vectors(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> PooledRows | None:
        pooled = self._last(hidden, chunks) if self.pooling == "last" else self._accumulated(hidden, chunks)
        ended = [chunk for chunk in chunks if chunk.ends]
        if not ended:
            return None
        return PooledRows(ended, pooled if self.head is None else self.head(pooled))

    def _last(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> Tensor:
        """[n, K] float32, the final hidden states of the last tokens."""
        lasts = [chunk.start + chunk.num_tokens - 1 for chunk in chunks if chunk.ends]
        return self.model.final_states(hidden.index_select(0, self._indices(lasts))).float()

    def _accumulated(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> Tensor:
        """[n, K] float32: mean or first final hidden state of each prompt that ends; keeps what the others need."""
        if self.pooling == "cls":
            firsts = [chunk for chunk in chunks if chunk.begins]
            states = self.model.final_states(hidden.index_select(0, self._indices([c.start for c in firsts])))
            found = dict(zip([chunk.row for chunk in firsts], states.float(), strict=True))
        else:
            found = dict(zip([chunk.row for chunk in chunks], self._sums(hidden, chunks), strict=True))
        ended = []
        for chunk in chunks:
            so_far = None if chunk.begins else self._partial.pop(chunk.row, None)
            new = found.get(chunk.row)
            value = so_far if new is None else new if so_far is None else so_far + new
            assert value is not None, f"row {chunk.row}: the prompt's first chunk is missing"
            if not chunk.ends:
                self._partial[chunk.row] = value
            else:
                ended.append(value if self.pooling == "cls" else value / chunk.prompt_len)
        return torch.stack(ended) if ended else hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)

    def _sums(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> Tensor:
        """[C, K] float32, the sum of each chunk's final hidden states, in the order of its tokens."""
        lengths = [chunk.num_tokens for chunk in chunks]
        num_tokens = sum(lengths)
        if num_tokens < len(hidden):  # other requests have rows in between
            starts = np.array([chunk.start for chunk in chunks])
            skipped = starts - (np.cumsum(lengths) - lengths)
            hidden = hidden.index_select(
                0, self._indices(np.arange(num_tokens) + np.repeat(skipped, lengths))
            )
        states = self.model.final_states(hidden).float()
        counts = self._indices(lengths)
        # unsafe: without a check of the lengths, for which the host would wait.
        return torch.segment_reduce(states, "sum", lengths=counts, axis=0, unsafe=True)

    def _labels(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> list[PooledRows]:
        """Log-probabilities of each request's labels as the next token; one group per number of labels."""
        if not chunks:
            return []
        lasts = self._indices([chunk.start + chunk.num_tokens - 1 for chunk in chunks])
        adapters = self.adapters_of([chunk.row for chunk in chunks])
        last_states = hidden.index_select(0, lasts)
        logits = (
            self.model.logits(last_states) if adapters is None else self.model.logits(last_states, adapters)
        )
        logits = logits.float()
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        groups: dict[int, list[int]] = {}
        for n, chunk in enumerate(chunks):
            groups.setdefault(len(chunk.params.label_ids), []).append(n)
        results = []
        for members in groups.values():
            ids = self._indices([chunks[n].params.label_ids for n in members])
            values = logprobs.index_select(0, self._indices(members)).gather(1, ids)
            results.append(PooledRows([chunks[n] for n in members], values))
        return results

    def _indices(self, indices: npt.ArrayLike) -> Tensor:
        return self.put(np.array(indices, dtype=np.int64))


def _finished(row: np.ndarray, params: PoolingParams) -> bytes | None:
    """The result as bytes: cut, then scaled to length 1, as the request asks for; None if it is not finite."""
    if params.dimensions:
        row = row[: params.dimensions]
    if not np.isfinite(row).all():
        return None
    if params.normalize:
        row = row / max(float(np.linalg.norm(row.astype(np.float64))), _TINY)
    return row.astype(np.float32).tobytes()
