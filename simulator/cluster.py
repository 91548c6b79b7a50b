"""`Cluster`: replicas on one virtual clock: dispatch of requests, prefill/decode disaggregation; `simulate` runs one.

A simple model of disaggregation: a prefill replica computes the prompt and the first token; it sends the KV over its
network card, one request at a time; a decode replica continues, and the prompt costs it memory but no computation.
Layer-wise transfer, retries and back pressure of a real system are not modeled.
"""

from __future__ import annotations

import gc
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from ..runtime.config.device_config import DispatchPolicyName
from ..runtime.errors import ConfigError
from ..runtime.messages import Call
from .cost_model import CostModel
from .dispatch import SimulatedDispatcher
from .report import Measurements, Report, make_report
from .sim_request import ActiveRequest, SimRequest, Workload
from .simulated_engine import ReplicaSettings, SimulatedEngine

_NO_LIMIT: Final = 1 << 30
_EVENTS_PER_REPORT: Final = 256
_Event = tuple[float, int, SimulatedEngine, ActiveRequest | Call | None]


class ClusterSettings(NamedTuple):
    """The number of replicas and their roles.

    Attributes:
        num_replicas: all replicas.
        num_prefill: replicas that only compute prompts; 0: no disaggregation.
        dispatch: policy for arriving requests, among the prefill replicas if there are some; decode replicas are
            chosen by `shortest-queue`.
        transfer_token_s: seconds to send one token's KV to another replica.
    """

    num_replicas: int = 1
    num_prefill: int = 0
    dispatch: DispatchPolicyName = "prefix-affinity"
    transfer_token_s: float = 0.0

    def check(self) -> None:
        """Raises:
        ConfigError: no replicas, or no replica that decodes.
        """
        if self.num_replicas < 1:
            raise ConfigError(f"--replicas is {self.num_replicas}, but it must be at least 1")
        if self.num_prefill and self.num_replicas == 1:
            raise ConfigError(
                f"--prefill-replicas is {self.num_prefill}, but the only replica must decode, too; raise --replicas"
            )
        if self.num_prefill and not 0 < self.num_prefill < self.num_replicas:
            raise ConfigError(
                f"--prefill-replicas is {self.num_prefill}, but it must lie in [1, {self.num_replicas - 1}]: of "
                f"{self.num_replicas} replicas at least one must decode; raise --replicas"
            )


class _Arrivals:
    """The requests of a workload and, in a closed loop, those that follow an answer; by arrival.

    Attributes:
        first: the next request; None: there is none, until an answer brings one.
    """

    def __init__(self) -> None:
        self.first: SimRequest | None = None
        self._workload: Workload = iter(())
        self._upcoming: SimRequest | None = None
        self._turns: list[tuple[float, int, SimRequest]] = []
        self._num_turns = 0

    def begin(self, workload: Workload) -> None:
        self._workload = workload
        self._upcoming = next(workload, None)
        self._choose()

    def advance(self) -> None:
        """Take `first`."""
        if self.first is self._upcoming:
            self._upcoming = next(self._workload, None)
        else:
            heapq.heappop(self._turns)
        self._choose()

    def answered(self, live: ActiveRequest, now_s: float) -> None:
        """A request has its last token: its session goes on."""
        turn = live.request.next_turn and live.request.next_turn(now_s)
        if turn is not None:
            self._num_turns += 1
            heapq.heappush(self._turns, (turn.arrival_s, self._num_turns, turn))
            self._choose()

    def _choose(self) -> None:
        self.first = self._upcoming
        if self._turns and (self.first is None or self._turns[0][0] < self.first.arrival_s):
            self.first = self._turns[0][2]


