"""Every message between the processes: one tagged union per socket and direction.

    tokenizer_manager --SchedulerInput--> scheduler --DetokenizerInput--> detokenizer --ManagerInput-->
    tokenizer_manager

    scheduler --CallDone--> tokenizer_manager

Token ids travel as bytes (int32, little-endian): 8,192 of them decode in microseconds where a list takes most of a
millisecond. What a process only forwards (`Usage`, `Logprobs`, `SchedulerReport`) is nested and passed untouched.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from .adapter_spec import AdapterSpec
from .grammar_use import GrammarUse
from .pooling import PoolingParams
from .sampling_params import RepetitionDetection, SamplingParams
from .scheduler_report import SchedulerReport
from .transport.kv_tiers import Forgotten, Found, Loaded, Stored
from .transport.kv_transfer import FromPeer, PagesWritten, PeerLost
from .transport.message_base import Logprobs, Message, Record

# ---------------------------------------------------------------- nested records


class FinishKind(enum.StrEnum):
    """End of a request; the values of STOP and LENGTH are OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


REPETITION: Final = "repetition_detected"
"""vLLM's word for the end of an answer that repeats itself."""


class Finish(Record, frozen=True):
    """Reason of a request's end.

    Attributes:
        kind: see `FinishKind`.
        matched: the stop token id, stop string or regular expression that matched, or `REPETITION`, for STOP.
        message: the text for the client, for ABORT and ERROR: value, rule, fix.
        status: the HTTP status for ERROR (and for ABORT by the server).
        code: the error code for the client, for ERROR; "" for the usual one of the status.
    """

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""
    status: int = 500
    code: str = ""


class TextOptions(Record, frozen=True):
    """How the detokenizer turns one request's tokens into text; sent with the request's first row only.

    Attributes:
        delivered_ids: [n] int32, the beginning of the answer that the client already has: its text is not sent again.
        keep_special_ids: special tokens that appear in the text although `skip_special_tokens` is set: markers that
            the parser of tool calls and reasoning needs.
        stop_regex, repetition_detection: see `SamplingParams`.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    delivered_ids: bytes = b""
    keep_special_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    repetition_detection: RepetitionDetection | None = None


class Overruled(Record, frozen=True):
    """A token that the model would have taken, and that a grammar refused.

    Attributes:
        position: of the token in the output, from 0.
        wanted_id: the refused token.
        got_id: the token at this position.
    """

    position: int
    wanted_id: int
    got_id: int


class GrammarUsage(Record, frozen=True):
    """The cost of a request's grammar so far, and how often it changed the answer.

    Attributes:
        compile_s: seconds that compiling it took; 0 if it was compiled already.
        mask_s: seconds for masks, and for checks of tokens that needed none.
        forced_tokens: tokens of the output that were the only ones that the grammar allowed.
        overruled_tokens: tokens of the output that replace one that the grammar refused; see `GetMasks.unmasked`.
        first_overruled: the first of them; None if there is none.
        cut_at: position of the first token that was chosen to complete the answer within its limit of tokens.
    """

    compile_s: float = 0.0
    mask_s: float = 0.0
    forced_tokens: int = 0
    overruled_tokens: int = 0
    first_overruled: Overruled | None = None
    cut_at: int | None = None


class Usage(Record, frozen=True):
    """The tokens and the time that one request has used so far.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated so far, this row's included.
        cached_tokens: prompt tokens that were not computed because the prefix cache had them, at first admission.
        queue_s: seconds between arrival at the scheduler and first admission.
        num_retractions: how often the request lost its KV memory and was recomputed.
        grammar: of a request with a grammar; None before it is ready, and without one.
        processed_tokens: prompt tokens with KV, in a row that says only this; None in all others.
        loaded_tokens: of `cached_tokens`, those that were loaded from a disk for this request.
        host_tokens: of `cached_tokens`, those that were copied from host memory.
        draft_tokens, accepted_draft_tokens: drafts that were verified for it, and those that were accepted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    num_retractions: int = 0
    grammar: GrammarUsage | None = None
    processed_tokens: int | None = None
    loaded_tokens: int = 0
    host_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


