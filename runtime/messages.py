"""Every message between the processes: one tagged union per socket and direction.

    tokenizer_manager --SchedulerInput--> scheduler --DetokenizerInput--> detokenizer --ManagerInput-->
    tokenizer_manager

Token ids travel as bytes (int32, little-endian): 8,192 of them decode in microseconds where a list takes most of a
millisecond. What a process only hands on (`Usage`, `Logprobs`, `SchedulerReport`) is nested and passed untouched.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from .sampling_params import SamplingParams


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Base of all that crosses a process border; the tag is the class name. New fields go last, with a default."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of what travels nested inside a message, so it needs no tag."""


# ---------------------------------------------------------------- nested records


class FinishKind(enum.StrEnum):
    """How a request ended; the values of STOP and LENGTH are OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Finish(Record, frozen=True):
    """Why a request ended.

    Attributes:
        kind: see `FinishKind`.
        matched: the stop token id or stop string that matched, for STOP.
        message: what to tell the client, for ABORT and ERROR: value, rule, way out.
        status: the HTTP status for ERROR (and for ABORT by the server).
    """

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""
    status: int = 500


class TextOptions(Record, frozen=True):
    """How the detokenizer shall print one request; sent with the request's first row only.

    Attributes:
        delivered_ids: [n] int32, the beginning of the answer, which the client has already: its text is not sent again.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    delivered_ids: bytes = b""