class Cluster:
    """See the module.

    Arrivals beyond `max_queued_requests` per replica wait outside the queue, like clients that get 429 and retry; this
    bounds the memory even if a million requests arrive at once.
    """

    def __init__(
        self, settings: ClusterSettings, replica: ReplicaSettings, cost: CostModel, measurements: Measurements
    ) -> None:
        settings.check()
        self._settings = settings
        self._measurements = measurements
        self._events: list[_Event] = []
        self._arrivals = _Arrivals()
        self._num_events = 0
        self._link_free_s: dict[int, float] = {}
        num_entry = settings.num_prefill or settings.num_replicas
        num_decode = settings.num_replicas - num_entry
        max_tokens = replica.capacity.max_total_tokens
        self._dispatcher = SimulatedDispatcher(settings.dispatch, num_entry, max_tokens)
        self._decode_dispatcher = SimulatedDispatcher("shortest-queue", num_decode, max_tokens)
        self._entry = [
            SimulatedEngine(
                replica,
                cost,
                measurements,
                self._dispatcher,
                answered=self._arrivals.answered,
                hand_over=partial(self._hand_over, idx) if num_decode else None,
            )
            for idx in range(num_entry)
        ]
        decode = _decode_settings(replica)
        self._decoders = [
            SimulatedEngine(
                decode, cost, measurements, self._decode_dispatcher, answered=self._arrivals.answered
            )
            for _ in range(num_decode)
        ]
        self._max_outstanding = replica.scheduler.max_queued_requests + replica.capacity.max_running_requests
        self._due: dict[int, tuple[float, int]] = {}  # id of a replica -> its next event; others are stale

    @property
    def replicas(self) -> list[SimulatedEngine]:
        """All replicas, the prefill replicas first."""
        return self._entry + self._decoders

    def run(
        self,
        workload: Workload,
        calls: Iterable[tuple[float, Call]] = (),
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Simulate until every request is finished.

        Args:
            calls: to every replica, with their times.
            on_progress: called now and then with the number of finished requests.
        """
        for at_s, call in calls:
            for engine in self.replicas:
                self._push(at_s, engine, call)
        with _no_garbage_collection():
            self._run(workload, on_progress)

    def _run(self, workload: Workload, on_progress: Callable[[int], None] | None) -> None:
        events, arrivals = self._events, self._arrivals
        arrivals.begin(workload)
        now_s = 0.0
        for num_events in itertools.count():
            if on_progress is not None and num_events % _EVENTS_PER_REPORT == 0:
                on_progress(self._measurements.num_finished)
            # At equal times arrivals go first: a step includes every request that has arrived.
            while (upcoming := arrivals.first) is not None and (
                not events or upcoming.arrival_s <= events[0][0]
            ):
                if not self._has_room():
                    break
                arrivals.advance()
                now_s = max(now_s, upcoming.arrival_s)
                self._dispatch(upcoming, now_s)
            if not events:
                assert upcoming is None, "requests wait although the replicas are idle"
                return
            at_s, number, engine, what = heapq.heappop(events)
            if what is not None:
                now_s = at_s
                self._deliver(engine, what, now_s)
                continue
            if self._due.get(id(engine)) != (at_s, number):
                continue
            now_s = at_s
            del self._due[id(engine)]
            next_s = engine.advance(now_s)
            if next_s is not None:
                self._wake(engine, next_s)

    # ------------------------------------------------------------ requests to replicas

    def _has_room(self) -> bool:
        return any(engine.num_outstanding < self._max_outstanding for engine in self._entry)

    def _accepting(self) -> list[int]:
        """Numbers of the replicas whose queues are not full."""
        return [
            idx for idx, engine in enumerate(self._entry) if engine.num_outstanding < self._max_outstanding
        ]

    def _dispatch(self, request: SimRequest, now_s: float) -> None:
        self._measurements.first_arrival_s = min(self._measurements.first_arrival_s, request.arrival_s)
        live = ActiveRequest(request)
        if request.is_prefilled and request.output_len == 1:
            self._measurements.answered(
                arrival_s=request.arrival_s,
                start_s=live.start_s,
                first_s=live.first_s,
                end_s=live.last_s,
                output_len=1,
            )
            self._arrivals.answered(live, live.last_s)
            return
        engine = self._entry[self._dispatcher.send(live, self._accepting())]
        if request.ready_s is None or request.ready_s <= now_s:
            self._deliver(engine, live, now_s)
        else:
            self._push(request.ready_s, engine, live)

    def _deliver(self, engine: SimulatedEngine, what: ActiveRequest | Call, now_s: float) -> None:
        engine.submit(what)
        if not engine.is_busy:
            self._wake(engine, now_s)

    def _hand_over(self, idx: int, live: ActiveRequest, now_s: float) -> None:
        """A prefill replica has finished a request: its KV is sent when the link is free."""
        start_s = max(now_s, self._link_free_s.get(idx, 0.0))
        arrives_s = start_s + live.request.prompt_len * self._settings.transfer_token_s
        self._link_free_s[idx] = arrives_s
        live.prefilled = True
        engine = self._decoders[self._decode_dispatcher.send(live, range(len(self._decoders)))]
        self._push(arrives_s, engine, live)

    # ------------------------------------------------------------ events

    def _wake(self, engine: SimulatedEngine, at_s: float) -> None:
        due = self._due.get(id(engine))
        if due is None or at_s < due[0]:
            self._due[id(engine)] = (at_s, self._push(at_s, engine, None))

    def _push(self, at_s: float, engine: SimulatedEngine, what: ActiveRequest | Call | None) -> int:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, engine, what))
        return self._num_events


def _decode_settings(replica: ReplicaSettings) -> ReplicaSettings:
    """The settings of a decode replica: prompts arrive computed, so the limits on prefill do not apply."""
    scheduler = replace(
        replica.scheduler,
        chunked_prefill_size=-1,
        target_step_ms=0.0,
        max_prefill_tokens=_NO_LIMIT,
        max_num_batched_tokens=None,
    )
    return replica._replace(scheduler=scheduler)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of live objects without cycles: the collector would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    workload: Workload,
    replica: ReplicaSettings,
    cost: CostModel,
    cluster: ClusterSettings | None = None,
    *,
    slo_ms: Mapping[str, float] | None = None,
    name: str = "",
    on_progress: Callable[[int], None] | None = None,
) -> Report:
    """Run a workload to its end and report; equal arguments give equal reports. `on_progress`: see `Cluster.run`.

    Raises:
        ConfigError: the cluster's settings contradict each other, or the workload's file is broken.
        SimulationError: the scheduler makes no progress; a bug.
    """
    cluster = cluster or ClusterSettings()
    measurements = Measurements()
    Cluster(cluster, replica, cost, measurements).run(workload, on_progress=on_progress)
    return make_report(
        measurements,
        name=name or replica.scheduler.schedule_policy,
        num_replicas=cluster.num_replicas,
        slo_ms=slo_ms,
    )
