"""`ModelRunner`: executes `StepPlan`s, decides nothing. Called by the scheduler's process and by TP ranks.

    runner.launch(plan, go_on) -> Pending       host work and kernel launches; nothing in it waits for the device
    pending.wait()             -> StepResult    waits for this step, and for none that was launched behind it

The parts: `RequestStates` (requests, host), `SlotTable`, `BatchBuilder` (plan -> `InputBatch`), `StepExecutor`
    (batch ->
logits), `KVPool`, `HostKVPool` (swapped pages), `Sampler`, `TokenRelay` (last tokens, device). The runner puts them in
the order that the plan's contract promises.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
import torch
from msgspec import structs

from ..runtime.messages import Logprobs
from ..runtime.step_plan import StepPlan, StepResult, to_the_end
from .memory.device_timer import DeviceTimer
from .request_states import SamplingFlag
from .sampling.logprobs import TokenLogprobs, concatenate
from .sampling.sampler import Sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from ..runtime.feasibility import Capacity
    from ..runtime.step_plan import GoOn, Pending
    from .batch_builder import BatchBuilder
    from .input_batch import InputBatch, PromptSpan
    from .memory.host_kv_pool import HostPages
    from .memory.io_buffers import InputBuffers, OutputBuffers
    from .memory.kv_pool import KVPool
    from .memory.slot_table import SlotTable
    from .models.registry import CausalLM
    from .recording.executor import StepExecutor
    from .request_states import RequestStates
    from .sampling.shared_sampler import SamplerLike
    from .sampling.token_counts import TokenCounts
    from .token_relay import TokenRelay

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_FINITE: Final = (
    "the model's output is not finite (NaN or infinity); its weights may be damaged, or try --dtype float32"
)
_PROMPT_LOGPROB_ROWS: Final = 256
"""Prompt positions whose logits exist at the same time: 50 MB for a vocabulary of 49k."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of one request's prompt tokens of one chunk, and whether all their logits were numbers."""

    span: PromptSpan
    logprobs: TokenLogprobs
    finite: Tensor


class Fetched(NamedTuple):
    """What a step's batch gave, in host tensors that are filled once the device is done with the step.

    Attributes:
        batch: whose results they are.
        sampled: None if nobody samples.
        num_tokens: see `Checked`; None in a step without drafts.
        cut_finite: [number of `InputBatch.cut_idx`] bool; where False the chunk's KV is not made of numbers.
        prompts: see `PromptLogprobs`.
    """

    batch: InputBatch
    sampled: Sampled | None
    cut_finite: Tensor | None = None
    prompts: Sequence[PromptLogprobs] = ()
    num_tokens: Tensor | None = None


class StepOutOfMemory(NamedTuple):
    """A step's batch was not computed: the allocator's reason."""

    reason: str


class RunnerSizes(NamedTuple):
    """What a runner takes of the device beside weights and KV pool, as far as it knows.

    Attributes:
        recorded_bytes: see `StepExecutor`.
        gathered_token_bytes: see `AttentionBackend`.
    """

    recorded_bytes: Sequence[int]
    gathered_token_bytes: int


