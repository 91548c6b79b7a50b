"""`ModelRunner`: executes `StepPlan`s, decides nothing. Called by the scheduler's process and by TP ranks.

    runner.launch(plan)  -> PendingStep    host work and kernel launches; nothing in it waits for the device
    pending.wait()       -> StepResult     waits for this step, and for none that was launched behind it

The parts: `RowStates` (requests, host), `BatchBuilder` (plan -> `ForwardBatch`), the model, `KVPool`, `HostKVPool`
(swapped pages), `Sampler`, `TokenRelay` (last tokens, device). The runner puts them in the order that the plan's
contract promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from ..runtime.messages import Logprobs
from ..runtime.step_plan import StepPlan, StepResult
from .device_timer import DeviceTimer
from .logprobs import TokenLogprobs, concatenate, token_logprobs
from .row_states import SamplingFlag

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from .batch_builder import BatchBuilder
    from .forward_batch import ForwardBatch, PromptSpan
    from .host_kv_pool import HostPages
    from .input_buffers import InputBuffers
    from .kv_pool import KVPool
    from .models.registry import CausalLM
    from .output_buffers import OutputBuffers
    from .row_states import RowStates
    from .sampler import Sampler
    from .token_counts import TokenCounts
    from .token_relay import TokenRelay

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
        token_ids: [S] int32; this and the next two are None if nobody samples.
        finite: [S] bool, see `Sampled`.
        logprobs: see `Sampled`.
        cut_finite: [number of `ForwardBatch.cut_idx_np`] bool; where False the chunk's KV is not made of numbers.
        prompts: see `PromptLogprobs`.
    """

    batch: ForwardBatch
    token_ids: Tensor | None
    finite: Tensor | None
    logprobs: TokenLogprobs | None
    cut_finite: Tensor | None
    prompts: list[PromptLogprobs]


class ModelRunner:
    """Rank 0's runner, or the only one."""

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_pool: KVPool,
        host_kv_pool: HostPages,
        states: RowStates,
        counts: TokenCounts,
        relay: TokenRelay,
        builder: BatchBuilder,
        sampler: Sampler,
        buffers: InputBuffers,
        outputs: OutputBuffers,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.host_kv_pool = host_kv_pool
        self._states = states
        self._counts = counts
        self._relay = relay
        self._builder = builder
        self._sampler = sampler
        self._buffers = buffers
        self._outputs = outputs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step; see `runtime.step_plan` for the order in which the plan's fields apply."""
        fetched = None
        timer = DeviceTimer(self._buffers.device)
        with timer:
            swap_timer = self._move_pages(plan)
            self._update_rows(plan)
            if plan.total_num_scheduled_tokens:
                fetched = self._forward(self._builder.build(plan))
        return PendingStep(plan.step_id, timer, swap_timer, fetched)

    def _update_rows(self, plan: StepPlan) -> None:
        """Forget the requests that left, and take in the new ones."""
        for row in np.frombuffer(plan.finished_rows, dtype=np.int32).tolist():
            self._states.remove(row)
            self._counts.remove(row)
        for new in plan.new_reqs:
            state = self._states.add(new)
            if self._states.flags[new.row] & SamplingFlag.PENALTIES:
                self._counts.add(
                    new.row, state.input_ids[: new.prompt_len], state.input_ids[new.prompt_len :]
                )

    def _move_pages(self, plan: StepPlan) -> DeviceTimer | None:
        """Swap and copy whole pages as the plan says; returns what measures the swaps, if there are any."""
        timer = DeviceTimer(self._buffers.device) if plan.swap_outs or plan.swap_ins else None
        if timer is not None and plan.swap_outs:
            with timer:
                self.host_kv_pool.copy_out(*_pairs(plan.swap_outs))
        if plan.page_copies:
            sources, destinations = _pairs(plan.page_copies)
            self.kv_pool.copy_pages(self._buffers.put(sources), self._buffers.put(destinations))
        if timer is not None and plan.swap_ins:
            with timer:
                self.host_kv_pool.copy_in(*_pairs(plan.swap_ins))
        return timer

    def _forward(self, batch: ForwardBatch) -> Fetched:
        hidden = self.model.forward(batch)
        fetch = self._outputs.fetch
        token_ids = finite = logprobs = cut_finite = None
        if batch.sampling.num_rows:
            last = hidden if batch.sample_indices is None else hidden.index_select(0, batch.sample_indices)
            sampled = self._sampler.sample(self.model.logits(last), batch.sampling)
            self._relay.store(batch.sample_rows, sampled.token_ids)
            token_ids, finite = fetch(sampled.token_ids.to(torch.int32)), fetch(sampled.finite)
            logprobs = sampled.logprobs.through(fetch) if sampled.logprobs is not None else None
        if batch.cut_indices is not None:
            cut_finite = fetch(hidden.index_select(0, batch.cut_indices).sum(dim=-1).isfinite())
        prompts = [self._prompt_logprobs(hidden, span) for span in batch.prompt_spans]
        return Fetched(batch, token_ids, finite, logprobs, cut_finite, prompts)

    def _prompt_logprobs(self, hidden: Tensor, span: PromptSpan) -> PromptLogprobs:
        parts, finite = [], []
        for done in range(0, len(span.targets), _PROMPT_LOGPROB_ROWS):
            targets = span.targets[done : done + _PROMPT_LOGPROB_ROWS]
            start = span.start + done
            logits = self.model.logits(hidden[start : start + len(targets)])
            finite.append(logits.sum().isfinite())
            parts.append(token_logprobs(logits, targets, span.top_k))
        fetch = self._outputs.fetch
        return PromptLogprobs(span, concatenate(parts).through(fetch), fetch(torch.stack(finite).all()))


