"""`SimulatedEngine`: one replica: the product's `Scheduler`, a cost model instead of a device, a virtual clock.

It does the same as the server's event loop: handle messages, plan, run the step, settle. The tokens of a step are
synthetic: filler, and the end-of-sequence token when a request has reached its length in the workload. The scheduler
therefore has no more information about lengths than in a server. Work per request is done in Python, work per token in
arrays by pool row.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..runtime.config.engine_config import CacheConfig, SchedulerConfig
from ..runtime.errors import EngineError
from ..runtime.feasibility import Capacity
from ..runtime.messages import AdapterRead, BatchTokenOutput, Call, GenerateRequest, LoadAdapter
from ..runtime.step_plan import ForwardMode, StepResult
from ..scheduler.batch import ScheduleBatch, work_of
from ..scheduler.records.decision_log import DecisionLog
from ..scheduler.requests.req import Req, ReqStatus
from ..scheduler.scheduler import Scheduler
from .cost_model import CostModel, PaddedWork, StageTimes, StaticPadding
from .dispatch import SimulatedDispatcher
from .report import Measurements
from .sim_request import EOS_TOKEN, FILLER_TOKEN, TOKEN_ID_BYTES, ActiveRequest

KEPT_RECORDS: Final = 64
"""Records of the decision log to keep: a simulated server is not asked for explanations."""

_TOKEN: Final = struct.Struct("<i")
_MAX_IDLE_PASSES: Final = 100


class SimulationError(EngineError):
    """The scheduler has work and makes no progress; a bug. The message has the scheduler's last decisions."""


