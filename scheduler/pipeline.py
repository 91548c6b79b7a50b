"""`Pipeline`: plans and launches the steps of a scheduler on its runner, and settles them in the order of launch.

The caller, the server's event loop or an engine on a thread, calls `advance` in a loop and passes messages with
`handle` in between. Each `advance` plans and launches a step, then settles the oldest step if too many are in flight.
The plain loop leaves no step in flight. The overlapped loop leaves one: the device computes it while the host settles
the step before it and plans the step after it.

    plain       plan 1  launch 1  settle 1 | plan 2  launch 2  settle 2 | plan 3 ...
    overlapped  plan 1  launch 1 | plan 2  launch 2  settle 1 | plan 3  launch 3  settle 2 | plan 4 ...
    device              [ step 1            ][ step 2                   ][ step 3 ...

The scheduler plans step 2 before it knows the tokens of step 1, which the runner keeps on the device. So a stop token
is noticed one step late: a request that ends with step 1 computes one surplus token in step 2, which is dropped when
step 2 is settled. Each request gets the same tokens either way.

The masks of grammars depend on the tokens of the step before. So a step with grammars settles step 1 within launch 2,
between the forward pass of step 2, which the device computes meanwhile, and its sampler:

    overlapped  plan 1  launch 1 | plan 2  launch 2 (forward  settle 1  masks  sampler) | plan 3 ...

A step with drafts yields an unknown number of tokens, so it is settled before the next one is planned; it may itself be
planned while another one is in flight (`speculation.py`).

With n pipeline stages n - 1 steps are left in flight, each with other requests: a request that samples is not planned
again before its token is settled (`MicroBatches`). Chunks of one prompt follow each other, because they sample
nothing. So no token is surplus, and masks need not wait:

    2 stages    plan 1  launch 1 | plan 2  launch 2  settle 1 | plan 3  launch 3  settle 2 | plan 4 ...
    stage 0             [ step 1 ]         [ step 2 ]                   [ step 3 ]
    stage 1                       [ step 1 ]         [ step 2 ]                   [ step 3 ]
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from ..runtime.errors import ConfigError
from ..runtime.messages import AdapterRead, Call, LoadAdapter, SchedulerInput, UnloadAdapter
from ..runtime.scheduler_report import GrammarTotals, SchedulerReport
from ..runtime.step_plan import GetMasks, Pending, Runner, no_masks
from .adapters.adapter_table import AdapterReader, EndOfRead
from .batch import ScheduleBatch
from .grammar.grammar_builder import GrammarBuilder
from .grammar.mask_filler import MaskMeter, StepMasks
from .journal.recorder import Recorder
from .scheduler import Scheduler

logger = logging.getLogger(__name__)


class InFlight(NamedTuple):
    """A step that was launched and is not settled; `masks`: of its grammars."""

    batch: ScheduleBatch
    pending: Pending
    masks: StepMasks | None


class Pipeline:
    """See the module. It makes all calls that change the scheduler, and reports each to the recorder, in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        recorder: Recorder,
        clock: Callable[[], float],
        *,
        overlap: bool,
        grammars: GrammarBuilder | None = None,
        adapters: AdapterReader | None = None,
    ) -> None:
        """Take the parts.

        Args:
            grammars: the scheduler's `MatcherSource`; None: no request has a grammar.
            adapters: reads the weights of adapters; None: the scheduler has no slots for any.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._clock = clock
        self._max_left_in_flight = max(int(overlap), scheduler.num_stages - 1)
        self._grammars = grammars or GrammarBuilder()
        self._adapters = adapters
        self._num_reads = 0  # of adapters, that have not ended
        self._in_flight: deque[InFlight] = deque()
        self._mask_meter = MaskMeter(clock)

    def handle(self, message: SchedulerInput) -> None:
        """Give the scheduler a message. Steps may be in flight."""
        prepared = self._grammars.received(message, self._scheduler.waiting_grammar)
        if prepared is not None:
            self._handle(prepared)

    def _handle(self, message: SchedulerInput) -> None:
        now_s = self._clock()
        self._recorder.received(message, now_s)
        self._scheduler.handle(message, now_s)
        self._grammars.clear()
        if self._adapters is not None:
            match message:
                case Call(request=LoadAdapter() as load) if self._scheduler.is_reading(load.store_id):
                    self._num_reads += 1
                    self._adapters.read_later(load.store_id, load.adapter)
                case Call(request=UnloadAdapter() as unload):
                    self._adapters.drop(unload.store_id)

    @property
    def is_preparing(self) -> bool:
        """Whether a request will become ready without a further message: a grammar is built, or an adapter read."""
        return self._grammars.is_building or self._num_reads > 0

    def _take_adapter(self, read: EndOfRead) -> None:
        self._num_reads -= 1
        if read.error:
            logger.warning("an adapter cannot be read: %s", read.error)
        self._handle(AdapterRead(read.store_id, read.error))

    def finish_reads(self) -> None:
        """Wait until all adapters are read; for the start.

        Raises:
            ConfigError: one cannot be read.
        """
        while self._adapters is not None and self._num_reads:
            read = self._adapters.wait()
            self._take_adapter(read)
            if read.error:
                raise ConfigError(read.error)

    def advance(self, has_news: Callable[[], bool]) -> bool:
        """Plan and launch a step if there is one, and settle a step if it must be; whether anything was done.

        Blocks until the device is done with the step that is settled, and no longer. If no step can be planned while
        one is in flight, that one is settled, because the next plan may depend on its result: call again at once.
        After False nothing is in flight, and only a message or time can change what the scheduler decides.

        Args:
            has_news: whether a message has arrived meanwhile; a message ends a multi-step decode.
        """
        for ready in self._grammars.take_ready():
            self._grammars.stage(ready, self._scheduler.waiting_grammar)
            self._handle(ready)
        if self._adapters is not None and self._num_reads:
            for read in self._adapters.done():
                self._take_adapter(read)
        now_s = self._clock()
        self._recorder.planning(now_s)
        batch = self._scheduler.next_batch(now_s)
        self._recorder.planned(batch)
        if batch is not None:
            self._in_flight.append(self._launch(batch, has_news))
        elif not self._in_flight:
            return False
        if batch is None or len(self._in_flight) > self._max_left_in_flight:
            self._settle_oldest()
        if batch is not None and self._scheduler.needs_result(batch):
            self._settle_all()
        return True

    def _launch(self, batch: ScheduleBatch, has_news: Callable[[], bool]) -> InFlight:
        launched_s = self._clock()
        rounds = itertools.count(1)

        def may_continue(next_token_ids: bytes) -> bool:
            if has_news():
                return False
            return self._scheduler.may_continue(
                batch, next_token_ids, next(rounds), self._clock() - launched_s
            )

        masks = None
        if batch.has_grammar:
            filler, settle_earlier = self._scheduler.masks, self._settle_all
            if self._scheduler.num_stages > 1:
                # A request is in no other step that samples, and the steps before go on while the masks are filled.
                filler, settle_earlier = self._scheduler.new_masks(), _nothing
            masks = StepMasks(filler, batch, settle_earlier, self._mask_meter)
        get_masks: GetMasks = no_masks if masks is None else masks
        return InFlight(batch, self._runner.launch(batch.plan, may_continue, get_masks), masks)

    def report(self, now_s: float) -> SchedulerReport:
        """The scheduler's report with the figures of grammars, which the scheduler, without a clock, does not have."""
        builder, meter = self._grammars, self._mask_meter
        grammar = GrammarTotals(builder.num_builds, builder.build_s, meter.num_masks, meter.seconds)
        return replace(self._scheduler.report(now_s), grammar=grammar)

    def idle(self) -> None:
        """Let the scheduler check its accounts. Call when `advance` had nothing to do.

        Raises:
            LedgerError: pages, locks or rows are missing. A bug.
        """
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        self._recorder.idle(self._clock())
        self._scheduler.on_idle()

    def _settle_all(self) -> None:
        while self._in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        batch, pending, masks = self._in_flight.popleft()
        result = pending.wait()
        self._scheduler.settle(batch, result, self._clock(), () if masks is None else masks.refused)
        self._recorder.settled()


def _nothing() -> None:
    return
