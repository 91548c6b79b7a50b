"""`StepPlan` and `StepResult`: all that the scheduler tells a model runner for one step, and all it hears back.

The runner decides nothing and the scheduler touches no device: this file is the whole border between them. A plan is a
plain value that can be logged, replayed, or sent to the ranks of a tensor-parallel group, which need nothing else.

Shapes: B requests in the batch, T new tokens in the batch, S requests of the batch that sample a token in this step.
Arrays are bytes in C order, int32 unless said otherwise; `numpy.frombuffer` views them without a copy.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from .messages import Logprobs, Message, Record
from .sampling_params import SamplingParams

MAX_DRAFT_STEP_TOKENS: Final = 64
"""No step that checks drafts has more tokens, so that a runner may compute larger ones in another way than decodes."""

_INT32_BYTES: Final = 4

GoOn = Callable[[bytes], bool]
"""Asked between the rounds of a burst, with the tokens of the last one ([B] int32): whether there is to be another."""


def to_the_end(next_token_ids: bytes) -> bool:
    """A `GoOn`: nothing ends a burst before its last round."""
    return True


class ForwardMode(enum.IntEnum):
    """What kinds of work a step holds. IDLE is a step without tokens (it may still finish rows)."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4


class NewReq(Record, frozen=True):
    """Everything a runner must know of a request, sent once, in the step of its first chunk (again after retraction).

    Attributes:
        rid: for logs only; the runner knows requests by row.
        row: index into the pool of rows; free until `finished_rows` of a later (or this) step releases it.
        input_ids: prompt, and after a retraction the output so far.
        prompt_len: how many of `input_ids` are prompt; the rest counts as output for penalties and `min_new_tokens`.
        prefix_loc: [prefix_len] the KV slots of the cached prefix, positions 0..prefix_len-1.
        sampling: verified parameters; seed and max_new_tokens are set.
    """

    rid: str
    row: int
    input_ids: bytes
    prompt_len: int
    prefix_loc: bytes
    sampling: SamplingParams


class RowUpdate(Record, frozen=True):
    """Overwrite the slots of one row: positions start..start+len(loc)-1 now live in `loc`.

    Needed where the scheduler found the same pages in the prefix cache and dropped the request's own copies.
    """

    row: int
    start: int
    loc: bytes


class StepPlan(Record, frozen=True):
    """One step: a flat list of new tokens and the KV slots they go to. No padding, no longest sequence.

    The runner applies the fields in this order: `swap_outs`, `page_copies`, `swap_ins`, `finished_rows`, `new_reqs`,
    `row_updates`, then the batch. The input token at position p of a row is `input_ids[p]` of its `NewReq`, or,
    beyond its end, the token sampled for that row in its last step, which need not have reached the host yet. Behind
    that one come the request's drafts, guesses at the next tokens: the runner samples after each of them, too, and
    keeps what is sampled as far as the drafts say the same, and the first token that they do not.

    A burst is a step of decodes alone that is made several times in a row: its rounds, each with the tokens that the
    one before has sampled. The host has nothing to do between two of them but to be asked whether it goes on.

    Attributes:
        step_id: counts up from 1.
        mode: see `ForwardMode`.
        rows: [B] pool row of each request, extends first, then decodes.
        num_computed_tokens: [B] tokens whose KV exists already: position of the first new token.
        num_scheduled_tokens: [B] new tokens: 1 for a decode, 1 + k for one with k drafts, more for a prefill chunk.
        out_cache_loc: [T] KV slot of each new token, in batch order; none twice. Of a burst [num_rounds, T].
        samples: [B] uint8, 1 where the request's last new token is followed by sampling; 0 for an unfinished prompt.
        total_num_scheduled_tokens: T.
        new_reqs, row_updates: see their classes.
        page_copies: [C, 2] (source page, destination page); no destination twice, and none of them is a source.
        finished_rows: rows whose requests left (finished, aborted, retracted) since the last plan.
        swap_outs: [O, 2] (page, host page): KV that goes to the host; the pages may be written again in this step.
        swap_ins: [I, 2] (host page, page): KV that comes back. Never both in one step; see `Capacity.num_host_pages`.
        num_drafts: [B] drafts of each request, only of decodes; empty if nobody has any.
        draft_ids: [sum of num_drafts] the drafts, request after request.
        num_rounds: 1, or how often a burst is made at most; the arrays tell of its first round.
    """

    step_id: int
    mode: ForwardMode
    rows: bytes = b""
    num_computed_tokens: bytes = b""
    num_scheduled_tokens: bytes = b""
    out_cache_loc: bytes = b""
    samples: bytes = b""
    total_num_scheduled_tokens: int = 0
    new_reqs: tuple[NewReq, ...] = ()
    row_updates: tuple[RowUpdate, ...] = ()
    page_copies: bytes = b""
    finished_rows: bytes = b""
    swap_outs: bytes = b""
    swap_ins: bytes = b""
    num_drafts: bytes = b""
    draft_ids: bytes = b""
    num_rounds: int = 1

    def round_loc(self, number: int) -> bytes:
        """[T] `out_cache_loc` of a round, 0 <= number < num_rounds."""
        num_bytes = _INT32_BYTES * self.total_num_scheduled_tokens
        return self.out_cache_loc[number * num_bytes : (number + 1) * num_bytes]

    def round(self, number: int) -> StepPlan:
        """A round, 0 <= number < num_rounds, as the plan of a step."""
        loc = self.round_loc(number)
        if not number:
            return msgspec.structs.replace(self, out_cache_loc=loc, num_rounds=1)
        positions = memoryview(self.num_computed_tokens).cast("i")
        return StepPlan(
            self.step_id,
            ForwardMode.DECODE,
            self.rows,
            struct.pack(f"{len(positions)}i", *[position + number for position in positions]),
            self.num_scheduled_tokens,
            loc,
            self.samples,
            self.total_num_scheduled_tokens,
        )


