"""`DecisionLog`: the decisions of the last passes, with their reasons.

In every pass each waiting request has exactly one verdict: its own if the pass considered it, else the shared verdict
of the rest. The rest is one count and one reason, so a pass with ten thousand waiting requests costs as much as one
with ten.

Records are msgspec structs, which `log_file.py` writes unchanged. Three kinds cover the life of a request: `Arrived`,
the `PassRecord`s, and the `Settled` that has its `Finished`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ...runtime.messages import FinishKind
from ...runtime.step_plan import ForwardMode
from ...runtime.text import counted
from .verdict import CacheMiss, Reason, Verdict


class BudgetState(NamedTuple):
    """The four figures of the prefill budget at one time, in tokens."""

    rem_total_tokens: int
    cur_rem_tokens: int
    rem_input_tokens: int
    rem_chunk_tokens: int


class StepTime(NamedTuple):
    """The predicted times of a pass's step.

    Attributes:
        target_s: the configured step time.
        decodes_s: time of the running requests alone.
        waiting_s: time of the waiting prompts that count, without what is cached, if they were computed now.
        prompts_s: time that prompts may take in this step.
        left_s: the unused part of that after the pass; below 0 if one page alone takes longer.
        token_s: time of a prompt token without attention; 0 while no prompt has been measured: then no prompt is cut.
    """

    target_s: float
    decodes_s: float
    waiting_s: float
    prompts_s: float
    left_s: float
    token_s: float

    def text(self) -> str:
        """The times as one line of text."""
        ms = 1000.0
        return (
            f"target {self.target_s * ms:.1f} ms: decodes {self.decodes_s * ms:.1f} ms; of waiting prompts, which take "
            f"{self.waiting_s * ms:,.0f} ms, at most {self.prompts_s * ms:.1f} ms ({self.left_s * ms:.1f} ms left; "
            f"{self.token_s * ms:.3f} ms per token)"
        )


KEPT_RECORDS: Final = 8192
_DIGEST_BYTES: Final = 9


class Retraction(NamedTuple):
    """A running request was retracted.

    Attributes:
        rid: the request.
        mode: "recompute" or "swap".
        cause: "memory" (too few KV pages), "priority" (preempted for a more urgent request), "background" (for
            one that is not of the background), "device memory" (the device had no memory for a step), "pause" or
            "chaos".
        num_pages: pages that it gave back or that were copied to the host.
        output_len: tokens that it had generated.
    """

    rid: str
    mode: str
    cause: str
    num_pages: int
    output_len: int


class PageCounts(NamedTuple):
    """The terms of the page equation."""

    free: int
    evictable: int
    locked: int
    held: int


class Arrived(msgspec.Struct, tag="arrived", array_like=True, gc=False):
    """A request arrived. If a lost scheduler had begun it, its client already has `num_delivered` tokens.

    `awaits_kv`: another engine computes its prompt; `Handover`s follow. It is the `turn`-th of its `session`, which is
    "" if it names none.
    """

    now_s: float
    rid: str
    prompt_len: int
    max_new_tokens: int
    priority: int = 0
    tenant: str = ""
    group: str = ""
    needs_grammar: bool = False
    num_delivered: int = 0
    awaits_kv: bool = False
    session: str = ""
    turn: int = 0
    num_images: int = 0
    background: bool = False


class Handover(msgspec.Struct, tag="handover", array_like=True, gc=False):
    """Something happened to the KV of a prompt that one engine computes and another one decodes, or that a disk has.

    Attributes:
        event: "claimed", "received", "not received", "computed here", "unclaimed", "sent", "not sent"; of a disk:
            "looked up", "loading", "loaded", "not loaded".
        detail: figures or a reason, in words.
    """

    now_s: float
    rid: str
    event: str
    detail: str = ""


class Finished(NamedTuple):
    """A request has ended.

    `num_accepted_drafts` of its `num_drafts` drafts became tokens of the answer; `num_overruled` tokens of the answer
    replace one that its grammar refused. `draft_methods`: the sources of its drafts, in the order of `DRAFT_METHODS`.
    """

    rid: str
    kind: FinishKind
    output_len: int
    message: str = ""
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_overruled: int = 0
    draft_methods: tuple[str, ...] = ()


class RefusedToken(NamedTuple):
    """A token that the model would have taken in a step, and that a grammar refused.

    Attributes:
        batch_idx: the request in its batch.
        offset: of the token that was taken instead, in the run of tokens that the request got in the step.
        token_id: the refused token.
    """

    batch_idx: int
    offset: int
    token_id: int


class MatcherDrafts(NamedTuple):
    """Verdict of a request's matcher about its drafts.

    Attributes:
        forced: tokens that its grammar forces.
        num_valid: how many of the proposed drafts, which begin with these tokens, its grammar allows.
    """

    forced: list[int]
    num_valid: int


class Settled(msgspec.Struct, tag="settled", array_like=True):
    """The result of a step, or (`step_id` 0) an event between steps: an abort, a deadline, a grammar.

    Attributes:
        now_s: when the scheduler took the result.
        step_id: the step; 0 for an event between steps.
        forward_s: seconds that the runner took.
        left: requests that ended with it.
        next_token_ids, errors, swap_s, encode_s, draft_s: as in `StepResult`; for replay.
        grammars: rids of requests that join the waiting queue because their grammar is compiled.
        out_of_memory: as in `StepResult`; the next `PassRecord` has the requests that were retracted for it.
        num_next_tokens: as in `StepResult`.
        grammar_ends: requests with a grammar that was complete, or that could not continue: rid -> why, or "".
        refused: what grammars refused in the step, whether or not the tokens instead became part of an answer.
        vectors: batch index -> digest of the pooling request's result; see `vector_digest`.
    """

    now_s: float
    step_id: int
    forward_s: float = 0.0
    left: list[Finished] = msgspec.field(default_factory=list)
    next_token_ids: bytes = b""
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    swap_s: float = 0.0
    grammars: list[str] = msgspec.field(default_factory=list)
    out_of_memory: str = ""
    num_next_tokens: bytes = b""
    grammar_ends: dict[str, str] = msgspec.field(default_factory=dict)
    refused: list[RefusedToken] = msgspec.field(default_factory=list)
    vectors: dict[int, bytes] = msgspec.field(default_factory=dict)
    encode_s: float = 0.0
    draft_s: float = 0.0


def vector_digest(vector: bytes) -> bytes:
    """A digest of a pooling request's result, for the log. A digest is its own digest: a replay has nothing else.

    Its length is not a multiple of four, so it cannot be taken for a vector.
    """
    return vector if len(vector) % 4 else hashlib.blake2b(vector, digest_size=_DIGEST_BYTES).digest()


class PassRecord(msgspec.Struct, tag="pass", array_like=True):
    """The decisions of one pass of `Scheduler.next_batch`.

    Attributes:
        now_s: the time of the pass.
        step_id: of the resulting plan; 0 if there is none.
        mode: of that plan.
        num_waiting: requests in the queue when admission began, including swapped ones and those without grammar.
        budget_before, budget_after: the token budget; None if admission was not tried.
        verdicts: about the waiting requests that the pass considered, in order.
        num_rest, rest_reason: the number of those that it did not consider, and why.
        rest_behind: the request at which the pass ended; "" if none.
        num_grammar: requests without a compiled grammar; their verdict is GRAMMAR_PENDING.
        continued: verdicts about partial prefills.
        retractions: the requests that were retracted.
        gave_memory_back: whether running requests gave back memory, so that another pass may admit more.
        num_running: requests with a row after the pass.
        num_decodes: requests that decode in the step.
        evicted_pages: pages evicted from the prefix cache in this pass.
        cache_misses: one for each request admitted from the queue.
        pages: page counts after the pass.
        policy: name of the policy that ordered the queue.
        notes: other decisions, in words (a policy switch, an injected fault).
        plan_crc: checksum of the plan's arrays; 0 without a plan.
        step_time: the prediction of the step's time; None if time did not limit the step.
        num_drafts: draft tokens that the step verifies.
        num_rounds: inner steps, the most tokens that each request gets; see `multi_step.py`.
        grammar_drafts: what matchers said about drafts, by rid; for replay, see `GrammarDrafts`.
        num_tiles: tiles of images that the step encodes, or whose last part it does, by the rid of the request that
            needs them first.
    """

    now_s: float
    step_id: int = 0
    mode: ForwardMode = ForwardMode.IDLE
    num_waiting: int = 0
    budget_before: BudgetState | None = None
    budget_after: BudgetState | None = None
    verdicts: list[Verdict] = msgspec.field(default_factory=list)
    num_rest: int = 0
    rest_reason: Reason | None = None
    rest_behind: str = ""
    num_grammar: int = 0
    continued: list[Verdict] = msgspec.field(default_factory=list)
    retractions: list[Retraction] = msgspec.field(default_factory=list)
    gave_memory_back: bool = False
    num_running: int = 0
    num_decodes: int = 0
    evicted_pages: int = 0
    cache_misses: list[CacheMiss] = msgspec.field(default_factory=list)
    pages: PageCounts = PageCounts(0, 0, 0, 0)
    policy: str = ""
    notes: list[str] = msgspec.field(default_factory=list)
    plan_crc: int = 0
    step_time: StepTime | None = None
    num_drafts: int = 0
    num_rounds: int = 1
    grammar_drafts: dict[str, MatcherDrafts] = msgspec.field(default_factory=dict)
    num_tiles: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def retracted(self) -> list[str]:
        """The rids of the requests that were retracted."""
        return [each.rid for each in self.retractions]

    def lines(self) -> Iterator[str]:
        """Text lines: the pass, then each verdict."""
        retracted = ",".join(f"{each.rid}({each.cause}, {each.mode})" for each in self.retractions)
        drafts = f"drafts={self.num_drafts} " if self.num_drafts else ""
        rounds = f"rounds={self.num_rounds} " if self.num_rounds > 1 else ""
        yield (
            f"step={self.step_id} mode={self.mode.name} decodes={self.num_decodes} {drafts}{rounds}"
            f"waiting={self.num_waiting} evicted_pages={self.evicted_pages} retracted={retracted or '-'}"
        )
        for note in self.notes:
            yield f"step={self.step_id} {note}"
        for rid, count in self.num_tiles.items():
            yield f"step={self.step_id} ENCODES {counted(count, 'tile')} of {rid}"
        if self.step_time is not None:
            yield f"step={self.step_id} STEP_TIME {self.step_time.text()}"
        for verdict in (*self.continued, *self.verdicts):
            yield f"step={self.step_id} {verdict.text()}"
        if self.num_grammar:
            reason = Reason.GRAMMAR_PENDING
            yield f"step={self.step_id} {reason.name} {self.num_grammar} others: {reason.text}"
        if self.rest_reason is not None:
            behind = f" ({self.rest_behind})" if self.rest_behind else ""
            yield (
                f"step={self.step_id} {self.rest_reason.name} {self.num_rest} others: {self.rest_reason.text}{behind}"
            )


DecisionRecord = Arrived | PassRecord | Settled | Handover


class DecisionLog:
    """The last `KEPT_RECORDS` records. Passes without a decision are not recorded.

    Attributes:
        num_records, num_passes: all that were appended, including those that are not kept any more.
    """

    def __init__(self, kept_records: int = KEPT_RECORDS) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=kept_records)
        self._last_pass: PassRecord | None = None
        self.num_records = 0
        self.num_passes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Iterate over the records, oldest first."""
        return iter(self._records)

    @property
    def passes(self) -> list[PassRecord]:
        """The records of passes, oldest first."""
        return [record for record in self._records if isinstance(record, PassRecord)]

    @property
    def last(self) -> PassRecord:
        """The newest pass. Fails if there was none."""
        assert self._last_pass is not None
        return self._last_pass

    def append(self, record: DecisionRecord) -> None:
        """Add a record. If there are too many, the oldest one is dropped."""
        self._records.append(record)
        self.num_records += 1
        if isinstance(record, PassRecord):
            self._last_pass = record
            self.num_passes += 1

    def since(self, num_records: int) -> list[DecisionRecord]:
        """The records after the first `num_records`, oldest first; only those that are still kept."""
        count = min(self.num_records - num_records, len(self._records))
        return [self._records[idx] for idx in range(-count, 0)]
