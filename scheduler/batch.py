"""`ScheduleBatch`: the requests of one step and the `StepPlan` made of them. A value: `plan_step` makes it.

In batch order come first the extends (prompt chunks), then the decodes; that is `mix_with_running` of SGLang.
"""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from ..runtime.step_plan import StepPlan
from .arrays import BoolArray, IntArray
from .memory.req_to_token_pool import ReqToTokenPool
from .requests.req import Req


class ScheduleBatch(msgspec.Struct, frozen=True, eq=False):
    """One step. B requests, the first E of them extends. Constructing one reads and changes nothing else.

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

    plan: StepPlan
    reqs: list[Req]
    num_extends: int
    rows: IntArray
    epochs: IntArray
    end: IntArray
    num_drafts: int
    sampled: IntArray

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