class StepResult(Record, frozen=True):
    """What a step produced.

    Attributes:
        step_id: of the plan.
        next_token_ids: [S] the sampled tokens, in batch order of the requests with `samples` = 1; in a step with drafts
            as many of each request as `num_next_tokens` says, one after the other; so, too, after a burst.
        logprobs: one entry per sampled request (each of n = 1 token), or empty when nobody in the batch asked.
        prompt_logprobs: batch index -> log-probabilities of the prompt tokens *predicted by* this chunk: the tokens at
            positions num_computed+1 .. min(num_computed+num_scheduled, prompt_len-1).
        errors: batch index -> message, for requests that failed on their own (numbers not finite, also in a chunk
            that samples nothing); who samples has an arbitrary entry in `next_token_ids`. The others are not affected.
        forward_s: seconds that the device spent on it, the way of the tokens to the host included; a step that was
            launched while the one before ran counts from that one's end. The CPU is a device that starts at once.
        swap_s: of these, seconds that the device was busy swapping; 0 without swaps.
        out_of_memory: why the step has computed nothing: the device had no memory for it. Everything of the plan before
            the batch has been done; the KV of the batch's new tokens is arbitrary. Empty for a step that has.
        num_next_tokens: [S] tokens of each request: 1 and one more for each draft that was right, or one of each round
            that was made of a burst; empty for a step without drafts or further rounds.
    """

    step_id: int
    next_token_ids: bytes = b""
    logprobs: tuple[Logprobs | None, ...] = ()
    prompt_logprobs: dict[int, Logprobs] = {}  # noqa: RUF012  (msgspec copies mutable defaults)
    errors: dict[int, str] = {}  # noqa: RUF012
    forward_s: float = 0.0
    swap_s: float = 0.0
    out_of_memory: str = ""
    num_next_tokens: bytes = b""


class Pending(Protocol):
    """A step under way on the device."""

    def wait(self) -> StepResult:
        """Block until the tokens are on the host. Called once per step, in launch order."""
        ...


class Runner(Protocol):
    """What the scheduler needs of a model runner; the product's is `model_runner.ModelRunner`."""

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end) -> Pending:
        """Start a step. May return before the device is done; nothing until `Pending.wait` may block on the device.

        Args:
            go_on: asked between the rounds of a burst, if there are any; when it says no, the burst has ended. Only
                devices that are done with a round when its launch returns can make one.
        """
        ...


class LaunchStep(Message, frozen=True):
    """Execute this step, after all that were sent before; rank 0 does the same. Nothing is answered."""

    plan: StepPlan


RankInput = LaunchStep
