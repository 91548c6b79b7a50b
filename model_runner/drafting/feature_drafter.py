"""`FeatureDrafter`: drafts with a small network over the model's features; `DraftHead`: the network.

The network reads pairs (feature of token p, token p + 1) and predicts token p + 2 (EAGLE, Li et al. 2024). It attends
to the pairs before, whose keys and values `DraftMemory` has. Pair p has position p in its rotary angles and in its slot
table, which is the model's without its first column.

Draft tokens are sampled with the request's own noise, temperature and filters. The model samples with the same noise,
so a draft is right more often than an independent sample would be; and greedy sampling is a special case.
"""

# Shapes: B requests of a step, T its tokens, n requests that get drafts, F numbers of a feature.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..attention.backend import BatchLayout
from ..input_batch import RELAYED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from ...runtime.step_plan import NewReq
    from ..attention.backend import AttentionBackend, StepAttention
    from ..input_batch import DraftRows, InputBatch, Int64s
    from ..recording.executor import StepFeatures
    from .draft_memory import DraftMemory
    from .drafter import DrafterParts


class DraftHead(Protocol):
    """The network of a `FeatureDrafter`."""

    def features_of(self, states: Tensor) -> Tensor:
        """The features of tokens, [T, F], from `StepFeatures.states`."""
        ...

    def store(self, features: Tensor, token_ids: Tensor, positions: Tensor, out_cache_loc: Tensor) -> None:
        """Store the keys and values of T pairs.

        Args:
            features: [T, F].
            token_ids, positions, out_cache_loc: [T] int64.
        """
        ...

    def predict(
        self,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        out_cache_loc: Tensor,
        attention: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        """Store n pairs, one of each request, and predict the tokens after them.

        Returns:
            the features of the tokens of the pairs, [n, F], for the next pairs; and logits, [n, V].
        """
        ...


class FeatureDrafter:
    """A `Drafter`; see the module."""

    def __init__(
        self, head: DraftHead, memory: DraftMemory, attention: AttentionBackend, parts: DrafterParts
    ) -> None:
        """`attention`: over the memory's KV, with the table of `shifted_table`."""
        self._head, self._memory, self._attention = head, memory, attention
        self._slot_table, self._relay, self._builder = parts.slot_table, parts.relay, parts.builder
        self._sampler, self._buffers = parts.sampler, parts.buffers
        num_rows = parts.slot_table.req_to_token.shape[0]
        # Of the last token of each row; `_is_known` is False until it is, where a row begins with a copy.
        self._last = memory.features.new_zeros((num_rows, memory.features.shape[1]))
        self._is_known = torch.zeros(num_rows, dtype=torch.bool, device=memory.features.device)

    def start(self, new_reqs: Sequence[NewReq]) -> None:
        prefixes = [(new.row, np.frombuffer(new.prefix_loc, dtype=np.int32)) for new in new_reqs]
        ends = [(row, int(loc[-1]), len(loc) - 1) for row, loc in prefixes if len(loc)]
        fresh = np.array([row for row, loc in prefixes if not len(loc)], dtype=np.int64)
        self._is_known.index_fill_(0, self._buffers.put(fresh), False)
        if ends:
            rows, slots, positions = np.array(ends, dtype=np.int64).T.copy()
            rows, pages, positions = self._buffers.put_all([rows, slots // self._memory.page_size, positions])
            self._last.index_copy_(0, rows, self._memory.features.index_select(0, pages))
            found = self._memory.positions.index_select(0, pages).squeeze(1)
            self._is_known.index_copy_(0, rows, found == positions)

    def leave(self, rows: Int64s) -> None:
        """Nothing waits: the pages hold every token of the steps before."""

    def draft(self, asked: DraftRows) -> npt.NDArray[np.int32]:
        rows, first_positions, counts, out_cache_loc, last_ids = asked
        firsts = np.cumsum(counts) - counts
        offsets = np.arange(len(out_cache_loc)) - np.repeat(firsts, counts)
        token_rows, positions = np.repeat(rows, counts), np.repeat(first_positions, counts) + offsets
        put = self._buffers.put
        self._slot_table.store(
            put(token_rows * self._slot_table.width + positions), put(out_cache_loc.astype(np.int32))
        )
        relayed = np.flatnonzero(last_ids == RELAYED)
        token_ids = put(last_ids.copy())
        if len(relayed):
            self._relay.fill(token_ids, put(relayed), put(rows[relayed]))
        features = self._last.index_select(0, put(rows))
        drafts = np.empty(len(out_cache_loc), dtype=np.int32)
        going = np.arange(len(rows))  # of the requests, those that get a further draft
        for step in range(int(counts.max())):
            kept = np.flatnonzero(counts[going] > step)
            if len(kept) < len(going):
                features, token_ids = (each.index_select(0, put(kept)) for each in (features, token_ids))
                going = going[kept]
            pairs = first_positions[going] + step - 1
            layout = BatchLayout(rows[going], pairs, np.ones_like(pairs), 0)
            places = firsts[going] + step
            features, logits = self._head.predict(
                features, token_ids, put(pairs), put(out_cache_loc[places]), self._attention.plan_step(layout)
            )
            sampling = self._builder.draft_sampling(rows[going], pairs + 2)
            token_ids = self._sampler.sample(logits, sampling).token_ids
            drafts[places] = token_ids.cpu().numpy()
        return drafts

    def absorb(self, batch: InputBatch, features: StepFeatures, num_tokens: Tensor | None) -> None:
        put, layout, page_size = self._buffers.put, batch.layout, self._memory.page_size
        states = self._head.features_of(features.states)
        starts_np = np.cumsum(layout.extend_lens) - layout.extend_lens
        starts, rows = put(starts_np), put(layout.rows)
        before = torch.empty_like(states)
        before[1:] = states[:-1]
        before.index_copy_(0, starts, self._last.index_select(0, rows))
        # A pair whose feature is not known is there already, or there is none: that of a request's first token.
        loc = features.out_cache_loc.clone()
        loc.index_copy_(0, starts, loc.index_select(0, starts) * self._is_known.index_select(0, rows))
        self._head.store(before, features.input_ids, (features.positions - 1).clamp_(min=0), loc)

        ends = np.flatnonzero((batch.positions + 1) % page_size == 0)
        if len(ends):
            self._keep(put(ends), states, features)
        lasts = starts + (put(layout.extend_lens) if num_tokens is None else num_tokens) - 1
        self._keep(lasts, states, features)  # after the ends, of which drafts that are wrong may be some
        self._last.index_copy_(0, rows, states.index_select(0, lasts))
        self._is_known.index_fill_(0, rows, True)

    def _keep(self, tokens: Tensor, states: Tensor, features: StepFeatures) -> None:
        """Keep the features of some tokens, [m] int64, with their pages."""
        pages = features.out_cache_loc.index_select(0, tokens) // self._memory.page_size
        self._memory.features.index_copy_(0, pages, states.index_select(0, tokens))
        self._memory.positions.index_copy_(0, pages, features.positions.index_select(0, tokens).unsqueeze(1))


def shifted_table(req_to_token: Tensor) -> Tensor:
    """The slot table from its second column on, as wide as before: the last column is not read."""
    num_rows, width = req_to_token.shape
    return req_to_token.view(-1)[1 : 1 + (num_rows - 1) * width].view(num_rows - 1, width)
