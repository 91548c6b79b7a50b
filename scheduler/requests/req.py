"""`Req`: one request, from its arrival at the scheduler to its finished row.

A `Req` has the values that are read a few times per request. The values that every step reads or writes for every
running request (lengths, token ids, pages) are in arrays indexed by pool row: see `RowStates` and `ReqToTokenPool`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ...runtime.messages import Delivered, GenerateRequest, GrammarUsage, Overruled, Usage
from ...runtime.transport.message_base import Logprobs
from ..arrays import TOKEN_ID_BYTES
from ..prefix_cache.base import namespace_of

if TYPE_CHECKING:
    from ...grammar.backend import Matcher
    from ...runtime.sampling_params import SamplingParams
    from ..arrays import IntArray
    from ..prefix_cache.base import Lease, PrefixMatch, Session
    from .prompt_images import PromptImages


@dataclass(slots=True)
class GrammarFigures:
    """Figures of one request, from its earlier attempts on. See `GrammarUsage` for the attributes.

    Attributes:
        num_forced: of the earlier attempts; the matcher counts those of this one.
    """

    compile_s: float = 0.0
    mask_s: float = 0.0
    num_forced: int = 0
    num_overruled: int = 0
    first_overruled: Overruled | None = None
    cut_at: int | None = None

    @classmethod
    def going_on(cls, usage: GrammarUsage) -> GrammarFigures:
        """The figures of a request that was lost, as of its last delivered token."""
        return cls(
            usage.compile_s,
            usage.mask_s,
            usage.forced_tokens,
            usage.overruled_tokens,
            usage.first_overruled,
            usage.cut_at,
        )

    def overruled(self, position: int, wanted_id: int, got_id: int) -> None:
        """Count a token of the output that replaces a refused one."""
        self.num_overruled += 1
        if self.first_overruled is None:
            self.first_overruled = Overruled(position, wanted_id, got_id)

    def usage(self, num_forced: int) -> GrammarUsage:
        """The figures for the client; `num_forced`: of the matcher."""
        return GrammarUsage(
            self.compile_s,
            self.mask_s,
            self.num_forced + num_forced,
            self.num_overruled,
            self.first_overruled,
            self.cut_at,
        )


MAX_OVERTAKEN: Final = 32
"""Ageing: after this many passes in which later requests were admitted, a request blocks their admission."""


class ReqStatus(enum.Enum):
    """Status of a request: with a row and pages in PREFILL and DECODE, else in a queue, until it is FINISHED.

    A RETRACTED request computes its prompt and its output so far again, also after its scheduler was lost. A SWAPPED
    request has its KV on the host. A RECEIVING request waits for KV of its prompt, which another engine computes or a
    disk may have.
    """

    WAITING_GRAMMAR = "waiting_grammar"
    RECEIVING = "receiving"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    RETRACTED = "retracted"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: Final[dict[ReqStatus, frozenset[ReqStatus]]] = {
    ReqStatus.WAITING_GRAMMAR: frozenset(
        {ReqStatus.RECEIVING, ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.FINISHED}
    ),
    ReqStatus.RECEIVING: frozenset({ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.FINISHED}),
    ReqStatus.WAITING: frozenset({ReqStatus.RECEIVING, ReqStatus.PREFILL, ReqStatus.FINISHED}),
    ReqStatus.PREFILL: frozenset(
        {ReqStatus.DECODE, ReqStatus.RETRACTED, ReqStatus.SWAPPED, ReqStatus.FINISHED}
    ),
    ReqStatus.DECODE: frozenset({ReqStatus.RETRACTED, ReqStatus.SWAPPED, ReqStatus.FINISHED}),
    ReqStatus.RETRACTED: frozenset({ReqStatus.RECEIVING, ReqStatus.PREFILL, ReqStatus.FINISHED}),
    ReqStatus.SWAPPED: frozenset({ReqStatus.PREFILL, ReqStatus.FINISHED}),
    ReqStatus.FINISHED: frozenset(),
}


class Req:
    """One request.

    Attributes:
        rid, sampling, arrival_s, priority, tenant, lora_id, group, grammar, keep_special_ids, pooling, handoff,
            reports_progress, keep_s, in_memory, background: as in `GenerateRequest`.
        call: equal for parallel samples, and for questions about one input while one of them waits (`LabelGroups`).
        receives_kv: its prompt's KV is to come from another engine, at first.
        session: its session; None: it names none, or no sessions are kept.
        turn: number of the request in its session, from 1; 0 without a session.
        extra_key: namespace in the prefix cache, made of the request's cache salt and its adapter.
        received_s: when the scheduler received it.
        seq: arrival number at the scheduler; orders requests by arrival, also those with equal times.
        prompt_len: tokens of the prompt.
        max_new_tokens: `sampling.max_new_tokens`, known to be set; 1 if another engine decodes.
        images: of its prompt; None: there are none.
        fill_ids: int32 bytes, tokens to compute before sampling: the prompt and, after a retraction, the output so far.
            An image's positions have its own id, see `MediaIds`; `ordinary_ids` has the model's placeholder.
        output_len: tokens generated and settled.
        status: see `ReqStatus`; only `enter` changes it.
        entered_s: when each status was entered for the first time.
        row: pool row in PREFILL and DECODE, else -1.
        adapter_slot: slot of its LoRA adapter while it has a row; 0 without an adapter.
        lease: the request's lock in the prefix cache while it has a row.
        host_pages: pages of the host's KV pool that hold its first `host_len` tokens while it is SWAPPED, else None.
        checkpoint: slot of the state from which it starts, when it has just been admitted; 0: from the first token.
        tree_len: tokens whose pages the prefix cache had when it was admitted, with a state at their end or without.
        match, match_generation: the last look-up in the prefix cache, and the cache's generation at that time.
        cached_tokens: prompt tokens that the prefix cache had at the first admission.
        loaded_tokens: tokens that were loaded from a disk for it.
        host_tokens: of `cached_tokens`, those that the host had.
        page_keys: of its first pages, for the host, see `KVMemory`.
        num_retractions: how often it was retracted or preempted.
        looked_up_after: the number of retractions when it was last looked up in a tier.
        num_overtaken: passes in which it waited and a later arrival was admitted; see `MAX_OVERTAKEN`.
        num_delivered: tokens of the output that the client had before the request was submitted again.
        answered: whether an output row was sent already.
        prompt_logprobs: log-probabilities of the prompt so far, one part per chunk.
        num_drafts, num_accepted_drafts: draft tokens that were verified for it, and those that were accepted.
        draft_methods: their sources, indices into `DRAFT_METHODS`.
        matcher: the state of its answer in its grammar; None before the grammar is ready, and without one.
        is_checked_late: its token may be sampled without a mask and checked afterwards; see `GetMasks`.
        grammar_figures: what its grammar has cost and changed; None without a grammar.
        ends_reasoning: its open reasoning block must end with its next token; see `MaskFiller`.
        num_matched: tokens of the output that `matcher` has accepted; above `output_len` within a multi-step decode.
        failed_alone: the furthest position at which the device had no memory for it alone, and how often in a row.
    """

    __slots__ = (
        "adapter_slot",
        "allowed_ids",
        "answered",
        "arrival_s",
        "background",
        "cached_tokens",
        "call",
        "checkpoint",
        "draft_methods",
        "ends_reasoning",
        "entered_s",
        "extra_key",
        "failed_alone",
        "fill_ids",
        "grammar",
        "grammar_figures",
        "group",
        "handoff",
        "host_len",
        "host_pages",
        "host_tokens",
        "images",
        "in_memory",
        "is_checked_late",
        "keep_s",
        "keep_special_ids",
        "lease",
        "loaded_tokens",
        "looked_up_after",
        "lora_id",
        "match",
        "match_generation",
        "matcher",
        "max_new_tokens",
        "num_accepted_drafts",
        "num_delivered",
        "num_drafts",
        "num_matched",
        "num_overtaken",
        "num_retractions",
        "output_len",
        "page_keys",
        "pooling",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "queue_s",
        "received_s",
        "receives_kv",
        "reports_progress",
        "rid",
        "row",
        "sampling",
        "seq",
        "session",
        "status",
        "tenant",
        "tree_len",
        "turn",
    )

    def __init__(
        self,
        message: GenerateRequest,
        seq: int,
        now_s: float,
        session: Session | None = None,
        images: PromptImages | None = None,
    ) -> None:
        assert message.sampling.max_new_tokens is not None
        self.rid = message.rid
        self.sampling = message.sampling
        allowed = message.sampling.allowed_token_ids
        self.allowed_ids = None if allowed is None else frozenset(allowed)
        self.priority = message.priority
        self.extra_key = namespace_of(message.extra_key, message.lora_id)
        self.tenant = message.tenant
        self.lora_id = message.lora_id
        self.group = message.group
        self.call: int | str = message.group or seq
        self.grammar = message.grammar
        self.keep_special_ids = message.keep_special_ids
        self.pooling = message.pooling
        self.handoff = handoff = message.handoff
        self.reports_progress = message.reports_progress
        self.keep_s = message.keep_s
        self.in_memory = message.in_memory
        self.background = message.background
        self.session = session
        self.turn = 0 if session is None else session.num_turns
        decodes_here = handoff is None or bool(handoff.peer)
        self.receives_kv = handoff is not None and decodes_here and _can_receive(message)
        self.arrival_s = message.arrival_s or now_s
        self.seq = seq
        self.prompt_len = len(message.input_ids) // TOKEN_ID_BYTES
        self.max_new_tokens: int = message.sampling.max_new_tokens if decodes_here else 1
        self.images = images
        self.fill_ids = message.input_ids if images is None else images.keyed_ids
        self.output_len = 0
        self.status = ReqStatus.RECEIVING if self.receives_kv else ReqStatus.WAITING
        if message.needs_grammar:
            self.status = ReqStatus.WAITING_GRAMMAR
        self.entered_s: dict[ReqStatus, float] = {self.status: now_s}
        self.row = -1
        self.adapter_slot = 0
        self.lease: Lease | None = None
        self.host_pages: IntArray | None = None
        self.host_len = 0
        self.match: PrefixMatch | None = None
        self.match_generation = -1
        self.checkpoint = 0
        self.tree_len = 0
        self.cached_tokens = self.loaded_tokens = self.host_tokens = 0
        self.page_keys: list[bytes] = []
        self.received_s = now_s
        self.queue_s = 0.0
        self.num_retractions = self.looked_up_after = 0
        self.num_delivered = 0
        self.num_overtaken = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.draft_methods: frozenset[int] = frozenset()
        self.answered = False
        self.prompt_logprobs: list[Logprobs] = []
        self.matcher: Matcher | None = None
        self.grammar_figures = GrammarFigures() if message.grammar is not None else None
        self.is_checked_late = message.grammar is not None and _can_be_checked_late(message.sampling)
        self.ends_reasoning = (
            message.grammar is not None
            and message.grammar.reasoning is not None
            and message.grammar.reasoning.ends
        )
        self.num_matched = 0
        self.failed_alone = (0, 0)
        if message.delivered is not None:
            self._go_on_behind(message.delivered, now_s)

    def _go_on_behind(self, delivered: Delivered, now_s: float) -> None:
        """Start as a request that was retracted after these tokens: they are computed again and count as output."""
        self.fill_ids += delivered.output_ids
        self.num_delivered = self.output_len = len(delivered.output_ids) // TOKEN_ID_BYTES
        self.cached_tokens = delivered.usage.cached_tokens
        self.loaded_tokens = delivered.usage.loaded_tokens
        self.host_tokens = delivered.usage.host_tokens
        self.queue_s = delivered.usage.queue_s
        self.num_drafts = delivered.usage.draft_tokens
        self.num_accepted_drafts = delivered.usage.accepted_draft_tokens
        self.num_retractions = self.looked_up_after = delivered.usage.num_retractions
        if self.grammar_figures is not None and delivered.usage.grammar is not None:
            self.grammar_figures = GrammarFigures.going_on(delivered.usage.grammar)
        if self.status is ReqStatus.WAITING:
            self.status = ReqStatus.RETRACTED
            self.entered_s = {self.status: now_s}

    def enter(self, status: ReqStatus, now_s: float) -> None:
        """Change the status. A change that `TRANSITIONS` does not list is a bug."""
        assert status in TRANSITIONS[self.status], (
            f"{self.rid}: {self.status} -> {status} is not a transition"
        )
        self.status = status
        self.entered_s.setdefault(status, now_s)

    @property
    def queued_s(self) -> float | None:
        """When it joined the waiting queue for the first time; None while it waits for its grammar."""
        # One that was begun elsewhere is RETRACTED from the start. All others are WAITING first.
        return self.entered_s.get(ReqStatus.WAITING, self.entered_s.get(ReqStatus.RETRACTED))

    @property
    def fill_len(self) -> int:
        """Tokens that must have KV before the next one can be sampled."""
        return len(self.fill_ids) // TOKEN_ID_BYTES

    @property
    def ordinary_ids(self) -> bytes:
        """`fill_ids` for the model."""
        if self.images is None:
            return self.fill_ids
        return self.images.input_ids + self.fill_ids[len(self.images.input_ids) :]

    def last_cut(self, position: int, page_size: int) -> int:
        """The last position up to this one at which a chunk or a cached prefix may end: of a page, not in an image."""
        cut = position // page_size * page_size
        for start, end in () if self.images is None else reversed(self.images.whole):
            if start < cut < end:
                cut = start // page_size * page_size
        return cut

    def next_cut(self, position: int, page_size: int) -> int:
        """The first position after this one at which a chunk may end, or one after the end of the prompt."""
        cut = (position // page_size + 1) * page_size
        for start, end in () if self.images is None else self.images.whole:
            if start < cut < end:
                cut = -(-end // page_size) * page_size
        return cut

    @property
    def delivered_ids(self) -> bytes:
        """The beginning of the output that the client has from an earlier attempt; int32 bytes."""
        begin = self.prompt_len * TOKEN_ID_BYTES
        return self.fill_ids[begin : begin + self.num_delivered * TOKEN_ID_BYTES]

    @property
    def max_kv_len(self) -> int:
        """The most KV slots that the request can need. Its last token is never an input and needs none."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def needs_all_tokens(self) -> bool:
        """Whether it needs what the model computes at tokens of its prompt before the last one.

        Then no part of them is taken from the prefix cache, and its KV is not swapped: the rest of the prompt's
        results, log-probabilities or a sum of hidden states, would be lost.
        """
        if self.pooling is not None:
            return self.pooling.all_tokens
        return self.sampling.prompt_logprobs is not None and not self.answered

    @property
    def shared_len(self) -> int:
        """Tokens at its beginning that other requests of its call have, too; see `PoolingParams`."""
        return 0 if self.pooling is None else self.pooling.shared_len

    @property
    def most_cached(self) -> int:
        """The most tokens at its beginning that need not be computed. The last one always is, to sample."""
        if not self.needs_all_tokens:
            return self.fill_len - 1
        return 0 if self.pooling is not None else min(self.sampling.prompt_logprobs_start, self.fill_len - 1)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts its tokens."""
        return self.grammar is not None

    def usage(self) -> Usage:
        """Token counts and times of the request so far."""
        grammar = None
        if self.matcher is not None and self.grammar_figures is not None:
            grammar = self.grammar_figures.usage(self.matcher.num_forced)
        return Usage(
            self.prompt_len,
            self.output_len,
            self.cached_tokens,
            self.queue_s,
            self.num_retractions,
            grammar,
            loaded_tokens=min(
                self.loaded_tokens, self.cached_tokens - self.host_tokens
            ),  # some may have been evicted before it started
            host_tokens=self.host_tokens,
            draft_tokens=self.num_drafts,
            accepted_draft_tokens=self.num_accepted_drafts,
        )

    def __repr__(self) -> str:
        return f"Req({self.rid!r}, {self.status.value}, prompt {self.prompt_len}, output {self.output_len})"


def _can_receive(message: GenerateRequest) -> bool:
    """Whether KV of the prompt is of use: not if results at its tokens are wanted, or if its answer was begun."""
    return message.pooling is None and message.delivered is None and message.sampling.prompt_logprobs is None


def _can_be_checked_late(sampling: SamplingParams) -> bool:
    """Whether masked and unmasked sampling agree on every allowed token, and sampling twice has no effect."""
    drops_tokens = sampling.has_rare_sampler or (sampling.filters and not sampling.greedy)
    return not sampling.depends_on_output and sampling.logprobs is None and not drops_tokens


class Chunk(NamedTuple):
    """A run of prompt tokens that the step computes.

    Attributes:
        req: the request.
        start: position of the first token.
        length: number of tokens.
        is_first: whether the request was admitted in this pass.
        is_last: whether the prompt ends with this chunk, so that a token is sampled.
    """

    req: Req
    start: int
    length: int
    is_first: bool
    is_last: bool
