"""`find_pages`: a page for each running request that needs one, by eviction and then by retraction.

This module chooses the victims; `preemption.py` retracts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..arrays import IntArray
from ..memory.kv_memory import KVMemory
from ..micro_batches import ONE_MICRO_BATCH, MicroBatches
from ..requests.req import Req
from ..requests.requests import RunningBatch
from ..requests.row_states import RowStates


class DecodesWithPages(NamedTuple):
    """The running requests of one pass, after pages were found.

    Attributes:
        rows, reqs: requests that decode in this step, with a page for their next token.
        retracted: requests that were retracted, first to last.
        starved: the last remaining request, if it still cannot get its page; None in a sound configuration.
    """

    rows: IntArray
    reqs: list[Req]
    retracted: list[Req]
    starved: Req | None = None


def find_pages(
    running: RunningBatch,
    partial: list[Req],
    states: RowStates,
    kv: KVMemory,
    retract: Callable[[Req], None],
    *,
    by_priority: bool = False,
    micro_batches: MicroBatches = ONE_MICRO_BATCH,
) -> DecodesWithPages:
    """Find the requests that decode in the next step and give each a page where it needs one.

    Args:
        running: not changed; the caller removes the retracted requests.
        partial: partial prefills; they hold memory, so they can be victims.
        retract: releases a victim's memory.
        by_priority: requests of the lowest priority are retracted first.
        micro_batches: chooses those that decode in this step; the others may be retracted, too.

    Victims are those with the least work to lose: shortest output, then longest input. One request always stays.
    """
    rows, reqs = running.rows, running.reqs
    to_decode = states.num_computed[rows] < states.max_kv_len[rows]
    # the last token of some requests may be in flight: they need no step, and their pages are freed when it is settled
    landing = np.count_nonzero(to_decode) < len(rows)
    if landing:
        rows = rows[to_decode]
        reqs = [reqs[idx] for idx in np.flatnonzero(to_decode)]
    decoding = reqs
    rows, reqs = micro_batches.choose(rows, reqs, len(running))
    full = kv.rows_without_room(rows)
    if full.size <= kv.available_pages:
        kv.grow_by_a_page(full)
        return DecodesWithPages(rows, reqs, [])
    if landing:
        return _sit_out(rows, reqs, full, kv)

    retracted: list[Req] = []
    for victim in _by_work_lost(decoding + partial, states, by_priority=by_priority)[:-1]:
        row = victim.row
        retracted.append(victim)
        retract(victim)
        rows = rows[rows != row]
        full = full[full != row]
        if full.size <= kv.available_pages:
            break
    gone = set(retracted)
    reqs = [req for req in reqs if req not in gone]
    if full.size > kv.available_pages:
        return DecodesWithPages(rows[:0], [], retracted, starved=reqs[0])
    kv.grow_by_a_page(full)
    return DecodesWithPages(rows, reqs, retracted)


def _sit_out(rows: IntArray, reqs: list[Req], full: IntArray, kv: KVMemory) -> DecodesWithPages:
    """Let requests without a page miss this step: a retraction costs more than waiting for the pages in flight."""
    served, waiting = full[: kv.available_pages], full[kv.available_pages :]
    kv.grow_by_a_page(served)
    stays = ~np.isin(rows, waiting)
    return DecodesWithPages(rows[stays], [reqs[idx] for idx in np.flatnonzero(stays)], [])


def _by_work_lost(reqs: list[Req], states: RowStates, *, by_priority: bool) -> list[Req]:
    """Least work to lose first; among equals the latest arrival first."""
    rows = np.array([req.row for req in reqs], dtype=np.int32)
    output_len = states.known_len[rows] - states.prompt_len[rows]
    keys = [-np.array([req.seq for req in reqs]), -states.prompt_len[rows], output_len]
    if by_priority:
        keys.append(np.array([req.priority for req in reqs]))
    order = np.lexsort(keys)
    return [reqs[idx] for idx in order]
