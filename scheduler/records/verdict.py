"""`Verdict`: what one pass decided about one request, with its reason and its arithmetic."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class AddReqResult(enum.StrEnum):
    """SGLang's three answers, and one more. The pass looks behind NO_TOKEN a bounded way, behind SKIP always."""

    CONTINUE = "continue"  # admitted
    NO_TOKEN = "no_token"  # KV memory is short
    SKIP = "skip"  # a rule concerns this request alone: those behind it lose nothing by going first
    OTHER = "other"  # a computing budget is spent, or a rule for all; ends the pass


class Reason(enum.StrEnum):
    """Why; `text` says it to people."""

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
    GRAMMAR_PENDING = "grammar_pending"
    ONE_AT_A_TIME = "one_at_a_time"
    BATCH_FORMING = "batch_forming"
    BATCH_RUNNING = "batch_running"
    NO_DEVICE_MEMORY = "no_device_memory"

    @property
    def text(self) -> str:
        """The reason in words."""
        return _TEXTS[self]

    @property
    def is_cut(self) -> bool:
        """Whether it admits a part of a prompt, and says what ends that part."""
        return self in (Reason.CHUNKED, Reason.CHUNKED_IN_TIME, Reason.CONTINUED_IN_TIME)


_TEXTS: Final = {
    Reason.ADMITTED: "admitted",
    Reason.ADMITTED_ALONE: "admitted, since nothing else runs and its worst case fits",
    Reason.CHUNKED: "admitted in part: the chunk budget ends inside its prompt",
    Reason.CHUNKED_IN_TIME: "admitted in part: more would make the step longer than its target time",
    Reason.CHUNK_CONTINUED: "its prompt is computed further",
    Reason.CONTINUED_IN_TIME: "its prompt is computed further, as far as the step's target time allows",
    Reason.SWAPPED_IN: "its KV memory comes back from the host",
    Reason.NO_KV: "KV memory is short",
    Reason.NO_ROW: "as many requests run as may",
    Reason.CHUNK_BUDGET: "the chunk budget of this step is spent",
    Reason.STEP_TIME: "the target time of this step is spent",
    Reason.INPUT_BUDGET: "the prefill budget of this step is spent",
    Reason.PARTIAL_LIMIT: "as many prompts are being computed in chunks as may",
    Reason.LONG_PARTIAL_LIMIT: "as many long prompts are being computed in chunks as may",
    Reason.RETRACTING: "running requests were just retracted: nobody is admitted in this pass",
    Reason.DECODES_FIRST: "this step belongs to the running requests",
    Reason.OVERTAKEN_AHEAD: "a request before it has been overtaken too often",
    Reason.LOOK_AHEAD_SPENT: "it stands too far behind others that cannot start now",
    Reason.BEHIND: "the pass ended before it",
    Reason.PREFIX_COMING: "another request is computing the beginning of its prompt, which it will share",
    Reason.SIBLING_PREFILLS: "its sibling computes the prompt, which it will share",
    Reason.LORA_LIMIT: "as many adapters are in use as may",
    Reason.GRAMMAR_PENDING: "its grammar is being compiled",
    Reason.ONE_AT_A_TIME: "the policy runs one request at a time, and one runs",
    Reason.BATCH_FORMING: "the policy waits until the batch is full",
    Reason.BATCH_RUNNING: "the policy waits for the slowest request of the batch that runs",
    Reason.NO_DEVICE_MEMORY: "the device had no memory for the smallest step, so none is made for a while",
}


class Verdict(NamedTuple):
    """One decision.

    Attributes:
        rid: about whom.
        result, reason: the decision.
        prefix_len: tokens that need not be computed: the prefix cache has them, or the host (see SWAPPED_IN).
        extend_len: tokens to compute: all of them when refused, those of this step when admitted.
        output_len: tokens reserved for its output.
        need, have: the two sides of the comparison that decided, in tokens; adapters for LORA_LIMIT.
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
        """One line for people."""
        return (
            f"{self.reason.name} {self.rid}: {self.reason.text}; need {self.need:,} have {self.have:,} "
            f"(cached {self.prefix_len:,}, compute {self.extend_len:,}, output {self.output_len:,})"
        )