class ReplicaSettings(NamedTuple):
    """The settings of a replica.

    Attributes:
        scheduler, cache: resolved.
        capacity: of its device.
        eos_token_ids: tokens that end an output.
        kept_records: of the decision log; few, since a simulated server is not asked for explanations.
        hop_token_s: seconds to send the activations of a token from a pipeline stage to the next one.
        adapters: adapters that requests name; they are loaded at the start.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    capacity: Capacity
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN})
    kept_records: int = 64
    hop_token_s: float = 0.0
    adapters: tuple[LoadAdapter, ...] = ()


class _InFlight(NamedTuple):
    """A step; `step_s` of one device with all layers, `end_s` when its results are there."""

    batch: ScheduleBatch
    step_s: float
    end_s: float


class SimulatedEngine:
    """One replica. See the module.

    Attributes:
        num_outstanding: requests that are queued or running here.
        scheduler: the product's.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        cost: CostModel,
        measurements: Measurements,
        dispatcher: SimulatedDispatcher,
        *,
        answered: Callable[[ActiveRequest, float], None],
        hand_over: Callable[[ActiveRequest, float], None] | None = None,
    ) -> None:
        """Create an idle replica.

        Args:
            dispatcher: chose this replica for its requests, and learns how they go.
            answered: called with each request that has its last token.
            hand_over: called with each request that has its first token; another replica continues it.
        """
        self._settings = settings
        self._cost = cost
        self._measurements = measurements
        self._dispatcher = dispatcher
        self._answered = answered
        self._hand_over = hand_over
        self._padding = StaticPadding() if settings.scheduler.schedule_policy == "static" else None
        self.scheduler = Scheduler(
            # Its tokens are all filler, so every draft would be accepted. Its host time is zero, so a multi-step
            # decode saves nothing.
            dataclasses.replace(settings.scheduler, speculative="off", multi_step_ms=0.0),
            # The answers of a tier are not simulated.
            dataclasses.replace(settings.cache, kv_disk=None, kv_store=None, kv_store_key=None),
            settings.capacity,
            settings.eos_token_ids,
            DecisionLog(settings.kept_records),
            streams=False,
        )
        for number, load in enumerate(settings.adapters, 1):
            self.scheduler.handle(Call(0, msgspec.structs.replace(load, store_id=number)), 0.0)
            self.scheduler.handle(AdapterRead(number), 0.0)
        num_rows = settings.capacity.max_running_requests
        self._live: dict[str, ActiveRequest] = {}
        self._owners: list[ActiveRequest | None] = [None] * num_rows
        self._remaining: npt.NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self._last_s = np.zeros(num_rows)
        self._inbox: list[GenerateRequest | Call] = []
        self._num_stages = settings.capacity.num_stages
        self._stages = StageTimes(self._num_stages, settings.hop_token_s)
        self._in_flight: deque[_InFlight] = deque()
        self._eos_token = min(settings.eos_token_ids, default=EOS_TOKEN)
        self._knows_outputs = False
        self._num_idle = 0
        self.num_outstanding = 0

    # ------------------------------------------------------------ input

    def submit(self, live: ActiveRequest | Call) -> None:
        """Add a request, or a call of another kind; the scheduler receives it at the next `advance`."""
        if isinstance(live, Call):
            self._inbox.append(live)
            return
        request = live.request
        self._live[request.rid] = live
        self._knows_outputs = self._knows_outputs or bool(request.output_ids)
        self.num_outstanding += 1
        if live.prefilled:
            self._inbox.append(live.after_first_token())
        elif self._hand_over is not None:
            self._inbox.append(live.first_token_only())
        else:
            self._inbox.append(live.message)

    @property
    def is_busy(self) -> bool:
        """Whether as many steps are in flight as there are pipeline stages."""
        return len(self._in_flight) == self._num_stages

    # ------------------------------------------------------------ the loop

    def advance(self, now_s: float) -> float | None:
        """Settle the steps that have ended, handle messages, plan the next step, or one for each stage.

        Returns:
            When to call again; None: after the next request.
        """
        in_flight = self._in_flight
        while in_flight and in_flight[0].end_s <= now_s:
            self._settle(in_flight.popleft(), now_s)
        for message in self._inbox:
            self.scheduler.handle(message, now_s)
        self._inbox = []
        while len(in_flight) < self._num_stages and (batch := self._next_batch(now_s)) is not None:
            self._num_idle = 0
            self._measurements.queued(self.scheduler.decisions.last)
            in_flight.append(self._launch(batch, now_s))
        return in_flight[0].end_s if in_flight else self._idle(now_s)

    def _next_batch(self, now_s: float) -> ScheduleBatch | None:
        """Plan a step that takes time."""
        scheduler = self.scheduler
        while (batch := scheduler.next_batch(now_s)) is not None and _costs_nothing(batch):
            scheduler.settle(batch, StepResult(batch.plan.step_id), now_s)
        for output in scheduler.take_outputs():  # refusals, and requests that ended while planning
            if isinstance(output, BatchTokenOutput):
                for row in output.outputs:
                    if row.finish is not None:
                        self._fail(row.rid, row.finish.message or row.finish.kind, now_s)
        return batch

    def _idle(self, now_s: float) -> float | None:
        """A pass without work; returns the time of the next one, None if a message must come first."""
        scheduler = self.scheduler
        scheduler.on_idle()
        if not scheduler.num_unfinished:
            return None
        wake_s = scheduler.wake_s()
        if wake_s is not None and wake_s > now_s:
            return wake_s
        self._num_idle += 1  # `on_idle` recovers from some stalls after several passes
        if self._num_idle > _MAX_IDLE_PASSES:
            raise SimulationError(
                f"{scheduler.num_unfinished} requests wait at {now_s:.3f} s and no step is planned; "
                f"last decisions: {' | '.join(scheduler.decisions.last.lines())}"
            )
        return now_s

    # ------------------------------------------------------------ a step

    def _launch(self, batch: ScheduleBatch, now_s: float) -> _InFlight:
        """Record the owners of rows and the cost of the step."""
        plan = batch.plan
        owners = self._owners
        for new in plan.new_reqs:  # the row's former owner may be a preempted request that returns later
            if (owner := owners[new.row]) is not None:
                owner.last_s = float(self._last_s[new.row])
                owners[new.row] = None
        num_transferred = 0
        for new in plan.new_reqs:
            live = self._live[new.rid]
            done = len(new.input_ids) // TOKEN_ID_BYTES - new.prompt_len
            if live.row >= 0 and owners[live.row] is live:  # its old row has no other owner yet
                live.last_s = float(self._last_s[live.row])
                owners[live.row] = None
            live.row = new.row
            owners[new.row] = live
            hands_over = self._hand_over is not None
            self._remaining[new.row] = 1 if hands_over else live.request.output_len - done - live.prefilled
            self._last_s[new.row] = live.last_s
            num_transferred += live.prefilled and not done
        capacity = self._settings.capacity
        transferred = self._transferred(batch) if num_transferred else None
        work = work_of(batch, capacity.page_size, transferred)
        padded = PaddedWork(work, 0) if self._padding is None else self._padding.pad(batch, work)
        step_s = self._cost.step_s(padded.work)
        pages = self.scheduler.decisions.last.pages
        tokens = padded.work.prefill_tokens + padded.work.decode_rows
        kv_use = (pages.held + pages.locked) / capacity.num_pages
        self._measurements.step(step_s / self._num_stages, tokens, padded.padded_tokens, kv_use)
        return _InFlight(batch, step_s, self._stages.end_s(now_s, step_s, tokens))

    def _transferred(self, batch: ScheduleBatch) -> npt.NDArray[np.bool_]:
        """[num_extends] whether the KV came from another replica and is not recomputed here."""
        owners = [self._owners[row] for row in batch.rows[: batch.num_extends]]
        return np.array(
            [
                owner is not None and owner.prefilled and not req.num_retractions
                for owner, req in zip(owners, batch.reqs, strict=False)
            ]
        )

    def _settle(self, step: _InFlight, now_s: float) -> None:
        """Create the tokens of a step, and record the requests with their first and their last token."""
        batch = step.batch
        # With stages a request may have left its row since; its token is dropped.
        here = self.scheduler.rows_still_here(batch)[batch.sampled]
        sampled = batch.sampled[here]
        rows = batch.rows[sampled]
        remaining = self._remaining[rows] - np.int32(1)
        self._remaining[rows] = remaining
        ended = remaining == 0
        token_ids = np.full(len(here), FILLER_TOKEN, dtype=np.int32)
        if self._knows_outputs:
            token_ids[here] = self._known_tokens(rows)
        elif ended.any():
            token_ids[here] = np.where(ended, np.int32(self._eos_token), np.int32(FILLER_TOKEN))
        leaving = [batch.reqs[idx] for idx in sampled[ended].tolist()]
        pooled = self._pooled(batch)
        leaving += [batch.reqs[idx] for idx in pooled]
        owners = [self._owners[req.row] for req in leaving]
        vectors = dict.fromkeys(pooled, b"")
        result = StepResult(batch.plan.step_id, token_ids.tobytes(), forward_s=step.step_s, vectors=vectors)
        self.scheduler.settle(batch, result, now_s)
        self.scheduler.take_outputs()  # their contents are already known here
        self._note_gaps(batch, sampled, now_s)
        for idx in pooled:
            owner = self._live[batch.reqs[idx].rid]
            self._dispatcher.started(owner, batch.reqs[idx].cached_tokens)
            owner.first_s = now_s
        for req, owner in zip(leaving, owners, strict=True):
            assert owner is not None
            self._leave(req, owner, now_s)
        num_inbox = sum(isinstance(message, GenerateRequest) for message in self._inbox)
        assert self.scheduler.num_unfinished + num_inbox == self.num_outstanding, "a request was lost"

    def _pooled(self, batch: ScheduleBatch) -> list[int]:
        """Batch indices of the requests that get their vector from this step."""
        if not batch.plan.pools:
            return []
        pools = np.frombuffer(batch.plan.pools, dtype=np.uint8).astype(np.bool_)
        return [int(idx) for idx in np.flatnonzero(pools & self.scheduler.rows_still_here(batch))]

    def _known_tokens(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The tokens of requests with recorded answers, filler for the others."""
        token_ids = np.full(len(rows), FILLER_TOKEN, dtype=np.int32)
        for idx, (row, left) in enumerate(zip(rows.tolist(), self._remaining[rows].tolist(), strict=True)):
            owner = self._owners[row]
            assert owner is not None
            request = owner.request
            if request.output_ids:
                position = request.output_len - 1 - left
                (token_ids[idx],) = _TOKEN.unpack_from(request.output_ids, position * TOKEN_ID_BYTES)
            elif left == 0:
                token_ids[idx] = self._eos_token
        return token_ids

    def _note_gaps(self, batch: ScheduleBatch, sampled: npt.NDArray[np.int32], now_s: float) -> None:
        """Record the times between tokens; `sampled`: batch indices of the requests that have one."""
        last_s = self._last_s
        rows = batch.rows[sampled]
        num_extends = batch.num_extends
        if num_extends:
            num_finished_prompts = int(np.searchsorted(sampled, num_extends))
            for idx in range(num_finished_prompts):
                owner = self._owners[rows[idx]]
                assert owner is not None
                if math.isnan(owner.first_s):
                    self._dispatcher.started(owner, batch.reqs[sampled[idx]].cached_tokens)
                    owner.first_s = now_s
                    last_s[rows[idx]] = now_s
                    continue
                if not batch.reqs[sampled[idx]].background:
                    self._measurements.gaps.add(np.array([now_s - last_s[rows[idx]]]))  # after a retraction
                last_s[rows[idx]] = now_s
            rows = rows[num_finished_prompts:]
        if len(rows):
            gaps_s = now_s - last_s[rows]
            last_s[rows] = now_s
            if any(req.background for req in batch.reqs):
                in_background = [
                    batch.reqs[idx].background for idx in sampled[len(sampled) - len(rows) :].tolist()
                ]
                gaps_s = gaps_s[~np.array(in_background)]
            self._measurements.gaps.add(gaps_s)

    # ------------------------------------------------------------ ends

    def _leave(self, req: Req, live: ActiveRequest, now_s: float) -> None:
        """Finish a request that received its last token on this replica."""
        assert req.status is ReqStatus.FINISHED, f"{req} should have finished with its last token"
        request, measurements = live.request, self._measurements
        del self._live[request.rid]
        self._owners[live.row] = None
        live.row = -1
        self.num_outstanding -= 1
        self._dispatcher.ended(live)
        if math.isnan(live.start_s):
            live.start_s = req.entered_s[ReqStatus.PREFILL]
        measurements.retractions += req.num_retractions
        if not live.prefilled:
            measurements.prompt_tokens += req.prompt_len
            measurements.cached_tokens += req.cached_tokens
        if self._hand_over is not None and request.output_len > 1:
            live.last_s = now_s
            self._hand_over(live, now_s)
            return
        if req.background:
            measurements.background_answered(request.output_len, now_s)
        else:
            measurements.answered(
                arrival_s=request.arrival_s,
                start_s=live.start_s,
                first_s=live.first_s,
                end_s=now_s,
                output_len=request.output_len,
            )
        self._answered(live, now_s)

    def _fail(self, rid: str, message: str, now_s: float) -> None:
        live = self._live.pop(rid)
        if live.row >= 0 and self._owners[live.row] is live:
            self._owners[live.row] = None
        self.num_outstanding -= 1
        self._dispatcher.ended(live)
        self._measurements.failed(message, now_s)


def _costs_nothing(batch: ScheduleBatch) -> bool:
    return batch.plan.mode is ForwardMode.IDLE and not batch.plan.swap_outs
