"""`StepPlan` and `StepResult`: the whole interface between the scheduler and a model runner, one of each per step.

The runner makes no scheduling decision and the scheduler touches no device. A plan is a plain value that can be
logged, replayed, or sent to the ranks of a tensor-parallel group, which need no other input.

Shapes: B requests in the batch, T new tokens in the batch, S requests of the batch that sample a token in this step.
Arrays are bytes in C order, int32 unless said otherwise; `numpy.frombuffer` views them without a copy.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .adapter_spec import AdapterSpec
from .pooling import PoolingParams
from .sampling_params import SamplingParams
from .transport.message_base import Logprobs, Message, Record

MAX_DRAFT_STEP_TOKENS: Final = 64
"""Most tokens in a step that verifies drafts. A runner may compute larger steps with other kernels than decodes."""

RUNNER_DRAFT: Final = -1
"""In `StepPlan.draft_ids`: the runner's drafter proposes the token."""

_INT32_BYTES: Final = 4

GoOn = Callable[[bytes], bool]
"""Called between rounds of a multi-step decode with the tokens of the last one ([B] int32): whether another follows."""


def to_the_end(next_token_ids: bytes) -> bool:
    """A `GoOn` that runs every round of a multi-step decode."""
    return True


class TokenMasks(NamedTuple):
    """The tokens that grammars allow next.

    Attributes:
        indices: [n] int64 ascending, into the rows of logits of a step: [S], or with drafts [R] (1 + k for a request
            with k drafts).
        bits: [n, at least V / 32] int32. Token t of a row is allowed if bit t % 32 of word t // 32 is set, as in
            xgrammar and llguidance.
    """

    indices: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]


class GetMasks(Protocol):
    """Has the token masks of one step, and of each round of a multi-step decode, from the forward pass on.

    With overlap a call waits for the tokens of the step before, which the masks depend on. A runner either calls it for
    all masks before it samples, or, where sampled tokens are on the host at once (a CPU), for those of `before`, then
    samples, and samples the rows of `after` again. The tokens are the same: without filters (top-k, top-p, min-p) the
    largest sum of logit and noise over all tokens, if it is an allowed token, is the largest over the allowed tokens.
    Most tokens of a model that follows its grammar are allowed, and to check one is much cheaper than to fill a mask.
    """

    def __call__(self) -> TokenMasks | None:
        """All masks; None if no row is constrained."""
        ...

    def before(self) -> TokenMasks | None:
        """The masks of the rows that cannot be checked after sampling."""
        ...

    def drafted(self, draft_ids: bytes) -> None:
        """Take the drafts of a step with drafts of the runner; before the first call for masks, which follow them.

        Args:
            draft_ids: all of the step, as in `StepPlan.draft_ids`. Grammars may refuse some: a row after a refused
                draft has no mask, because no sampled token with a mask equals that draft.
        """
        ...

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        """Report the likeliest token without its mask, of each row of the last masks; for figures only.

        A runner calls it after the masks were returned and before it asks for others: before the next step's, and
        before those of `after`. Those of `after` need no call, because the sampled tokens say the same.

        Args:
            token_ids: [n] as many as the masks had rows.
        """
        ...

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        """The masks of the other rows whose sampled token ([R], of each row of logits) is not allowed."""
        ...


class _NoMasks:
    """The masks of a step without grammars."""

    def __call__(self) -> TokenMasks | None:
        return None

    def before(self) -> TokenMasks | None:
        return None

    def drafted(self, draft_ids: bytes) -> None:
        return None

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        return None

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        return None


no_masks: Final[GetMasks] = _NoMasks()


