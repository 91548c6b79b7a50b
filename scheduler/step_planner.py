"""`plan_step`: turns the decisions of a pass (`Work`, drafts, inner steps) into the step's `ScheduleBatch`.

Every token of the step has its row and its page before this. `plan_step` does three things, once per step:

1. It computes the arrays of the plan: rows, positions, lengths and KV slots, extends first, then decodes.
2. It counts the tokens of the step as computed (`RowStates.num_computed`).
3. It takes the changes that the runner gets with the next plan: page copies, copies to and from the host, row updates
   (pages that changed) and finished rows. Each of these goes into exactly one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..runtime.step_plan import ForwardMode, NewReq, RowUpdate, StepPlan
from .arrays import IntArray
from .batch import ScheduleBatch
from .media.encoder_cache import NO_ENCODE_WORK, EncodeWork
from .memory.kv_memory import RowMemory
from .memory.req_to_token_pool import ReqToTokenPool
from .phases import Work
from .requests.req import Chunk
from .speculation.drafts import NO_DRAFTS, Drafts


class _Tokens(NamedTuple):
    """The new tokens of a step. B requests, T new tokens.

    Attributes:
        rows: [B] pool rows.
        positions: [B] position of the first new token.
        ends: [B] tokens that count as computed after the step; drafts do not.
        lengths: [B] new tokens.
        out_cache_loc: [T] KV slots, in batch order.
        samples: [B] uint8, 1 where the last new token is followed by sampling.
        pools: see `StepPlan`.
    """

    rows: IntArray
    positions: IntArray
    ends: IntArray
    lengths: IntArray
    out_cache_loc: IntArray
    samples: npt.NDArray[np.uint8]
    pools: bytes = b""


def plan_step(
    step_id: int,
    work: Work,
    memory: RowMemory,
    drafts: Drafts = NO_DRAFTS,
    num_rounds: int = 1,
    adapter_loads: bytes = b"",
    images: EncodeWork = NO_ENCODE_WORK,
) -> ScheduleBatch:
    """Make the step's batch; advance `num_computed` and take the changes for the runner. Call once per step.

    Drafts are not counted as computed, because they may be rejected. The further inner steps of a multi-step decode
    are not counted either, because they may not run. `settle` counts both.

    Args:
        step_id: of the new step; one more than the last.
        work: the prompt chunks and decodes of the step.
        memory: the rows and pages of the requests.
        drafts: draft tokens of the decodes.
        num_rounds: inner steps; above 1 only for a step of decodes alone, without drafts.
        adapter_loads: see `StepPlan`.
        images: the tiles that the step encodes, and the rows that its new requests read.
    """
    chunks, decode_rows = work.chunks, work.decode_rows
    pool, kv, host = memory.pool, memory.kv, memory.host
    tokens = _decode_tokens(work, memory, drafts)
    # KV slots of further inner steps. A multi-step decode has no chunks.
    further_loc = [pool.slots_at(decode_rows, tokens.positions + np.int32(k)) for k in range(1, num_rounds)]
    reqs = work.decode_reqs
    if chunks:
        tokens = _with_chunks(tokens, chunks, pool)
        reqs = [chunk.req for chunk in chunks] + reqs
    sampled = np.flatnonzero(tokens.samples).astype(np.int32)
    state_saves = kv.state_slots.plan(chunks, decode_rows, memory.states.num_computed, num_rounds)
    # Nothing else has changed up to here. From here on state changes: tokens count as computed, and lists are emptied.
    memory.states.num_computed[tokens.rows] = tokens.ends
    moved, left_rows, page_copies = kv.take_moved(), pool.take_left_rows(), kv.take_copies()
    swap_outs, swap_ins = host.take_copies()
    plan = StepPlan(
        step_id=step_id,
        mode=_mode(len(chunks), len(decode_rows)),
        rows=tokens.rows.tobytes(),
        num_computed_tokens=tokens.positions.tobytes(),
        num_scheduled_tokens=tokens.lengths.tobytes(),
        out_cache_loc=b"".join([loc.tobytes() for loc in (tokens.out_cache_loc, *further_loc)]),
        samples=tokens.samples.tobytes(),
        total_num_scheduled_tokens=len(tokens.out_cache_loc),
        new_reqs=tuple([_new_req(chunk, pool, images) for chunk in chunks if chunk.is_first]),
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
        pools=tokens.pools,
        adapter_loads=adapter_loads,
        state_saves=state_saves,
        encodes=images.encodes,
    )
    return ScheduleBatch(
        plan=plan,
        reqs=reqs,
        num_extends=len(chunks),
        rows=tokens.rows,
        epochs=pool.epoch[tokens.rows],
        end=tokens.ends,
        num_drafts=len(drafts.token_ids),
        sampled=sampled,
        has_grammar=bool(memory.states.has_grammar[tokens.rows[sampled]].any()),
        draft_methods=drafts.methods,
        num_tiles=images.num_tiles,
    )


def by_adapter(work: Work, memory: RowMemory) -> Work:
    """The same work, with the requests of an adapter side by side: kernels read an adapter once for a run of them."""
    slots = memory.states.adapter_slot[work.decode_rows]
    chunks = work.chunks
    if any(chunk.req.adapter_slot for chunk in chunks):
        chunks = sorted(chunks, key=lambda chunk: chunk.req.adapter_slot)
    if not slots.any():
        return work._replace(chunks=chunks)
    order = np.argsort(slots, kind="stable")
    return Work(chunks, work.decode_rows[order], [work.decode_reqs[idx] for idx in order.tolist()])


def _decode_tokens(work: Work, memory: RowMemory, drafts: Drafts) -> _Tokens:
    """One token for each running request, and its draft tokens."""
    rows, pool = work.decode_rows, memory.pool
    positions = memory.states.num_computed[rows]
    lengths = np.ones_like(positions)
    if drafts:
        lengths += drafts.counts
        offsets = np.cumsum(lengths, dtype=np.int32) - lengths
        token_positions = np.repeat(positions - offsets, lengths)
        token_positions += np.arange(len(token_positions), dtype=np.int32)
        out_cache_loc = pool.slots_at(np.repeat(rows, lengths), token_positions)
    else:
        out_cache_loc = pool.slots_at(rows, positions)
    samples = np.ones(len(rows), dtype=np.uint8)
    return _Tokens(rows, positions, positions + np.int32(1), lengths, out_cache_loc, samples)


def _with_chunks(decodes: _Tokens, chunks: Sequence[Chunk], pool: ReqToTokenPool) -> _Tokens:
    """The tokens of prompt chunks, then those of the decodes."""
    rows = np.array([chunk.req.row for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
    slots = [pool.slots(chunk.req.row, chunk.start, chunk.start + chunk.length) for chunk in chunks]
    lasts = np.array([chunk.is_last for chunk in chunks], dtype=np.uint8)
    pooled = np.array([chunk.req.pooling is not None for chunk in chunks], dtype=np.uint8)
    pools = b""
    if (ends := lasts & pooled).any():
        pools = ends.tobytes() + bytes(len(decodes.rows))
    return _Tokens(
        np.concatenate([rows, decodes.rows]),
        np.concatenate([starts, decodes.positions]),
        np.concatenate([starts + lengths, decodes.ends]),
        np.concatenate([lengths, decodes.lengths]),
        np.concatenate([*slots, decodes.out_cache_loc]),
        np.concatenate([lasts & ~pooled & 1, decodes.samples]),
        pools,
    )


def _int32_bytes(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes() if values else b""


def _mode(num_extends: int, num_decodes: int) -> ForwardMode:
    if not num_extends:
        return ForwardMode.DECODE if num_decodes else ForwardMode.IDLE
    return ForwardMode.MIXED if num_decodes else ForwardMode.EXTEND


def _per_request(drafts: Drafts, num_extends: int) -> bytes:
    """[B] int32 bytes: the number of drafts of each request of the batch. Prompt chunks have none."""
    return np.concatenate([np.zeros(num_extends, dtype=np.int32), drafts.counts]).tobytes() if drafts else b""


def _new_req(chunk: Chunk, pool: ReqToTokenPool, images: EncodeWork) -> NewReq:
    req = chunk.req
    return NewReq(
        rid=req.rid,
        row=req.row,
        input_ids=req.ordinary_ids,
        prompt_len=req.prompt_len,
        prefix_loc=pool.slots(req.row, 0, chunk.start).tobytes(),
        sampling=req.sampling,
        pooling=req.pooling,
        adapter_slot=req.adapter_slot,
        checkpoint=req.checkpoint,
        media=images.placements.get(req.rid, b""),
        rope=b"" if req.images is None else req.images.rope,
    )
