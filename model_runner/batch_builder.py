"""`BatchBuilder`: from a `StepPlan` to a `ForwardBatch`; owns the device's mirror of the slot table.

All arithmetic is on whole arrays; only requests with prompt tokens in the step are visited one by one, to copy them.
"""

# Shapes: B requests, T new tokens in the batch, S requests that sample in this step.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention.backend import AttentionBackend, BatchLayout
from .forward_batch import ForwardBatch, PromptSpan
from .row_states import RowStates, SamplingFlag
from .sampling_batch import plan_sampling

if TYPE_CHECKING:
    from ..runtime.step_plan import StepPlan
    from .input_buffers import InputBuffers
    from .token_counts import TokenCounts
    from .token_relay import TokenRelay

Int64s = npt.NDArray[np.int64]


class BatchBuilder:
    """Builds batches.

    Attributes:
        req_to_token: [rows, max_model_len] int32, device: the KV slot of each position of each row's request.
    """

    def __init__(
        self,
        *,
        req_to_token: Tensor,
        attention: AttentionBackend,
        states: RowStates,
        counts: TokenCounts,
        relay: TokenRelay,
        eos_token_ids: tuple[int, ...],
        buffers: InputBuffers,
    ) -> None:
        self.req_to_token = req_to_token
        self._attention = attention
        self._states = states
        self._counts = counts
        self._relay = relay
        self._eos_token_ids = eos_token_ids
        self._buffers = buffers

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Update the slot table by the plan and make its batch.

        Args:
            plan: with at least one token; its new requests are in `RowStates` already.
        """
        rows = _int64(plan.rows)
        computed = _int64(plan.num_computed_tokens)
        scheduled = _int64(plan.num_scheduled_tokens)
        out_cache_loc_np = _int64(plan.out_cache_loc)
        num_tokens = len(out_cache_loc_np)
        assert num_tokens == scheduled.sum() == plan.total_num_scheduled_tokens, f"step {plan.step_id}"
        starts = np.cumsum(scheduled) - scheduled
        lasts = starts + scheduled - 1
        if num_tokens == len(rows):
            token_rows, positions_np = rows, computed
        else:
            token_rows = np.repeat(rows, scheduled)
            positions_np = np.repeat(computed - starts, scheduled) + np.arange(num_tokens)
        token_indices = token_rows * self.req_to_token.shape[1] + positions_np
        samples = np.frombuffer(plan.samples, dtype=np.uint8)
        sampled, cut = np.flatnonzero(samples), np.flatnonzero(samples == 0)
        relayed = np.flatnonzero(computed + scheduled > self._states.known_len[rows])

        (
            table_indices,
            table_slots,
            out_cache_loc,
            positions,
            input_ids,
            relayed_indices,
            relayed_rows,
            sample_rows,
            sample_indices,
            cut_indices,
        ) = self._buffers.put_all(
            [
                *self._slot_news(plan, token_indices, out_cache_loc_np),
                out_cache_loc_np,
                positions_np,
                self._known_ids(rows, computed, scheduled, starts),
                lasts[relayed],
                rows[relayed],
                rows[sampled],
                lasts[sampled],
                lasts[cut],
            ]
        )
        self.req_to_token.view(-1).index_copy_(0, table_indices, table_slots)
        if len(relayed):
            self._relay.fill(input_ids, relayed_indices, relayed_rows)
        longer = np.flatnonzero(scheduled > 1)
        num_extends = int(longer[-1]) + 1 if len(longer) else 0
        return ForwardBatch(
            mode=plan.mode,
            input_ids=input_ids,
            positions=positions,
            attention=self._attention.plan_step(
                BatchLayout(rows, computed, scheduled, num_extends), out_cache_loc
            ),
            sample_indices=None if len(sampled) == num_tokens else sample_indices,
            sample_rows=sample_rows,
            sampled_idx_np=sampled,
            cut_indices=cut_indices if len(cut) else None,
            cut_idx_np=cut,
            sampling=plan_sampling(
                rows[sampled],
                (computed + scheduled)[sampled],
                self._states,
                self._counts,
                self._eos_token_ids,
                self._buffers,
            ),
            prompt_spans=self._prompt_spans(rows, computed, scheduled, starts),
        )

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

    def _prompt_spans(
        self, rows: Int64s, computed: Int64s, scheduled: Int64s, starts: Int64s
    ) -> tuple[PromptSpan, ...]:
        wanting = np.flatnonzero(self._states.flags[rows] & SamplingFlag.PROMPT_LOGPROBS)
        spans = []
        for idx in wanting.tolist():
            state = self._states[int(rows[idx])]
            first = int(computed[idx]) + 1
            targets = state.input_ids[first : min(first + int(scheduled[idx]), state.prompt_len)]
            if len(targets):
                spans.append(
                    PromptSpan(
                        batch_idx=idx,
                        start=int(starts[idx]),
                        targets=self._buffers.put(targets.astype(np.int64)),
                        top_k=state.sampling.prompt_logprobs or 0,
                    )
                )
        return tuple(spans)


def _int64(data: bytes) -> Int64s:
    return np.frombuffer(data, dtype=np.int32).astype(np.int64)


def _last_wins(indices: Int64s, values: Int64s) -> tuple[Int64s, Int64s]:
    """Without repeated indices, each with its last value: torch leaves the order of writes open."""
    unique, last = np.unique(indices[::-1], return_index=True)
    return unique, values[::-1][last]


def make_req_to_token(num_rows: int, max_model_len: int, device: torch.device) -> Tensor:
    """An empty slot table; every entry is the dummy slot."""
    return torch.zeros((num_rows, max_model_len), dtype=torch.int32, device=device)
