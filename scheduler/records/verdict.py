"""`Verdict`: the decision of a pass about one request, with its arithmetic; `CacheMiss`: why no more was cached."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class AddReqResult(enum.StrEnum):
    """SGLang's three results, and SKIP. After NO_TOKEN the look-ahead bounds the pass; after SKIP it goes on."""

    CONTINUE = "continue"  # admitted
    NO_TOKEN = "no_token"  # KV memory is short, or rows of the encoder
    SKIP = "skip"  # a rule refuses this request alone; admitting requests after it does not delay it
    OTHER = "other"  # a compute budget is spent, or a rule refuses all requests; ends the pass


class Reason(enum.StrEnum):
    """The reason of a verdict; `text` is the reason in words."""

    ADMITTED = "admitted"
    ADMITTED_ALONE = "admitted_alone"
    CHUNKED = "chunked"
    CHUNKED_IN_TIME = "chunked_in_time"
    CHUNK_CONTINUED = "chunk_continued"
    CONTINUED_IN_TIME = "continued_in_time"
    SWAPPED_IN = "swapped_in"
    NO_KV = "no_kv"
    NO_ROW = "no_row"
    CHUNK_BUDGET = "chunk_budget"
    STEP_TIME = "step_time"
    INPUT_BUDGET = "input_budget"
    PARTIAL_LIMIT = "partial_limit"
    LONG_PARTIAL_LIMIT = "long_partial_limit"
    RETRACTING = "retracting"
    DECODES_FIRST = "decodes_first"
    OVERTAKEN_AHEAD = "overtaken_ahead"
    LOOK_AHEAD_SPENT = "look_ahead_spent"
    BEHIND = "behind"
    PREFIX_COMING = "prefix_coming"
    SIBLING_PREFILLS = "sibling_prefills"
    LORA_LIMIT = "lora_limit"
    ADAPTER_LOADING = "adapter_loading"
    GRAMMAR_PENDING = "grammar_pending"
    ONE_AT_A_TIME = "one_at_a_time"
    BATCH_FORMING = "batch_forming"
    BATCH_RUNNING = "batch_running"
    NO_DEVICE_MEMORY = "no_device_memory"
    PAUSED = "paused"
    COPY_BUDGET = "copy_budget"
    MEDIA_LIMIT = "media_limit"
    ENCODE_TIME = "encode_time"
    BACKGROUND = "background"

    @property
    def text(self) -> str:
        """The reason in words."""
        return _TEXTS[self]

    @property
    def is_cut(self) -> bool:
        """Whether the verdict admits a part of a prompt; the reason says what limits that part."""
        return self in (Reason.CHUNKED, Reason.CHUNKED_IN_TIME, Reason.CONTINUED_IN_TIME)


_TEXTS: Final = {
    Reason.ADMITTED: "admitted",
    Reason.ADMITTED_ALONE: "admitted, since nothing else runs and its worst case fits",
    Reason.CHUNKED: "admitted in part: the chunk budget ends inside its prompt",
    Reason.CHUNKED_IN_TIME: "admitted in part: more would make the step longer than its target time",
    Reason.CHUNK_CONTINUED: "its prompt is computed further",
    Reason.CONTINUED_IN_TIME: "its prompt is computed further, within the target time of this step",
    Reason.SWAPPED_IN: "its KV memory comes back from the host",
    Reason.NO_KV: "KV memory is short",
    Reason.NO_ROW: "the limit of running requests is reached",
    Reason.CHUNK_BUDGET: "the chunk budget of this step is spent",
    Reason.STEP_TIME: "the target time of this step is spent",
    Reason.INPUT_BUDGET: "the prefill budget of this step is spent",
    Reason.PARTIAL_LIMIT: "the limit of partial prefills is reached",
    Reason.LONG_PARTIAL_LIMIT: "the limit of long partial prefills is reached",
    Reason.RETRACTING: "running requests were just retracted, so this pass admits no request",
    Reason.DECODES_FIRST: "this step belongs to the running requests",
    Reason.OVERTAKEN_AHEAD: "a request before it has been overtaken too often",
    Reason.LOOK_AHEAD_SPENT: "a request before it cannot start now, and it is beyond the look-ahead after that one",
    Reason.BEHIND: "the pass ended before it",
    Reason.PREFIX_COMING: "another request is computing the beginning of its prompt, which it will share",
    Reason.SIBLING_PREFILLS: "its sibling computes the prompt, which it will share",
    Reason.LORA_LIMIT: "it waits for an adapter slot: all are in use",
    Reason.ADAPTER_LOADING: "its adapter is being read",
    Reason.GRAMMAR_PENDING: "its grammar is being compiled",
    Reason.ONE_AT_A_TIME: "the policy runs one request at a time, and one runs",
    Reason.BATCH_FORMING: "the policy waits until the batch is full",
    Reason.BATCH_RUNNING: "the policy waits for the slowest request of the batch that runs",
    Reason.NO_DEVICE_MEMORY: "the device had no memory for the smallest step, so no step is planned for a while",
    Reason.PAUSED: "an admin has paused the server",
    Reason.COPY_BUDGET: "this step copies enough from the host for others",
    Reason.MEDIA_LIMIT: "the encoder's rows are promised to other images",
    Reason.ENCODE_TIME: "this step encodes other images for as long as its target time allows",
    Reason.BACKGROUND: "it is a batch request, and another request waits for a row or for memory",
}