class Usage(Record, frozen=True):
    """What one request has consumed so far.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated so far, this row's included.
        cached_tokens: prompt tokens that were not computed because the prefix cache had them, at first admission.
        queue_s: seconds between arrival at the scheduler and first admission.
        num_retractions: how often the request lost its KV memory and was computed again.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    num_retractions: int = 0


class Logprobs(Record, frozen=True):
    """Log-probabilities of n consecutive tokens, natural logarithm, after no temperature (the model's own).

    Attributes:
        token_logprobs: [n] float32, each token's own.
        top_ids: [n, k] int32, the k likeliest tokens, descending; empty for k = 0.
        top_logprobs: [n, k] float32.
        top_k: k.
    """

    token_logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    top_k: int = 0


_LIFE: Final = "+"


def rid_of_life(rid: str, life: int) -> str:
    """The id under which a request is submitted for the (life + 1)-th time, after a process was lost with it."""
    return f"{first_rid(rid)}{_LIFE}{life}"


def first_rid(rid: str) -> str:
    """The id under which a request was submitted first, which is how its client knows it."""
    return rid.partition(_LIFE)[0]


# ---------------------------------------------------------------- tokenizer manager -> scheduler


class Delivered(Record, frozen=True):
    """What the client of a request has already, when the request is submitted again because a process was lost.

    Attributes:
        output_ids: [n] int32, not empty: the generated tokens that were delivered, in order.
        usage: as of the last of them.
    """

    output_ids: bytes
    usage: Usage


class GenerateRequest(Message, frozen=True):
    """Start one generation; exactly one finished row answers it.

    Attributes:
        rid: made by the server, unique for its life; matched exactly.
        input_ids: [prompt_len] int32, not empty, each below the vocabulary size.
        sampling: verified; `max_new_tokens` and `seed` are set.
        arrival_s: CLOCK_MONOTONIC when the request reached the tokenizer manager.
        priority: larger is scheduled earlier where the policy looks at it.
        extra_key: namespace of the prefix cache (cache salt, adapter): equal tokens match only under equal keys.
        tenant: whom to account the request to (API key or `user` field).
        lora_id: the adapter to run it with; "" for the model itself.
        needs_grammar: it waits aside until `GrammarReady` comes.
        group: siblings (n > 1) have the same one, not "", and the same prompt: one computes it, all share its pages.
        queue_timeout_s: seconds from arrival within which it must be started; None: the server's limit.
        timeout_s: seconds from arrival within which it must have ended; None: the server's limit.
        delivered: set when the request goes on where one with another `rid` was lost: these tokens count as its output
            (limits, penalties, positions of the noise, usage), and rows begin behind them.
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


class GrammarReady(Message, frozen=True):
    """The grammar that a request waits for is there, or, with an `error`, will never be. Unknown ids are ignored."""

    rid: str
    error: str = ""


class PinPrefix(Message, frozen=True):
    """Keep what is cached of a prefix for a time, as far as the quota goes; answered by `PinDone` with the same id.

    Pinning again sets a new end; `ttl_s` 0 unpins. Pinned pages are the last to go, but they go when running requests
    need them: a pin can never block admission.
    """

    pin_id: int
    input_ids: bytes
    ttl_s: float
    extra_key: str = ""


class Explain(Message, frozen=True):
    """Ask why a request fared as it did; answered by `Explanation` with the same id."""

    explain_id: int
    rid: str


class ListRequests(Message, frozen=True):
    """Ask for the requests that are not finished; answered by `RequestList` with the same id.

    Attributes:
        limit: how many to tell of at most.
    """

    list_id: int
    limit: int


class AbortRequest(Message, frozen=True):
    """End a request wherever it is; idempotent, unknown and finished ids are ignored.

    The client is gone, or asked for it, or the detokenizer has answered (a stop string, an error). The scheduler frees
    everything and sends a finished row with ABORT, so that the detokenizer forgets the request too; who has answered
    already drops that row.
    """

    rid: str
    reason: str


class AbandonRequests(Message, frozen=True):
    """A new tokenizer manager takes over: abort what arrived at the one before it, also what is still under way.

    Attributes:
        before_s: CLOCK_MONOTONIC; requests with an earlier `arrival_s` have nobody who reads their rows.
    """

    before_s: float


class FlushCache(Message, frozen=True):
    """Drop every unlocked page of the prefix cache; answered by `FlushCacheDone` with the same id."""

    flush_id: int


SchedulerInput = (
    GenerateRequest
    | AbortRequest
    | AbandonRequests
    | FlushCache
    | GrammarReady
    | PinPrefix
    | Explain
    | ListRequests
)


# ---------------------------------------------------------------- scheduler -> detokenizer


class TokenOutput(Record, frozen=True):
    """News of one request.

    Attributes:
        rid: the request.
        token_ids: [n] int32, generated since the last row; may be empty in a finished row.
        usage: totals so far.
        finish: set in the last row of a request, and only there.
        options: set in the first row of a request, and only there.
        logprobs: of `token_ids`, when asked for.
        prompt_logprobs: of prompt tokens 1..prompt_len-1, in the first row, when asked for.
    """

    rid: str
    token_ids: bytes
    usage: Usage
    finish: Finish | None = None
    options: TextOptions | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class BatchTokenOutput(Message, frozen=True):
    """What one scheduling step has to tell, at most one row per request."""

    outputs: list[TokenOutput]


class SchedulerReport(Message, frozen=True):
    """The scheduler's heartbeat and its numbers; sent at least every `HEARTBEAT_INTERVAL_S`, also while idle.

    Totals count from the start of the scheduler process. `*_tokens` of KV memory count slots.
    """

    sent_s: float  # CLOCK_MONOTONIC
    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    kv_used_tokens: int = 0  # held by requests
    kv_cached_tokens: int = 0  # in the radix tree, locked or not
    kv_total_tokens: int = 0
    new_token_ratio: float = 0.0
    retracted_reqs_total: int = 0
    prompt_tokens_total: int = 0  # prompt tokens of admitted requests, cached or computed
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0  # prompt tokens taken from the prefix cache
    evicted_tokens_total: int = 0
    num_steps_total: int = 0  # each round of a burst is one
    step_s_total: float = 0.0
    num_swapped_reqs: int = 0  # of num_queue_reqs, those whose KV is on the host
    num_grammar_reqs: int = 0  # of num_queue_reqs, those that wait for a grammar
    preempted_reqs_total: int = 0  # of retracted_reqs_total, those that made place for a more urgent request
    swapped_out_tokens_total: int = 0
    swapped_in_tokens_total: int = 0
    host_used_tokens: int = 0
    host_total_tokens: int = 0
    pinned_tokens: int = 0
    timed_out_reqs_total: int = 0
    policy: str = ""  # the one that orders the queue now
    waiting_by_reason: dict[str, int] = {}
    stalled: str = ""  # why nothing moves although requests wait; "" if all is well
    draft_tokens_total: int = 0  # guesses at next tokens that steps have checked, see --speculative
    accepted_draft_tokens_total: int = 0  # of these, those that were right
    detokenizer_reqs: int = (
        0  # requests that the detokenizer has a text state of; it says so as the report passes
    )


class FlushCacheDone(Message, frozen=True):
    """Answer to `FlushCache`: how many tokens were dropped, and how many stay because running requests use them."""

    flush_id: int
    flushed_tokens: int
    kept_tokens: int


class PinDone(Message, frozen=True):
    """Answer to `PinPrefix`: how many tokens are pinned, of how many asked; `reason` says why not all, if not all."""

    pin_id: int
    pinned_tokens: int
    asked_tokens: int
    reason: str = ""


class Explanation(Message, frozen=True):
    """Answer to `Explain`: one sentence and a table; not `found` when nothing is remembered of the request."""

    explain_id: int
    found: bool
    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


class LiveRequest(Record, frozen=True):
    """A request that is not finished.

    Attributes:
        rid: the request.
        phase: where it is: waiting, waiting_grammar, prefill, decode, retracted or swapped.
        prompt_len, output_len, max_new_tokens, cached_tokens, num_retractions, priority: as everywhere.
        age_s: seconds since it arrived.
        reason: what the last pass decided about it, as the decision log names it (no_kv, ...); "" if no pass has come
            to it, or if it decodes.
        why: the same in words.
        need, have: the arithmetic, in tokens; 0 and 0 if there is none.
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


class RequestList(Message, frozen=True):
    """Answer to `ListRequests`: those with a row first, then those that wait, each in order of arrival.

    Attributes:
        total: how many there are, told or not.
        last_pass: figures of the last pass: step_id, decodes, and the budgets before and after it, in tokens.
    """

    list_id: int
    requests: list[LiveRequest]
    total: int
    last_pass: dict[str, int] = {}


DetokenizerInput = BatchTokenOutput | SchedulerReport | FlushCacheDone | PinDone | Explanation | RequestList


# ---------------------------------------------------------------- detokenizer -> tokenizer manager


class TextOutput(Record, frozen=True):
    """News of one request, printable.

    Attributes:
        rid: the request.
        text: certain new text: whole characters, no beginning of a stop string held back.
        token_ids: [n] int32, the tokens of this row (text may lag behind them).
        usage: totals so far; `completion_tokens` ends at the token that completed a stop string.
        finish: set in the last row, and only there.
        logprobs, prompt_logprobs: as in `TokenOutput`.
        ended_by_detokenizer: the detokenizer wrote `finish` (a stop string, or text that could not be made) while the
            scheduler goes on; whoever reads this tells it with an `AbortRequest`.
    """

    rid: str
    text: str
    token_ids: bytes
    usage: Usage
    finish: Finish | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    ended_by_detokenizer: bool = False


class BatchTextOutput(Message, frozen=True):
    """The printable form of one `BatchTokenOutput`."""

    outputs: list[TextOutput]


ManagerInput = BatchTextOutput | SchedulerReport | FlushCacheDone | PinDone | Explanation | RequestList

HEARTBEAT_INTERVAL_S = 0.5
