"""`ScheduleBatch`: the requests of one step and the `StepPlan` made of them. Complete when constructed, never changed.

In batch order come first the extends (prompt chunks), then the decodes; that is `mix_with_running` of SGLang.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ..runtime.step_plan import ForwardMode, NewReq, RowUpdate, StepPlan
from .arrays import BoolArray, IntArray
from .drafts import NO_DRAFTS, Drafts
from .memory.kv_memory import KVMemory
from .memory.req_to_token_pool import ReqToTokenPool
from .memory.swap_pool import HostMemory
from .requests.chunk import Chunk
from .requests.req import Req
from .requests.row_states import RowStates


class ScheduleBatch:
    """One step. B requests, the first E of them extends.

    Attributes:
        plan: what the runner gets.
        reqs: [B].
        num_extends: E.
        rows: [B] the requests' rows when the step was planned.
        epochs: [B] the rows' epochs then; see `still_here`.
        end: [B] the number of tokens with KV after the step; those of right drafts, and of the further rounds of a
            burst, come on top.
        num_drafts: draft tokens of all requests.
        sampled: [S] batch indices of those that sample; `StepResult.next_token_ids` is in this order.
    """

    __slots__ = ("end", "epochs", "num_drafts", "num_extends", "plan", "reqs", "rows", "sampled")

    def __init__(
        self,
        step_id: int,
        chunks: Sequence[Chunk],
        decode_rows: IntArray,
        decode_reqs: list[Req],
        *,
        states: RowStates,
        pool: ReqToTokenPool,
        kv: KVMemory,
        host: HostMemory,
        drafts: Drafts = NO_DRAFTS,
        num_rounds: int = 1,
    ) -> None:
        """Build the plan of a step and count its tokens as computed.

        Not counted are drafts, which may be wrong, and the further rounds of a burst, which may not be made. Rows and
        pages of all tokens are taken already; the pool's rows that left, the rows whose pages moved, and the copies
        between pages and with the host since the last plan are collected here.
        """
        positions = states.num_computed[decode_rows]
        ends = positions + np.int32(1)
        states.num_computed[decode_rows] = ends
        lengths = np.ones_like(positions)
        if drafts:
            lengths += drafts.counts
            offsets = np.cumsum(lengths, dtype=np.int32) - lengths
            token_positions = np.repeat(positions - offsets, lengths)
            token_positions += np.arange(len(token_positions), dtype=np.int32)
            out_cache_loc = pool.slots_at(np.repeat(decode_rows, lengths), token_positions)
        else:
            out_cache_loc = pool.slots_at(decode_rows, positions)
        # Of a burst, which is made of decodes alone.
        further_loc = [pool.slots_at(decode_rows, positions + np.int32(k)) for k in range(1, num_rounds)]
        if chunks:
            chunk_rows = np.array([chunk.req.row for chunk in chunks], dtype=np.int32)
            starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
            chunk_lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
            chunk_ends = starts + chunk_lengths
            states.num_computed[chunk_rows] = chunk_ends
            chunk_slots = [
                pool.slots(chunk.req.row, chunk.start, chunk.start + chunk.length) for chunk in chunks
            ]
            out_cache_loc = np.concatenate([*chunk_slots, out_cache_loc])
            positions = np.concatenate([starts, positions])
            ends = np.concatenate([chunk_ends, ends])
            lengths = np.concatenate([chunk_lengths, lengths])
            self.rows: IntArray = np.concatenate([chunk_rows, decode_rows])
            self.reqs = [chunk.req for chunk in chunks] + decode_reqs
            samples = np.ones(len(self.rows), dtype=np.uint8)
            samples[: len(chunks)] = [chunk.is_last for chunk in chunks]
            self.sampled: IntArray = np.flatnonzero(samples).astype(np.int32)
        else:
            self.rows = decode_rows
            self.reqs = decode_reqs
            samples = np.ones(len(decode_rows), dtype=np.uint8)
            self.sampled = np.arange(len(decode_rows), dtype=np.int32)
        self.num_extends = len(chunks)
        self.num_drafts = len(drafts.token_ids)
        self.epochs: IntArray = pool.epoch[self.rows]
        self.end = ends
        swap_outs, swap_ins = host.take_copies()
        self.plan = StepPlan(
            step_id=step_id,
            mode=_mode(len(chunks), len(decode_rows)),
            rows=self.rows.tobytes(),
            num_computed_tokens=positions.tobytes(),
            num_scheduled_tokens=lengths.tobytes(),
            out_cache_loc=b"".join([loc.tobytes() for loc in (out_cache_loc, *further_loc)]),
            samples=samples.tobytes(),
            total_num_scheduled_tokens=len(out_cache_loc),
            new_reqs=tuple([_new_req(chunk, pool) for chunk in chunks if chunk.is_first]),
            row_updates=tuple(
                [
                    RowUpdate(row, start, pool.slots(row, start, stop).tobytes())
                    for row, start, stop in kv.take_moved()
                ]
            ),
            finished_rows=_int32_bytes(pool.take_left_rows()),
            page_copies=kv.take_copies(),
            swap_outs=swap_outs.tobytes(),
            swap_ins=swap_ins.tobytes(),
            num_drafts=_per_request(drafts, len(chunks)),
            draft_ids=drafts.token_ids.tobytes(),
            num_rounds=num_rounds,
        )

    def __len__(self) -> int:
        return len(self.reqs)

    def rounds_made(self, num_next_tokens: bytes) -> int:
        """How often the step was made, by its result's number of tokens of each request: 1 if it is no burst."""
        if self.plan.num_rounds == 1 or not num_next_tokens:
            return 1
        return int(np.frombuffer(num_next_tokens, dtype=np.int32)[0])

    def checksum(self) -> int:
        """Of the plan's arrays: equal plans have equal ones, so a replay can be compared without keeping plans."""
        plan = self.plan
        checksum = zlib.crc32(plan.out_cache_loc, zlib.crc32(plan.rows))
        for array in (plan.num_scheduled_tokens, plan.finished_rows, plan.page_copies, plan.draft_ids):
            checksum = zlib.crc32(array, checksum)
        return zlib.crc32(plan.swap_ins, zlib.crc32(plan.swap_outs, checksum))

    def still_here(self, pool: ReqToTokenPool) -> BoolArray:
        """[B] whether the request still has the row it had; False once it finished, was aborted or was retracted."""
        result: BoolArray = pool.epoch[self.rows] == self.epochs
        return result


def _int32_bytes(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes() if values else b""


def _mode(num_extends: int, num_decodes: int) -> ForwardMode:
    if not num_extends:
        return ForwardMode.DECODE if num_decodes else ForwardMode.IDLE
    return ForwardMode.MIXED if num_decodes else ForwardMode.EXTEND


def _per_request(drafts: Drafts, num_extends: int) -> bytes:
    """How many drafts each request of the batch has; prompts have none."""
    return np.concatenate([np.zeros(num_extends, dtype=np.int32), drafts.counts]).tobytes() if drafts else b""


def _new_req(chunk: Chunk, pool: ReqToTokenPool) -> NewReq:
    req = chunk.req
    return NewReq(
        rid=req.rid,
        row=req.row,
        input_ids=req.fill_ids,
        prompt_len=req.prompt_len,
        prefix_loc=pool.slots(req.row, 0, chunk.start).tobytes(),
        sampling=req.sampling,
    )