class ForwardMode(enum.IntEnum):
    """Kinds of work that a step holds. IDLE is a step without tokens (it may still finish rows)."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4


class NewReq(Record, frozen=True):
    """A request as the runner needs it, sent once, in the step of its first chunk (again after a retraction).

    Attributes:
        rid: for logs only; the runner knows requests by row.
        row: index into the pool of rows; in use until `finished_rows` of a later (or this) step releases it.
        input_ids: prompt, and after a retraction the output so far.
        prompt_len: number of prompt tokens in `input_ids`; the rest is output for penalties and `min_new_tokens`.
        prefix_loc: [prefix_len] the KV slots of the cached prefix, positions 0..prefix_len-1.
        sampling: verified parameters; seed and max_new_tokens are set.
        pooling: what is computed of the prompt instead of a next token; None: the request generates text.
        adapter_slot: of the LoRA adapter that it runs with; 0: the base model.
        checkpoint: in a model with state layers the state after the prefix, read in this step; 0: there is no prefix.
        media: [n, 3] (position, length, first row): tokens of the prompt that take rows of the encoder, consecutive
            from `first row`, instead of the embeddings of their ids.
        rope: [3, n] of a prompt with images, for a model whose tokens have positions on three axes: those of its first
            n tokens, which end after the last image or later. Heads turn by them; a token after the first n has the
            next larger number on all axes. Empty: all axes have the position.
    """

    rid: str
    row: int
    input_ids: bytes
    prompt_len: int
    prefix_loc: bytes
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    adapter_slot: int = 0
    checkpoint: int = 0
    media: bytes = b""
    rope: bytes = b""


class Encode(Record, frozen=True):
    """Compute the encoder's rows of some tiles of an image.

    Attributes:
        pixels, shape: as in `MediaItem`.
        first_tile, num_tiles: the tiles to encode.
        first_row: the first of their rows in the runner's buffer, which are consecutive.
        first_part, num_parts: the work on a single tile, if it is divided among steps: of its
            `Capacity.encoder_tile_parts` parts a block those from `first_part` on; the parts before are done, and no
            other tile has had these rows since. 0 parts: all.
        blocks: [n] of a single tile whose rows are in several blocks of `Capacity.encoder_tile_rows`: the first row of
            each, `first_row` the first of them. Empty: a tile is a block.
    """

    pixels: str
    shape: tuple[int, int, int, int]
    first_tile: int
    num_tiles: int
    first_row: int
    first_part: int = 0
    num_parts: int = 0
    blocks: bytes = b""

    @property
    def num_blocks(self) -> int:
        """Blocks of rows of each tile."""
        return len(self.blocks) // _INT32_BYTES or 1

    def work_pixels(self, tile_parts: int) -> float:
        """Pixels of its tiles, in proportion to the parts; `tile_parts`: `Capacity.encoder_tile_parts`."""
        share = self.num_parts / (tile_parts * self.num_blocks) if self.num_parts else self.num_tiles
        return share * self.shape[1] * self.shape[2]


class RowUpdate(Record, frozen=True):
    """Overwrite the slots of one row: positions start..start+len(loc)-1 are now stored in `loc`.

    Sent when the scheduler found the same pages in the prefix cache and freed the request's own copies.
    """

    row: int
    start: int
    loc: bytes


class StepPlan(Record, frozen=True):
    """One step: a flat list of new tokens and the KV slots they go to, without padding.

    The runner applies the fields in this order: `swap_outs`, `page_copies`, `swap_ins`, `finished_rows`,
    `adapter_loads`, `new_reqs`, `row_updates`, `encodes`, then the batch. The input token at position p of a row is
    `input_ids[p]` of its `NewReq`, or, beyond its end, the token sampled for that row in its last step, which need
    not have reached the host yet. The request's draft tokens follow it. The runner samples after each draft as well.
    It keeps the sampled tokens that equal the drafts, up to and including the first one that differs.

    A multi-step decode is a step of decodes only that runs several rounds; each round takes the tokens that the
    round before sampled. Between two rounds the host only decides whether another one follows.

    Attributes:
        step_id: counts up from 1.
        mode: see `ForwardMode`.
        rows: [B] pool row of each request, extends first, then decodes.
        num_computed_tokens: [B] tokens with KV already in the pool: position of the first new token.
        num_scheduled_tokens: [B] new tokens: 1 for a decode, 1 + k for one with k drafts, more for a prefill chunk.
        out_cache_loc: [T] KV slot of each new token, in batch order; no repeats. For a multi-step decode
            [num_rounds, T].
        samples: [B] uint8, 1 where the request's last new token is followed by sampling; 0 for an unfinished prompt,
            and for all chunks of a pooling request.
        total_num_scheduled_tokens: T.
        new_reqs, row_updates: see their classes.
        page_copies: [C, 2] (source page, destination page); destinations are distinct, and none of them is a source.
        finished_rows: rows of requests that ended (finished, aborted, retracted) since the last plan.
        swap_outs: [O, 2] (page, host page): KV that moves to the host; the pages may be written again in this step.
        swap_ins: [I, 2] (host page, page): KV that returns; see `Capacity.num_host_pages`. A host page may be in
            both: then what was copied out in the step returns.
        num_drafts: [B] drafts of each request, only for decodes; empty if no request has drafts.
        draft_ids: [sum of num_drafts] the drafts, request after request; `RUNNER_DRAFT` for all drafts of a request
            whose drafts the runner makes, which it does before the batch.
        num_rounds: 1, or the most rounds of a multi-step decode; the arrays describe its first round.
        pools: [B] uint8, 1 where the request's last new token ends the prompt of a pooling request; empty if none does.
        adapter_loads: [n, 2] (slot, store id): LoRA adapters that move into slots, after `finished_rows`.
        state_saves: [n, 3] (row, position, checkpoint): the state after the row's first `position` tokens, the last of
            which is a new token of this step or of one of its rounds, goes into a checkpoint, 1 or above. Distinct,
            and none that a new request of the plan reads. Saves of rounds that do not run are dropped. Only for models
            with state layers, which keep a state for each row besides: a row's first step starts from its
            `NewReq.checkpoint`, or from zeros.
        encodes: tiles of images whose rows the batch of this step or of a later one reads.
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
    pools: bytes = b""
    adapter_loads: bytes = b""
    state_saves: bytes = b""
    encodes: tuple[Encode, ...] = ()

    def round_loc(self, number: int) -> bytes:
        """[T] `out_cache_loc` of a round, 0 <= number < num_rounds."""
        num_bytes = _INT32_BYTES * self.total_num_scheduled_tokens
        return self.out_cache_loc[number * num_bytes : (number + 1) * num_bytes]

    def round(self, number: int) -> StepPlan:
        """One round, 0 <= number < num_rounds, as the plan of a single step."""
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
            state_saves=self.state_saves,
        )


