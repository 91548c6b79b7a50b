"""`BatchBuilder`: turns a `StepPlan` into an `InputBatch`. It does not compute the step; a `StepExecutor` does.

All arithmetic is on whole arrays. Only requests with prompt tokens in the step are handled one by one, to copy these.
"""

# Shapes: B requests, T new tokens in the batch, W of them need logits, S requests that sample in this step.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ..runtime.step_plan import RUNNER_DRAFT
from .attention.backend import BatchLayout
from .input_batch import RELAYED, DraftRows, InputBatch, PromptSpan
from .pooling.pooler import PooledChunk
from .request_states import RequestStates, SamplingFlag, TokenRelay
from .sampling.draft_batch import DraftBatch
from .sampling.sampling_batch import SamplingBatch, plan_sampling
from .states.state_planner import StatePlanner
from .vision.encoder_rows import ImageTokens, ends_of_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.step_plan import StepPlan
    from .memory.io_buffers import InputBuffers
    from .sampling.token_counts import TokenCounts

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NOTHING: Final[Int64s] = np.empty(0, dtype=np.int64)


@dataclass(eq=False, kw_only=True)
class BatchBuilder:
    """Builds the batch of each step.

    Attributes:
        has_token_types: the model has a type for the second text of a pair.
        pools_first: a result depends on the first token of a whole text only (an encoder with cls pooling).
        states_of_layers: plans the states; None: the model has no state layers.
        images_are_whole: tokens of an image attend to all of it.
        layer_input_id: see `VisionSpec`.
        processed_logprobs: see `plan_sampling`.
    """

    states: RequestStates
    counts: TokenCounts
    relay: TokenRelay
    eos_token_ids: tuple[int, ...]
    buffers: InputBuffers
    has_token_types: bool = False
    pools_first: bool = False
    states_of_layers: StatePlanner | None = None
    images_are_whole: bool = False
    layer_input_id: int | None = None
    processed_logprobs: bool = False

    def build(self, plan: StepPlan) -> InputBatch:
        """The batch of a plan with at least one token; the plan's new requests must already be in `RequestStates`."""
        if _each_decodes(plan):
            rows, computed = _int64(plan.rows), _int64(plan.num_computed_tokens)
            input_ids = np.full(len(rows), RELAYED, dtype=np.int64)
            known = (computed < self.states.known_len[rows]).nonzero()[0]
            for idx in known.tolist():
                input_ids[idx] = self.states[int(rows[idx])].input_ids[int(computed[idx])]
            if not len(known) or (computed >= self.states.media_end[rows]).all():
                return self._decodes(
                    plan, rows, computed, np.ones_like(rows), _int64(plan.out_cache_loc), input_ids
                )
        return self._build_any(plan, _Step.of(plan))

    def draft_rows(self, plan: StepPlan) -> DraftRows | None:
        """The drafts that a plan leaves to the runner; None if there are none. Prompts are in no step with drafts."""
        if not plan.draft_ids:
            return None
        num_drafts, draft_ids = _int64(plan.num_drafts), _int64(plan.draft_ids)
        firsts = np.cumsum(num_drafts) - num_drafts
        idx = np.flatnonzero(num_drafts)
        idx = idx[draft_ids[firsts[idx]] == RUNNER_DRAFT]
        if not len(idx):
            return None
        scheduled, counts = _int64(plan.num_scheduled_tokens), num_drafts[idx]
        starts = (np.cumsum(scheduled) - scheduled)[idx]
        rows, positions = _int64(plan.rows)[idx], _int64(plan.num_computed_tokens)[idx]
        slots = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        ones = np.ones_like(rows)
        last_ids = self._known_ids(rows, positions, ones, np.arange(len(rows)))
        return DraftRows(rows, positions, counts, _int64(plan.out_cache_loc)[slots], last_ids)

    def draft_sampling(self, rows: Int64s, positions: Int64s) -> SamplingBatch:
        """The sampling of a drafter's tokens at these positions, without log-probabilities."""
        return replace(self._plan_sampling(rows, positions), logprobs=None)

    def next_round(self, last: InputBatch, plan: StepPlan, number: int) -> InputBatch:
        """The batch of the next inner step of a multi-step decode, from the batch of the last one, after it sampled."""
        rows, ones = last.layout.rows, last.layout.extend_lens
        relayed = np.full(len(rows), RELAYED, dtype=np.int64)
        return self._decodes(plan, rows, last.positions + 1, ones, _int64(plan.round_loc(number)), relayed)

    def _decodes(
        self,
        plan: StepPlan,
        rows: Int64s,
        positions: Int64s,
        ones: Int64s,
        out_cache_loc: Int64s,
        input_ids: Int64s,
    ) -> InputBatch:
        """The batch of a step in which each request computes one token and samples: the fast path of most steps.

        Such a step cannot need prompt logprobs: they come from tokens before the last one of a prompt.
        """
        return InputBatch(
            layout=BatchLayout(rows, positions, ones, 0),
            token_rows=rows,
            positions=positions,
            out_cache_loc=out_cache_loc,
            input_ids=input_ids,
            logits_indices=None,
            sample_indices=None,
            sampled_idx=np.arange(len(rows)),
            cut_indices=_NOTHING,
            cut_idx=_NOTHING,
            sampling=self._plan_sampling(rows, positions + 1),
            prompt_spans=(),
            drafts=None,
            adapter_slots=self._adapter_slots(rows),
            state_plan=self._state_plan(plan, rows, positions, ones),
            rope_positions=self._rope_positions(rows, positions),
        )

    def _build_any(self, plan: StepPlan, step: _Step) -> InputBatch:
        """The batch of a step of any kind."""
        rows, computed, scheduled, starts = step.rows, step.computed, step.scheduled, step.starts
        num_tokens = len(step.out_cache_loc)
        lasts = starts + scheduled - 1
        token_rows = np.repeat(rows, scheduled)
        positions = np.repeat(computed - starts, scheduled) + np.arange(num_tokens)
        sampled, cut = np.flatnonzero(step.samples), np.flatnonzero(step.samples == 0)
        input_ids = self._known_ids(rows, computed, scheduled, starts)
        drafts = None
        if len(step.draft_ids):
            drafts = DraftBatch.of(step.num_drafts[sampled], step.draft_ids, self.buffers)
            input_ids[_trailing(lasts, step.num_drafts)] = step.draft_ids
        sampled_tokens = _trailing(lasts[sampled], step.num_drafts[sampled] + 1)
        prompt_targets = self._prompt_targets(rows, computed, scheduled, starts)
        pooled = self._pooled(step)
        logits = _LogitsTokens.of(num_tokens, sampled_tokens, lasts[cut], prompt_targets, pooled)
        longer = np.flatnonzero(scheduled > 1)
        num_extends = int(longer[-1]) + 1 if len(longer) else 0
        num_drafts = step.num_drafts if len(step.draft_ids) else None
        samples_all_logits = len(sampled_tokens) == len(logits.tokens)
        seeing = self._seeing_chunks(rows, computed, scheduled, starts)
        images = ImageTokens.of(seeing) if seeing else None
        if images is not None and self.layer_input_id is not None:
            input_ids[images.indices] = self.layer_input_id  # rows of images replace their embeddings
        return InputBatch(
            layout=BatchLayout(
                rows,
                computed,
                scheduled,
                num_extends,
                num_drafts,
                ends_of_images(positions, seeing) if images is not None and self.images_are_whole else None,
            ),
            token_rows=token_rows,
            positions=positions,
            out_cache_loc=step.out_cache_loc,
            input_ids=input_ids,
            logits_indices=None if len(logits.tokens) == num_tokens else logits.tokens,
            sample_indices=None if samples_all_logits else logits.index_of[sampled_tokens],
            sampled_idx=sampled,
            cut_indices=logits.index_of[lasts[cut]],
            cut_idx=cut,
            sampling=self._plan_sampling(token_rows[sampled_tokens], positions[sampled_tokens] + 1),
            prompt_spans=self._prompt_spans(rows, prompt_targets, logits.index_of),
            drafts=drafts,
            pooled=tuple(chunk._replace(start=int(logits.index_of[chunk.start])) for chunk in pooled),
            adapter_slots=self._adapter_slots(token_rows),
            token_types=self._token_types(token_rows, positions) if self.has_token_types else None,
            state_plan=self._state_plan(plan, rows, computed, scheduled, num_drafts),
            images=images,
            rope_positions=self._rope_of_chunks(step, token_rows, positions),
        )

    def _rope_positions(self, token_rows: Int64s, positions: Int64s) -> Int64s | None:
        """`InputBatch.rope_positions` of tokens after all images of their requests."""
        deltas = self.states.rope_delta[token_rows]
        return positions + deltas if deltas.any() else None

    def _rope_of_chunks(self, step: _Step, token_rows: Int64s, positions: Int64s) -> Int64s | None:
        """`InputBatch.rope_positions` of any tokens; with axes only if these differ."""
        found = self._rope_positions(token_rows, positions)
        axes: Int64s | None = None
        for idx in np.flatnonzero(step.computed < self.states.media_end[step.rows]).tolist():
            first, start, rope = (
                int(step.computed[idx]),
                int(step.starts[idx]),
                self.states[int(step.rows[idx])].rope,
            )
            if rope is None:
                continue
            if axes is None:
                axes = np.stack([positions if found is None else found] * 3)
            known = rope[:, first : first + int(step.scheduled[idx])]
            axes[:, start : start + known.shape[1]] = known
        if axes is None:
            return found
        return axes[0] if (axes == axes[0]).all() else axes

    def _seeing_chunks(
        self, rows: Int64s, computed: Int64s, scheduled: Int64s, starts: Int64s
    ) -> list[tuple[int, int, int, Int64s]]:
        """The chunks before the end of the images of their prompts, see `ImageTokens.of`."""
        chunks = []
        for idx in np.flatnonzero(computed < self.states.media_end[rows]).tolist():
            media = self.states[int(rows[idx])].media
            assert media is not None, "its end is known"
            chunks.append((int(starts[idx]), int(computed[idx]), int(scheduled[idx]), media))
        return chunks

    def _adapter_slots(self, token_rows: Int64s) -> Int64s | None:
        slots = self.states.adapter_slot[token_rows]
        return slots if slots.any() else None

    def _state_plan(
        self,
        plan: StepPlan,
        rows: Int64s,
        prefix_lens: Int64s,
        extend_lens: Int64s,
        num_drafts: Int64s | None = None,
    ) -> Int64s | None:
        if self.states_of_layers is None:
            return None
        return self.states_of_layers.plan(plan, rows, prefix_lens, extend_lens, num_drafts)

    def _token_types(self, token_rows: Int64s, positions: Int64s) -> Int64s | None:
        """[T] 1 for the tokens of second texts; None if the step has no pairs."""
        seconds = self.states.second_start[token_rows]
        if not seconds.any():
            return None
        return ((seconds > 0) & (positions >= seconds)).astype(np.int64)

    def _pooled(self, step: _Step) -> list[PooledChunk]:
        """The chunks of pooling requests, with `start` still counted among the T tokens."""
        chunks = []
        for idx in np.flatnonzero(self.states.is_pooling[step.rows]).tolist():
            row, start, length = int(step.rows[idx]), int(step.starts[idx]), int(step.scheduled[idx])
            state, ends = self.states[row], bool(len(step.pools) and step.pools[idx])
            assert state.pooling is not None
            if not state.pooling.all_tokens:
                if not ends:
                    continue
                start, length = start + length - 1, 1
            begins = int(step.computed[idx]) == 0
            if self.pools_first and begins and ends:
                start, length = int(step.starts[idx]), 1
            chunks.append(PooledChunk(idx, row, start, length, state.prompt_len, begins, ends, state.pooling))
        return chunks

    def _plan_sampling(self, rows: Int64s, positions: Int64s) -> SamplingBatch:
        return plan_sampling(
            rows,
            positions,
            self.states,
            self.counts,
            self.eos_token_ids,
            self.relay.last_token,
            processed_logprobs=self.processed_logprobs,
        )

    def _known_ids(self, rows: Int64s, computed: Int64s, scheduled: Int64s, starts: Int64s) -> Int64s:
        """[T] the input tokens, `RELAYED` for those that only the device knows."""
        input_ids = np.full(int(scheduled.sum()), RELAYED, dtype=np.int64)
        for idx in np.flatnonzero(computed < self.states.known_len[rows]).tolist():
            first, start = int(computed[idx]), int(starts[idx])
            tokens = self.states[int(rows[idx])].input_ids[first : first + int(scheduled[idx])]
            input_ids[start : start + len(tokens)] = tokens
        return input_ids

    def _prompt_targets(
        self, rows: Int64s, computed: Int64s, scheduled: Int64s, starts: Int64s
    ) -> dict[int, _Targets]:
        """Targets of prompt logprobs: batch index -> the wanted prompt tokens after those that are computed here."""
        targets = {}
        for idx in np.flatnonzero(self.states.flags[rows] & SamplingFlag.PROMPT_LOGPROBS).tolist():
            state, first = self.states[int(rows[idx])], int(computed[idx])
            skipped = max(0, state.sampling.prompt_logprobs_start - first)
            end = min(first + 1 + int(scheduled[idx]), state.prompt_len)
            found = state.input_ids[first + 1 + skipped : end]
            if len(found):
                targets[idx] = _Targets(int(starts[idx]) + skipped, found)
        return targets

    def _prompt_spans(
        self, rows: Int64s, prompt_targets: dict[int, _Targets], index_of: Int64s
    ) -> tuple[PromptSpan, ...]:
        """The spans of `prompt_targets`; `index_of`: as in `_LogitsTokens`."""
        return tuple(
            PromptSpan(
                batch_idx=idx,
                start=int(index_of[targets.start]),
                targets=self.buffers.put(targets.tokens.astype(np.int64)),
                top_k=self.states[int(rows[idx])].sampling.prompt_logprobs or 0,
                chosen=self.states[int(rows[idx])].sampling.logprob_token_ids,
            )
            for idx, targets in prompt_targets.items()
        )


