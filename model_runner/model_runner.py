"""`ModelRunner`: executes `StepPlan`s, makes no scheduling decisions. Used by the scheduler's process and by TP ranks.

    runner.launch(plan, go_on, masks) -> Pending    host work and kernel launches; does not wait for the device
    pending.wait()                    -> StepResult waits for this step, but not for steps launched after it

The parts: `RequestStates` (requests, host), `SlotTable`, `BatchBuilder` (plan -> `InputBatch`), `StepExecutor`
(batch -> logits), `KVPool`, `HostKVPool` (swapped pages), `Sampler`, `TokenRelay` (last tokens, device). The runner
calls them in the order that the plan's contract promises.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
import torch
from msgspec import structs

from ..runtime.step_plan import RUNNER_DRAFT, StepPlan, StepResult, no_masks, to_the_end
from ..runtime.transport.message_base import Logprobs
from .adapter_runs import runs_or_none
from .memory.device_memory import free_cached_memory
from .memory.device_timer import DeviceTimer
from .request_states import SamplingFlag
from .sampling.logits import TokenLogprobs, chosen_logprobs, concatenate, ranks_of
from .sampling.sampler import Sampled
from .structures.causal_lm import logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from ..runtime.feasibility import Capacity
    from ..runtime.step_plan import GetMasks, GoOn, Pending, RowTokens
    from .adapters.adapter_store import AdapterSlots
    from .batch_builder import BatchBuilder
    from .drafting.drafter import Drafter
    from .input_batch import InputBatch, PromptSpan
    from .memory.host_kv_pool import HostKVPool
    from .memory.io_buffers import InputBuffers, OutputBuffers
    from .memory.kv_pool import KVPool
    from .memory.slot_table import SlotTable
    from .memory.state_pool import StatePool
    from .pooling.pooler import PooledChunk, PooledRows, Pooler
    from .recording.executor import RecordedBytes, StepExecutor
    from .request_states import RequestStates, TokenRelay
    from .sampling.shared_sampler import SamplerLike
    from .sampling.token_counts import TokenCounts
    from .structures.causal_lm import CausalLM
    from .vision.encoder_rows import EncoderRows

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_FINITE: Final = (
    "the model's output is not finite (NaN or infinity); its weights may be damaged, or try --dtype float32"
)
_PROMPT_LOGPROB_ROWS: Final = 256
"""Prompt positions with logits in memory at the same time: 50 MB for a vocabulary of 49k."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities and ranks of one request's prompt tokens of one chunk, and whether all logits are finite.

    `chosen`: [n, m] of the span's chosen tokens; None if it has none.
    """

    span: PromptSpan
    logprobs: TokenLogprobs
    ranks: Tensor
    finite: Tensor
    chosen: Tensor | None


class UnmaskedTokens(NamedTuple):
    """The likeliest token of each row of logits ([R] int64), for `GetMasks.unmasked`, which gets those of `indices`."""

    token_ids: Tensor
    indices: npt.NDArray[np.int64]
    masks: GetMasks

    def pass_on(self) -> None:
        """Pass the tokens on, when they are on the host."""
        self.masks.unmasked(self.token_ids.numpy()[self.indices])


class Fetched(NamedTuple):
    """The results of a step's batch, in host tensors that are filled when the device has finished the step.

    Attributes:
        batch: the batch of the results.
        sampled: the sampled tokens; None if no request samples.
        num_tokens: see `Checked`; None in a step without drafts.
        unmasked: the likeliest tokens without masks, still to be passed on; None if there is nothing to pass on.
        pooled: results of pooling requests.
        cut_finite: [number of `InputBatch.cut_idx`] bool; where False the chunk's KV is not finite.
        prompts: see `PromptLogprobs`.
    """

    batch: InputBatch
    sampled: Sampled | None
    cut_finite: Tensor | None = None
    prompts: Sequence[PromptLogprobs] = ()
    num_tokens: Tensor | None = None
    unmasked: UnmaskedTokens | None = None
    pooled: Sequence[PooledRows] = ()


class StepOutOfMemory(NamedTuple):
    """A step's batch was not computed; `reason` is the allocator's message."""

    reason: str


class RunnerSizes(NamedTuple):
    """Known device memory of a runner besides weights and KV pool.

    Attributes:
        recorded_bytes: see `StepExecutor`.
        gathered_token_bytes: see `AttentionBackend`.
    """

    recorded_bytes: RecordedBytes
    gathered_token_bytes: int


@dataclass(slots=True, eq=False, kw_only=True)
class ModelRunner:
    """The runner of one rank.

    Attributes:
        model: the model that `executor` runs; used here only for logits of prompts.
        builder, sampler: make the executor's input, and sample from its output.
        capacity: the capacity of all parts.
        sizes: device memory of some parts.
        drops_steps: True: a step for which the device has no memory is dropped. False: the error is raised.
        attention_backend: name of the backend that `executor` uses.
        adapters: the slots of the model's adapters, and their store; None: the server has none.
        drafter: makes the drafts that plans leave to the runner; None: no plan does.
        encoder_rows: the rows of images, and what computes them; None: this rank computes none.
    """

    model: CausalLM
    executor: StepExecutor
    kv_pool: KVPool
    state_pool: StatePool | None
    host_kv_pool: HostKVPool | None
    slot_table: SlotTable
    states: RequestStates
    counts: TokenCounts
    relay: TokenRelay
    builder: BatchBuilder
    sampler: SamplerLike
    pooler: Pooler
    buffers: InputBuffers
    outputs: OutputBuffers
    capacity: Capacity
    sizes: RunnerSizes
    drops_steps: bool = True
    attention_backend: str = ""
    adapters: AdapterSlots | None = None
    drafter: Drafter | None = None
    encoder_rows: EncoderRows | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        """Start a step; see `runtime.step_plan` for the order in which the plan's fields apply."""
        fetched: Fetched | StepOutOfMemory | None = None
        further: list[Sampled] = []
        timer, draft_timer = DeviceTimer(self.buffers.device), DeviceTimer(self.buffers.device)
        with timer:
            if self.drafter is not None and plan.finished_rows:
                rows = np.frombuffer(plan.finished_rows, dtype=np.int32).astype(np.int64)
                self.buffers.retried(self.drafter.leave, rows)
            swap_timer = self._move_pages(plan)
            self._update_rows(plan)
            if plan.total_num_scheduled_tokens:
                self.buffers.retried(self.slot_table.update, plan)
            encode_timer = DeviceTimer(self.buffers.device) if plan.encodes else None
            fetched = self._try_batch(plan, masks, draft_timer, encode_timer)
            if plan.num_rounds > 1 and isinstance(fetched, Fetched):
                further = self._further_rounds(plan, fetched, go_on, masks)
            if self.drafter is not None and plan.state_saves:
                rows = np.frombuffer(plan.state_saves, dtype=np.int32)[::3].astype(np.int64)
                self.buffers.retried(self.drafter.share, np.unique(rows))
        failures = self._failures(fetched)
        pending = PendingStep(plan.step_id, timer, swap_timer, draft_timer, fetched, encode_timer, failures)
        return PendingMultiStep(pending, further) if further else pending

    def _with_drafts(self, drafter: Drafter, plan: StepPlan, masks: GetMasks) -> StepPlan:
        """The plan with the drafts that it leaves to the runner; the masks follow them."""
        if plan.new_reqs:
            drafter.start(plan.new_reqs)
        asked = self.builder.draft_rows(plan)
        if asked is None:
            return plan
        draft_ids = np.frombuffer(plan.draft_ids, dtype=np.int32).copy()
        draft_ids[draft_ids == RUNNER_DRAFT] = drafter.draft(asked)
        plan = structs.replace(plan, draft_ids=draft_ids.tobytes())
        masks.drafted(plan.draft_ids)
        return plan

    def store_tokens(self, sampled: RowTokens) -> None:
        """Store tokens that were sampled by another pipeline stage; later steps read them as input."""
        rows = np.frombuffer(sampled.rows, dtype=np.int32).astype(np.int64)
        # Of a row that occurs twice the later token counts, which an indexed copy on a device does not promise.
        _, lasts = np.unique(rows[::-1], return_index=True)
        keep = len(rows) - 1 - lasts
        if len(rows):
            token_ids = np.frombuffer(sampled.token_ids, dtype=np.int32).astype(np.int64)
            self.relay.store(self.buffers.put(rows[keep]), self.buffers.put(token_ids[keep]))

    def _further_rounds(self, plan: StepPlan, first: Fetched, go_on: GoOn, masks: GetMasks) -> list[Sampled]:
        """Run the rounds of a multi-step decode after its first; it also ends if logits are not finite."""
        assert self.buffers.device.type == "cpu", (
            "on other devices the tokens are not known yet after the launch"
        )
        rounds: list[Sampled] = []
        last = first
        for number in range(1, plan.num_rounds):
            assert last.sampled is not None, "a multi-step decode consists of decodes"
            token_ids, finite = last.sampled.token_ids, last.sampled.finite
            if not finite.numpy().all() or not go_on(token_ids.numpy().astype(np.int32).tobytes()):
                break
            last = self._forward(self.builder.next_round(last.batch, plan, number), masks)
            assert last.sampled is not None
            rounds.append(last.sampled)
        return rounds

    def _update_rows(self, plan: StepPlan) -> None:
        """Remove finished requests and add new ones."""
        for row in np.frombuffer(plan.finished_rows, dtype=np.int32).tolist():
            self.states.remove(row)
            self.counts.remove(row)
        if plan.adapter_loads:
            assert self.adapters is not None, "the plan loads adapters, the model has no slots"
            self.buffers.retried(self.adapters.load, plan.adapter_loads)
        for new in plan.new_reqs:
            state = self.states.add(new)
            if self.states.flags[new.row] & SamplingFlag.PENALTIES:
                prompt_ids, output_ids = np.split(state.input_ids, [new.prompt_len])
                self.buffers.retried(self.counts.add, new.row, prompt_ids, output_ids)

    def _failures(self, fetched: Fetched | StepOutOfMemory | None) -> dict[int, str]:
        """Requests with tokens that take rows which could not be computed, by their index in the batch."""
        images = fetched.batch.images if isinstance(fetched, Fetched) else None
        if self.encoder_rows is None or images is None or not isinstance(fetched, Fetched):
            return {}
        failures, layout, (indices, rows) = {}, fetched.batch.layout, images
        owners = np.repeat(np.arange(len(layout.rows)), layout.extend_lens)[indices]
        for idx in np.unique(owners).tolist():
            if (reason := self.encoder_rows.failure(rows[owners == idx])) is not None:
                failures[idx] = reason
        return failures

    def _move_pages(self, plan: StepPlan) -> DeviceTimer | None:
        """Swap and copy whole pages as planned; returns the timer of the swaps, None without swaps."""
        host = self.host_kv_pool
        timer = DeviceTimer(self.buffers.device) if plan.swap_outs or plan.swap_ins else None
        missing = "the plan swaps pages, but there is no KV memory on the host"
        if timer is not None and plan.swap_outs:
            assert host is not None, missing
            with timer:
                self.buffers.retried(host.copy_out, *_pairs(plan.swap_outs))
        if plan.page_copies:
            self.buffers.retried(self._copy_pages, *_pairs(plan.page_copies))
        if timer is not None and plan.swap_ins:
            assert host is not None, missing
            with timer:
                self.buffers.retried(host.copy_in, *_pairs(plan.swap_ins))
        return timer

    def _copy_pages(self, sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64]) -> None:
        self.kv_pool.copy_pages(self.buffers.put(sources), self.buffers.put(destinations))

    def _try_batch(
        self, plan: StepPlan, masks: GetMasks, draft_timer: DeviceTimer, encode_timer: DeviceTimer | None
    ) -> Fetched | StepOutOfMemory | None:
        """Encode tiles, make drafts and compute the batch, or drop all of it if the device has no memory for it.

        Later pipeline stages have no rows of tiles. Tensor-parallel ranks drop no steps: the other ranks would wait
        within the step for this rank.
        """
        try:
            if encode_timer is not None and self.encoder_rows is not None:
                with encode_timer:
                    self.encoder_rows.encode(plan.encodes)
            if not plan.total_num_scheduled_tokens:
                return None
            if self.drafter is not None:
                with draft_timer:
                    plan = self._with_drafts(self.drafter, plan, masks)
            batch = self.buffers.retried(self.builder.build, plan if plan.num_rounds == 1 else plan.round(0))
            return self._forward(batch, masks)
        except torch.OutOfMemoryError as error:
            if not self.drops_steps:
                raise
            reason = str(error)
        free_cached_memory(self.buffers.device)
        return StepOutOfMemory(reason)

    def _forward(self, batch: InputBatch, masks: GetMasks) -> Fetched:
        output = self.executor.run(batch)
        hidden = output.hidden
        sampled = cut_finite = num_tokens = unmasked = None
        if output.logits is not None:
            sampled, num_tokens, unmasked = self._sample(batch, output.logits, output.sample_rows, masks)
        if self.drafter is not None:
            assert output.features is not None, "the executor keeps features for a drafter"
            self.drafter.absorb(batch, output.features, num_tokens)
        num_tokens = None if num_tokens is None else self.outputs.fetch(num_tokens)
        if hidden is None:
            return Fetched(batch, sampled, num_tokens=num_tokens, unmasked=unmasked)
        if output.cut_indices is not None:
            cut = hidden.index_select(0, output.cut_indices)
            cut_finite = self.outputs.fetch(cut.sum(dim=-1).isfinite())
        prompts = [
            self._prompt_logprobs(hidden, span, int(batch.layout.rows[span.batch_idx]))
            for span in batch.prompt_spans
        ]
        pooled = self._pool(hidden, batch.pooled) if batch.pooled else ()
        return Fetched(batch, sampled, cut_finite, prompts, num_tokens, unmasked, pooled)

    def _pool(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> list[PooledRows]:
        fetch = self.outputs.fetch
        return [rows._replace(values=fetch(rows.values)) for rows in self.pooler.pool(hidden, chunks)]

    def _sample(
        self, batch: InputBatch, logits: Tensor, sample_rows: Tensor, masks: GetMasks
    ) -> tuple[Sampled, Tensor | None, UnmaskedTokens | None]:
        """Sample from logits, [R, V], store the last tokens for the next step, and fetch the results.

        With drafts there is also a row for each draft, and the number of valid tokens of each request is returned too,
        on the device.
        The third result is for a device that has not computed the tokens yet: see `Fetched`.
        """
        fetch = self.outputs.fetch
        unmasked = None
        if masks is no_masks:
            sampled = self.sampler.sample(logits, batch.sampling)
        elif logits.device.type == "cpu":
            early = masks.before()
            if early is not None:
                masks.unmasked(logits[torch.from_numpy(early.indices)].argmax(-1).numpy())
            sampled = self.sampler.sample(logits, batch.sampling.with_masks(early), masks.after)
        else:
            early = masks()
            if early is not None:
                unmasked = UnmaskedTokens(fetch(logits.argmax(-1)), early.indices, masks)
            sampled = self.sampler.sample(logits, batch.sampling.with_masks(early))
        last_ids, num_tokens = sampled.token_ids, None
        if batch.drafts is not None:
            checked = batch.drafts.check(sampled.token_ids)
            last_ids, num_tokens = checked.last_ids, checked.num_tokens
        self.relay.store(sample_rows, last_ids)
        token_ids, finite = self.outputs.fetch_pair(sampled.token_ids, sampled.finite)
        fetched = Sampled(
            token_ids=token_ids,
            finite=finite,
            logprobs=sampled.logprobs.through(fetch) if sampled.logprobs is not None else None,
            chosen=fetch(sampled.chosen) if sampled.chosen is not None else None,
        )
        return fetched, num_tokens, unmasked

    def _prompt_logprobs(self, hidden: Tensor, span: PromptSpan, row: int) -> PromptLogprobs:
        parts, ranks, finite, chosen = [], [], [], []
        slot = self.states.adapter_slot[row]
        chosen_ids = self.buffers.put(np.array([span.chosen], dtype=np.int64)) if span.chosen else None
        for done in range(0, len(span.targets), _PROMPT_LOGPROB_ROWS):
            targets = span.targets[done : done + _PROMPT_LOGPROB_ROWS]
            start = span.start + done
            adapters = runs_or_none(np.full(len(targets), slot), self.buffers.put)
            logits = logits_of(self.model, hidden[start : start + len(targets)], adapters)
            finite.append(logits.sum(dtype=torch.float32).isfinite())
            parts.append(self.sampler.token_logprobs(logits, targets, span.top_k))
            ranks.append(ranks_of(logits, targets))
            if chosen_ids is not None:
                chosen.append(chosen_logprobs(logits, chosen_ids))
        fetch = self.outputs.fetch
        return PromptLogprobs(
            span,
            concatenate(parts).through(fetch),
            fetch(torch.cat(ranks)),
            fetch(torch.stack(finite).all()),
            fetch(torch.cat(chosen)) if chosen else None,
        )


@dataclass(slots=True, eq=False)
class PendingStep:
    """A launched step; `wait` may be called once. `timer` covers all queued work, including the copies to the host."""

    step_id: int
    timer: DeviceTimer
    swap_timer: DeviceTimer | None
    draft_timer: DeviceTimer
    fetched: Fetched | StepOutOfMemory | None
    encode_timer: DeviceTimer | None = None
    failures: dict[int, str] = field(default_factory=dict)

    def wait(self) -> StepResult:
        """Wait for the device and make the result from the fetched tensors."""
        forward_s = self.timer.wait_for_seconds()
        swap_s = self.swap_timer.wait_for_seconds() if self.swap_timer is not None else 0.0
        draft_s = self.draft_timer.wait_for_seconds()
        encode_s = self.encode_timer.wait_for_seconds() if self.encode_timer is not None else 0.0
        if self.fetched is None or isinstance(self.fetched, StepOutOfMemory):
            reason = self.fetched.reason if self.fetched is not None else ""
            return StepResult(
                self.step_id, forward_s=forward_s, swap_s=swap_s, out_of_memory=reason, encode_s=encode_s
            )
        batch, sampled, cut_finite, prompts, num_tokens, unmasked, pooled = self.fetched
        if unmasked is not None:
            unmasked.pass_on()
        errors: dict[int, str] = {}
        next_ids = counts = finite = None
        if sampled is not None:
            next_ids, finite = sampled.token_ids.numpy().astype(np.int32), sampled.finite.numpy()
            if batch.drafts is not None and num_tokens is not None:
                counts = num_tokens.numpy()
                next_ids, finite = batch.drafts.runs(next_ids, counts), batch.drafts.all_true(finite, counts)
            if np.count_nonzero(finite) < len(finite):
                errors = dict.fromkeys(batch.sampled_idx[~finite].tolist(), NOT_FINITE)
        if cut_finite is not None:
            errors |= dict.fromkeys(batch.cut_idx[~cut_finite.numpy()].tolist(), NOT_FINITE)
        prompt_logprobs = {}
        for prompt in prompts:
            if bool(prompt.finite):
                packed = prompt.logprobs.pack(0, len(prompt.span.targets), prompt.span.top_k)
                prompt_logprobs[prompt.span.batch_idx] = structs.replace(
                    packed,
                    ranks=prompt.ranks.numpy().tobytes(),
                    chosen_ids=np.array(prompt.span.chosen, dtype=np.int32).tobytes(),
                    chosen=b"" if prompt.chosen is None else prompt.chosen.numpy().tobytes(),
                )
            else:
                errors[prompt.span.batch_idx] = NOT_FINITE
        vectors = {}
        for batch_idx, vector in chain.from_iterable(rows.results() for rows in pooled):
            if vector is None:
                errors[batch_idx] = NOT_FINITE
            elif batch_idx not in errors:
                vectors[batch_idx] = vector
        return StepResult(
            step_id=self.step_id,
            next_token_ids=b"" if next_ids is None else next_ids.tobytes(),
            logprobs=_pack_logprobs(batch, sampled, counts),
            prompt_logprobs=prompt_logprobs,
            errors=errors | self.failures,
            forward_s=forward_s,
            swap_s=swap_s,
            num_next_tokens=b"" if counts is None else counts.astype(np.int32).tobytes(),
            vectors=vectors,
            draft_s=draft_s,
            encode_s=encode_s,
        )


@dataclass(slots=True, eq=False)
class PendingMultiStep:
    """A computed multi-step decode; `wait` may be called once. `further`: the tokens of at least one more round."""

    first: PendingStep
    further: Sequence[Sampled]

    def wait(self) -> StepResult:
        """The result of the first round, with the tokens of all rounds."""
        first = self.first.wait()
        rounds = [np.frombuffer(first.next_token_ids, dtype=np.int32)]
        rounds += [each.token_ids.numpy().astype(np.int32) for each in self.further]
        # A multi-step decode ends at the first round with a value that is not finite.
        finite = self.further[-1].finite.numpy()
        return structs.replace(
            first,
            next_token_ids=np.stack(rounds, axis=1).tobytes(),
            errors=dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE),
            num_next_tokens=np.full(len(finite), len(rounds), dtype=np.int32).tobytes(),
        )