class StepResult(Record, frozen=True):
    """Results of a step.

    Attributes:
        step_id: of the plan.
        next_token_ids: [S] the sampled tokens, in batch order of the requests with `samples` = 1; after a step with
            drafts or a multi-step decode, `num_next_tokens` of each request, consecutively.
        logprobs: one entry per sampled request, of its tokens in this step; empty if no request of the batch needs any.
        prompt_logprobs: batch index -> log-probabilities of the prompt tokens *predicted by* this chunk: the tokens at
            positions num_computed+1 .. min(num_computed+num_scheduled, prompt_len-1).
        errors: batch index -> message, for requests that failed on their own (values not finite, also in a chunk that
            samples nothing; tiles that could not be read). Their entries in `next_token_ids` are arbitrary; other
            requests are not affected. After an error the tiles that the step encoded count as not encoded, and so do
            all tiles of these requests.
        forward_s: seconds that the device spent on the step, including the copy of the tokens to the host; a step
            launched while the one before ran counts from that one's end. The CPU is a device that starts at once.
        swap_s: of these, seconds that the device was busy swapping; 0 without swaps.
        draft_s: of `forward_s`, seconds in which the runner made drafts.
        encode_s: of `forward_s`, seconds that it encoded tiles of images; 0 without encodes.
        out_of_memory: why the step has computed nothing: the device ran out of memory. Every part of the plan before
            the encodes has been applied; the KV of the batch's new tokens and the rows of its tiles are arbitrary.
            Empty if the step succeeded.
        num_next_tokens: [S] tokens of each request: 1 plus one per accepted draft, or one per completed round of a
            multi-step decode; empty for a step without drafts or further rounds.
        vectors: batch index -> result of the pooling request, float32, for each with `pools` = 1 and no error.
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
    vectors: dict[int, bytes] = {}  # noqa: RUF012
    draft_s: float = 0.0
    encode_s: float = 0.0


class Pending(Protocol):
    """A launched step on the device."""

    def wait(self) -> StepResult:
        """Block until the tokens are on the host. Called once per step, in launch order."""
        ...


class Runner(Protocol):
    """The interface of a model runner; the product's is `model_runner.ModelRunner`."""

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        """Start a step. May return before the device is done; only `Pending.wait` may block on the device.

        Args:
            masks: called between the forward pass and the sampler; see `GetMasks`.
            go_on: called between the rounds of a multi-step decode; the multi-step decode ends when it returns
                False. Only devices that have finished a round when its launch returns can run a multi-step decode.
        """
        ...


class RowTokens(Record, frozen=True):
    """Sampled tokens of rows, [n] int32 each; of a row that occurs twice the later one counts."""

    rows: bytes = b""
    token_ids: bytes = b""


class PackedMasks(Record, frozen=True):
    """`TokenMasks` as bytes; `num_words`: of a mask."""

    indices: bytes
    bits: bytes
    num_words: int


class LaunchStep(Message, frozen=True):
    """Execute this step, after all steps sent before; rank 0 does the same.

    Without pipeline stages there is no answer. With stages the first rank of each stage after the first answers with a
    `StageResult`.

    Attributes:
        sampled: with stages the tokens of the steps that were settled since the last launch: those of the last stage
            are not known to the first one otherwise.
        masks: with stages the masks of all constrained rows, for the last stage.
    """

    plan: StepPlan
    sampled: RowTokens = RowTokens()
    masks: PackedMasks | None = None


class StageResult(Record, frozen=True):
    """Results of one pipeline stage for a step; only the last one has tokens.

    `unmasked`: [n] int64, the likeliest token without its mask, of each row with one; see `GetMasks`.
    """

    result: StepResult
    unmasked: bytes = b""


class ReadAdapter(Message, frozen=True):
    """Read a LoRA adapter beside the steps; a later plan moves it into a slot."""

    store_id: int
    adapter: AdapterSpec


class DropAdapter(Message, frozen=True):
    """Forget an adapter."""

    store_id: int


RankInput = LaunchStep | ReadAdapter | DropAdapter