class _Targets(NamedTuple):
    """Prompt tokens that get log-probabilities: [n] ids, and the batch's token that predicts the first of them."""

    start: int
    tokens: Int32s


class _LogitsTokens(NamedTuple):
    """The tokens that need logits or hidden states: those after which a request samples, the last token of a chunk that
    does not end its prompt, those that predict a prompt token, and those that pooling requests need.

    Attributes:
        tokens: [W], ascending.
        index_of: [T] index of each such token among the W.
    """

    tokens: Int64s
    index_of: Int64s

    @classmethod
    def of(
        cls,
        num_tokens: int,
        sampled: Int64s,
        cut: Int64s,
        prompt_targets: dict[int, _Targets],
        pooled: Sequence[PooledChunk] = (),
    ) -> Self:
        has_logits = np.zeros(num_tokens, dtype=np.bool_)
        has_logits[sampled] = has_logits[cut] = True
        for start, tokens in prompt_targets.values():
            has_logits[start : start + len(tokens)] = True
        for chunk in pooled:
            has_logits[chunk.start : chunk.start + chunk.num_tokens] = True
        return cls(np.flatnonzero(has_logits), np.cumsum(has_logits) - 1)


class _Step(NamedTuple):
    """The arrays of a plan: [B] rows, computed and scheduled tokens, first token in the batch, samples, number of
    drafts; [T] slots; the draft ids; [B] pools, or empty.
    """

    rows: Int64s
    computed: Int64s
    scheduled: Int64s
    starts: Int64s
    samples: npt.NDArray[np.uint8]
    out_cache_loc: Int64s
    num_drafts: Int64s
    draft_ids: Int64s
    pools: npt.NDArray[np.uint8]

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
            np.frombuffer(plan.pools, dtype=np.uint8),
        )


def _each_decodes(plan: StepPlan) -> bool:
    """Whether every request computes one token and samples the next."""
    return len(plan.out_cache_loc) == len(plan.rows) and b"\0" not in plan.samples


def _int64(data: bytes) -> Int64s:
    return np.frombuffer(data, dtype=np.int32).astype(np.int64)


def _trailing(lasts: Int64s, counts: Int64s) -> Int64s:
    """Indices of the last `counts` [n] tokens up to and including `lasts` [n], one request after the other."""
    if (counts == 1).all():
        return lasts
    ends = np.cumsum(counts)
    result: Int64s = np.repeat(lasts + 1 - ends, counts) + np.arange(int(ends[-1]))
    return result
