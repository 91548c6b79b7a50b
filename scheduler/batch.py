"""`ScheduleBatch`: the requests of one step, with the `StepPlan` that goes to the runner.

`plan_step` makes it; it does not change afterwards. The scheduler keeps it until `settle` gets the step's result. The
extends (prompt chunks) come first, then the decodes, as in SGLang's `mix_with_running`:

    batch index   0 ..................... E - 1  |  E ............................. B - 1
    requests      extends: one prompt chunk each |  decodes: one token each, plus drafts
    samples       if its prompt ends here        |  every request
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..runtime.step_plan import StepPlan
from .arrays import TOKEN_ID_BYTES, BoolArray, IntArray
from .memory.req_to_token_pool import ReqToTokenPool
from .requests.req import Req


class ScheduleBatch(msgspec.Struct, frozen=True, eq=False):
    """One step of B requests; the first E of them are extends.

    Attributes:
        plan: the step as the runner gets it.
        reqs: [B] the requests.
        num_extends: E.
        rows: [B] the row of each request when the step was planned.
        epochs: [B] the epoch of each row at that time; see `still_here`.
        end: [B] the number of tokens with KV after the step. Accepted drafts, and the further inner steps of a
            multi-step decode, add to it.
        num_drafts: the draft tokens of all requests together.
        draft_methods: [num_drafts] uint8, see `Drafts`.
        sampled: [S] batch indices of the requests that sample. `StepResult.next_token_ids` is in this order.
        has_grammar: a request that samples has a grammar.
        num_tiles: tiles of images that the step encodes, or whose last part it does, by the rid of the request that
            needs them first.
    """

    plan: StepPlan
    reqs: list[Req]
    num_extends: int
    rows: IntArray
    epochs: IntArray
    end: IntArray
    num_drafts: int
    sampled: IntArray
    has_grammar: bool = False
    draft_methods: bytes = b""
    num_tiles: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.reqs)

    def rounds_made(self, num_next_tokens: bytes) -> int:
        """Number of inner steps that ran, from the result's token count of each request; 1 if not multi-step."""
        if self.plan.num_rounds == 1 or not num_next_tokens:
            return 1
        return int(np.frombuffer(num_next_tokens, dtype=np.int32)[0])

    def checksum(self) -> int:
        """CRC of the plan's arrays. Equal plans have equal checksums, so a replay compares them without the plans."""
        plan = self.plan
        checksum = zlib.crc32(plan.out_cache_loc, zlib.crc32(plan.rows))
        for array in (
            plan.num_scheduled_tokens,
            plan.finished_rows,
            plan.page_copies,
            plan.draft_ids,
            plan.pools,
            plan.state_saves,
        ):
            checksum = zlib.crc32(array, checksum)
        for encode in plan.encodes:
            where = (encode.first_row, encode.first_part, encode.num_parts)
            checksum = zlib.crc32(np.array(where, dtype=np.int32).tobytes(), checksum)
        for new in plan.new_reqs:
            checksum = zlib.crc32(new.media, checksum)
        return zlib.crc32(plan.swap_ins, zlib.crc32(plan.swap_outs, checksum))

    def still_here(self, pool: ReqToTokenPool) -> BoolArray:
        """[B] whether each request still has its row; False after it finished, was aborted or was retracted."""
        result: BoolArray = pool.epoch[self.rows] == self.epochs
        return result


class StepWork(NamedTuple):
    """The work of one step; padding included, if a policy pads.

    Attributes:
        prefill_tokens: prompt tokens that are computed.
        prefill_pairs: (query, key) pairs of their attention.
        decode_rows: requests that generate from their last token alone.
        kv_tokens: tokens of KV that the step reads: all earlier ones of each decode, those before each chunk.
        num_sampled: tokens that are sampled.
        swapped_tokens: tokens of KV that are copied to or from the host.
    """

    prefill_tokens: int
    prefill_pairs: float
    decode_rows: int
    kv_tokens: int
    num_sampled: int
    swapped_tokens: int = 0


def work_of(
    batch: ScheduleBatch, page_size: int, transferred: npt.NDArray[np.bool_] | None = None
) -> StepWork:
    """Count a step's work, without padding.

    Args:
        transferred: [num_extends] prompts with KV from another replica: they cost as much as a decode.
    """
    plan, end, num_extends = batch.plan, batch.end, batch.num_extends
    swapped = (len(plan.swap_outs) + len(plan.swap_ins)) // (2 * TOKEN_ID_BYTES) * page_size
    if batch.num_drafts:  # never in a step with extends; a draft costs as much as a prompt token with logits
        drafts = np.frombuffer(plan.num_drafts, dtype=np.int32).astype(np.int64)
        pairs = drafts * end + drafts * (drafts + 1) / 2
        num_drafts = batch.num_drafts
        return StepWork(
            num_drafts, float(pairs.sum()), len(end), int(end.sum()), len(end) + num_drafts, swapped
        )
    if not num_extends:
        return StepWork(0, 0.0, len(end), int(end.sum()), len(end), swapped)
    ends = end[:num_extends].astype(np.int64)
    starts = np.frombuffer(plan.num_computed_tokens, dtype=np.int32)[:num_extends].astype(np.int64)
    if transferred is not None:
        starts = np.where(transferred, ends - 1, starts)
    lengths = ends - starts
    pairs = lengths * starts + lengths * (lengths + 1) / 2
    num_decodes = len(end) - num_extends
    kv_tokens = int(end[num_extends:].sum()) + int(starts.sum())
    return StepWork(
        int(lengths.sum()), float(pairs.sum()), num_decodes, kv_tokens, len(batch.sampled), swapped
    )
