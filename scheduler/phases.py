"""`StepPhases`: how a step is divided between prompts and decodes; `PrefillFirst` divides it in another way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..runtime.config.engine_config import SchedulerConfig
from .admission.admission import Admission
from .arrays import EMPTY, IntArray
from .decodes import Decodes, still_decoding
from .pass_state import PassState
from .pause import Pauses
from .preemption.out_of_memory import OutOfMemory
from .records.verdict import Reason
from .requests.req import Chunk, Req
from .requests.requests import Requests
from .step_size.background_share import BackgroundShare


class Work(NamedTuple):
    """Work of a step: prompt chunks, and one token for each decoding request."""

    chunks: list[Chunk]
    decode_rows: IntArray
    decode_reqs: list[Req]


class StepPhases:
    """Plans the work of a pass. Running requests decode in every step; prompts get the rest of the token budget.

    Both "mixed" (SGLang's `mix_with_running`) and "decode-first" (vLLM V1's order, with one budget for all tokens of a
    step) work like this. They differ in the budget that `Admission` makes.
    """

    def __init__(
        self,
        admission: Admission,
        decodes: Decodes,
        requests: Requests,
        share: BackgroundShare,
        out_of_memory: OutOfMemory,
        pauses: Pauses,
    ) -> None:
        self._requests = requests
        self._share = share
        self._admission = admission
        self._decodes = decodes
        self._out_of_memory = out_of_memory
        self._pauses = pauses

    def plan(self, state: PassState) -> Work:
        """Decide what the step computes. Rows and pages are taken only for that.

        While the device has no memory even for the smallest step, and in a pause, nothing is computed.
        """
        if self._pauses.stops_all:
            self._pauses.retract(state)
            return Work(self._admission.skip(state, Reason.PAUSED), EMPTY, [])
        if self._out_of_memory.holds(state.now_s):
            return Work(self._admission.skip(state, Reason.NO_DEVICE_MEMORY), EMPTY, [])
        return self._divide(state)

    def _divide(self, state: PassState) -> Work:
        rows, reqs = self._decodes.plan(state)
        num_retractions = state.num_retractions
        chunks = self._admission.plan(state, rows)
        if state.num_retractions > num_retractions:
            rows, reqs = still_decoding(rows, reqs)
        return self._with_background(state, Work(chunks, rows, reqs))

    def _with_background(self, state: PassState, work: Work) -> Work:
        """The work of interactive requests, and what the step has room for beside it."""
        share = self._share
        share.observe(state.now_s)
        if not self._requests.num_background:
            return work
        rows, reqs = self._decodes.background()
        chosen = share.choose(rows, work.chunks, work.decode_rows, state.now_s)
        rows, reqs = self._decodes.plan_background(
            rows[chosen], [reqs[idx] for idx in chosen.tolist()], state
        )
        num_beside = len(work.decode_reqs) + len(reqs) + sum(chunk.length for chunk in work.chunks)
        chunks = self._admission.plan_background(
            state, num_beside, share.for_prompts(work.chunks, work.decode_rows, rows), share.reserve
        )
        if not (chunks or reqs):
            return work
        return Work(work.chunks + chunks, np.concatenate([work.decode_rows, rows]), work.decode_reqs + reqs)


class PrefillFirst(StepPhases):
    """A step computes prompts as long as there are some to admit; else the running requests decode (SGLang's default).

    Two bounds limit how long running requests wait. `max_in_a_row` limits consecutive prefill steps. `decode_interval`
    is the least number of decode steps between two prefill steps (SGLang's `--prefill-decode-interval`).
    """

    def __init__(
        self,
        admission: Admission,
        decodes: Decodes,
        requests: Requests,
        share: BackgroundShare,
        out_of_memory: OutOfMemory,
        pauses: Pauses,
        *,
        max_in_a_row: int,
        decode_interval: int,
    ) -> None:
        super().__init__(admission, decodes, requests, share, out_of_memory, pauses)
        self._max_in_a_row = max_in_a_row
        self._decode_interval = decode_interval
        self._prefill_steps = 0  # in a row, until now
        self._decode_steps = decode_interval  # since the last prefill step

    def _divide(self, state: PassState) -> Work:
        if self._requests.has_interactive_decodes and not self._may_prefill:
            chunks = self._admission.skip(state, Reason.DECODES_FIRST)
        else:
            chunks = self._admission.plan(state, EMPTY)
        if chunks:
            self._prefill_steps += 1
            self._decode_steps = 0
            return self._with_background(state, Work(chunks, EMPTY, []))
        self._prefill_steps = 0
        rows, reqs = self._decodes.plan(state)
        self._decode_steps += bool(reqs)
        return self._with_background(state, Work([], rows, reqs))

    @property
    def _may_prefill(self) -> bool:
        if self._prefill_steps:
            return self._prefill_steps < self._max_in_a_row and not self._decode_interval
        return self._decode_steps >= self._decode_interval


def make_phases(
    config: SchedulerConfig,
    admission: Admission,
    decodes: Decodes,
    requests: Requests,
    share: BackgroundShare,
    out_of_memory: OutOfMemory,
    pauses: Pauses,
) -> StepPhases:
    """The mode that `config.phases` names."""
    if config.phases == "prefill-first":
        return PrefillFirst(
            admission,
            decodes,
            requests,
            share,
            out_of_memory,
            pauses,
            max_in_a_row=config.max_prefill_steps_in_a_row,
            decode_interval=config.prefill_decode_interval,
        )
    return StepPhases(admission, decodes, requests, share, out_of_memory, pauses)