class ModelRunner:
    """Rank 0's runner, or the only one.

    Attributes:
        capacity: what all parts have room for.
        sizes: what some of them take.
        executor: runs the steps.
        builder, sampler: make what it is given, and choose tokens by what it gives.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        executor: StepExecutor,
        kv_pool: KVPool,
        host_kv_pool: HostPages,
        slot_table: SlotTable,
        states: RequestStates,
        counts: TokenCounts,
        relay: TokenRelay,
        builder: BatchBuilder,
        sampler: SamplerLike,
        buffers: InputBuffers,
        outputs: OutputBuffers,
        capacity: Capacity,
        sizes: RunnerSizes,
        drops_steps: bool = True,
    ) -> None:
        """Take the parts.

        Args:
            model: what `executor` runs; here only for logits of prompts.
            capacity: what all of them have room for.
            sizes: what some of them take.
            drops_steps: a step for which the device has no memory is dropped; else that ends the runner.
        """
        self.capacity = capacity
        self.sizes = sizes
        self.model = model
        self.executor = executor
        self.kv_pool = kv_pool
        self.host_kv_pool = host_kv_pool
        self.slot_table = slot_table
        self._states = states
        self._counts = counts
        self._relay = relay
        self.builder = builder
        self.sampler = sampler
        self._buffers = buffers
        self._outputs = outputs
        self._drops_steps = drops_steps

    @torch.inference_mode()
    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end) -> Pending:
        """Start a step; see `runtime.step_plan` for the order in which the plan's fields apply."""
        fetched: Fetched | StepOutOfMemory | None = None
        further: list[Sampled] = []
        timer = DeviceTimer(self._buffers.device)
        with timer:
            swap_timer = self._move_pages(plan)
            self._update_rows(plan)
            if plan.total_num_scheduled_tokens:
                self._retry_after_oom(partial(self.slot_table.update, plan))
                fetched = self._try_forward(plan if plan.num_rounds == 1 else plan.round(0))
            if plan.num_rounds > 1 and isinstance(fetched, Fetched):
                further = self._further_rounds(plan, fetched, go_on)
        pending = PendingStep(plan.step_id, timer, swap_timer, fetched)
        return PendingMultiStep(pending, further) if further else pending

    def _further_rounds(self, plan: StepPlan, first: Fetched, go_on: GoOn) -> list[Sampled]:
        """What a multi-step decode samples behind its first round; it ends, too, where numbers are not finite."""
        assert self._buffers.device.type == "cpu", (
            "tokens are known here only where a launch is the whole step"
        )
        rounds: list[Sampled] = []
        last = first
        for number in range(1, plan.num_rounds):
            assert last.sampled is not None, "a multi-step decode is made of decodes"
            token_ids, finite, _ = last.sampled
            if not finite.numpy().all() or not go_on(token_ids.numpy().astype(np.int32).tobytes()):
                break
            last = self._forward(self.builder.next_round(last.batch, plan, number))
            assert last.sampled is not None
            rounds.append(last.sampled)
        return rounds

    def _update_rows(self, plan: StepPlan) -> None:
        """Forget the requests that left, and take in the new ones."""
        for row in np.frombuffer(plan.finished_rows, dtype=np.int32).tolist():
            self._states.remove(row)
            self._counts.remove(row)
        for new in plan.new_reqs:
            state = self._states.add(new)
            if self._states.flags[new.row] & SamplingFlag.PENALTIES:
                prompt_ids, output_ids = np.split(state.input_ids, [new.prompt_len])
                self._retry_after_oom(partial(self._counts.add, new.row, prompt_ids, output_ids))

    def _move_pages(self, plan: StepPlan) -> DeviceTimer | None:
        """Swap and copy whole pages as the plan says; returns what measures the swaps, if there are any."""
        timer = DeviceTimer(self._buffers.device) if plan.swap_outs or plan.swap_ins else None
        if timer is not None and plan.swap_outs:
            with timer:
                self._retry_after_oom(partial(self.host_kv_pool.copy_out, *_pairs(plan.swap_outs)))
        if plan.page_copies:
            self._retry_after_oom(partial(self._copy_pages, *_pairs(plan.page_copies)))
        if timer is not None and plan.swap_ins:
            with timer:
                self._retry_after_oom(partial(self.host_kv_pool.copy_in, *_pairs(plan.swap_ins)))
        return timer

    def _copy_pages(self, sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64]) -> None:
        self.kv_pool.copy_pages(self._buffers.put(sources), self._buffers.put(destinations))

    def _retry_after_oom(self, call: Callable[[], T]) -> T:
        """Do what later steps rest on; where the device has no memory, give back what is cached and do it once more.

        Args:
            call: may be made twice.
        """
        try:
            return call()
        except torch.OutOfMemoryError as error:
            logger.warning("tried once more, with the allocator's cached memory given back: %s", error)
        # Not before the error is gone: its traceback holds the tensors of the call.
        self._give_back()
        return call()

    def _give_back(self) -> None:
        if self._buffers.device.type == "cuda":
            torch.cuda.empty_cache()

    def _try_forward(self, plan: StepPlan) -> Fetched | StepOutOfMemory:
        """Compute the batch, or drop it where the device has no memory for it.

        Ranks that share a model drop nothing: the others would wait in the middle of a step for what never comes.
        """
        try:
            return self._forward(self.builder.build(plan))
        except torch.OutOfMemoryError as error:
            if not self._drops_steps:
                raise
            reason = str(error)
        self._give_back()
        return StepOutOfMemory(reason)

    def _forward(self, batch: InputBatch) -> Fetched:
        output = self.executor.run(batch)
        hidden = output.hidden
        sampled = cut_finite = num_tokens = None
        if output.logits is not None:
            sampled, num_tokens = self._sample(batch, output.logits, output.sample_rows)
        if hidden is None:
            return Fetched(batch, sampled, num_tokens=num_tokens)
        if output.cut_indices is not None:
            cut = hidden.index_select(0, output.cut_indices)
            cut_finite = self._outputs.fetch(cut.sum(dim=-1).isfinite())
        prompts = [self._prompt_logprobs(hidden, span) for span in batch.prompt_spans]
        return Fetched(batch, sampled, cut_finite, prompts, num_tokens)

    def _sample(
        self, batch: InputBatch, logits: Tensor, sample_rows: Tensor
    ) -> tuple[Sampled, Tensor | None]:
        """Choose tokens by [R, V] float32, keep the last ones for the next step, and fetch them.

        With drafts there is a row for each draft, too; then also how many tokens of each request count.
        """
        sampled, fetch = self.sampler.sample(logits, batch.sampling), self._outputs.fetch
        last_ids, num_tokens = sampled.token_ids, None
        if batch.drafts is not None:
            checked = batch.drafts.check(sampled.token_ids)
            last_ids, num_tokens = checked.last_ids, fetch(checked.num_tokens)
        self._relay.store(sample_rows, last_ids)
        fetched = Sampled(
            token_ids=fetch(sampled.token_ids),
            finite=fetch(sampled.finite),
            logprobs=sampled.logprobs.through(fetch) if sampled.logprobs is not None else None,
        )
        return fetched, num_tokens

    def _prompt_logprobs(self, hidden: Tensor, span: PromptSpan) -> PromptLogprobs:
        parts, finite = [], []
        for done in range(0, len(span.targets), _PROMPT_LOGPROB_ROWS):
            targets = span.targets[done : done + _PROMPT_LOGPROB_ROWS]
            start = span.start + done
            logits = self.model.logits(hidden[start : start + len(targets)])
            finite.append(logits.sum().isfinite())
            parts.append(self.sampler.token_logprobs(logits, targets, span.top_k))
        fetch = self._outputs.fetch
        return PromptLogprobs(span, concatenate(parts).through(fetch), fetch(torch.stack(finite).all()))


