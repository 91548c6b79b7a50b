"""`Eagle3Drafter`: drafts with an EAGLE-3 head (`--speculative eagle3`), whose KV is in the pages of the model.

What the head computes for a token depends on the model's features of the token before it:

    slot of token j     keys and values of (features of token j - 1, token j)

So they depend on tokens up to j only, and a page of them is as shareable as the model's own. The features of the last
token of a cached prefix come with its last page: the KV pool has a row of them per page, that of the page's last
computed token. In a copy of another row's page, of which that row has computed more tokens, the features are of a later
token; then the keys and values of the token after the prefix are in the copy already, and are kept. A draft is computed
with the head's own output in the place of features, and again with these when the model has computed it.

The keys and values of a token need no attention, so tokens without drafts cost two projections.
"""

# Shapes: n requests, T tokens of a step or a run, W of them need drafts, K hidden size of the head, V tokens of the
# model's vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from ..forward_batch import ForwardBatch

if TYPE_CHECKING:
    from torch import Tensor

    from ..attention.backend import AttentionBackend, StepAttention
    from ..input_batch import InputBatch
    from ..memory.kv_pool import KVPool
    from ..memory.slot_table import SlotTable
    from ..recording.executor import StepFeatures
    from .drafter import DrafterParts
    from .eagle3 import Eagle3Head
    from .lag import Run

Int64s = npt.NDArray[np.int64]

_NO_ATTENTION: Final = cast("StepAttention", None)


class Eagle3Drafter:
    """A `DraftModule`; see the module. The states before tokens are `Eagle3Head.state` of the features before them."""

    keeps_drafts = False

    def __init__(
        self,
        head: Eagle3Head,
        kv_pool: KVPool,
        attention: AttentionBackend,
        parts: DrafterParts,
        *,
        num_places: int,
        vocab_size: int,
    ) -> None:
        """Take the parts.

        Args:
            head: computes the tokens.
            kv_pool: the tensors of the head; its `page_states` are those of the model's pool.
            attention: over these.
            parts: of the runner.
            num_places: states that wait of each row, see `Lag`.
            vocab_size: of the model.
        """
        self._head, self._kv_pool, self._attention = head, kv_pool, attention
        self._slot_table: SlotTable = parts.slot_table
        self._put = parts.buffers.put
        self._page_size = kv_pool.page_size
        self._num_places, self._vocab_size = num_places, vocab_size
        assert kv_pool.page_states is not None and kv_pool.page_ends is not None
        self._page_states, self._page_ends = kv_pool.page_states, kv_pool.page_ends
        size = self._page_states.shape[1]
        num_rows = self._slot_table.req_to_token.shape[0]
        # The state before the token at position p of a row is in place p % num_places.
        self._states = self._page_states.new_zeros((num_rows * num_places, size))
        self._copied = np.full(num_rows, -1, dtype=np.int64)  # position of the token whose keys a copy has
        self._drafted = self._step_states = self._states[:0]

    def start(self, row: int, prefix_loc: Int64s) -> None:
        place = row * self._num_places + len(prefix_loc) % self._num_places
        self._copied[row] = -1
        if len(prefix_loc):
            page = int(prefix_loc[-1]) // self._page_size
            self._states[place] = self._page_states[page]
            if int(self._page_ends[page]) != len(prefix_loc) - 1:
                self._copied[row] = len(prefix_loc)
        else:
            self._states[place] = 0.0

    def keep(self, batch: InputBatch, features: StepFeatures, valid: Int64s) -> None:
        lens = batch.layout.extend_lens
        states = features.states  # `Eagle3Head.state` of the features, which the model's step has computed
        starts = np.cumsum(lens) - lens
        # Of long chunks only the last tokens have a place, and the others are computed in this step.
        first = np.maximum(valid - self._num_places, 0)
        counts = valid - first
        tokens = np.repeat(starts + first - (np.cumsum(counts) - counts), counts) + np.arange(
            int(counts.sum())
        )
        rows, positions = batch.token_rows[tokens], batch.positions[tokens]
        places = rows * self._num_places + (positions + 1) % self._num_places
        self._step_states = self._before(batch, states, starts)
        self._states.index_copy_(0, self._put(places), states.index_select(0, self._put(tokens)))
        is_last = np.zeros(len(batch.positions), dtype=np.bool_)
        is_last[starts + valid - 1] = True
        in_answer = np.repeat(valid, lens) > np.arange(len(is_last)) - np.repeat(starts, lens)
        ends = in_answer & (is_last | (batch.positions % self._page_size == self._page_size - 1))
        ending = np.flatnonzero(ends)
        pages = self._put(batch.out_cache_loc[ending] // self._page_size)
        self._page_states.index_copy_(0, pages, states.index_select(0, self._put(ending)))
        self._page_ends.index_copy_(0, pages, self._put(batch.positions[ending][:, None]))

    def compute(self, run: Run) -> None:
        batch = self._batch(run, _NO_ATTENTION, None)
        self._head.store(batch.input_ids, self._states_of(run), batch)

    def logits(self, run: Run, *, first: bool) -> Tensor:
        idx = self._put(run.idx)
        before = self._states_of(run) if first else self._drafted.index_select(0, idx)
        after = self._forward(run, before, run.lasts if first else None)
        if first:
            self._drafted = torch.empty_like(after)
        self._drafted.index_copy_(0, idx, after)
        logits = self._head.logits(after)
        if self._head.token_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._head.token_ids, logits)

    def _states_of(self, run: Run) -> Tensor:
        """[T, K] the states before the tokens of a run."""
        if run.step_tokens is not None:
            return self._step_states.index_select(0, self._put(run.step_tokens))
        places = run.token_rows * self._num_places + run.positions % self._num_places
        return self._states.index_select(0, self._put(places))

    def _before(self, batch: InputBatch, states: Tensor, starts: Int64s) -> Tensor:
        """[T, K] the states before the tokens of a step, from those after them."""
        before = states.roll(1, 0)
        layout = batch.layout
        places = layout.rows * self._num_places + layout.prefix_lens % self._num_places
        before.index_copy_(0, self._put(starts), self._states.index_select(0, self._put(places)))
        return before

    def _forward(self, run: Run, states: Tensor, wanted: Int64s | None) -> Tensor:
        """[W, K] states after the wanted tokens of a run; None: after all."""
        put, table = self._put, self._slot_table
        # The model's step writes the slots of drafts only after they are made.
        table.store(
            put(run.token_rows * table.width + run.positions), put(run.out_cache_loc.astype(np.int32))
        )
        batch = self._batch(run, self._attention.plan_step(run.layout()), wanted)
        return self._head.forward(batch.input_ids, states, batch)

    def _batch(self, run: Run, attention: StepAttention, wanted: Int64s | None) -> ForwardBatch:
        is_copied = run.positions == self._copied[run.token_rows]
        return ForwardBatch(
            input_ids=self._put(run.input_ids),
            positions=self._put(run.positions),
            kv_pool=self._kv_pool,
            out_cache_loc=self._put(np.where(is_copied, 0, run.out_cache_loc)),
            attention=attention,
            logits_indices=None if wanted is None else self._put(wanted),
        )