class Verdict(NamedTuple):
    """One decision about one request.

    Attributes:
        rid: the request.
        result, reason: the decision.
        prefix_len: tokens that need not be computed, because the prefix cache or the host has their KV.
        extend_len: tokens to compute: in all if the request is refused, in this step if it is admitted.
        output_len: tokens reserved for its output.
        need, have: the two sides of the deciding comparison, in tokens; in adapters for LORA_LIMIT, in rows of the
            encoder for MEDIA_LIMIT.
    """

    rid: str
    result: AddReqResult
    reason: Reason
    prefix_len: int = 0
    extend_len: int = 0
    output_len: int = 0
    need: int = 0
    have: int = 0

    def text(self) -> str:
        """The verdict as one line of text."""
        return (
            f"{self.reason.name} {self.rid}: {self.reason.text}; need {self.need:,} have {self.have:,} "
            f"(cached {self.prefix_len:,}, compute {self.extend_len:,}, output {self.output_len:,})"
        )


class MissKind(enum.StrEnum):
    """Reason why the cached prefix ends where it ends; `text` is the reason in words."""

    NONE = "none"
    NO_PREFIX = "cold"
    DIFFERS = "differs"
    EVICTED = "evicted"
    FLUSHED = "flushed"
    OTHER_NAMESPACE = "other_namespace"
    ROUNDING = "rounding"
    BYPASSED = "not_asked"
    PROMPT_LONGER = "ends"
    OFF = "off"
    NO_STATE = "no_state"

    @property
    def text(self) -> str:
        """The reason in words."""
        return _MISS_TEXTS[self]


_MISS_TEXTS: Final = {
    MissKind.NONE: "all that can be cached was cached; the last token is always computed",
    MissKind.NO_PREFIX: "no prompt with this beginning was cached",
    MissKind.DIFFERS: "the nearest cached prompt differs from here on",
    MissKind.EVICTED: "the rest had been cached and was evicted to make room",
    MissKind.FLUSHED: "the rest had been cached, until the whole cache was emptied",
    MissKind.OTHER_NAMESPACE: "the same tokens are cached under another cache salt or adapter, which are never shared",
    MissKind.ROUNDING: "prefixes are shared in whole pages, and the rest fills none",
    MissKind.BYPASSED: "the request needs the results of all tokens of its prompt, so all of it is computed",
    MissKind.PROMPT_LONGER: "the nearest cached prompt ends here, and this one goes on",
    MissKind.OFF: "the prefix cache is switched off",
    MissKind.NO_STATE: "more is cached, but no state of the model's state layers was kept at its end",
}


class CacheMiss(NamedTuple):
    """The result of one look-up in the prefix cache.

    Attributes:
        rid: the request.
        prompt_len: tokens of the prompt.
        prefix_len: tokens found.
        kind: why not more were found.
        differs_at: position of the first token that differs from the nearest cached prompt; `prefix_len` is rounded
            down to a page. Equal to `prefix_len` if there is no prompt to compare with.
        evicted_at: the cache's count of evictions when the missing page was evicted; 0 unless EVICTED.
        own_kind: for OTHER_NAMESPACE: the kind if no other namespace existed.
        lost_s: seconds since the missing page was evicted or flushed; `idle_s`: from its last use until then.
        host_tokens: tokens after those found that come back from host memory.
    """

    rid: str
    prompt_len: int
    prefix_len: int
    kind: MissKind
    differs_at: int
    evicted_at: int = 0
    own_kind: MissKind | None = None
    lost_s: float = 0.0
    idle_s: float = 0.0
    host_tokens: int = 0

    def for_clients(self) -> CacheMiss:
        """A copy without information about other namespaces, which a cache salt must hide.

        A client can learn neither what another tenant has cached nor, from the count of evictions, how busy other
        tenants are. The operator gets the complete `CacheMiss`.
        """
        return self._replace(kind=self.own_kind or self.kind, evicted_at=0, own_kind=None)