class PendingStep:
    """A step under way; `wait` may be called once."""

    def __init__(
        self, step_id: int, timer: DeviceTimer, swap_timer: DeviceTimer | None, fetched: Fetched | None
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
        if self._fetched is None:
            return StepResult(self._step_id, forward_s=forward_s, swap_s=swap_s)
        batch, token_ids, finite, _, cut_finite, prompts = self._fetched
        errors: dict[int, str] = {}
        if finite is not None:
            errors |= dict.fromkeys(batch.sampled_idx_np[~finite.numpy()].tolist(), NOT_FINITE)
        if cut_finite is not None:
            errors |= dict.fromkeys(batch.cut_idx_np[~cut_finite.numpy()].tolist(), NOT_FINITE)
        prompt_logprobs = {}
        for prompt in prompts:
            if bool(prompt.finite):
                packed = prompt.logprobs.pack(0, len(prompt.span.targets), prompt.span.top_k)
                prompt_logprobs[prompt.span.batch_idx] = packed
            else:
                errors[prompt.span.batch_idx] = NOT_FINITE
        return StepResult(
            step_id=self._step_id,
            next_token_ids=b"" if token_ids is None else token_ids.numpy().tobytes(),
            logprobs=_pack_logprobs(self._fetched),
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            forward_s=forward_s,
            swap_s=swap_s,
        )


def _pairs(data: bytes) -> npt.NDArray[np.int64]:
    """[n, 2] int32 as bytes -> [2, n] contiguous: one array per column."""
    return np.frombuffer(data, dtype=np.int32).reshape(-1, 2).T.astype(np.int64, order="C")


def _pack_logprobs(fetched: Fetched) -> tuple[Logprobs | None, ...]:
    """One entry per sampled request, or nothing if none of them asked."""
    sampling, logprobs = fetched.batch.sampling, fetched.logprobs
    if sampling.logprobs is None or logprobs is None:
        return ()
    packed: list[Logprobs | None] = [None] * sampling.num_rows
    for n, (idx, top_k) in enumerate(
        zip(sampling.logprobs.sampled_idx, sampling.logprobs.top_k, strict=True)
    ):
        packed[idx] = logprobs.pack(n, n + 1, top_k)
    return tuple(packed)
