"""`FeatureModule`: drafts with a small network over the model's features, a `FeatureHead`.

The network reads pairs (feature of token j - 1, token j) and predicts token j + 1 (EAGLE, Li et al. 2024; DeepSeek-V3,
2024). It attends to the pairs before. The keys and values of a pair are further tensors of the KV pool, in the slot of
its token. They depend on tokens up to j only, so a page can be shared like the model's part of it:

    tokens      t0    t1        t2        t3        t4
    model       kv0   kv1       kv2       kv3       kv4
    network     -     (f0, t1)  (f1, t2)  (f2, t3)  (f3, t4)

Token 0 has no pair: the pair of token j has position j - 1 in its rotary angles and in its slot table, which is the
model's without its first column. A request with a cached prefix needs the feature of the prefix's last token for its
first pair. So the KV pool has a feature of each page: that of its last computed token, with the position of this token.
In a copy of another row's page, of which that row has computed more tokens, the feature is of a later token; then the
first pair is in the copy already, and is kept. A draft is computed with the network's own output in the place of a
feature, and again with the feature when the model has computed it.

The keys and values of a pair need no attention, so tokens without drafts cost some projections.
"""

# Shapes: n requests, T tokens of a step or a run, W of them need drafts, F numbers of a feature, K of what the network
# reads in its place, N tokens that it can draft, V tokens of the model's vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from ..attention.backend import BatchLayout
from ..forward_batch import ForwardBatch
from .head_programs import HeadPrograms
from .lag import ranges

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.spec.model_spec import ModelSpec
    from ..attention.backend import StepAttention
    from ..input_batch import InputBatch
    from .drafter import DrafterParts
    from .head_programs import FeatureHead
    from .lag import Run, Tokens

Int64s = npt.NDArray[np.int64]

_NO_ATTENTION: Final = cast("StepAttention", None)


