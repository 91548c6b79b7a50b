"""Messages of prefill/decode disaggregation: between two engines, and between a scheduler and its `LinkThread`.

A `bootstrap_room` names one prompt that one engine computes and another one decodes; the router (or the prefill engine)
draws it. The decode engine *claims* the prompt's pages from the prefill engine, which writes them and then sends the
first token:

    decode engine                                    prefill engine
    Hello (layout, where its ranks' pages are) ──►
                                             ◄──     Welcome, or Refused
    Claim (bootstrap_room, target pages)     ──►
                                             ◄──     the pages, chunk by chunk, by the transfer backend:
                                                     each rank writes its part into those of its counterpart
                                             ◄──     Prefilled (first token), or ClaimFailed
    ClaimAborted (bootstrap_room)            ──►
                                             ◄──     AbortAck: nothing will be written any more
    PromptReleased (bootstrap_room)          ──►     the prompt is not needed

`Welcome` also says that nothing of an earlier connection will be written any more. A prefill engine that does not know
the sender of a message, because it was silent for too long, answers `SayHello`.

A claim has an *attempt* number, which the decode engine never uses twice. The same structs are messages of the two
schedulers: `FromPeer` and `ToPeer` add the name of the other engine.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from .message_base import Logprobs, Message, ProcessIdentity, Record


class KVLayout(Record, frozen=True):
    """Facts that must be equal on two engines so that a page of one is a page of the other.

    Attributes:
        release: version of the engine.
        weights: fingerprint of the weight files.
        model: digest of what the configuration files say of the model.
        page_size: tokens per page.
        tensors: (dtype, bytes of a page) of each tensor of rank 0's KV pool, in order.
        tp: ranks that share the model.
        others: the same of the ranks 1, 2, ... as digests; see `digest_of`.
    """

    release: str
    weights: str
    page_size: int
    tensors: tuple[tuple[str, int], ...]
    tp: int = 1
    model: str = ""
    others: tuple[str, ...] = ()

    def difference(self, other: KVLayout) -> str:
        """In words, how this layout differs from another one; "" if pages can be exchanged."""
        for what, own, theirs in (
            ("engine version", self.release, other.release),
            ("weight files (fingerprint)", self.weights, other.weights),
            ("configuration of the model (digest)", self.model, other.model),
            ("--page-size", self.page_size, other.page_size),
            ("--tp", self.tp, other.tp),
            ("KV dtype or shape", _words_of(self.tensors), _words_of(other.tensors)),
        ):
            if own != theirs:
                return f"they differ in {what}: {own} and {theirs}"
        if self.tensors != other.tensors:
            return "they differ in the order of KV tensors"
        for rank, (ours, of_them) in enumerate(zip(self.others, other.others, strict=False), 1):
            if ours != of_them:
                return f"they differ in KV dtype or shape of rank {rank} (digest): {ours} and {of_them}"
        if len(self.others) != len(other.others):
            return f"they differ in the number of ranks: {1 + len(self.others)} and {1 + len(other.others)}"
        return ""


def digest_of(tensors: tuple[tuple[str, int], ...]) -> str:
    """Digest of (dtype, bytes of a page) of the tensors of a pool."""
    return blake2b(msgspec.json.encode(tensors), digest_size=8).hexdigest()


def _words_of(tensors: tuple[tuple[str, int], ...]) -> str:
    kinds = ", ".join(sorted({f"{dtype} with {num_bytes} bytes a page" for dtype, num_bytes in tensors}))
    return f"{len(tensors)} tensors ({kinds})"


# ---------------------------------------------------------------- decode engine -> prefill engine


class Hello(Message, frozen=True):
    """The first message of a connection.

    Attributes:
        layout: of the decode engine's KV pool.
        backend: its `--transfer-backend`.
        targets: for each rank what the backend of the prefill engine's rank needs to write into its pool; only
            backends read it.
    """

    layout: KVLayout
    backend: str
    targets: tuple[bytes, ...]


class Claim(Message, frozen=True):
    """Ask for the prompt's pages, from `first_page` on.

    Attributes:
        bootstrap_room: see the module.
        attempt: number of this claim.
        first_page: pages at the beginning of the prompt that the decode engine has already.
        pages: [n] int32, its pages for the n that follow, which are whole.
        prompt_crc: of the token ids and their namespace; see `prompt_crc`.
    """

    bootstrap_room: str
    attempt: int
    first_page: int
    pages: bytes
    prompt_crc: int


class ClaimAborted(Message, frozen=True):
    """The decode engine gives a claim up; answered by `AbortAck`, until which it does not reuse its pages."""

    bootstrap_room: str
    attempt: int


class PromptReleased(Message, frozen=True, tag="RoomReleased"):  # the tag in earlier decision logs
    """The decode engine does not need the prompt, and makes no claim."""

    bootstrap_room: str


class PagesTaken(Message, frozen=True):
    """The pages of a `PageData` are in the decode engine's pool, or were dropped with their claim."""

    number: int


