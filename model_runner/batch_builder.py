"""`BatchBuilder`: from a `StepPlan` to a `ForwardBatch`; owns the device's mirror of the slot table.

All arithmetic is on whole arrays; only requests with prompt tokens in the step are visited one by one, to copy them.
"""

# Shapes: B requests, T new tokens in the batch, W of them wanted, S requests that sample in this step.

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention.backend import AttentionBackend, BatchLayout
from .forward_batch import ForwardBatch, PromptSpan
from .recording.decode_graphs import Replayed
from .recording.decode_inputs import RELAYED
from .row_states import RowStates, SamplingFlag
from .sampling.draft_batch import DraftBatch
from .sampling.sampling_batch import SamplingBatch, plan_sampling

if TYPE_CHECKING:
    from ..runtime.step_plan import StepPlan
    from .memory.io_buffers import InputBuffers
    from .memory.kv_pool import KVPool
    from .recording.recorded_step import StepRecordings
    from .sampling.token_counts import TokenCounts
    from .token_relay import TokenRelay

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NOTHING: Final[Int64s] = np.empty(0, dtype=np.int64)


class BatchBuilder:
    """Builds batches.

    Attributes:
        req_to_token: [rows + 1, max_model_len] int32, device: the KV slot of each position of each row's request; the
            last row, whose slots are all the dummy one, is for padding.
        last_step_id: of the last plan whose changes are in that table.
    """

    def __init__(
        self,
        *,
        req_to_token: Tensor,
        kv_pool: KVPool,
        attention: AttentionBackend,
        states: RowStates,
        counts: TokenCounts,
        relay: TokenRelay,
        eos_token_ids: tuple[int, ...],
        buffers: InputBuffers,
        recordings: StepRecordings,
    ) -> None:
        self.req_to_token = req_to_token
        self._kv_pool = kv_pool
        self._attention = attention
        self._states = states
        self._counts = counts
        self._relay = relay
        self._eos_token_ids = eos_token_ids
        self._buffers = buffers
        self._recordings = recordings
        self.last_step_id = 0

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Update the slot table by the plan and make its batch.

        Args:
            plan: with at least one token; its new requests are in `RowStates` already.
        """
        return self._build_recorded(plan) or self._build_eager(plan, _Step.of(plan))

    def next_round(self, last: ForwardBatch, plan: StepPlan, number: int) -> ForwardBatch:
        """The batch of a burst's round, given that of the round before, whose tokens have been sampled."""
        recorded = last.recorded
        if recorded is None or recorded.advance is None:
            return self.build(plan.round(number))
        recorded.advance(np.frombuffer(plan.round_loc(number), dtype=np.int32))
        rows, positions = recorded.rows.numpy(), recorded.positions.numpy()
        return replace(last, sampling=self._plan_sampling(rows, positions + 1))

    def _build_recorded(self, plan: StepPlan) -> ForwardBatch | None:
        """The batch of a step that is replayed; None if it cannot be.

        It can if everybody computes one token and samples, as in a decode. Nobody wants log-probabilities of his prompt
        then: those are made by the tokens before its last one.
        """
        if not _each_decodes(plan):
            return None
        rows, computed, out_cache_loc = (
            _int64(plan.rows),
            _int64(plan.num_computed_tokens),
            _int64(plan.out_cache_loc),
        )
        num = len(rows)
        known_ids = np.full(num, RELAYED, dtype=np.int64)
        for idx in (computed < self._states.known_len[rows]).nonzero()[0].tolist():
            known_ids[idx] = self._states[int(rows[idx])].input_ids[int(computed[idx])]
        if plan.new_reqs or plan.row_updates:  # the slots of the new tokens are a matter of the recording
            indices, slots = self._buffers.put_all([*self._slot_news(plan, _NOTHING, _NOTHING)])
            self.req_to_token.view(-1).index_copy_(0, indices, slots)
        recorded = self._recordings.ready(rows, computed, out_cache_loc, known_ids)
        if recorded is None:
            return None
        self.last_step_id = plan.step_id
        return ForwardBatch(
            mode=plan.mode,
            input_ids=recorded.input_ids,
            positions=recorded.positions,
            kv_pool=self._kv_pool,
            out_cache_loc=recorded.out_cache_loc,
            attention=Replayed(),
            sample_indices=None,
            sample_rows=recorded.rows,
            sampled_idx_np=np.arange(num),
            cut_indices=None,
            cut_idx_np=_NOTHING,
            sampling=self._plan_sampling(rows, computed + 1),
            prompt_spans=(),
            recorded=recorded,
        )

    def _build_eager(self, plan: StepPlan, step: _Step) -> ForwardBatch:
        """The batch of a step that is launched kernel by kernel."""
        rows, computed, scheduled = step.rows, step.computed, step.scheduled
        starts, out_cache_loc_np = step.starts, step.out_cache_loc
        num_tokens = len(out_cache_loc_np)
        lasts = starts + scheduled - 1
        if num_tokens == len(rows):
            token_rows, positions_np = rows, computed
        else:
            token_rows = np.repeat(rows, scheduled)
            positions_np = np.repeat(computed - starts, scheduled) + np.arange(num_tokens)
        token_indices = token_rows * self.req_to_token.shape[1] + positions_np
        sampled, cut = np.flatnonzero(step.samples), np.flatnonzero(step.samples == 0)
        relayed = np.flatnonzero(computed + scheduled > self._states.known_len[rows])
        input_ids_np = self._known_ids(rows, computed, scheduled, starts)
        drafts = None
        if len(step.draft_ids):
            drafts = DraftBatch.of(step.num_drafts[sampled], step.draft_ids, self._buffers)
            input_ids_np[_trailing(lasts, step.num_drafts)] = step.draft_ids
        sampled_tokens = _trailing(lasts[sampled], step.num_drafts[sampled] + 1)
        prompt_targets = self._prompt_targets(rows, computed, scheduled)
        wanted = _Wanted.of(num_tokens, sampled_tokens, lasts[cut], starts, prompt_targets)

        (
            table_indices,
            table_slots,
            out_cache_loc,
            positions,
            input_ids,
            relayed_indices,
            relayed_rows,
            sample_rows,
            wanted_tokens,
            sample_indices,
            cut_indices,
        ) = self._buffers.put_all(
            [
                *self._slot_news(plan, token_indices, out_cache_loc_np),
                out_cache_loc_np,
                positions_np,
                input_ids_np,
                starts[relayed],
                rows[relayed],
                rows[sampled],
                wanted.tokens,
                wanted.index_of[sampled_tokens],
                wanted.index_of[lasts[cut]],
            ]
        )
        self.req_to_token.view(-1).index_copy_(0, table_indices, table_slots)
        self.last_step_id = plan.step_id
        if len(relayed):
            self._relay.fill(input_ids, relayed_indices, relayed_rows)
        longer = np.flatnonzero(scheduled > 1)
        num_extends = int(longer[-1]) + 1 if len(longer) else 0
        num_drafts = step.num_drafts if len(step.draft_ids) else None
        layout = BatchLayout(rows, computed, scheduled, num_extends, num_drafts)
        recorded = None
        if len(sampled_tokens) == num_tokens and not prompt_targets:
            recorded = self._recordings.ready_tokens(layout, positions, out_cache_loc, input_ids)
        return ForwardBatch(
            mode=plan.mode,
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=out_cache_loc,
            attention=Replayed() if recorded is not None else self._attention.plan_step(layout),
            sample_indices=None if len(sampled_tokens) == len(wanted.tokens) else sample_indices,
            sample_rows=sample_rows,
            sampled_idx_np=sampled,
            cut_indices=cut_indices if len(cut) else None,
            cut_idx_np=cut,
            sampling=self._plan_sampling(token_rows[sampled_tokens], positions_np[sampled_tokens] + 1),
            prompt_spans=self._prompt_spans(rows, prompt_targets, wanted.index_of[starts]),
            recorded=recorded,
            drafts=drafts,
            wanted=None if len(wanted.tokens) == num_tokens else wanted_tokens,
        )

    def _plan_sampling(self, rows: Int64s, positions: Int64s) -> SamplingBatch:
        return plan_sampling(rows, positions, self._states, self._counts, self._eos_token_ids)

    def _known_ids(self, rows: Int64s, computed: Int64s, scheduled: Int64s, starts: Int64s) -> Int64s:
        """[T] the input tokens that the host knows; 0 for those sampled since, which the relay has."""
        input_ids = np.zeros(int(scheduled.sum()), dtype=np.int64)
        for idx in np.flatnonzero(computed < self._states.known_len[rows]).tolist():
            first, start = int(computed[idx]), int(starts[idx])
            tokens = self._states[int(rows[idx])].input_ids[first : first + int(scheduled[idx])]
            input_ids[start : start + len(tokens)] = tokens
        return input_ids

    def _slot_news(
        self, plan: StepPlan, indices: Int64s, loc: Int64s
    ) -> tuple[Int64s, npt.NDArray[np.int32]]:
        """What the plan changes in the slot table: cached prefixes, replaced slots, slots of the new tokens.

        Returns:
            indices into the flat table, each once, and what to write there.
        """
        if plan.new_reqs or plan.row_updates:
            news = [(new.row, 0, _int64(new.prefix_loc)) for new in plan.new_reqs]
            news += [(update.row, update.start, _int64(update.loc)) for update in plan.row_updates]
            width = self.req_to_token.shape[1]
            all_indices = [row * width + np.arange(start, start + len(slots)) for row, start, slots in news]
            indices, loc = _last_wins(
                np.concatenate([*all_indices, indices]),
                np.concatenate([*(slots for _, _, slots in news), loc]),
            )
        return indices, loc.astype(np.int32)

    def _prompt_targets(self, rows: Int64s, computed: Int64s, scheduled: Int64s) -> dict[int, Int32s]:
        """The prompt tokens behind those of the step, of each request, by index, that wants their log-probabilities."""
        targets = {}
        for idx in np.flatnonzero(self._states.flags[rows] & SamplingFlag.PROMPT_LOGPROBS).tolist():
            state = self._states[int(rows[idx])]
            first = int(computed[idx]) + 1
            found = state.input_ids[first : min(first + int(scheduled[idx]), state.prompt_len)]
            if len(found):
                targets[idx] = found
        return targets

    def _prompt_spans(
        self, rows: Int64s, prompt_targets: dict[int, Int32s], starts: Int64s
    ) -> tuple[PromptSpan, ...]:
        """`starts`: [B] each request's first token, counted among the wanted ones; of others it does not matter."""
        return tuple(
            PromptSpan(
                batch_idx=idx,
                start=int(starts[idx]),
                targets=self._buffers.put(targets.astype(np.int64)),
                top_k=self._states[int(rows[idx])].sampling.prompt_logprobs or 0,
            )
            for idx, targets in prompt_targets.items()
        )