class FeatureModule:
    """A `DraftModule`; see the module.

    Attributes:
        programs: drafts as native programs; None: they are computed call by call.
    """

    keeps_drafts = False

    def __init__(
        self,
        head: FeatureHead,
        layer: ModelSpec,
        parts: DrafterParts,
        *,
        num_places: int,
        vocab_size: int,
        records: bool,
    ) -> None:
        """Take the parts.

        Args:
            head: computes the pairs.
            layer: this rank's part of the head's layer, as a model. Its keys and values are the pool's last tensors.
            parts: of the runner.
            num_places: features that wait of each row, see `Lag`.
            vocab_size: of the model.
            records: drafts are native programs where they can be.
        """
        pool, self._slot_table, self._put = parts.kv_pool, parts.slot_table, parts.buffers.put
        self._head, self._num_places, self._vocab_size = head, num_places, vocab_size
        assert pool.page_states is not None and pool.page_ends is not None
        self._page_states, self._page_ends, self._page_size = pool.page_states, pool.page_ends, pool.page_size
        self._kv_pool = pool.beyond(len(pool.k) - 1, (0,))
        self._kv_pool.page_size = 1  # positions begin with token 1, so pages begin in the middle of pages
        table = shifted_table(self._slot_table.req_to_token)
        self._attention = parts.make_attention(layer, self._kv_pool, table)
        num_rows = len(table)
        # The feature of the token before position p of a row is in place p % num_places.
        self._features = self._page_states.new_zeros((num_rows * num_places, self._page_states.shape[1]))
        self._copied = np.full(num_rows, -1, dtype=np.int64)  # position of the token whose pair a copy has
        self._drafted = self._features[:0]
        self.programs: HeadPrograms | None = None
        repeatable = self._attention.repeatable() if records else None
        if repeatable is not None:
            self.programs = HeadPrograms(head, self._kv_pool, repeatable, self._features)

    def start(self, row: int, prefix_loc: Int64s) -> None:
        place, num_tokens = row * self._num_places + len(prefix_loc) % self._num_places, len(prefix_loc)
        self._copied[row] = -1
        if not num_tokens:
            self._features[place] = 0.0
            return
        page = int(prefix_loc[-1]) // self._page_size
        self._features[place] = self._page_states[page]
        # The feature of a full page is that of its end.
        if num_tokens % self._page_size and int(self._page_ends[page]) != num_tokens - 1:
            self._copied[row] = num_tokens

    def keep(self, batch: InputBatch, states: Tensor, valid: Int64s) -> None:
        lens, stops = batch.layout.extend_lens, np.cumsum(valid)
        tokens = ranges(np.cumsum(lens) - lens, valid)
        is_end = batch.positions[tokens] % self._page_size == self._page_size - 1
        is_end[stops - 1] = True
        ending = tokens[is_end]
        end_states = states.index_select(0, self._put(ending))
        self._keep_of_pages(batch.out_cache_loc[ending], batch.positions[ending], end_states)
        if int(valid.max()) > self._num_places:  # of long chunks only the last tokens have a place
            tokens = tokens[np.arange(len(tokens)) >= np.repeat(stops - self._num_places, valid)]
        places = self._places(batch.token_rows[tokens], batch.positions[tokens] + 1)
        self._features.index_copy_(0, places, states.index_select(0, self._put(tokens)))

    def wait(self, tokens: Tokens) -> None:
        """The features of pages follow when the tokens are computed."""
        self._features.index_copy_(0, self._places(tokens.token_rows, tokens.positions + 1), tokens.states)

    def compute(self, run: Run, states: Tensor | None = None) -> None:
        if states is None:
            features = self._waiting(run)
            self._end_pages(run, run.lasts)
        else:
            features = self._of_step(run, states)
        batch = self._batch(run, _NO_ATTENTION, None)
        self._head.store(batch.input_ids, self._head.entered(features), batch)

    def logits(self, run: Run, *, first: bool) -> Tensor:
        put, table, idx = self._put, self._slot_table, self._put(run.idx)
        before = self._waiting(run) if first else self._drafted.index_select(0, idx)
        if first and len(run.positions) > len(run.rows):  # the feature of the last token is not known yet
            self._end_pages(run, run.lasts[run.extend_lens > 1] - 1)
        # The model's step writes the slots of drafts only after they are made.
        table.store(
            put(run.token_rows * table.width + run.positions), put(run.out_cache_loc.astype(np.int32))
        )
        layout = run.layout()
        lens = layout.extend_lens
        # The tokens that waited are attended to like drafts: decodes, in a program and without.
        pairs = BatchLayout(layout.rows, layout.prefix_lens - 1, lens, layout.num_extends, lens - 1)
        if self.programs is not None and len(run.positions) <= self.programs.max_tokens:
            after, logits = self.programs.predict(
                [
                    *self._inputs(run),
                    *map(put, (run.lasts, pairs.rows, pairs.prefix_lens, pairs.extend_lens)),
                ],
                before,
                first=first,
            )
        else:
            wanted = put(run.lasts) if layout.num_extends else None
            batch = self._batch(run, self._attention.plan_step(pairs), wanted)
            before = self._head.entered(before) if first else before
            after, logits = self._head.predict(batch.input_ids, before, batch)
        if first:
            self._drafted = torch.empty_like(after)
        self._drafted.index_copy_(0, idx, after)
        if self._head.token_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._head.token_ids, logits)

    def _waiting(self, run: Run) -> Tensor:
        """[T, F] the features before the tokens of a run that waited."""
        return self._features.index_select(0, self._places(run.token_rows, run.positions))

    def _end_pages(self, run: Run, lasts: Int64s) -> None:
        """Keep the features of pages that waited; `lasts`: index of the last token of each request that waited."""
        is_end = run.positions % self._page_size == self._page_size - 1
        is_end[run.lasts] = False
        is_end[lasts] = True
        ending = np.flatnonzero(is_end)
        positions = run.positions[ending]
        features = self._features.index_select(0, self._places(run.token_rows[ending], positions + 1))
        self._keep_of_pages(run.out_cache_loc[ending], positions, features)

    def _keep_of_pages(self, loc: Int64s, positions: Int64s, features: Tensor) -> None:
        """Keep the features [n, F] of the last tokens of pages, which have these slots and positions."""
        page_idx = self._put(loc // self._page_size)
        self._page_states.index_copy_(0, page_idx, features)
        self._page_ends.index_copy_(0, page_idx, self._put(positions)[:, None])

    def _places(self, token_rows: Int64s, positions: Int64s) -> Tensor:
        """[T] int64, the places of the features before the tokens at `positions`."""
        return self._put(token_rows * self._num_places + positions % self._num_places)

    def _of_step(self, run: Run, states: Tensor) -> Tensor:
        """[T, F] the features before the tokens of a run of a step, from those of the step's tokens."""
        assert run.step_tokens is not None, "they are tokens of a step"
        put = self._put
        before = states.index_select(0, put(np.maximum(run.step_tokens - 1, 0)))
        firsts = run.lasts + 1 - run.extend_lens
        places = self._places(run.rows, run.prefix_lens)
        return before.index_copy_(0, put(firsts), self._features.index_select(0, places))

    def _inputs(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """[T] ids, positions and slots of the pairs of a run."""
        is_copied = run.positions == self._copied[run.token_rows]
        slots = np.where(is_copied, 0, run.out_cache_loc)
        return run.input_ids, self._put(np.maximum(run.positions - 1, 0)), self._put(slots)

    def _batch(self, run: Run, attention: StepAttention, wanted: Tensor | None) -> ForwardBatch:
        input_ids, positions, slots = self._inputs(run)
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=slots,
            attention=attention,
            logits_indices=wanted,
        )


def shifted_table(req_to_token: Tensor) -> Tensor:
    """The slot table from its second column on, as wide as before: the last column is not read."""
    num_rows, width = req_to_token.shape
    return req_to_token.view(-1)[1 : 1 + (num_rows - 1) * width].view(num_rows - 1, width)
