"""`KVEventReader`: a subscriber of a server's KV events that keeps the cached prefixes; pyzmq and msgpack alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, Self

import msgspec
import zmq

from .serving import DEADLINE_S, EngineServe

Prefix = tuple[str | None, tuple[int, ...]]

_SOCKETS: Final = re.compile(r"publishing kv events block_size=(\d+) at (\S+) (\S+)")
_END: Final = 2**64 - 1


def sockets_of(engine: EngineServe) -> tuple[int, str, str]:
    """Block size, and the addresses of events and replays, as the log of the server has them."""
    matches = _SOCKETS.findall(engine.log)
    assert matches, engine.log
    block_size, events, replays = matches[-1]
    return int(block_size), events, replays


class KVEventReader:
    """A context manager.

    Attributes:
        cached: adapter and tokens up to the end of each block, by hash.
        seqs: the numbers of all messages so far.
        kinds: the types of all events so far.
    """

    def __init__(self, events: str, replays: str) -> None:
        self.cached: dict[int, Prefix] = {}
        self.seqs: list[int] = []
        self.kinds: list[str] = []
        self._taken: set[tuple[int, bytes]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(b"")
        self._events.connect(events)
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.connect(replays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._context.destroy(linger=0)

    def catch_up(self) -> None:
        """Take what was published before, or was missed."""
        first = self.seqs[-1] + 1 if self.seqs else 0
        self._replays.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._replays.poll(int(DEADLINE_S * 1000))
            _, _, number, payload = self._replays.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq == _END:
                return
            self._take(seq, payload)

    def read_until(self, condition: Callable[[Self], bool]) -> None:
        """Take messages as they come until a condition holds."""
        until_s = time.monotonic() + DEADLINE_S
        while not condition(self):
            left_s = max(0.0, until_s - time.monotonic())
            assert self._events.poll(int(left_s * 1000)), (self.seqs, self.kinds)
            _, number, payload = self._events.recv_multipart()
            seq = int.from_bytes(number, "big")
            if not self.seqs or seq > self.seqs[-1]:
                self._take(seq, payload)
            elif (seq, payload) not in self._taken:  # of a new process
                self.seqs.clear()
                self._take(seq, payload)

    def longest(self, lora_name: str | None, tokens: list[int]) -> int:
        """Tokens at the beginning of a prompt that are cached."""
        known = set(self.cached.values())
        return max((n for n in range(len(tokens) + 1) if (lora_name, tuple(tokens[:n])) in known), default=0)

    def _take(self, seq: int, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        assert not self.seqs or seq == self.seqs[-1] + 1
        self.seqs.append(seq)
        self._taken.add((seq, payload))
        for event in events:
            self.kinds.append(event["type"])
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                size, parent = event["block_size"], event["parent_block_hash"]
                tokens = tuple[int, ...]() if parent is None else self.cached[parent][1]
                for number, block_hash in enumerate(event["block_hashes"]):
                    tokens = tokens + tuple(event["token_ids"][number * size : (number + 1) * size])
                    self.cached[block_hash] = (event["lora_name"], tokens)
            case "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del self.cached[block_hash]
            case "AllBlocksCleared":
                self.cached.clear()
