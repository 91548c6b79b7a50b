"""`plan_step`: makes the `ScheduleBatch` of a step of what the phases have decided, and counts its tokens as computed.

Rows and pages of all tokens are taken before. What has to reach the runner with the next plan is taken here, once: the
copies between pages and with the host, the rows whose pages moved, and the rows that requests have left.
"""

from __future__ import annotations

import numpy as np

from ..runtime.step_plan import ForwardMode, NewReq, RowUpdate, StepPlan
from .batch import ScheduleBatch
from .drafts import NO_DRAFTS, Drafts
from .memory.req_to_token_pool import ReqToTokenPool
from .memory.row_memory import RowMemory
from .phases import Work
from .requests.chunk import Chunk


def plan_step(
    step_id: int, work: Work, memory: RowMemory, drafts: Drafts = NO_DRAFTS, num_rounds: int = 1
) -> ScheduleBatch:
    """Advance `num_computed`, take what the runner must be told, and construct the step. Call once per step.

    Not counted as computed are drafts, which may be wrong, and the further rounds of a multi-step decode, which may
    not be made.
    """
    chunks, decode_rows = work.chunks, work.decode_rows
    states, pool, kv, host = memory.states, memory.pool, memory.kv, memory.host
    positions = states.num_computed[decode_rows]
    ends = positions + np.int32(1)
    lengths = np.ones_like(positions)
    if drafts:
        lengths += drafts.counts
        offsets = np.cumsum(lengths, dtype=np.int32) - lengths
        token_positions = np.repeat(positions - offsets, lengths)
        token_positions += np.arange(len(token_positions), dtype=np.int32)
        out_cache_loc = pool.slots_at(np.repeat(decode_rows, lengths), token_positions)
    else:
        out_cache_loc = pool.slots_at(decode_rows, positions)
    # Of a multi-step decode, which is made of decodes alone.
    further_loc = [pool.slots_at(decode_rows, positions + np.int32(k)) for k in range(1, num_rounds)]
    if chunks:
        chunk_rows = np.array([chunk.req.row for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        chunk_lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        chunk_ends = starts + chunk_lengths
        chunk_slots = [pool.slots(chunk.req.row, chunk.start, chunk.start + chunk.length) for chunk in chunks]
        out_cache_loc = np.concatenate([*chunk_slots, out_cache_loc])
        positions = np.concatenate([starts, positions])
        ends = np.concatenate([chunk_ends, ends])
        lengths = np.concatenate([chunk_lengths, lengths])
        rows = np.concatenate([chunk_rows, decode_rows])
        reqs = [chunk.req for chunk in chunks] + work.decode_reqs
        samples = np.ones(len(rows), dtype=np.uint8)
        samples[: len(chunks)] = [chunk.is_last for chunk in chunks]
        sampled = np.flatnonzero(samples).astype(np.int32)
    else:
        rows = decode_rows
        reqs = work.decode_reqs
        samples = np.ones(len(decode_rows), dtype=np.uint8)
        sampled = np.arange(len(decode_rows), dtype=np.int32)
    # Until here the step was only computed; from here on it is taken.
    states.num_computed[rows] = ends
    moved, left_rows, page_copies = kv.take_moved(), pool.take_left_rows(), kv.take_copies()
    swap_outs, swap_ins = host.take_copies()
    plan = StepPlan(
        step_id=step_id,
        mode=_mode(len(chunks), len(decode_rows)),
        rows=rows.tobytes(),
        num_computed_tokens=positions.tobytes(),
        num_scheduled_tokens=lengths.tobytes(),
        out_cache_loc=b"".join([loc.tobytes() for loc in (out_cache_loc, *further_loc)]),
        samples=samples.tobytes(),
        total_num_scheduled_tokens=len(out_cache_loc),
        new_reqs=tuple([_new_req(chunk, pool) for chunk in chunks if chunk.is_first]),
        row_updates=tuple(
            [RowUpdate(row, start, pool.slots(row, start, stop).tobytes()) for row, start, stop in moved]
        ),
        finished_rows=_int32_bytes(left_rows),
        page_copies=page_copies,
        swap_outs=swap_outs.tobytes(),
        swap_ins=swap_ins.tobytes(),
        num_drafts=_per_request(drafts, len(chunks)),
        draft_ids=drafts.token_ids.tobytes(),
        num_rounds=num_rounds,
    )
    return ScheduleBatch(
        plan=plan,
        reqs=reqs,
        num_extends=len(chunks),
        rows=rows,
        epochs=pool.epoch[rows],
        end=ends,
        num_drafts=len(drafts.token_ids),
        sampled=sampled,
    )


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
