"""`Verdict`: what one pass decided about one request, with its reason and its arithmetic."""

from __future__ import annotations

import enum
from typing import NamedTuple


class AddReqResult(enum.Enum):
    """SGLang's three answers. NO_TOKEN lets the pass look at others behind; OTHER ends it."""

    CONTINUE = "continue"  # admitted
    NO_TOKEN = "no_token"  # KV memory is short
    OTHER = "other"  # a computing budget is spent, or a rule


class Reason(enum.Enum):
    """Why; the values are for people."""

    ADMITTED = "admitted"
    ADMITTED_ALONE = "admitted, since nothing else runs and its worst case fits"
    CHUNKED = "admitted in part: the chunk budget ends inside its prompt"
    CHUNK_CONTINUED = "its prompt is computed further"
    NO_KV = "KV memory is short"
    NO_ROW = "as many requests run as may"
    CHUNK_BUDGET = "the chunk budget of this step is spent"
    INPUT_BUDGET = "the prefill budget of this step is spent"
    PARTIAL_LIMIT = "another prompt is being computed in chunks"
    RETRACTING = "memory just ran out: running requests were retracted in this pass"
    DECODES_FIRST = "the running requests have waited long enough: this step decodes"
    OVERTAKEN_AHEAD = "a request before it has been overtaken too often"
    LOOK_AHEAD_SPENT = "it stands too far behind a request that lacks memory"
    BEHIND = "the pass ended before it"


class Verdict(NamedTuple):
    """One decision.

    Attributes:
        rid: about whom.
        result, reason: the decision.
        prefix_len: tokens the prefix cache has.
        extend_len: tokens to compute: all of them when refused, those of this step when admitted.
        output_len: tokens reserved for its output.
        need, have: the two sides of the comparison that decided, in tokens.
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
            f"{self.reason.name} {self.rid}: {self.reason.value}; need {self.need:,} have {self.have:,} "
            f"(cached {self.prefix_len:,}, compute {self.extend_len:,}, output {self.output_len:,})"
        )
