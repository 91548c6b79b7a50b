"""`Adaptive`: a different policy for each load, with hysteresis."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from ...runtime.messages import FinishKind
from ..requests.req import Chunk, Req
from ..requests.requests import WaitingQueue
from .base import Load, PolicyParts, SchedulePolicy
from .key_orders import Fcfs, Lpm, Priority

logger = logging.getLogger(__name__)

LOW_LOAD: Final = 0.3
HIGH_LOAD: Final = 0.8
BAND: Final = 0.05
"""Hysteresis: a threshold is crossed when the load is this far beyond it."""

MIN_STEPS: Final = 32
"""Steps that a policy stays active at least; a batch that starts or ends changes the load only briefly."""


class Adaptive(SchedulePolicy):
    """Low load: fcfs; high load: lpm; between them: priority. Load is the larger share of rows and of KV memory.

    Under low load every request starts at once, so the order without a cost is best. Under high load throughput
    matters, and cached prefixes save the most computing. Between them urgent requests go first. The load is read after
    each planned step. Each switch is logged and noted in the decision log.
    """

    name = "adaptive"

    def __init__(self, parts: PolicyParts, priority: Priority) -> None:
        self._load = parts.load
        self._low, self._middle, self._high = Fcfs(), priority, Lpm(parts)
        self._policies: tuple[SchedulePolicy, ...] = (self._low, self._middle, self._high)
        self._active: SchedulePolicy = self._low
        self._num_steps = MIN_STEPS
        self._notes: list[str] = []

    @property
    def active_name(self) -> str:
        """For example `adaptive:lpm`."""
        return f"{self.name}:{self._active.name}"

    def enqueued(self, req: Req) -> None:
        for policy in self._policies:
            policy.enqueued(req)

    def dequeued(self, req: Req) -> None:
        for policy in self._policies:
            policy.dequeued(req)

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        for policy in self._policies:
            policy.planned(chunks, decodes)
        self._num_steps += 1
        if self._num_steps >= MIN_STEPS:
            self._choose(self._load())

    def gained(self, req: Req, num_tokens: int) -> None:
        for policy in self._policies:
            policy.gained(req, num_tokens)

    def finished(self, req: Req, kind: FinishKind) -> None:
        for policy in self._policies:
            policy.finished(req, kind)

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return self._active.order(waiting, now_s)

    def may_displace(self, req: Req, victim: Req) -> bool:
        return self._active.may_displace(req, victim)

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def _choose(self, load: Load) -> None:
        share = max(load.num_running / load.max_running, load.kv_share)
        chosen = self._for_load(share)
        if chosen is not self._active:
            self._notes.append(f"{self._active.name} -> {chosen.name} at load {share:.2f}")
            logger.info(
                "adaptive policy switches from=%s to=%s load=%.2f", self._active.name, chosen.name, share
            )
            self._active = chosen
            self.preempts, self.by_priority = chosen.preempts, chosen.by_priority
            self._num_steps = 0

    def _for_load(self, share: float) -> SchedulePolicy:
        """The policy for a load; the thresholds of the active policy are moved away from it by `BAND`."""
        low = LOW_LOAD + (BAND if self._active is self._low else -BAND)
        high = HIGH_LOAD + (-BAND if self._active is self._high else BAND)
        if share < low:
            return self._low
        return self._high if share > high else self._middle
