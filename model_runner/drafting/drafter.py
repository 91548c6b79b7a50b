"""`Drafter`: proposes the next tokens of requests from states that only the runner has; see `StepPlan.draft_ids`.

The runner calls it in this order in each step:

    leave     requests leave their rows; their tokens are still in their pages
    start     requests got rows; their cached prefixes are in the KV pool and in the slot table
    draft     the drafts that the plan asks for, from the state left by the last step
    absorb    the step's tokens, after the sampler: with their features, and which of them are valid
    share     the pages of requests are shared from the next step on, though these go on

Its module (a draft model, or a head over the model's features) computes every token of the model once more, also those
of prompts, because pages with its keys and values are shared like the model's: a page must not depend on what has
computed it. But it need not do so in the same step, see `lag`. The tokens of steps of decodes without drafts are not
even looked at before some are drafted for, a request leaves, or `MOST` steps: so such a step costs two small copies.

Drafts are sampled with the noise that the model will use at the same position, and with the same filters, so that they
are right more often than independent samples. With greedy sampling they are the module's likeliest tokens.
"""

# Shapes: n requests with drafts, T tokens of a step, V tokens of the model's vocabulary, F numbers of a feature.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..input_batch import RELAYED
from .lag import MOST, Lag, Run, Tokens, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ...models.spec.model_spec import ModelSpec
    from ...runtime.step_plan import NewReq
    from ..attention.backend import AttentionBackend
    from ..batch_builder import BatchBuilder
    from ..input_batch import DraftRows, InputBatch
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from ..memory.slot_table import SlotTable
    from ..recording.executor import StepFeatures
    from ..request_states import RequestStates, TokenRelay
    from ..sampling.shared_sampler import SamplerLike

Int64s = npt.NDArray[np.int64]

_NOTHING: Final[Int64s] = np.empty(0, dtype=np.int64)


class DraftModule(Protocol):
    """The network of a `Drafter`, with its keys and values. The tokens of a run follow those of earlier runs.

    Attributes:
        keeps_drafts: keys and values of drafts that were right need not be computed again.
    """

    @property
    def keeps_drafts(self) -> bool: ...

    def start(self, row: int, prefix_loc: Int64s) -> None:
        """A request with a cached prefix, [prefix_len] slots, got the row."""
        ...

    def compute(self, run: Run, states: Tensor | None = None) -> None:
        """Compute the tokens of a run for their keys and values only.

        `states`: [T, F] features of all tokens of the step that these are tokens of; None: they waited.
        """
        ...

    def keep(self, batch: InputBatch, states: Tensor, valid: Int64s) -> None:
        """Take what later runs need of a step with features [T, F], of which [n] tokens of each request are right."""
        ...

    def wait(self, tokens: Tokens) -> None:
        """The same of decodes that wait; later runs compute all of them."""
        ...

    def logits(self, run: Run, *, first: bool) -> Tensor:
        """Compute the tokens of a run: [n, V] logits after the last one of each request, in the run's order.

        Args:
            first: these are tokens of the model; else the drafts that were sampled from the logits before.
        """
        ...