class Ping(Message, frozen=True):
    """A sign of life; answered by `Pong`."""


# ---------------------------------------------------------------- prefill engine -> decode engine


class Welcome(Message, frozen=True):
    """Pages can be exchanged. Nothing is written any more for claims of an earlier connection.

    `processes`: those of the prefill engine that write, one for each rank.
    """

    processes: tuple[ProcessIdentity, ...]


class SayHello(Message, frozen=True):
    """The sender of a message is not known, or not any more: begin again with `Hello`."""


class Refused(Message, frozen=True):
    """The engines do not fit together."""

    reason: str


class Prefilled(Message, frozen=True):
    """The prompt is computed, and its pages are written.

    Attributes:
        bootstrap_room, attempt: of the claim.
        num_pages: how many of the claimed pages were written, from the first one on; fewer if some were evicted.
        output_ids: [1] int32, the first token of the answer.
        logprobs: of that token, if they were asked for.
        cached_tokens: prompt tokens that the prefill engine's prefix cache had.
        overruled: (position, wanted id, got id) if a grammar refused another token, as `Overruled`.
    """

    bootstrap_room: str
    attempt: int
    num_pages: int
    output_ids: bytes
    logprobs: Logprobs | None = None
    cached_tokens: int = 0
    overruled: tuple[int, int, int] | None = None


class ClaimFailed(Message, frozen=True):
    """The prompt will not come. Nothing will be written for this claim any more."""

    bootstrap_room: str
    attempt: int
    reason: str


class AbortAck(Message, frozen=True):
    """Nothing will be written for an aborted claim any more."""

    bootstrap_room: str
    attempt: int


class Pong(Message, frozen=True):
    """A sign of life."""


class PageData(Message, frozen=True):
    """The head of pages that the backend `local` sends through the connection; answered by `PagesTaken`.

    A frame with their ids ([n] int32) and a frame for each tensor of the pool follow.

    Attributes:
        bootstrap_room, attempt: of the claim.
        rank: the rank with these parts of the pages, on both sides.
        number: of this message; no two have the same.
    """

    bootstrap_room: str
    attempt: int
    rank: int
    number: int


ToPrefill = Hello | Claim | ClaimAborted | PromptReleased | PagesTaken | Ping
ToDecode = Welcome | SayHello | Refused | Prefilled | ClaimFailed | AbortAck | Pong | PageData


# ---------------------------------------------------------------- LinkThread -> scheduler


class FromPeer(Message, frozen=True):
    """A message of the other engine. `peer`: HOST:PORT of a prefill engine, or the name of a decode engine."""

    peer: str
    message: Claim | ClaimAborted | PromptReleased | Prefilled | ClaimFailed | AbortAck


class PagesWritten(Message, frozen=True):
    """A `WritePages` has ended; `error`: why it failed. Each one is answered."""

    peer: str
    bootstrap_room: str
    attempt: int
    error: str = ""
    seconds: float = 0.0


class PeerLost(Message, frozen=True):
    """The other engine does not answer any more: all claims of or at it have failed.

    A decode engine's scheduler then aborts them; the link answers each with `AbortAck`, when its pages are free.
    """

    peer: str
    reason: str


# ---------------------------------------------------------------- scheduler -> LinkThread


class ToPeer(Record, frozen=True):
    """Send a message to the other engine."""

    peer: str
    message: Claim | ClaimAborted | PromptReleased | Prefilled | ClaimFailed | AbortAck


class WritePages(Record, frozen=True):
    """Write pages of our pool into that of a decode engine; answered by `PagesWritten`.

    Attributes:
        sources, targets: [n] int32 each.
        step_id: the last step that rank 0 has settled. It has computed the pages, or an earlier one has; other ranks
            may be a step behind.
    """

    peer: str
    bootstrap_room: str
    attempt: int
    sources: bytes
    targets: bytes
    step_id: int


TransferCommand = ToPeer | WritePages


class TransferFigures(Record, frozen=True):
    """Transfers of a scheduler now, by `bootstrap_room`, and totals since its start.

    Attributes:
        waiting: decode: requests that wait for memory to claim their prompt; prefill: prompts without a claim.
        open: prompts with a claim.
        held_pages: decode: pages that claims hold; prefill: pages that are locked for claims.
        sent_pages, received_pages: totals.
        transfer_s: total seconds, of the writes (prefill), or from the claims to their end (decode).
        transfers: prompts that were sent or received.
        failures: prompts that were not, by reason.
        page_bytes: of one page.
    """

    waiting: int = 0
    open: int = 0
    held_pages: int = 0
    sent_pages: int = 0
    received_pages: int = 0
    transfer_s: float = 0.0
    transfers: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    page_bytes: int = 0
