"""`RecordedRun`: a run from a decision log in the form that a simulation needs: requests, step times, latencies.

The log holds the scheduler's calls, not the requests' histories. The calls are therefore replayed on a scheduler with
the same settings, by the code of `engine replay`. Each settled step then has its batch, which gives the work that was
done and the request of each token.

A simulation of these requests has no grammar, no draft and no other engine: each answer ends with the token with which
it ended in the log, for any reason, and a prompt with KV from another engine comes when it came.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ..runtime.errors import ConfigError
from ..runtime.messages import (
    Call,
    FinishKind,
    FlushCache,
    GenerateRequest,
    HintSession,
    LoadAdapter,
    Pause,
    PinPrefix,
)
from ..runtime.step_plan import ForwardMode
from ..runtime.transport.kv_transfer import FromPeer, Prefilled
from ..scheduler.batch import ScheduleBatch, work_of
from ..scheduler.journal.log_file import Header, Idle, Input, LoggedRun, Planning, choose_runs
from ..scheduler.journal.replay import ReplayedCalls, with_effects
from ..scheduler.records.decision_log import DecisionRecord, Handover, PassRecord, Settled
from .fitted import Fitted, MeasuredStep
from .report import Measurements
from .sim_request import TOKEN_ID_BYTES, SimRequest, Workload

_HOST_COPY_BANDWIDTH: Final = 10e9  # bytes per second; for swaps if the log has none

_CUT_SHORT: Final = frozenset({FinishKind.ABORT, FinishKind.ERROR})


class RecordedRun(NamedTuple):
    """See the module.

    Attributes:
        header: the run's settings.
        requests: those that received tokens or a vector, by arrival; the first one arrives at 0.
        next_turns: rid -> that of the next turn of its session, and the seconds from the last token to it.
        adapters: every adapter that was loaded.
        calls: flushes and pins of the prefix cache, with their times.
        outcome: the recorded latencies.
        steps: the work and the time of each step.
        overhead_s: median time between two steps.
        swapped_token_s: seconds per swapped token.
        num_left_out: requests without a result: refused, timed out, aborted early.
        num_cut_short: requests that ended after some tokens by an error, a deadline, or an abort.
        num_transferred: requests with a prompt that another engine computed.
        damage: the part of the log that could not be read; "" if there is none.
    """

    header: Header
    requests: list[SimRequest]
    next_turns: dict[str, tuple[str, float]]
    adapters: list[LoadAdapter]
    calls: list[tuple[float, Call]]
    outcome: Measurements
    steps: list[MeasuredStep]
    overhead_s: float
    swapped_token_s: float
    num_left_out: int
    num_cut_short: int
    num_transferred: int
    damage: str

    def cost_model(self) -> Fitted:
        """The cost model that fits the steps best.

        Raises:
            ConfigError: the run has too few steps.
        """
        return Fitted.to(self.steps, overhead_s=self.overhead_s, swapped_token_s=self.swapped_token_s)

    def workload(self) -> Workload:
        """The requests in a closed loop: a turn of a session comes its pause after the simulated answer before it."""
        by_rid: dict[str, SimRequest] = {}
        for request in reversed(self.requests):  # a turn is later than the one that it follows
            later = self.next_turns.get(request.rid)
            if later is not None:
                turn = partial(_turn, by_rid.pop(later[0]), later[1])
                request = request._replace(next_turn=turn)
            by_rid[request.rid] = request
        return iter(sorted(by_rid.values(), key=lambda request: request.arrival_s))


def read_recorded_run(
    path: str | Path, on_read: Callable[[int], None] | None = None, *, number: int | None = None
) -> RecordedRun:
    """The last run in a decision log that generated tokens or vectors.

    Args:
        on_read: see `LoggedRun`.
        number: number of the run to take instead, from 1.

    Raises:
        LogFileError: it cannot be read.
        ConfigError: there is no such run, there were no results, or this engine decides differently from the one that
            wrote the log.
    """
    found: RecordedRun | None = None
    error: ConfigError | None = None
    for _, run, is_chosen in choose_runs(path, number):
        if not is_chosen:
            continue
        run.on_read = on_read
        try:
            each = _Reader(run).read()
        except ConfigError as wrong:  # an earlier run of the file may be of another engine
            found, error = None, wrong
            continue
        if each.requests:
            found, error = each, None
    if error is not None:
        raise error
    if found is None:
        which = path if number is None else f"run {number} of {path}"
        raise ConfigError(f"{which} has no request that got a token or a vector; record a run with traffic")
    return found


class _Life:
    """One request of the log.

    `ready_s`: when its grammar was compiled, or the KV of its prompt had come from another engine; 0 without such an
    event.
    """

    __slots__ = (
        "arrival_s",
        "end_s",
        "first_s",
        "is_prefilled",
        "kind",
        "last_s",
        "message",
        "ready_s",
        "start_s",
        "tokens",
    )

    def __init__(self, message: GenerateRequest, now_s: float) -> None:
        self.message = message
        self.arrival_s = message.arrival_s or now_s
        self.start_s = self.first_s = self.last_s = self.end_s = self.ready_s = 0.0
        self.is_prefilled = False
        self.tokens: list[int] = []
        self.kind: FinishKind | None = None

    @property
    def delivered_ids(self) -> bytes:
        """The beginning of its answer that an earlier attempt had made."""
        return b"" if self.message.delivered is None else self.message.delivered.output_ids

    def ended(self, kind: FinishKind, output_len: int, now_s: float) -> None:
        """Note the end; tokens after it, accepted drafts, are dropped."""
        self.kind, self.end_s = kind, now_s
        del self.tokens[max(0, output_len - len(self.delivered_ids) // TOKEN_ID_BYTES) :]

    def got(self, tokens: list[int], now_s: float) -> None:
        """Note its next tokens; none for a vector."""
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        self.tokens += tokens


class _Reader:
    """Replays the calls of one run and records their results."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._calls = ReplayedCalls(run.header)
        self._lives: dict[str, _Life] = {}
        self._first_tokens: dict[str, bytes] = {}  # of other engines, by bootstrap_room
        self._adapters: dict[str, LoadAdapter] = {}  # by fingerprint
        self._cache_calls: list[tuple[float, Call]] = []
        self._planned_s: dict[int, float] = {}  # of steps in flight, by their id
        self._steps: list[MeasuredStep] = []
        self._gaps: list[float] = []
        self._swapped_tokens = 0
        self._swap_s = 0.0
        self._overheads_s: list[float] = []
        # The last step's planning time, its seconds, its rounds; None after an idle period.
        self._last_step: tuple[float, float, int] | None = None

    def read(self) -> RecordedRun:
        for record, effects in with_effects(self._run.records):
            match record:
                case Input():
                    self._note_message(record)
                    self._calls.call(record, effects)
                case Planning():
                    self._plan(record, effects)
                case PassRecord() if record.plan_crc:
                    in_flight = self._calls.in_flight
                    if not in_flight or in_flight[-1].checksum() != record.plan_crc:
                        raise self._decides_otherwise(record.step_id)
                case Settled():
                    if record.step_id:
                        self._settle(record, effects)
                    for rid in record.grammars:
                        self._lives[rid].ready_s = record.now_s
                    for left in record.left:
                        if (life := self._lives.get(left.rid)) is not None:
                            life.ended(left.kind, left.output_len, record.now_s)
                case Handover() if record.event == "received":
                    life = self._lives[record.rid]
                    assert life.message.handoff is not None
                    first = self._first_tokens.pop(life.message.handoff.bootstrap_room)
                    life.start_s = life.ready_s = record.now_s
                    life.is_prefilled = True
                    life.got(np.frombuffer(first, dtype=np.int32).tolist(), record.now_s)
                case Idle():
                    self._calls.call(record, effects)
                    self._last_step = None
                case _:
                    pass
            if self._calls.raised:
                raise ConfigError(
                    f"the run ends in an error, which needs a run without one: {self._calls.raised}; record another"
                )
        return self._result()

    def _note_message(self, record: Input) -> None:
        match record.message:
            case GenerateRequest() as message:
                self._lives[message.rid] = _Life(message, record.now_s)
            case Call(request=LoadAdapter() as load):
                self._adapters[load.adapter.fingerprint] = load
            case Call(request=FlushCache() | PinPrefix() | HintSession()) as call:
                self._cache_calls.append((record.now_s, call))
            case Call(request=Pause()):
                raise ConfigError(
                    "an admin paused the server in this run, so its times say nothing about settings; record another"
                )
            case FromPeer(message=Prefilled() as prefilled):
                self._first_tokens[prefilled.bootstrap_room] = prefilled.output_ids
            case _:
                pass

    def _plan(self, record: Planning, effects: Sequence[DecisionRecord]) -> None:
        num_in_flight = len(self._calls.in_flight)
        self._calls.call(record, effects)
        if len(self._calls.in_flight) == num_in_flight:
            return
        now_s, plan = record.now_s, self._calls.in_flight[-1].plan
        if self._last_step is not None:
            planned_s, forward_s, num_rounds = self._last_step
            overhead_s = max(0.0, now_s - planned_s - forward_s) / num_rounds
            self._overheads_s += [overhead_s] * num_rounds
            self._last_step = None
        for new in plan.new_reqs:
            life = self._lives[new.rid]
            life.start_s = life.start_s or now_s
        self._planned_s[plan.step_id] = now_s

    def _settle(self, record: Settled, effects: Sequence[DecisionRecord]) -> None:
        in_flight = self._calls.in_flight
        if not in_flight or in_flight[0].plan.step_id != record.step_id:
            raise self._decides_otherwise(record.step_id)
        batch, planned_s = in_flight[0], self._planned_s.pop(record.step_id)
        if batch.plan.mode is not ForwardMode.IDLE:
            self._measure(batch, record)
            self._last_step = planned_s, record.forward_s, batch.rounds_made(record.num_next_tokens)
        if not record.out_of_memory:
            self._note_tokens(batch, record)
        self._calls.call(record, effects)

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
        is_here = self._calls.scheduler.rows_still_here(batch).tolist()
        sampled = batch.sampled.tolist()
        counts = np.frombuffer(record.num_next_tokens, dtype=np.int32).tolist() or [1] * len(sampled)
        end = 0
        for idx, count in zip(sampled, counts, strict=True):
            start, end = end, end + count
            if not is_here[idx] or idx in record.errors:
                continue
            life = self._lives[batch.reqs[idx].rid]
            if life.tokens:
                gap_s = (record.now_s - life.last_s) / count
                self._gaps += [gap_s] * count
            life.got(tokens[start:end], record.now_s)
        for idx in record.vectors:
            if is_here[idx]:
                self._lives[batch.reqs[idx].rid].got([], record.now_s)

    # ------------------------------------------------------------ the result

    def _result(self) -> RecordedRun:
        lives = sorted(
            (life for life in self._lives.values() if life.first_s), key=lambda life: life.arrival_s
        )
        origin_s = lives[0].arrival_s if lives else 0.0
        return RecordedRun(
            header=self._run.header,
            requests=[self._request(life, origin_s) for life in lives],
            next_turns=_next_turns(lives),
            adapters=[*self._adapters.values()],
            calls=[(max(0.0, now_s - origin_s), call) for now_s, call in self._cache_calls],
            outcome=self._outcome(lives, origin_s),
            steps=self._steps,
            overhead_s=statistics.median(self._overheads_s) if self._overheads_s else 0.0,
            swapped_token_s=self._swapped_token_s(),
            num_left_out=len(self._lives) - len(lives),
            num_cut_short=sum(life.kind in _CUT_SHORT for life in lives),
            num_transferred=sum(life.is_prefilled for life in lives),
            damage=self._run.damage,
        )

    def _request(self, life: _Life, origin_s: float) -> SimRequest:
        """The request, with an answer that ends where it ended for any reason (a grammar, a stop string, an abort)."""
        message, output_len = life.message, len(life.tokens)
        sampling, num_delivered = message.sampling, len(life.delivered_ids) // TOKEN_ID_BYTES
        limit = (sampling.max_new_tokens or num_delivered + output_len) - num_delivered
        if message.handoff is not None and not message.handoff.peer:
            limit = 1  # the rest of the answer was decoded by another engine
        eos = self._run.header.eos_token_ids
        if 0 < output_len < limit:
            if sampling.ignore_eos or not eos:
                limit = output_len  # only the limit can end it there
            elif life.tokens[-1] not in eos:
                life.tokens[-1] = eos[0]
        return SimRequest(
            rid=message.rid,
            arrival_s=life.arrival_s - origin_s,
            input_ids=message.input_ids + life.delivered_ids,
            output_len=output_len,
            max_new_tokens=limit,
            output_ids=np.array(life.tokens, dtype=np.int32).tobytes(),
            template=_as_asked(message, message.input_ids + life.delivered_ids),
            ready_s=life.ready_s - origin_s if life.ready_s else None,
            is_prefilled=life.is_prefilled,
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
        report = self._calls.scheduler.report(0.0)
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


def _next_turns(lives: Sequence[_Life]) -> dict[str, tuple[str, float]]:
    """See `RecordedRun`. A turn follows the one with the prompt that it continues, else the last one of its session.

    Args:
        lives: by arrival.
    """
    found: dict[str, tuple[str, float]] = {}
    without: dict[str, list[_Life]] = {}  # by session: turns that none follows yet
    for life in filter(lambda life: life.message.session, lives):
        prompt = life.message.input_ids
        turns = without.setdefault(life.message.session, [])
        ended = [turn for turn in turns if turn.last_s <= life.arrival_s]
        if ended:
            before = max(ended, key=lambda turn: (prompt.startswith(turn.message.input_ids), turn.last_s))
            found[before.message.rid] = life.message.rid, life.arrival_s - before.last_s
            turns.remove(before)
        turns.append(life)
    return found


def _turn(request: SimRequest, pause_s: float, answered_s: float) -> SimRequest:
    """A recorded turn after a simulated answer."""
    arrival_s = answered_s + pause_s
    ready_s = None if request.ready_s is None else request.ready_s + arrival_s - request.arrival_s
    return request._replace(arrival_s=arrival_s, ready_s=ready_s)


def _as_asked(message: GenerateRequest, input_ids: bytes) -> GenerateRequest:
    """The message for a simulation.

    A simulation compiles no grammar, its filler token must not be a stop token, and no deadline ends an answer: in
    every run the answer ends with the same token as in the log, so that the runs are comparable. Tokens of an earlier
    attempt cost as much as the prompt, of which they are made a part.
    """
    sampling = msgspec.structs.replace(message.sampling, stop_token_ids=(), min_new_tokens=0, logprobs=None)
    return msgspec.structs.replace(
        message,
        input_ids=input_ids,
        needs_grammar=False,
        grammar=None,
        sampling=sampling,
        queue_timeout_s=None,
        timeout_s=None,
        delivered=None,
        handoff=None,
    )