_ATTEMPT: Final = "+"


def attempt_rid(rid: str, attempt: int) -> str:
    """The rid of a request that is submitted for the (attempt + 1)-th time, after a crash lost the earlier attempts."""
    return f"{base_rid(rid)}{_ATTEMPT}{attempt}"


def base_rid(rid: str) -> str:
    """The rid of the first attempt, which is the client's."""
    return rid.partition(_ATTEMPT)[0]


# ---------------------------------------------------------------- calls: tokenizer manager -> scheduler, and back

# A call is named in three places: here, in `tokenizer_manager/control.py` and in `scheduler/queries/calls.py`.


class FlushCache(Message, frozen=True):
    """Drop every unlocked page of the prefix cache, and all that its tiers have of this model; each may be left out.

    Attributes:
        device: pages of the KV pool.
        tier: the disk, or the store.
        host: host memory.
    """

    device: bool = True
    tier: bool = True
    host: bool = True


class FlushCacheDone(Message, frozen=True):
    """Answer to `FlushCache`, when a crash does not bring back what was flushed.

    Attributes:
        flushed_tokens: that the KV pool dropped.
        kept_tokens: that stay there because running requests use them.
        error: why the tier may not have forgotten; "": it has.
    """

    flushed_tokens: int
    kept_tokens: int
    error: str = ""


class PinPrefix(Message, frozen=True):
    """Keep the cached part of a prefix for a time, within the quota.

    Pinning again sets a new end; `ttl_s` 0 unpins. Pinned pages are evicted last, but they are evicted when running
    requests need them: a pin can never block admission.
    """

    input_ids: bytes
    ttl_s: float
    extra_key: str = ""
    lora_id: str = ""  # as in `GenerateRequest`


class PinDone(Message, frozen=True):
    """Answer to `PinPrefix`: tokens that are pinned, tokens that were asked for, and the `reason` for a difference."""

    pinned_tokens: int
    asked_tokens: int
    reason: str = ""


class HintAction(enum.StrEnum):
    """Orders about the pages of a session: OPEN counts no turn; CLOSE and DEMOTE let them be evicted first, and CLOSE
    forgets the session; RETAIN keeps them for a time. PREFETCH is answered by the tokenizer manager.
    """

    OPEN = "open"
    CLOSE = "close"
    DEMOTE = "demote"
    RETAIN = "retain"
    PREFETCH = "prefetch"


