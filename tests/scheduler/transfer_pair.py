"""`Pair`: a prefill and a decode scheduler with FakeRunners, and a connection that a test controls.

The decode side's runner checks every KV value that it reads, so a page that comes late, never or wrong is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from engine.runtime.messages import KVHandoff
from engine.runtime.transport.kv_transfer import (
    AbortAck,
    ClaimAborted,
    FromPeer,
    PagesWritten,
    PeerLost,
    ToPeer,
    WritePages,
)

from .harness import Harness

PREFILL, DECODE = "prefill:8998", "decode-1"


class Delivery(NamedTuple):
    """Something under way. Of the kinds "to prefill" and "to decode" the order is kept, of "write" it is not."""

    kind: str
    make: Callable[[], None]


class Pair:
    """Commands of the two schedulers become deliveries, which wait in `network` until `deliver` makes them.

    Attributes:
        network: what is under way.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        prefill: dict[str, Any] | None = None,
        make: Callable[..., Harness] = Harness,
        **decode: Any,
    ) -> None:
        """Make both sides with `make`; further settings are those of the decode side."""
        self.prefill = make(disaggregation_mode="prefill", num_pages=num_pages, **(prefill or {}))
        self.decode = make(disaggregation_mode="decode", num_pages=num_pages, **decode)
        self.network: deque[Delivery] = deque()
        self.is_prefill_alive = True
        self.fails_write: Callable[[WritePages], bool] = lambda command: False

    def submit(
        self, bootstrap_room: str, *, to_prefill: bool = True, to_decode: bool = True, **request: Any
    ) -> str:
        """Send the two halves of a request; returns its id, which is the same on both sides."""
        rid: str = request.pop("rid", f"r{len(self.decode.answers)}-{bootstrap_room}")
        prompt = request.pop("prompt", None)
        if prompt is None:
            prompt = [int(token) for token in self.decode.rng.integers(1, 97, request.pop("prompt_len", 11))]
        fields = request.pop("message", {})
        if to_decode:
            handoff = KVHandoff(bootstrap_room, PREFILL)
            self.decode.submit(rid, prompt=prompt, message={**fields, "handoff": handoff}, **request)
        if to_prefill:
            self.prefill.submit(
                rid, prompt=prompt, message={**fields, "handoff": KVHandoff(bootstrap_room)}, **request
            )
        self.collect()
        return rid

    def step(self, *, deliver: bool = True) -> bool:
        """A turn of both event loops, and of the network; whether anything was done."""
        now_s = max(self.prefill.now_s, self.decode.now_s)
        self.prefill.now_s = self.decode.now_s = now_s
        busy = False
        for harness in (self.prefill, self.decode):
            if harness is self.prefill and not self.is_prefill_alive:
                continue
            busy |= harness.step() is not None or bool(harness.in_flight)
        self.collect()
        while deliver and self.network:
            self.deliver()
            busy = True
        return busy

    def run(self, max_steps: int = 2_000) -> None:
        """Until both are idle; then the books of both are checked."""
        idle = 0
        for _ in range(max_steps):
            if self.step():
                idle = 0
                continue
            idle += 1
            for harness in (self.prefill, self.decode):
                harness.scheduler.on_idle()
            wakes = [harness.scheduler.wake_s() for harness in (self.prefill, self.decode)]
            due = [wake for wake in wakes if wake is not None]
            if due:
                self.prefill.now_s = self.decode.now_s = max(self.decode.now_s, *due)
            elif idle > 1:
                self.check()
                return
        raise AssertionError("not idle")

    def check(self) -> None:
        """Each request of the decode side was answered as if it had run alone; nothing is left of any."""
        for harness in (self.prefill, self.decode):
            if harness is self.prefill and not self.is_prefill_alive:
                continue
            harness.scheduler.audit()
            harness.scheduler.on_idle()
            figures = harness.scheduler.report(0.0).transfer
            assert figures is not None
            assert (figures.open, figures.waiting, figures.held_pages) == (0, 0, 0)
        self.decode.check_answers()

    # ------------------------------------------------------------ the network

    def collect(self) -> None:
        """Queue what the schedulers have ordered since."""
        for command in self.prefill.scheduler.take_transfer_commands():
            if isinstance(command, ToPeer):
                assert command.peer == DECODE
                message = FromPeer(PREFILL, command.message)
                self.network.append(Delivery("to decode", partial(self.tell, self.decode, message)))
            else:
                assert isinstance(command, WritePages)
                self.network.append(Delivery("write", partial(self.write, command)))
        for command in self.decode.scheduler.take_transfer_commands():
            assert isinstance(command, ToPeer) and command.peer == PREFILL
            message = FromPeer(DECODE, command.message)
            self.network.append(Delivery("to prefill", partial(self.to_prefill, message)))

    def deliver(self, index: int = 0) -> None:
        """Make one of the deliveries."""
        self.network.rotate(-index)
        delivery = self.network.popleft()
        self.network.rotate(index)
        delivery.make()
        self.collect()

    def choices(self) -> list[int]:
        """What may be delivered next: any write, and the first message of each direction."""
        found, seen = [], set()
        for index, delivery in enumerate(self.network):
            if delivery.kind == "write" or delivery.kind not in seen:
                found.append(index)
            seen.add(delivery.kind)
        return found

    def tell(self, harness: Harness, message: FromPeer | PagesWritten | PeerLost) -> None:
        harness.scheduler.handle(message, harness.now_s)
        harness.collect()
        harness.scheduler.audit()

    def to_prefill(self, message: FromPeer) -> None:
        if self.is_prefill_alive:
            self.tell(self.prefill, message)
        elif isinstance(message.message, ClaimAborted):  # its link answers
            ack = FromPeer(PREFILL, AbortAck(message.message.bootstrap_room, message.message.attempt))
            self.network.append(Delivery("to decode", partial(self.tell, self.decode, ack)))

    def write(self, command: WritePages) -> None:
        """Copy the pages, as they are now."""
        error = "the connection was reset" if self.fails_write(command) else ""
        if not error:
            sources, targets = (
                np.frombuffer(each, dtype=np.int32) for each in (command.sources, command.targets)
            )
            assert len(sources) == len(targets) > 0
            page_size = self.decode.capacity.page_size
            here = self.prefill.runner.kv.reshape(-1, page_size)
            self.decode.runner.kv.reshape(-1, page_size)[targets] = here[sources]
        self.tell(
            self.prefill, PagesWritten(command.peer, command.bootstrap_room, command.attempt, error, 0.001)
        )

    def lose_prefill(self) -> None:
        """The prefill engine dies, with all that is under way."""
        self.is_prefill_alive = False
        self.network.clear()
        self.tell(self.decode, PeerLost(PREFILL, "it is gone"))
