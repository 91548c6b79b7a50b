"""`ResultSettler`: applies the result of a step to the requests of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..runtime.messages import Finish, FinishKind, TokenOutput, Usage
from ..runtime.step_plan import ForwardMode, StepResult
from ..runtime.transport.message_base import Logprobs
from .arrays import TOKEN_ID_BYTES, BoolArray, IntArray
from .batch import ScheduleBatch
from .estimator import OutputEstimator
from .grammar.grammar_rules import advance
from .memory.kv_memory import RowMemory
from .policy.by_class import ByClass
from .preemption.out_of_memory import OutOfMemory
from .preemption.preemption import PreemptionMode
from .records.decision_log import RefusedToken
from .records.stats import SchedulerStats
from .requests.outputs import StopRules, output_row, progress_row
from .requests.req import Req
from .requests.requests import Requests
from .speculation.multi_step import MultiStepDecode
from .speculation.speculation import Speculation
from .step_size.background_share import BackgroundShare
from .step_size.step_limits import StepCaps
from .step_size.step_target import StepTarget


class ResultSettler:
    """Appends tokens, finishes requests, fills the prefix cache, makes the rows for the detokenizer."""

    def __init__(
        self,
        requests: Requests,
        *,
        memory: RowMemory,
        stop_rules: StopRules,
        caps: StepCaps,
        out_of_memory: OutOfMemory,
        estimator: OutputEstimator,
        mode: PreemptionMode,
        policy: ByClass,
        target: StepTarget,
        share: BackgroundShare,
        speculation: Speculation,
        multi_step: MultiStepDecode,
        stats: SchedulerStats,
        streams: bool = True,
    ) -> None:
        """`streams`: whether each token is sent when it is settled; else only a request's first and last row are."""
        self._requests = requests
        self._states, self._pool, self._kv = memory.states, memory.pool, memory.kv
        self._stop_rules = stop_rules
        self._caps = caps
        self._out_of_memory = out_of_memory
        self._estimator = estimator
        self._mode = mode
        self._policy = policy
        self._target = target
        self._share = share
        self._speculation = speculation
        self._multi_step = multi_step
        self._stats = stats
        self._streams = streams
        self._last_settle_s = 0.0

    def settle(
        self,
        batch: ScheduleBatch,
        result: StepResult,
        now_s: float,
        refused: Sequence[RefusedToken] = (),
    ) -> list[TokenOutput]:
        """Take a result; return one row for each request with new output. `refused`: see `Settled`.

        Later steps may already be planned, and requests of this batch may have left their rows since. The epoch of the
        row identifies such requests; their part of the result is dropped.
        """
        assert result.step_id == batch.plan.step_id, (result.step_id, batch.plan.step_id)
        num_live = len(self._requests)
        here = batch.still_here(self._pool)
        if result.out_of_memory:
            return self._settle_out_of_memory(batch, result, here, now_s)
        if len(batch):  # an IDLE step needs no memory, so its success shows nothing
            self._caps.succeeded()
        self._learn_costs(batch, result, now_s - self._last_settle_s)
        self._last_settle_s = now_s
        self._states.num_settled[batch.rows[here]] = batch.end[here]
        rows = self._settle_errors(batch, result, here, now_s)
        rows += self._settle_prompts(batch, result, here)
        if result.vectors:
            rows += self._settle_vectors(batch, result, here, now_s)
        by_request = _by_request(refused)
        if result.num_next_tokens:
            rows += self._settle_runs(batch, result, here, now_s, by_request)
        else:
            rows += self._settle_tokens(batch, result, here, now_s, by_request)
        self._kv.settle_states(batch.reqs)
        if len(self._requests) < num_live:
            self._requests.remove_stopped()
        self._stats.step_s += result.forward_s
        return rows

    def _settle_out_of_memory(
        self, batch: ScheduleBatch, result: StepResult, here: BoolArray, now_s: float
    ) -> list[TokenOutput]:
        rows = self._out_of_memory.settle(batch, result, here, now_s)
        self._requests.remove_stopped()
        self._stats.step_s += result.forward_s
        return rows

    def _learn_costs(self, batch: ScheduleBatch, result: StepResult, interval_s: float) -> None:
        """Record measured times: steps for the step time target, prefill and swapping for the preemption mode.

        `interval_s`: since the last settle.
        """
        num_rounds = batch.rounds_made(result.num_next_tokens)
        compute_s = result.forward_s - result.swap_s - result.encode_s
        self._stats.num_steps += num_rounds - 1
        self._stats.encode_s += result.encode_s
        self._share.measured(batch, compute_s / num_rounds)
        self._target.measured(batch, compute_s / num_rounds, result.encode_s)
        num_pages = (len(batch.plan.swap_outs) + len(batch.plan.swap_ins)) // (2 * TOKEN_ID_BYTES)
        if num_pages:
            self._mode.measured_swap(num_pages, result.swap_s)
        if (
            batch.plan.mode is ForwardMode.EXTEND
        ):  # also beside copies: a full pool evicts in nearly every step
            self._mode.measured_prefill(batch.plan.total_num_scheduled_tokens, compute_s)
        elif batch.plan.mode is ForwardMode.DECODE and not num_pages:
            self._speculation.measured(
                len(batch),
                batch.num_drafts,
                (compute_s - result.draft_s) / num_rounds,
                between_s=max(0.0, interval_s - result.forward_s),
                num_rounds=num_rounds,
            )
            if not batch.num_drafts:
                self._multi_step.measured(len(batch), num_rounds, compute_s)

    def _settle_errors(
        self, batch: ScheduleBatch, result: StepResult, here: BoolArray, now_s: float
    ) -> list[TokenOutput]:
        """End the requests that failed on their own. Their KV may be bad, so it is not kept.

        The tokens of inner steps before the last one of a multi-step decode are part of their output.
        """
        rows = []
        num_rounds = batch.rounds_made(result.num_next_tokens)
        for idx, message in result.errors.items():
            if here[idx]:
                here[idx] = False
                req, finish = batch.reqs[idx], Finish(FinishKind.ERROR, message=message)
                first = idx * num_rounds * TOKEN_ID_BYTES  # all requests of a multi-step decode sample
                id_bytes = result.next_token_ids[first : first + (num_rounds - 1) * TOKEN_ID_BYTES]
                req.output_len += num_rounds - 1
                self._stats.generation_tokens += num_rounds - 1
                rows.append(self._requests.finish(req, finish, now_s, id_bytes, keep=False))
        return rows

    def _settle_prompts(self, batch: ScheduleBatch, result: StepResult, here: BoolArray) -> list[TokenOutput]:
        """Offer the computed prompt pages to the prefix cache at once, so that the next request can share them.

        Returns:
            rows of progress, for requests that report it and have no token yet.
        """
        rows = []
        for idx in range(batch.num_extends):
            if here[idx]:
                req = batch.reqs[idx]
                if idx in result.prompt_logprobs and not req.answered:
                    req.prompt_logprobs.append(result.prompt_logprobs[idx])
                self._kv.cache_settled(req)
                if req.reports_progress and not req.output_len and batch.end[idx] < req.prompt_len:
                    rows.append(progress_row(req, int(batch.end[idx])))
        return rows

    def _settle_vectors(
        self, batch: ScheduleBatch, result: StepResult, here: BoolArray, now_s: float
    ) -> list[TokenOutput]:
        """End the pooling requests whose prompt is computed, each with its vector."""
        finish = Finish(FinishKind.STOP)
        rows = []
        for idx, vector in result.vectors.items():
            if here[idx]:
                here[idx] = False
                rows.append(self._requests.finish(batch.reqs[idx], finish, now_s, vector=vector))
        return rows

    def _settle_tokens(
        self,
        batch: ScheduleBatch,
        result: StepResult,
        here: BoolArray,
        now_s: float,
        refused: dict[int, list[RefusedToken]],
    ) -> list[TokenOutput]:
        """Append the sampled tokens; return a row for each request that sampled."""
        positions = batch_indices = batch.sampled  # `positions`: in `next_token_ids`
        token_ids, pool_rows = np.frombuffer(result.next_token_ids, dtype=np.int32), batch.rows
        if np.count_nonzero(here[batch.sampled]) < len(batch):  # else all sampled and have their row
            positions = np.flatnonzero(here[batch.sampled]).astype(np.int32)
            batch_indices, token_ids = batch.sampled[positions], token_ids[positions]
            pool_rows = batch.rows[batch_indices]
        lengths = self._states.append(pool_rows, token_ids)
        may_finish = self._stop_rules.may_finish(self._states, pool_rows, token_ids, lengths)
        if batch.num_extends:
            may_finish |= batch_indices < batch.num_extends  # the first row of a request carries more fields
        self._stats.generation_tokens += len(positions)

        reqs = batch.reqs
        if len(positions) < len(reqs):
            reqs = [reqs[idx] for idx in batch_indices.tolist()]
        for req in reqs:
            req.output_len += 1
        watched = may_finish.nonzero()[0].tolist()
        watched_rows = []
        for k in watched:
            req, token_id = reqs[k], int(token_ids[k])
            logprobs = None
            if req.sampling.logprobs is not None and result.logprobs:
                logprobs = result.logprobs[positions[k]]
            if refused:
                self._count_overruled(req, token_ids[k : k + 1], refused.get(int(batch_indices[k]), ()))
            finish = self._finish(req, token_id)
            id_bytes = token_ids[k].tobytes()
            if finish is None:
                watched_rows.append(output_row(req, id_bytes, logprobs=logprobs))
            else:
                watched_rows.append(self._end(req, finish, now_s, id_bytes, logprobs))
        if not self._streams:
            return watched_rows
        rows = _plain_rows(reqs, token_ids.tobytes())
        for k, row in zip(watched, watched_rows, strict=True):
            rows[k] = row
        return rows

    def _settle_runs(
        self,
        batch: ScheduleBatch,
        result: StepResult,
        here: BoolArray,
        now_s: float,
        refused: dict[int, list[RefusedToken]],
    ) -> list[TokenOutput]:
        """Like `_settle_tokens`, for a step with drafts or inner steps, where a request may get a run of tokens."""
        counts = np.frombuffer(result.num_next_tokens, dtype=np.int32)
        assert len(counts) == len(batch.sampled), f"step {result.step_id}: {len(counts)} runs"
        token_ids = np.frombuffer(result.next_token_ids, dtype=np.int32)
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32)
        firsts = np.cumsum(num_drafts) - num_drafts
        if batch.num_drafts:
            self._stats.drafts.count(num_drafts, batch.draft_methods, counts - 1)
            self._speculation.checked(batch, result, counts - 1)
            self._stats.draft_tokens += batch.num_drafts
            self._stats.accepted_draft_tokens += len(token_ids) - len(counts)
        else:
            for _ in range(1, int(counts.max(initial=1))):
                self._estimator.after_decode()
        rows = []
        for idx, end in enumerate(np.cumsum(counts).tolist()):
            batch_idx = batch.sampled[idx]
            if not here[batch_idx]:
                continue
            req = batch.reqs[batch_idx]
            run, finish = self._cut(req, token_ids[end - counts[idx] : end])
            self._states.append_run(req.row, run)
            if refused:
                self._count_overruled(req, run, refused.get(int(batch_idx), ()))
            self._stats.generation_tokens += len(run)
            if batch.num_drafts:
                req.num_drafts += int(num_drafts[batch_idx])
                req.num_accepted_drafts += min(int(counts[idx]) - 1, len(run))  # a run may be cut within them
                first = int(firsts[batch_idx])
                req.draft_methods |= set(batch.draft_methods[first : first + int(num_drafts[batch_idx])])
            if len(run) > 1:
                self._policy.gained(req, len(run) - 1)
            logprobs = result.logprobs[idx] if result.logprobs else None
            if logprobs is not None and len(run) < counts[idx]:
                logprobs = logprobs.first(len(run))
            id_bytes = run.tobytes()
            if finish is not None:
                rows.append(self._end(req, finish, now_s, id_bytes, logprobs))
            elif self._streams or self._states.needs_host_check[req.row]:
                rows.append(output_row(req, id_bytes, logprobs=logprobs))
        return rows

    def _end(
        self, req: Req, finish: Finish, now_s: float, id_bytes: bytes, logprobs: Logprobs | None
    ) -> TokenOutput:
        """End a request with its newest tokens; returns its last row."""
        self._estimator.finished(req.output_len, req.max_new_tokens)
        self._speculation.answered(req)
        return self._requests.finish(req, finish, now_s, id_bytes, logprobs)

    def _cut(self, req: Req, run: IntArray) -> tuple[IntArray, Finish | None]:
        """Count the tokens of a run, up to and including the one that ends the request; drop the rest."""
        for num_tokens, token_id in enumerate(run.tolist(), start=1):
            req.output_len += 1
            finish = self._finish(req, token_id)
            if finish is not None:
                return run[:num_tokens], finish
        return run, None

    def _count_overruled(self, req: Req, run: IntArray, refused: Sequence[RefusedToken]) -> None:
        """Count the tokens of a run, the last ones of the output so far, that replace refused ones."""
        if req.grammar_figures is None:
            return
        for _, offset, wanted_id in refused:
            if offset < len(run):
                position = req.output_len - len(run) + offset
                req.grammar_figures.overruled(position, wanted_id, int(run[offset]))
                self._stats.overruled_tokens += 1

    def _finish(self, req: Req, token_id: int) -> Finish | None:
        """The end of a request with its newest token, which `output_len` counts."""
        finish = self._stop_rules.finish(req, token_id)
        return finish if req.matcher is None else advance(req, token_id, finish)


def _by_request(refused: Sequence[RefusedToken]) -> dict[int, list[RefusedToken]]:
    """Refused tokens by the batch index of their request."""
    by_request: dict[int, list[RefusedToken]] = {}
    for each in refused:
        by_request.setdefault(each.batch_idx, []).append(each)
    return by_request


def _plain_rows(reqs: list[Req], id_bytes: bytes) -> list[TokenOutput]:
    """A row for each request that only gets one more token.

    This is the hottest loop of the scheduler. `Req.usage` is inlined: one call per row took a fifth of settling.
    """
    starts = range(0, len(id_bytes), TOKEN_ID_BYTES)
    return [
        TokenOutput(
            req.rid,
            id_bytes[start : start + TOKEN_ID_BYTES],
            Usage(
                req.prompt_len,
                req.output_len,
                req.cached_tokens,
                req.queue_s,
                req.num_retractions,
                None,
                None,
                min(req.loaded_tokens, req.cached_tokens - req.host_tokens) if req.loaded_tokens else 0,
                req.host_tokens,
                req.num_drafts,
                req.num_accepted_drafts,
            ),
        )
        for req, start in zip(reqs, starts, strict=True)
    ]
