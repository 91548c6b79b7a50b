"""`TransferRole`: what a scheduler does for prompts that one engine computes and another one decodes.

One class per `--disaggregation-mode`: `TransferRole` itself (null), `PrefillRole`, `DecodeRole`. Like the scheduler, a
role does no I/O and uses no clock: messages of the other engine come in through `handle`, commands for the `LinkThread`
go out through `take_commands`.

    prefill engine                          decode engine
    request, computed as any other          request, RECEIVING
        │ chunk settled: pages cached           │ memory for the prompt: pages taken, `Claim`
        ├── WritePages ──────────────────────►  │
        │ first token                           │
        └── Prefilled ───────────────────────►  pages to the prefix cache, first token to the client,
                                                then WAITING: the rest of the last page is computed, and it decodes

Both sides keep the pages in the prefix cache, so a transfer fills one cache from another. Only whole pages travel; the
tokens after them, at most a page, are computed again together with the first decode step. If the transfer fails, the
decode engine computes the prompt itself, unless `--no-disaggregation-fallback`.

A prefill engine holds nothing for a `bootstrap_room` without a claim: its pages are as evictable as any other. A decode
engine claims when it has the memory. So no engine waits for memory of another one that waits for it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...runtime.messages import TokenOutput
from ...runtime.transport.kv_tiers import TierCommand, TierFigures, TierNews
from ...runtime.transport.kv_transfer import (
    FromPeer,
    PagesWritten,
    PeerLost,
    TransferCommand,
    TransferFigures,
)
from ..batch import ScheduleBatch
from ..prefix_cache.base import Lease
from ..requests.req import Req

News = FromPeer | PagesWritten | PeerLost | TierNews
Command = TransferCommand | TierCommand


class Step(NamedTuple):
    """Progress of the transfer of a request's prompt; for the decision log.

    Attributes:
        rid: the request.
        event: what happened, as `Handover.event`.
        detail: figures or a reason, in words.
    """

    rid: str
    event: str
    detail: str = ""


class Changes(NamedTuple):
    """The effects of a call on requests.

    Attributes:
        steps: for the decision log, in order.
        rows: output rows.
        grammar_ends: as in `Settled`.
        flushes: ids of calls, each with an error or "": nothing lower than the KV pool has what was flushed.
    """

    steps: Sequence[Step] = ()
    rows: Sequence[TokenOutput] = ()
    grammar_ends: Mapping[str, str] = {}
    flushes: Sequence[tuple[int, str]] = ()


NO_CHANGES: Final = Changes()


class TransferRole:
    """See the module. The calls that return `Changes` are made between steps.

    This base is `--disaggregation-mode null`: each request is computed here.
    """

    @property
    def num_open(self) -> int:
        """Transfers that will end without a further request: pages or locks are taken for them."""
        return 0

    def reason_against(self, receives: bool) -> str:
        """Reason why a request with a handoff cannot run in this mode; `receives`: another engine has its prompt."""
        return "the request has a handoff, but this engine has no --disaggregation-mode; start it with one"

    def arrived(self, req: Req, now_s: float) -> Sequence[Step]:
        """A request was queued; with its grammar, if it has one."""
        return ()

    def plan(self, now_s: float) -> Changes:
        """A pass begins: claim prompts, and end what has taken too long."""
        return NO_CHANGES

    def settled(self, batch: ScheduleBatch, forward_s: float) -> None:
        """A step is settled, which took `forward_s`; pages of its prompt chunks are cached."""

    def answered(self, rows: Sequence[TokenOutput], now_s: float) -> Sequence[Step]:
        """Rows are sent; requests that have ended are among them."""
        return ()

    def handle(self, message: News, now_s: float) -> Changes:
        """Take a message of the `LinkThread`, or of the I/O thread of a disk tier."""
        return NO_CHANGES

    def flushed(self, call_id: int, now_s: float) -> Changes:
        """The prefix cache is about to be emptied at a client's wish; `Changes.flushes` says, now or later, when."""
        return Changes(flushes=[(call_id, "")])

    def close(self) -> None:
        """The engine stops, and no other call but `take_commands` follows: give the last commands."""

    def take_commands(self) -> Sequence[Command]:
        """Take the commands for the thread that moves KV since the last call."""
        return []

    def wake_s(self) -> float | None:
        """When `plan` has something to do without a message; None if never."""
        return None

    def leases(self) -> list[Lease]:
        """Locks of the prefix cache that transfers hold; for checks."""
        return []

    def figures(self) -> TransferFigures | None:
        """For reports; None: there are no transfers in this mode."""
        return None

    def tier_figures(self) -> dict[str, TierFigures]:
        """For reports: the figures of each tier of the prefix cache by its name."""
        return {}


@dataclass(slots=True)
class TransferCounts:
    """Totals since the start; see `TransferFigures`."""

    sent_pages: int = 0
    received_pages: int = 0
    transfer_s: float = 0.0
    transfers: int = 0
    failures: Counter[str] = field(default_factory=Counter)


def prompt_crc(token_ids: bytes, namespace: str) -> int:
    """CRC-32 of a prompt and its namespace. The two sides tokenize by themselves; another tokenizer shows here."""
    return zlib.crc32(namespace.encode(errors="surrogatepass"), zlib.crc32(token_ids))