class Drafter:
    """See the module."""

    def __init__(self, module: DraftModule, lag: Lag, parts: DrafterParts) -> None:
        """Take the module that computes the tokens, and the parts of the runner."""
        self.module = module
        self._parts = parts
        self._lag = lag
        self._drafted: tuple[Int64s, Int64s] = (_NOTHING, _NOTHING)
        self._unread: list[Tokens] = []  # of the last steps, if they were decodes without drafts

    def start(self, new_reqs: Sequence[NewReq]) -> None:
        """Requests got rows."""
        for new in new_reqs:
            prefix_loc = np.frombuffer(new.prefix_loc, dtype=np.int32).astype(np.int64)
            self._lag.start(new.row, len(prefix_loc), len(new.input_ids) // 4)
            self.module.start(new.row, prefix_loc)

    def leave(self, rows: Int64s) -> None:
        """Requests leave their rows ([n]): the pages are freed or shared after this call. It may be called again."""
        # Drafts of a step that had no memory, if there are any: the rows get other tokens.
        self._drafted = _NOTHING, _NOTHING
        self.share(rows)

    def share(self, rows: Int64s) -> None:
        """Compute the tokens of rows ([n]) that wait."""
        self._read()
        self._compute(self._lag.waiting(rows))

    def draft(self, asked: DraftRows) -> npt.NDArray[np.int32]:
        """The drafts, [sum of counts], request after request; waits for the device."""
        self._read()
        put = self._parts.buffers.put
        rows, counts = asked.rows, asked.counts
        starts = np.cumsum(counts) - counts
        drafts = np.empty(int(counts.sum()), dtype=np.int64)
        run = self._lag.take_with(rows, asked.positions, self._last_ids(asked), asked.out_cache_loc[starts])
        drafts[starts[run.idx]] = self._sampled(run, asked.positions[run.idx] + 1, first=True)
        self._lag.computed(run)
        for number in range(1, int(counts.max())):
            live = np.flatnonzero(counts > number)
            places, positions = starts[live] + number, asked.positions[live] + number
            before, loc = put(drafts[places - 1]), asked.out_cache_loc[places]
            run = Run.of_one_each(live, rows[live], positions, before, loc)
            drafts[places] = self._sampled(run, positions + 1, first=False)
        self._drafted = rows, asked.positions + counts
        return drafts.astype(np.int32)

    def absorb(self, batch: InputBatch, features: StepFeatures, num_tokens: Tensor | None) -> None:
        """Take the computed tokens of a step; waits for the device only after drafts.

        Args:
            batch: the step.
            features: of its T tokens.
            num_tokens: [S] int64, device: in a step with drafts, the valid tokens of each request among its new ones,
                see `DraftBatch`. None: all are.
        """
        layout = batch.layout
        waits = self._lag.may_wait(layout)
        if num_tokens is None and not layout.num_extends and waits.all():
            if len(self._unread) == MOST:
                self._read()
            self._drafted = _NOTHING, _NOTHING  # also if the step with these drafts had no memory
            # The memory of ids and features is that of the next step, too.
            copies = features.input_ids.clone(), features.states.clone()
            self._unread.append(Tokens(batch.token_rows, batch.positions, batch.out_cache_loc, *copies))
            return
        self._read()
        lens = layout.extend_lens
        valid = lens if num_tokens is None else num_tokens.cpu().numpy()
        drafted, self._drafted = self._drafted, (_NOTHING, _NOTHING)
        if not waits.all():
            idx = np.flatnonzero(~waits)
            self.leave(layout.rows[idx])  # what waits comes first
            run = Run.of_step(batch, features.input_ids, idx, self._parts.buffers.put)
            self.module.compute(run, features.states)
            self._lag.done(run.rows, run.prefix_lens + valid[idx])
        idx = np.flatnonzero(waits)
        self._compute(self._lag.full(layout.rows[idx]))
        self.module.keep(batch, features.states, valid)
        if not len(idx):
            return
        tokens = ranges((np.cumsum(lens) - lens)[idx], valid[idx])
        ids = features.input_ids.index_select(0, self._parts.buffers.put(tokens))
        rows, positions, loc = batch.token_rows, batch.positions, batch.out_cache_loc
        self._lag.add(rows[tokens], positions[tokens], loc[tokens], ids)
        if self.module.keeps_drafts:
            self._lag.reached(*drafted)

    def _read(self) -> None:
        """Let the tokens of the last steps wait."""
        if self._unread:
            tokens = Tokens.of_steps(self._unread)
            self._compute(self._lag.full(np.unique(tokens.token_rows)))
            self._lag.add(*tokens[:4])
            self.module.wait(tokens)
            self._unread.clear()

    def _compute(self, rows: Int64s) -> None:
        """Compute the waiting tokens of rows, each of which has some."""
        if len(rows):
            run = self._lag.take(rows)
            self.module.compute(run)
            self._lag.computed(run)

    def _last_ids(self, asked: DraftRows) -> Tensor:
        """[n] the last tokens."""
        put = self._parts.buffers.put
        token_ids, relayed = put(asked.input_ids.copy()), np.flatnonzero(asked.input_ids == RELAYED)
        if len(relayed):
            self._parts.relay.fill(token_ids, put(relayed), put(asked.rows[relayed]))
        return token_ids

    def _sampled(self, run: Run, positions: Int64s, *, first: bool) -> Int64s:
        """[n] tokens at `positions` [n], after the last ones of a run, in its order."""
        sampling = self._parts.builder.draft_sampling(run.rows, positions)
        logits = self.module.logits(run, first=first)
        ids: Int64s = self._parts.sampler.sample(logits, sampling).token_ids.cpu().numpy()
        return ids


class DrafterParts(NamedTuple):
    """The parts of a runner that a drafter may use.

    Attributes:
        make_attention: makes the attention of a layer: this rank's spec of it, the pool of its keys and values, and
            their slot table.
    """

    kv_pool: KVPool
    slot_table: SlotTable
    states: RequestStates
    relay: TokenRelay
    builder: BatchBuilder
    sampler: SamplerLike
    buffers: InputBuffers
    make_attention: Callable[[ModelSpec, KVPool, Tensor], AttentionBackend]


MakeDrafter = Callable[[DrafterParts], Drafter]