class PendingStep:
    """A step under way; `wait` may be called once."""

    def __init__(
        self,
        step_id: int,
        timer: DeviceTimer,
        swap_timer: DeviceTimer | None,
        fetched: Fetched | StepOutOfMemory | None,
    ) -> None:
        """Take what `launch` has queued; `timer` holds all of it, the copies to the host included."""
        self._step_id = step_id
        self._timer = timer
        self._swap_timer = swap_timer
        self._fetched = fetched

    def wait(self) -> StepResult:
        """Wait for the device, and make the result of what has come to the host."""
        forward_s = self._timer.wait_for_seconds()
        swap_s = self._swap_timer.wait_for_seconds() if self._swap_timer is not None else 0.0
        if self._fetched is None or isinstance(self._fetched, StepOutOfMemory):
            reason = self._fetched.reason if self._fetched is not None else ""
            return StepResult(self._step_id, forward_s=forward_s, swap_s=swap_s, out_of_memory=reason)
        batch, sampled, cut_finite, prompts, num_tokens = self._fetched
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
                prompt_logprobs[prompt.span.batch_idx] = packed
            else:
                errors[prompt.span.batch_idx] = NOT_FINITE
        return StepResult(
            step_id=self._step_id,
            next_token_ids=b"" if next_ids is None else next_ids.tobytes(),
            logprobs=_pack_logprobs(batch, sampled),
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            forward_s=forward_s,
            swap_s=swap_s,
            num_next_tokens=b"" if counts is None else counts.astype(np.int32).tobytes(),
        )


class PendingMultiStep:
    """A multi-step decode that has been made; `wait` may be called once."""

    def __init__(self, first: PendingStep, further: Sequence[Sampled]) -> None:
        """`further`: what was sampled after the first round, at least once."""
        self._first = first
        self._further = further

    def wait(self) -> StepResult:
        """The result of the first round, with the tokens of the others."""
        first = self._first.wait()
        rounds = [np.frombuffer(first.next_token_ids, dtype=np.int32)]
        rounds += [each.token_ids.numpy().astype(np.int32) for each in self._further]
        finite = self._further[-1].finite.numpy()  # those before it were, or it had not come to this one
        return structs.replace(
            first,
            next_token_ids=np.stack(rounds, axis=1).tobytes(),
            errors=dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE),
            num_next_tokens=np.full(len(finite), len(rounds), dtype=np.int32).tobytes(),
        )


def _pairs(data: bytes) -> npt.NDArray[np.int64]:
    """[n, 2] int32 as bytes -> [2, n] contiguous: one array per column."""
    return np.frombuffer(data, dtype=np.int32).reshape(-1, 2).T.astype(np.int64, order="C")


def _pack_logprobs(batch: InputBatch, sampled: Sampled | None) -> tuple[Logprobs | None, ...]:
    """One entry per sampled request, or nothing if none of them asked; who asks has no drafts."""
    sampling = batch.sampling
    if sampling.logprobs is None or sampled is None or sampled.logprobs is None:
        return ()
    packed: list[Logprobs | None] = [None] * sampling.num_rows
    for n, (idx, top_k) in enumerate(
        zip(sampling.logprobs.sampled_idx, sampling.logprobs.top_k, strict=True)
    ):
        packed[idx] = sampled.logprobs.pack(n, n + 1, top_k)
    return tuple(packed if batch.drafts is None else (packed[row] for row in batch.drafts.firsts_np))