class _Wanted(NamedTuple):
    """The tokens whose hidden states are looked at: those behind which somebody samples, the last ones of prompts that
    go on, and those that predict tokens of a prompt.

    Attributes:
        tokens: [W], ascending.
        index_of: [T] what number each of them has among them.
    """

    tokens: Int64s
    index_of: Int64s

    @classmethod
    def of(
        cls,
        num_tokens: int,
        sampled: Int64s,
        cut: Int64s,
        starts: Int64s,
        prompt_targets: dict[int, Int32s],
    ) -> Self:
        is_wanted = np.zeros(num_tokens, dtype=np.bool_)
        is_wanted[sampled] = is_wanted[cut] = True
        for idx, targets in prompt_targets.items():
            is_wanted[starts[idx] : starts[idx] + len(targets)] = True
        return cls(np.flatnonzero(is_wanted), np.cumsum(is_wanted) - 1)


class _Step(NamedTuple):
    """The arrays of a plan: [B] rows, computed and scheduled tokens, first token in the batch, samples, drafts; [T]
    slots; the drafts.
    """

    rows: Int64s
    computed: Int64s
    scheduled: Int64s
    starts: Int64s
    samples: npt.NDArray[np.uint8]
    out_cache_loc: Int64s
    num_drafts: Int64s
    draft_ids: Int64s

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        scheduled, out_cache_loc = _int64(plan.num_scheduled_tokens), _int64(plan.out_cache_loc)
        assert len(out_cache_loc) == scheduled.sum() == plan.total_num_scheduled_tokens, (
            f"step {plan.step_id}"
        )
        starts = np.cumsum(scheduled) - scheduled
        samples = np.frombuffer(plan.samples, dtype=np.uint8)
        num_drafts = _int64(plan.num_drafts) if plan.num_drafts else np.zeros_like(scheduled)
        return cls(
            _int64(plan.rows),
            _int64(plan.num_computed_tokens),
            scheduled,
            starts,
            samples,
            out_cache_loc,
            num_drafts,
            _int64(plan.draft_ids),
        )


def _each_decodes(plan: StepPlan) -> bool:
    """Whether everybody computes one token, and samples the next."""
    return len(plan.out_cache_loc) == len(plan.rows) and b"\0" not in plan.samples


def _int64(data: bytes) -> Int64s:
    return np.frombuffer(data, dtype=np.int32).astype(np.int64)


def _trailing(lasts: Int64s, counts: Int64s) -> Int64s:
    """Indices of the tokens up to `lasts` [n], `counts` [n] of each, one request after the other."""
    if (counts == 1).all():
        return lasts
    ends = np.cumsum(counts)
    result: Int64s = np.repeat(lasts + 1 - ends, counts) + np.arange(int(ends[-1]))
    return result


def _last_wins(indices: Int64s, values: Int64s) -> tuple[Int64s, Int64s]:
    """Without repeated indices, each with its last value: torch leaves the order of writes open."""
    unique, last = np.unique(indices[::-1], return_index=True)
    return unique, values[::-1][last]


def make_req_to_token(num_rows: int, max_model_len: int, device: torch.device) -> Tensor:
    """An empty slot table, and a dummy row behind the others; every entry is the dummy slot."""
    return torch.zeros((num_rows + 1, max_model_len), dtype=torch.int32, device=device)