def _pairs(data: bytes) -> npt.NDArray[np.int64]:
    """[n, 2] int32 as bytes -> [2, n] contiguous: one array per column."""
    return np.frombuffer(data, dtype=np.int32).reshape(-1, 2).T.astype(np.int64, order="C")


def _pack_logprobs(
    batch: InputBatch, sampled: Sampled | None, counts: npt.NDArray[np.int64] | None
) -> tuple[Logprobs | None, ...]:
    """One entry per sampled request; empty if no request asks for logprobs.

    `counts`: [S] tokens of each request, which are the first of its rows; None without drafts: one each.
    """
    sampling = batch.sampling
    if sampling.logprobs is None or sampled is None or sampled.logprobs is None:
        return ()
    firsts, num_tokens = range(sampling.num_rows), [1] * sampling.num_rows
    if batch.drafts is not None and counts is not None:
        firsts, num_tokens = batch.drafts.firsts_np.tolist(), counts.tolist()
    places = {row: n for n, row in enumerate(sampling.logprobs.sampled_idx)}
    packed: list[Logprobs | None] = []
    for first, count in zip(firsts, num_tokens, strict=True):
        n = places.get(first)
        entry = None if n is None else sampled.logprobs.pack(n, n + count, sampling.logprobs.top_k[n])
        if entry is not None and n is not None and sampled.chosen is not None:
            ids = np.array(sampling.logprobs.chosen[n], dtype=np.int32)
            chosen = sampled.chosen[n : n + count, : len(ids)].numpy().tobytes()
            entry = structs.replace(entry, chosen_ids=ids.tobytes(), chosen=chosen)
        packed.append(entry)
    return tuple(packed)