class HintOutcome(enum.StrEnum):
    """The result of a hint: CLIPPED by a quota, DEFERRED until running turns end, MISSING: there is no such session."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


class HintSession(Message, frozen=True):
    """An order about a session; `ttl_s`: of RETAIN, in seconds. The `tenant` is that of a session that is opened."""

    session: str
    action: HintAction
    ttl_s: float = 0.0
    tenant: str = ""


class HintDone(Message, frozen=True):
    """Answer to `HintSession`; `detail`: figures or a reason, in words."""

    outcome: HintOutcome
    detail: str = ""


class Explain(Message, frozen=True):
    """Ask for the scheduling history of a request."""

    rid: str


class Explanation(Message, frozen=True):
    """Answer to `Explain`: one sentence and a table; not `found` if the scheduler has no record of the request."""

    found: bool
    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


class ListRequests(Message, frozen=True):
    """Ask for the requests that are not finished, at most `limit`."""

    limit: int


class LiveRequest(Record, frozen=True):
    """A request that is not finished.

    Attributes:
        rid: the request.
        phase: waiting, waiting_grammar, prefill, decode, retracted or swapped.
        prompt_len, output_len, max_new_tokens, cached_tokens, num_retractions, priority: as in the scheduler.
        age_s: seconds since it arrived.
        reason: the last pass's verdict on it, as the decision log names it (no_kv, ...); "" if no pass has reached it,
            or if it decodes.
        why: the same in words.
        need, have: the arithmetic, in tokens; 0 and 0 if there is none.
        background: as in `GenerateRequest`.
    """

    rid: str
    phase: str
    prompt_len: int
    output_len: int
    max_new_tokens: int
    cached_tokens: int
    age_s: float
    num_retractions: int = 0
    priority: int = 0
    reason: str = ""
    why: str = ""
    need: int = 0
    have: int = 0
    background: bool = False


class RequestList(Message, frozen=True):
    """Answer to `ListRequests`: first the requests with a row, then the waiting ones, each in order of arrival.

    Attributes:
        total: number of unfinished requests, listed or not.
        last_pass: figures of the last pass: step_id, decodes, and the budgets before and after it, in tokens.
    """

    requests: list[LiveRequest]
    total: int
    last_pass: dict[str, int] = msgspec.field(default_factory=dict)


class ListSessions(Message, frozen=True):
    """Ask for the sessions, those with the latest turns first, at most `limit`."""

    limit: int


class SessionState(Record, frozen=True):
    """One session.

    Attributes:
        session: a digest of its key.
        turns: requests so far; parallel samples count once.
        conversations: ends of turns that no other turn goes on with.
        cached_tokens: that its conversations cover; others may cover them, too.
        idle_s: seconds since its last turn arrived.
    """

    session: str
    turns: int
    conversations: int
    cached_tokens: int
    idle_s: float


class SessionList(Message, frozen=True):
    """Answer to `ListSessions`; `total`: sessions, listed or not."""

    sessions: list[SessionState]
    total: int


class EndReasoning(Message, frozen=True):
    """Let the open reasoning block of a request end with its next token that is not being computed yet."""

    rid: str


class ReasoningDone(Message, frozen=True):
    """Answer to `EndReasoning`; `done`: a block was open, and its request has a matcher that can end it."""

    done: bool


class LoadAdapter(Message, frozen=True):
    """Read a LoRA adapter into host memory.

    Requests for it may be sent from now on: they wait until it is read, and fail if it cannot be.

    Attributes:
        store_id: of the adapter, above 0; made by the tokenizer manager, one for each fingerprint.
    """

    store_id: int
    adapter: AdapterSpec


class UnloadAdapter(Message, frozen=True):
    """Forget an adapter; requests that still use it end with an error."""

    store_id: int


class AdapterDone(Message, frozen=True):
    """Answer to `LoadAdapter` and `UnloadAdapter`; `error` is "" if it was done."""

    error: str = ""


class PauseMode(enum.StrEnum):
    """The effect of a pause on the requests that run: KEEP leaves them as they are, RETRACT takes their rows and pages
    and queues them, WAIT lets them end, but for those that are retracted meanwhile, which stay in the queue. No other
    request starts.
    """

    KEEP = "keep"
    RETRACT = "retract"
    WAIT = "wait"


class Pause(Message, frozen=True):
    """Stop generating until `Resume`; answered when no step is in flight and the mode's work is done."""

    mode: PauseMode


class Resume(Message, frozen=True):
    """Go on after a `Pause`, which is answered too if it waits."""


class PauseDone(Message, frozen=True):
    """Answer to `Pause` and `Resume`: whether the scheduler is paused now."""

    paused: bool


Question = Explain | ListRequests | ListSessions
"""The calls that change nothing; the decision log leaves them out."""

CallRequest = (
    FlushCache
    | PinPrefix
    | HintSession
    | EndReasoning
    | LoadAdapter
    | UnloadAdapter
    | Pause
    | Resume
    | Question
)
CallAnswer = (
    FlushCacheDone
    | PinDone
    | HintDone
    | ReasoningDone
    | AdapterDone
    | PauseDone
    | Explanation
    | RequestList
    | SessionList
)


class Call(Message, frozen=True):
    """A call that is no generation; one `CallDone` with the same id answers it, unless the id is 0."""

    call_id: int
    request: CallRequest


