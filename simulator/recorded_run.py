"""`RecordedRun`: a run from a decision log in the form that a simulation needs: requests, step times, latencies.

The log holds the scheduler's calls, not the requests' histories. The calls are therefore replayed on a scheduler with
the same settings (as `engine replay` does). Each settled step then has its batch, which gives the work that was done
and the request of each token.
"""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ..runtime.errors import ConfigError
from ..runtime.messages import FinishKind, GenerateRequest
from ..runtime.step_plan import ForwardMode, StepResult
from ..scheduler.batch import ScheduleBatch, work_of
from ..scheduler.journal.log_file import Header, Idle, Input, LoggedRun, Planning, read_runs
from ..scheduler.journal.replay import new_scheduler
from ..scheduler.records.decision_log import PassRecord, Settled
from .fitted import Fitted, MeasuredStep
from .report import Measurements
from .sim_request import SimRequest

_HOST_COPY_BANDWIDTH: Final = 10e9  # bytes per second; for swaps if the log has none

_CUT_SHORT: Final = frozenset({FinishKind.ABORT, FinishKind.ERROR})


class RecordedRun(NamedTuple):
    """See the module.

    Attributes:
        header: the run's settings.
        requests: those that received tokens, by arrival; the first one arrives at 0.
        outcome: the recorded latencies.
        steps: the work and the time of each step.
        overhead_s: median time between two steps.
        swapped_token_s: seconds per swapped token.
        num_left_out: requests without a token: refused, timed out, aborted early.
        num_cut_short: requests that ended after some tokens by an error, a deadline, or an abort.
        damage: the part of the log that could not be read; "" if there is none.
    """

    header: Header
    requests: list[SimRequest]
    outcome: Measurements
    steps: list[MeasuredStep]
    overhead_s: float
    swapped_token_s: float
    num_left_out: int
    num_cut_short: int
    damage: str

    def cost_model(self) -> Fitted:
        """The cost model that fits the steps best.

        Raises:
            ConfigError: the run has too few steps.
        """
        return Fitted.to(self.steps, overhead_s=self.overhead_s, swapped_token_s=self.swapped_token_s)


def read_recorded_run(path: str | Path) -> RecordedRun:
    """The last run in a decision log that generated tokens.

    Raises:
        LogFileError: it cannot be read.
        ConfigError: no tokens were generated, or this engine decides differently from the one that wrote the log.
    """
    found: RecordedRun | None = None
    for run in read_runs(path):
        each = _Reader(run).read()
        found = each if each.requests else found
    if found is None:
        raise ConfigError(f"{path} has no request that got a token; record a run with traffic")
    return found


class _Life:
    """One request of the log."""

    __slots__ = ("arrival_s", "end_s", "first_s", "kind", "last_s", "message", "start_s", "tokens")

    def __init__(self, message: GenerateRequest, now_s: float) -> None:
        self.message = message
        self.arrival_s = message.arrival_s or now_s
        self.start_s = self.first_s = self.last_s = self.end_s = 0.0
        self.tokens: list[int] = []
        self.kind: FinishKind | None = None


