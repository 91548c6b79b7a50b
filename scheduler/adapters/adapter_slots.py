"""`AdapterSlots`: which LoRA adapters are in the runner's slots, and whether a request's adapter can get one.

A step reads the adapters of its requests from slots 1..n; slot 0 is the base model. A slot is

    free      it has no adapter yet
    idle      its adapter is in it, and no request with a row uses it: the next request need not move it, and the slot
              that was idle longest is taken for another adapter
    in use    by the rows of one or more requests

    free + idle + in use == n

A slot that is taken for another adapter is written by the next plan (`StepPlan.adapter_loads`). Earlier plans that
still read it are launched before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from ..memory.pages import LedgerError
from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.req import MAX_OVERTAKEN, Req, ReqStatus
from .adapter_table import AdapterTable

_WAITING = (ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.SWAPPED)


class AdapterSlots:
    """See the module. Admission asks it first; a `RowObserver`.

    Without a further rule, new requests of the adapters in use could block another adapter without end. So after a
    request was overtaken `MAX_OVERTAKEN` times, the adapter with the fewest requests is drained: no new request starts
    with it until the overtaken one has started. SGLang's `lora_drainer` does the same after a time.
    """

    def __init__(self, num_slots: int, table: AdapterTable) -> None:
        self._num_slots = num_slots
        self._table = table
        self._slot_of: dict[str, int] = {}  # by fingerprint, idle or in use
        self._in_use: Counter[str] = Counter()  # requests, by fingerprint
        self._idle: OrderedDict[str, None] = OrderedDict()  # fingerprints, the longest idle first
        self._loads: dict[int, int] = {}  # slot -> store id, for the next plan
        self._drained = ""  # fingerprint
        self._drained_for: Req | None = None

    @property
    def num_in_use(self) -> int:
        """Slots that rows use."""
        return len(self._in_use)

    # ------------------------------------------------------------ admission

    def refusal(self, req: Req) -> Verdict | None:
        """Reason why a waiting request cannot start now; None if it can."""
        fingerprint = req.lora_id
        if not fingerprint:
            return None
        adapter = self._table.get(fingerprint)
        if adapter is None or not adapter.is_ready:
            return Verdict(req.rid, AddReqResult.SKIP, Reason.ADAPTER_LOADING)
        self._end_drain()
        in_use = fingerprint in self._in_use
        if in_use and fingerprint != self._drained:
            return None
        if not in_use and len(self._in_use) < self._num_slots and self._drained_for in (None, req):
            return None
        if not in_use and self._drained_for is None and req.num_overtaken >= MAX_OVERTAKEN:
            self._drained = min(self._in_use, key=lambda other: (self._in_use[other], other))
            self._drained_for = req
        num_adapters = len(self._in_use) + (not in_use)
        return Verdict(req.rid, AddReqResult.SKIP, Reason.LORA_LIMIT, need=num_adapters, have=self._num_slots)

    def to_free_one(self, req: Req, background: Iterable[Req]) -> list[Req]:
        """Requests to retract so that a slot comes free for `req`: all that use one adapter; none if none is needed.

        Args:
            req: has a refusal.
            background: requests with a row that may be retracted.
        """
        if req.lora_id in self._in_use or len(self._in_use) < self._num_slots:
            return []
        users: dict[str, list[Req]] = {}
        for each in background:
            if each.lora_id:
                users.setdefault(each.lora_id, []).append(each)
        alone = [reqs for fingerprint, reqs in users.items() if len(reqs) == self._in_use[fingerprint]]
        return min(alone, key=len, default=[])

    def _end_drain(self) -> None:
        """Stop draining if the request that it was for has started or ended."""
        if self._drained_for is not None and self._drained_for.status not in _WAITING:
            self._drained, self._drained_for = "", None

    def admitted(self, req: Req) -> None:
        """Count a request from its admission on; it gets a row at the end of the pass."""
        if not req.lora_id:
            return
        self._idle.pop(req.lora_id, None)
        self._in_use[req.lora_id] += 1
        slot = self._slot_of.get(req.lora_id)
        if slot is None:
            slot = self._slot_of[req.lora_id] = self._take_slot()
            adapter = self._table.get(req.lora_id)
            assert adapter is not None, f"{req}: its adapter is unknown"
            self._loads[slot] = adapter.store_id
        req.adapter_slot = slot

    def _take_slot(self) -> int:
        if len(self._slot_of) < self._num_slots:
            taken = set(self._slot_of.values())
            return next(slot for slot in range(1, self._num_slots + 1) if slot not in taken)
        longest_idle, _ = self._idle.popitem(last=False)
        return self._slot_of.pop(longest_idle)

    def started(self, req: Req) -> None:
        pass

    def stopped(self, req: Req) -> None:
        if not req.lora_id:
            return
        req.adapter_slot = 0
        self._in_use[req.lora_id] -= 1
        if not self._in_use[req.lora_id]:
            del self._in_use[req.lora_id]
            if self._table.get(req.lora_id) is None:  # it was unloaded: its slot is free
                self._loads.pop(self._slot_of.pop(req.lora_id), None)
            else:
                self._idle[req.lora_id] = None

    # ------------------------------------------------------------ plans and unloads

    def take_loads(self) -> bytes:
        """[n, 2] int32 (slot, store id): the adapters that move into slots with the next plan; returned once."""
        if not self._loads:
            return b""
        loads = np.array(sorted(self._loads.items()), dtype=np.int32).tobytes()
        self._loads = {}
        return loads

    def unloaded(self, fingerprint: str) -> None:
        """An adapter is not in the table any more."""
        if fingerprint in self._idle:
            del self._idle[fingerprint]
            slot = self._slot_of.pop(fingerprint)
            self._loads.pop(slot, None)

    def audit(self, with_row: Iterable[Req]) -> None:
        """Check the slot equation, and that it agrees with the requests that have a row. For tests.

        Raises:
            LedgerError: it does not.
        """
        users: Counter[str] = Counter()
        for req in with_row:
            if req.lora_id:
                users[req.lora_id] += 1
                if req.adapter_slot != self._slot_of.get(req.lora_id):
                    raise LedgerError(
                        f"{req}: slot {req.adapter_slot} instead of {self._slot_of.get(req.lora_id)}"
                    )
            elif req.adapter_slot:
                raise LedgerError(f"{req}: slot {req.adapter_slot} without an adapter")
        if users != self._in_use:
            raise LedgerError(f"adapters in use: {dict(self._in_use)}, by the requests {dict(users)}")
        slots = list(self._slot_of.values())
        idle, in_use = len(self._idle), len(self._in_use)
        free = self._num_slots - len(set(slots))
        if len(set(slots)) != len(slots) or free + idle + in_use != self._num_slots:
            raise LedgerError(
                f"slot equation: free {free} + idle {idle} + in use {in_use}, but there are {self._num_slots} slots: "
                f"{self._slot_of}"
            )
        if not self._idle.keys() | self._in_use.keys() == self._slot_of.keys():
            raise LedgerError(
                f"slots of {sorted(self._slot_of)}, idle {list(self._idle)}, in use {list(self._in_use)}"
            )