class CallDone(Message, frozen=True):
    """The scheduler's answer to a `Call`, sent to the tokenizer manager without the detokenizer.

    Attributes:
        replica: number of the scheduler; only replicas that ran when the call was made count.
    """

    call_id: int
    answer: CallAnswer
    replica: int = 0


# ---------------------------------------------------------------- tokenizer manager -> scheduler


class Delivered(Record, frozen=True):
    """The part of the answer that the client has, of a request that is submitted again after a process was lost.

    Attributes:
        output_ids: [n] int32, not empty: the generated tokens that were delivered, in order.
        usage: as of the last of these tokens.
    """

    output_ids: bytes
    usage: Usage


class KVHandoff(Record, frozen=True):
    """One side of a request that is computed by two engines, one for the prompt; see `kv_transfer.py`.

    Attributes:
        bootstrap_room: name of the pair of requests; equal on both sides, different for parallel samples.
        peer: HOST:PORT at which the prefill engine is asked for the prompt; "": this engine is the prefill engine.
    """

    bootstrap_room: str
    peer: str = ""


class MediaItem(Record, frozen=True):
    """One image of a prompt.

    Attributes:
        digest: 32 bytes, of its pixels and of all that changes what the encoder makes of them.
        runs: [n, 2] int32 (start, length): the positions of the prompt that hold rows of the encoder instead of
            embeddings of tokens, in the order of the rows. The ids there are the model's placeholder.
        pixels: a file with the tiles, uint8, which all processes of this machine can read while the request lives.
        shape: of the tiles: (tiles, height, width, 3).
        rows: [n, 2] int32 (first, length): the rows at these positions, numbered through all tiles, which begin and
            end in their order; empty: all rows in their order.
    """

    digest: bytes
    runs: bytes
    pixels: str
    shape: tuple[int, int, int, int]
    rows: bytes = b""


class GenerateRequest(Message, frozen=True):
    """Start one generation; exactly one finished row answers it.

    Attributes:
        rid: made by the server, unique among its requests; matched exactly.
        input_ids: [prompt_len] int32, not empty, each below the vocabulary size.
        sampling: verified; `max_new_tokens` and `seed` are set.
        arrival_s: CLOCK_MONOTONIC when the request reached the tokenizer manager.
        priority: larger is scheduled earlier, under policies that use it.
        extra_key: namespace of the prefix cache (cache salt, adapter): equal tokens match only under equal keys.
        tenant: the request is accounted to it (API key or `user` field).
        lora_id: fingerprint of the LoRA adapter to run it with; "" for the model itself.
        needs_grammar: the request is not scheduled until `GrammarReady` arrives; the scheduler's process sets it.
        group: parallel samples (n > 1) share one group, not "", and one prompt: one computes it, all share its pages.
        queue_timeout_s: seconds from arrival within which it must be started; None: the server's limit.
        timeout_s: seconds from arrival within which it must be finished; None: the server's limit.
        delivered: set when the request continues one with another `rid` that was lost: these tokens count as its output
            (limits, penalties, positions of the noise, usage), and rows begin after them.
        grammar: what the answer is constrained to; None: free text.
        keep_special_ids: see `TextOptions`.
        pooling: a request for a vector instead of text. `sampling.max_new_tokens` is 1 then: the vector counts as a
            token. None: text.
        data_parallel_rank: the replica that its client wants, for the dispatcher; None: any.
        handoff: its prompt is computed for another engine, or by another one; None: this one does both.
        reports_progress: a row with `Usage.processed_tokens` follows each chunk of its prompt but the last.
        keep_s: seconds from its end for which the prefix cache keeps its prompt, within the quota of pins; 0: its pages
            are evicted first; None: neither.
        session: a digest of its session's key: the conversations of one agent or user. "": it names none.
        in_memory: its prompt is not written to a disk.
        media: the images of the prompt, in its order.
        background: it runs on what other requests leave; see `scheduler/policy/by_class.py`.
    """

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0
    extra_key: str = ""
    tenant: str = ""
    lora_id: str = ""
    needs_grammar: bool = False
    group: str = ""
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    delivered: Delivered | None = None
    grammar: GrammarUse | None = None
    keep_special_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    data_parallel_rank: int | None = None
    handoff: KVHandoff | None = None
    reports_progress: bool = False
    keep_s: float | None = None
    session: str = ""
    in_memory: bool = False
    media: tuple[MediaItem, ...] = ()
    background: bool = False


