"""`replay`: repeats all calls of a logged run on a new `Scheduler`, and compares every decision with the log.

The scheduler does no I/O and reads no clock, so the same calls with the same times must lead to the same decisions, in
every field of every record, the checksum of each plan included. A difference means that the code has changed, or that
there is a bug (for example, an order that depends on hashing).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from ...runtime.messages import FinishKind
from ...runtime.step_plan import ForwardMode, StepResult
from ..batch import ScheduleBatch
from ..grammar.matchers import LoggedEnd, LoggedMatchers, MatcherSource
from ..records.decision_log import Arrived, DecisionRecord, Handover, MatcherDrafts, PassRecord, Settled
from ..scheduler import Scheduler
from .log_file import Header, Idle, Input, LoggedRun, LogRecord, Planning

_MAX_TEXT: Final = 200


class FieldDifference(NamedTuple):
    """One field that differs, for example `verdicts[3].need`, and its two values as text."""

    field: str
    logged: str
    replayed: str


class Difference(NamedTuple):
    """The first record that differs.

    Attributes:
        num_passes_before: passes that were equal.
        step_id: of the pass's plan, or of the settled step; 0 for none.
        now_s: time of the record, by the run's clock.
        what: one sentence.
        fields: the fields that differ; empty if a record has no counterpart.
    """

    num_passes_before: int
    step_id: int
    now_s: float
    what: str
    fields: tuple[FieldDifference, ...] = ()


class Replay(NamedTuple):
    """The result of a replay.

    Attributes:
        num_passes: passes in the log.
        num_equal: passes that were equal, up to the first difference.
        num_steps, num_requests: in the log; steps that compute something.
        span_s: from the first to the last record.
        digest: of all passes of the log: equal for two runs with the same decisions at the same times.
        difference: the first one; None if all records are equal.
        raised: the error that ended the run and its replay; "" if none did.
    """

    num_passes: int
    num_equal: int
    num_steps: int
    num_requests: int
    span_s: float
    digest: str
    difference: Difference | None
    raised: str

    @property
    def is_equal(self) -> bool:
        """Whether the replay made every decision of the log."""
        return self.difference is None


def replay(run: LoggedRun) -> Replay:
    """Read a run to its end, and repeat its calls while the decisions are equal.

    Raises:
        LogFileError: the run was recorded with settings that this engine does not have.
        ConfigError: its settings are invalid.
    """
    calls = ReplayedCalls(run.header)
    tally = _Tally()
    difference: Difference | None = None
    for record, effects in with_effects(run.records):
        if difference is None:
            difference = calls.take(record, effects, tally.num_passes)
            if difference is not None:
                tally.num_equal = tally.num_passes
        tally.count(record)
    if difference is None:
        tally.num_equal = tally.num_passes
    return Replay(
        tally.num_passes,
        tally.num_equal,
        tally.num_steps,
        tally.num_requests,
        tally.last_s - tally.first_s,
        tally.passes.hexdigest(),
        difference,
        calls.raised,
    )


def new_scheduler(header: Header, matchers: MatcherSource | None = None, **changes: object) -> Scheduler:
    """A scheduler in the initial state of a run, with `changes` to the scheduler group of settings."""
    return Scheduler(
        header.scheduler_config(**changes),
        header.cache_config(),
        header.capacity,
        frozenset(header.eos_token_ids),
        matchers=matchers,
    )


class _Tally:
    """Counts the records of the log."""

    def __init__(self) -> None:
        self.num_passes = self.num_equal = self.num_steps = self.num_requests = 0
        self.first_s = self.last_s = 0.0
        self.passes = hashlib.blake2b(digest_size=8)
        self._encoder = msgspec.msgpack.Encoder()

    def count(self, record: LogRecord) -> None:
        if isinstance(record, Header):
            return
        self.last_s = record.now_s
        self.first_s = self.first_s or record.now_s
        if isinstance(record, PassRecord):
            self.num_passes += 1
            self.num_steps += record.mode is not ForwardMode.IDLE
            self.passes.update(self._encoder.encode(record))
        elif isinstance(record, Arrived):
            self.num_requests += 1


class ReplayedCalls:
    """Repeats the calls of a run on a new scheduler; `take` compares each of its decisions with the logged one.

    All that a request needs comes from the log: its grammar, for example, ends it where it ended.

    Attributes:
        scheduler: in the state after the last call.
        in_flight: planned steps that are not settled, the oldest first.
        raised: the error of the last call; "" if it returned.
    """

    def __init__(self, header: Header) -> None:
        self._matchers = LoggedMatchers()
        self.scheduler = new_scheduler(header, self._matchers)
        self._num_seen = self.scheduler.decisions.num_records
        self._replayed: deque[DecisionRecord] = deque()  # decisions that are not yet compared
        self.in_flight: deque[ScheduleBatch] = deque()
        self.raised = ""

    def take(
        self, record: LogRecord, effects: Sequence[DecisionRecord], num_passes: int
    ) -> Difference | None:
        """Make the call of `record`, or compare `record` with the decisions of the last call.

        Args:
            record: the next one of the log.
            effects: the decisions of the call that `record` is; see `with_effects`.
            num_passes: passes of the log before it.
        """
        if self.raised:
            return _difference(record, num_passes, f"the replay ended here: {self.raised}")
        if isinstance(record, Settled) and record.step_id and not self._replayed:
            if not self.in_flight:
                return _difference(record, num_passes, "the log settles a step that the replay did not plan")
            self.call(record, effects)
        if isinstance(record, Arrived | PassRecord | Settled | Handover):
            return self._compare(record, num_passes)
        if self._replayed:
            extra = self._replayed[0]
            return _difference(extra, num_passes, f"only the replay has this record: {_words(extra)}")
        self.call(record, effects)
        return None

    def call(self, record: LogRecord, effects: Sequence[DecisionRecord]) -> None:
        """Make the call that `record` is; `effects`: see `with_effects`. An error is kept in `raised`."""
        scheduler, matchers = self.scheduler, self._matchers
        matchers.ends, matchers.drafts = _grammar_ends(effects), _grammar_drafts(effects)
        try:
            match record:
                case Input():
                    scheduler.handle(record.message, record.now_s)
                case Planning():
                    batch = scheduler.next_batch(record.now_s)
                    if batch is not None:
                        self.in_flight.append(batch)
                case Settled():
                    scheduler.settle(self.in_flight.popleft(), _result(record), record.now_s, record.refused)
                case Idle():
                    scheduler.on_idle()
        except Exception as error:  # a bug that ended the run; the replay reproduces it
            self.raised = f"{type(error).__name__}: {error}"
        scheduler.take_outputs()
        scheduler.take_call_answers()
        scheduler.take_transfer_commands()
        decisions = scheduler.decisions
        self._replayed.extend(decisions.since(self._num_seen))
        self._num_seen = decisions.num_records

    def _compare(self, logged: DecisionRecord, num_passes: int) -> Difference | None:
        if not self._replayed:
            what = f"the replay ended here: {self.raised}" if self.raised else "only the log has this record"
            return _difference(logged, num_passes, f"{what}: {_words(logged)}")
        replayed = self._replayed.popleft()
        if logged == replayed:
            return None
        if type(logged) is not type(replayed):
            what = f"the log goes on with {_words(logged)}, the replay with {_words(replayed)}"
            return _difference(logged, num_passes, what)
        fields = tuple(_field_differences(logged, replayed))
        names = ", ".join(dict.fromkeys(field.field.split("[")[0].split(".")[0] for field in fields))
        return _difference(logged, num_passes, f"{_words(logged)} differs in {names}", fields)


def with_effects(records: Iterable[LogRecord]) -> Iterator[tuple[LogRecord, Sequence[DecisionRecord]]]:
    """Pair each recorded call with its decisions; other records have none.

    The log has the decisions of a call after it; the result of a step is a call and its decision at once.
    """
    call: LogRecord | None = None
    effects: list[DecisionRecord] = []
    for record in records:
        if isinstance(record, Arrived | PassRecord | Handover) or (
            isinstance(record, Settled) and not record.step_id
        ):
            effects.append(record)
            continue
        yield from _in_log_order(call, effects)
        call, effects = record, []
        if isinstance(record, Settled):
            yield record, (record,)
            call = None
    yield from _in_log_order(call, effects)


def _in_log_order(
    call: LogRecord | None, effects: Sequence[DecisionRecord]
) -> Iterator[tuple[LogRecord, Sequence[DecisionRecord]]]:
    if call is not None:
        yield call, effects
    for effect in effects:
        yield effect, ()


def _grammar_ends(effects: Sequence[DecisionRecord]) -> dict[str, LoggedEnd]:
    return {
        left.rid: LoggedEnd(left.output_len, record.grammar_ends[left.rid], left.kind is FinishKind.LENGTH)
        for record in effects
        if isinstance(record, Settled) and record.grammar_ends
        for left in record.left
        if left.rid in record.grammar_ends
    }


def _grammar_drafts(effects: Sequence[DecisionRecord]) -> dict[str, MatcherDrafts]:
    drafts: dict[str, MatcherDrafts] = {}
    for record in effects:
        if isinstance(record, PassRecord) and record.grammar_drafts:
            drafts.update(record.grammar_drafts)
    return drafts


def _result(record: Settled) -> StepResult:
    return StepResult(
        record.step_id,
        record.next_token_ids,
        errors=record.errors,
        forward_s=record.forward_s,
        swap_s=record.swap_s,
        out_of_memory=record.out_of_memory,
        num_next_tokens=record.num_next_tokens,
        vectors=record.vectors,
        encode_s=record.encode_s,
        draft_s=record.draft_s,
    )


def _difference(
    record: LogRecord, num_passes: int, what: str, fields: tuple[FieldDifference, ...] = ()
) -> Difference:
    step_id = record.step_id if isinstance(record, PassRecord | Settled) else 0
    now_s = record.now_s if not isinstance(record, Header) else 0.0
    return Difference(num_passes, step_id, now_s, what, fields)


def _words(record: DecisionRecord) -> str:
    match record:
        case Arrived():
            return f"the arrival of {record.rid}"
        case Handover():
            return f"the handover of {record.rid}: {record.event}"
        case PassRecord():
            return f"the pass of step {record.step_id}" if record.step_id else "a pass without a step"
        case Settled() if record.step_id:
            return f"the result of step {record.step_id}"
        case Settled() if record.grammars:
            return "the grammar of " + ", ".join(record.grammars)
        case Settled():
            return "the end of " + ", ".join(left.rid for left in record.left)


def _field_differences(logged: DecisionRecord, replayed: DecisionRecord) -> Iterator[FieldDifference]:
    for name in logged.__struct_fields__:
        yield from _differences(name, getattr(logged, name), getattr(replayed, name))


def _differences(name: str, logged: object, replayed: object) -> Iterator[FieldDifference]:
    """The differences at the deepest level with a name: the first item of a list, the fields of a tuple."""
    if logged == replayed:
        return
    names = getattr(logged, "_fields", None)
    if names is not None and type(logged) is type(replayed):
        for field in names:
            yield from _differences(f"{name}.{field}", getattr(logged, field), getattr(replayed, field))
    elif isinstance(logged, list) and isinstance(replayed, list):
        yield from _first_of_list(name, logged, replayed)
    else:
        yield FieldDifference(name, _text(logged), _text(replayed))


def _first_of_list(
    name: str, logged: Sequence[object], replayed: Sequence[object]
) -> Iterator[FieldDifference]:
    for idx, (before, after) in enumerate(zip(logged, replayed, strict=False)):
        if before != after:
            if getattr(before, "rid", None) == getattr(after, "rid", None):
                yield from _differences(f"{name}[{idx}]", before, after)
            else:
                yield FieldDifference(f"{name}[{idx}]", _text(before), _text(after))
            return
    idx = min(len(logged), len(replayed))
    before_text, after_text = (_text(each[idx]) if idx < len(each) else "-" for each in (logged, replayed))
    yield FieldDifference(f"{name}[{idx}]", before_text, after_text)


def _text(value: object) -> str:
    verdict_text = getattr(value, "text", None)
    text = str(verdict_text()) if callable(verdict_text) else repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