class _Reader:
    """Replays the calls of one run and records their results."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._scheduler = new_scheduler(run.header)
        self._lives: dict[str, _Life] = {}
        self._in_flight: deque[tuple[ScheduleBatch, float]] = deque()
        self._steps: list[MeasuredStep] = []
        self._gaps: list[float] = []
        self._swapped_tokens = 0
        self._swap_s = 0.0
        self._overheads_s: list[float] = []
        # The last step's planning time, its seconds, its rounds; None after an idle period.
        self._last_step: tuple[float, float, int] | None = None

    def read(self) -> RecordedRun:
        scheduler = self._scheduler
        for record in self._run.records:
            match record:
                case Input():
                    if isinstance(record.message, GenerateRequest):
                        self._lives[record.message.rid] = _Life(record.message, record.now_s)
                    scheduler.handle(record.message, record.now_s)
                case Planning():
                    self._plan(record.now_s)
                case PassRecord() if record.plan_crc:
                    if not self._in_flight or self._in_flight[-1][0].checksum() != record.plan_crc:
                        raise self._decides_otherwise(record.step_id)
                case Settled():
                    if record.step_id:
                        self._settle(record)
                    for left in record.left:
                        if (life := self._lives.get(left.rid)) is not None:
                            life.kind, life.end_s = left.kind, record.now_s
                            del life.tokens[left.output_len :]  # accepted drafts after the end
                case Idle():
                    scheduler.on_idle()
                    self._last_step = None
                case _:
                    pass
            scheduler.take_outputs()
            scheduler.take_call_answers()
        return self._result()

    def _plan(self, now_s: float) -> None:
        batch = self._scheduler.next_batch(now_s)
        if batch is None:
            return
        if self._last_step is not None:
            planned_s, forward_s, num_rounds = self._last_step
            overhead_s = max(0.0, now_s - planned_s - forward_s) / num_rounds
            self._overheads_s += [overhead_s] * num_rounds
            self._last_step = None
        for new in batch.plan.new_reqs:
            life = self._lives[new.rid]
            life.start_s = life.start_s or now_s
        self._in_flight.append((batch, now_s))

    def _settle(self, record: Settled) -> None:
        if not self._in_flight or self._in_flight[0][0].plan.step_id != record.step_id:
            raise self._decides_otherwise(record.step_id)
        batch, planned_s = self._in_flight.popleft()
        if batch.plan.mode is not ForwardMode.IDLE:
            self._measure(batch, record)
            self._last_step = planned_s, record.forward_s, batch.rounds_made(record.num_next_tokens)
        if not record.out_of_memory:
            self._note_tokens(batch, record)
        result = StepResult(
            record.step_id,
            record.next_token_ids,
            errors=record.errors,
            forward_s=record.forward_s,
            swap_s=record.swap_s,
            out_of_memory=record.out_of_memory,
            num_next_tokens=record.num_next_tokens,
        )
        self._scheduler.settle(batch, result, record.now_s)

    def _decides_otherwise(self, step_id: int) -> ConfigError:
        return ConfigError(
            f"step {step_id} of the log is not one that this engine plans; `engine replay` shows where its decisions "
            f"differ from those of engine {self._run.header.engine_version}"
        )

    def _measure(self, batch: ScheduleBatch, record: Settled) -> None:
        """Record the work of a step; each round of a multi-step decode is a step, since a simulation has none."""
        work = work_of(batch, self._run.header.capacity.page_size)
        self._swapped_tokens += work.swapped_tokens
        self._swap_s += record.swap_s
        num_rounds = batch.rounds_made(record.num_next_tokens)
        step_s = max(0.0, record.forward_s - record.swap_s) / num_rounds
        for number in range(num_rounds):
            kv_tokens = work.kv_tokens + number * work.decode_rows
            self._steps.append(MeasuredStep(work._replace(swapped_tokens=0, kv_tokens=kv_tokens), step_s))

    def _note_tokens(self, batch: ScheduleBatch, record: Settled) -> None:
        """Assign the tokens to requests; tokens of requests preempted meanwhile are dropped, they are sampled again."""
        tokens = np.frombuffer(record.next_token_ids, dtype=np.int32).tolist()
        is_here = self._scheduler.rows_still_here(batch).tolist()
        sampled = batch.sampled.tolist()
        counts = np.frombuffer(record.num_next_tokens, dtype=np.int32).tolist() or [1] * len(sampled)
        end = 0
        for idx, count in zip(sampled, counts, strict=True):
            start, end = end, end + count
            if not is_here[idx] or idx in record.errors:
                continue
            req = batch.reqs[idx]
            life = self._lives[req.rid]
            if life.tokens:
                gap_s = (record.now_s - life.last_s) / count
                self._gaps += [gap_s] * count
            else:
                life.first_s = record.now_s
            life.last_s = record.now_s
            life.tokens += tokens[start:end]

    # ------------------------------------------------------------ the result

    def _result(self) -> RecordedRun:
        lives = sorted(
            (life for life in self._lives.values() if life.tokens), key=lambda life: life.arrival_s
        )
        origin_s = lives[0].arrival_s if lives else 0.0
        return RecordedRun(
            header=self._run.header,
            requests=[self._request(life, origin_s) for life in lives],
            outcome=self._outcome(lives, origin_s),
            steps=self._steps,
            overhead_s=statistics.median(self._overheads_s) if self._overheads_s else 0.0,
            swapped_token_s=self._swapped_token_s(),
            num_left_out=len(self._lives) - len(lives),
            num_cut_short=sum(life.kind in _CUT_SHORT for life in lives),
            damage=self._run.damage,
        )

    def _request(self, life: _Life, origin_s: float) -> SimRequest:
        """The request, with an answer that ends where it ended for any reason (a stop string, an abort)."""
        sampling, output_len = life.message.sampling, len(life.tokens)
        limit = sampling.max_new_tokens or output_len
        eos = self._run.header.eos_token_ids
        if output_len < limit:
            if sampling.ignore_eos or not eos:
                limit = output_len  # only the limit can end it there
            elif life.tokens[-1] not in eos:
                life.tokens[-1] = eos[0]
        return SimRequest(
            rid=life.message.rid,
            arrival_s=life.arrival_s - origin_s,
            input_ids=life.message.input_ids,
            output_len=output_len,
            max_new_tokens=limit,
            output_ids=np.array(life.tokens, dtype=np.int32).tobytes(),
            template=_as_asked(life.message),
        )

    def _outcome(self, lives: list[_Life], origin_s: float) -> Measurements:
        measurements = Measurements()
        measurements.first_arrival_s = 0.0
        for life in lives:
            measurements.answered(
                arrival_s=life.arrival_s - origin_s,
                start_s=life.start_s - origin_s,
                first_s=life.first_s - origin_s,
                end_s=life.last_s - origin_s,
                output_len=len(life.tokens),
            )
        measurements.gaps.add(np.array(self._gaps))
        report = self._scheduler.report(0.0)
        measurements.prompt_tokens = report.totals.prompt_tokens
        measurements.cached_tokens = report.totals.cached_tokens
        measurements.retractions = report.totals.retracted_reqs
        measurements.num_steps = len(self._steps)
        measurements.busy_s = sum(step.step_s for step in self._steps)
        return measurements

    def _swapped_token_s(self) -> float:
        if self._swapped_tokens:
            return self._swap_s / self._swapped_tokens
        return self._run.header.capacity.kv_token_bytes / _HOST_COPY_BANDWIDTH


def _as_asked(message: GenerateRequest) -> GenerateRequest:
    """The message for a simulation.

    A simulation compiles no grammar, its filler token must not be a stop token, and no deadline ends an answer: in
    every run the answer ends with the same token as in the log, so that the runs are comparable.
    """
    sampling = msgspec.structs.replace(
        message.sampling,
        stop_token_ids=(),
        min_new_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
    )
    return msgspec.structs.replace(
        message, needs_grammar=False, grammar=None, sampling=sampling, queue_timeout_s=None, timeout_s=None
    )