class GrammarReady(Message, frozen=True):
    """The grammar that a request waits for is ready, or has failed with `error`. Unknown ids are ignored.

    From the tokenizer manager it means that the sandbox has compiled it; the scheduler's process then compiles
    it, too, and gives the scheduler the same message, with the `compile_s` that it took.
    """

    rid: str
    error: str = ""
    compile_s: float = 0.0


class AbortRequest(Message, frozen=True):
    """End a request in any state; idempotent, unknown and finished ids are ignored.

    Sent when the client has disconnected or aborts, or when the detokenizer has finished the request (a stop string, an
    error). The scheduler frees everything and sends a finished row with ABORT, so that the detokenizer drops its state
    too. If the request was answered already, that row is discarded.
    """

    rid: str
    reason: str


class AbandonRequests(Message, frozen=True):
    """A new tokenizer manager takes over: abort the requests of its predecessor, including those still on their way.

    Attributes:
        before_s: CLOCK_MONOTONIC; requests with an earlier `arrival_s` have no reader of their rows.
    """

    before_s: float


class AdapterRead(Message, frozen=True):
    """The scheduler's process has read an adapter, or cannot: `error` says why."""

    store_id: int
    error: str = ""


SchedulerInput = (
    GenerateRequest
    | AbortRequest
    | AbandonRequests
    | GrammarReady
    | Call
    | AdapterRead
    | FromPeer
    | PagesWritten
    | PeerLost
    | Found
    | Loaded
    | Stored
    | Forgotten
)


# ---------------------------------------------------------------- scheduler -> detokenizer


class TokenOutput(Record, frozen=True):
    """New tokens of one request.

    Attributes:
        rid: the request.
        token_ids: [n] int32, generated since the last row; empty in a row of progress, and in some finished rows.
        usage: totals so far.
        finish: set in the last row of a request, and only there.
        options: set in the first row of a request that is not a row of progress, and only there.
        logprobs: of `token_ids`, when asked for.
        prompt_logprobs: of prompt tokens 1..prompt_len-1, in the first row, when asked for.
        vector: float32, the result of a pooling request, in its only row.
    """

    rid: str
    token_ids: bytes
    usage: Usage
    finish: Finish | None = None
    options: TextOptions | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    vector: bytes = b""


class BatchTokenOutput(Message, frozen=True):
    """The rows of one scheduling step, at most one per request."""

    outputs: list[TokenOutput]


DetokenizerInput = BatchTokenOutput | SchedulerReport


# ---------------------------------------------------------------- detokenizer, scheduler -> tokenizer manager


class TextOutput(Record, frozen=True):
    """New text of one request.

    Attributes:
        rid: the request.
        text: new text that is final: whole characters, without a possible beginning of a stop string.
        token_ids: [n] int32, the tokens of this row (text may come in a later row).
        usage: totals so far; `completion_tokens` ends at the token that completed a stop string.
        finish: set in the last row, and only there.
        logprobs, prompt_logprobs, vector: as in `TokenOutput`.
        ended_by_detokenizer: the detokenizer wrote `finish` (a stop string, or a decoding error) while the scheduler
            still runs the request; the receiver sends it an `AbortRequest`.
    """

    rid: str
    text: str
    token_ids: bytes
    usage: Usage
    finish: Finish | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    ended_by_detokenizer: bool = False
    vector: bytes = b""


class BatchTextOutput(Message, frozen=True):
    """The text form of one `BatchTokenOutput`."""

    outputs: list[TextOutput]


ManagerInput = BatchTextOutput | SchedulerReport | CallDone

HEARTBEAT_INTERVAL_S = 0.5
