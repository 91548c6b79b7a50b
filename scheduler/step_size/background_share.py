"""`BackgroundShare`: what the background gets of a step's time, and of rows and pages.

*Beside decodes of interactive requests* the predicted time of a step is at most `1 + slowdown` times its time without
the background, and at most the target:

    limit_s = min(interactive_s * (1 + slowdown) / error, target_s)

`error` is how much longer steps with the background are than predicted, compared with steps without it, 1 or more: a
moving average of measured over predicted time, of the one kind divided by that of the other. It forgets slowly while no
step has any, so that a bad time ends. The other terms of `StepTarget` do not count the background: its prompts and its
queue make no step longer.

*Beside prompts of interactive requests* there is no background: arithmetic bounds these steps, so sharing them gains
nothing, and they are the longest, which make the P99 of both latencies, all the more where requests queue.

*Without interactive work* a request that arrives meanwhile waits for the step, and with overlap for the next one, so
steps are short soon after the last interactive request, and at full size in a quiet night:

    limit_s = max(clamp(time since the last interactive request / 100, target_s, 8 * target_s), 2 * fixed_s)

`fixed_s` is the part of a step that does not depend on its work: a step that is hardly longer would read all weights
for a few tokens. Without a target (`--target-step-ms 0`, the default on CUDA) `NO_TARGET_S` takes its place; eight of
these compute as many tokens a second as the largest steps. Something is always computed: one request decodes, or a page
of one prompt.

`python benchmarks/batch_class.py --simulate llama-3.1-8b:h200:1 llama-3.1-8b:h200:5 llama-3.1-8b:h200:20` shows the
effect of these rules.

Decodes come before prompts; those that waited longest are first. *Rows and pages* that interactive requests had in the
busiest moment of the last minute stay free for them, beside those that they have now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ..arrays import IntArray
from ..batch import ScheduleBatch, work_of
from ..memory.kv_memory import RowMemory
from ..requests.req import Chunk
from ..requests.requests import Requests
from .step_target import PromptTime, StepTarget

NO_TARGET_S: Final = 0.005
"""In place of a target that is not set, for steps without interactive requests: those of a GPU."""
SHARE_OF_QUIET: Final = 0.01
MOST_TARGETS: Final = 8
LEAST_FIXED: Final = 2
PEAK_S: Final = 60.0
_WEIGHT: Final = 1 / 16  # of a step with requests of the background, or without
_FORGETTING: Final = 1 / 256  # of the former, at each of the latter
_MOST_SURPRISE: Final = 2.0


class Reserve(NamedTuple):
    """Rows and pages that stay free for interactive requests when one of the background is admitted."""

    rows: int = 0
    pages: int = 0


NO_RESERVE: Final = Reserve()


class BackgroundShare:
    """See the module. Times are arguments, so equal calls give equal shares.

    Attributes:
        reserve: rows and pages that stay free for interactive requests.
    """

    def __init__(self, target: StepTarget, slowdown: float, requests: Requests, memory: RowMemory) -> None:
        """`slowdown`: `--batch-slowdown`."""
        self._target = target
        self._slowdown = slowdown
        self._requests = requests
        self._memory = memory
        self._rows, self._pages = _Peak(), _Peak()
        self.reserve = Reserve()
        self._has_interactive = False
        self._used_s = self._limit_s = 0.0
        self._last_interactive_s = -math.inf
        self._turn_of_row = np.zeros(memory.pool.num_rows, dtype=np.int64)  # when it decoded last
        self._num_turns = 0
        self._with = self._without = 1.0  # measured over predicted time

    @property
    def error(self) -> float:
        """Factor by which the background makes steps longer beyond what is predicted; 1 or more."""
        return max(1.0, self._with / self._without)

    def observe(self, now_s: float) -> None:
        """Note what interactive requests have; in each pass."""
        requests, kv, pool = self._requests, self._memory.kv, self._memory.pool
        num_rows, num_pages = requests.num_with_row, kv.num_pages - kv.available_pages
        if requests.num_background:
            partial = [req.row for req in requests.partial]
            rows = np.concatenate([requests.running.rows, np.array(partial, dtype=np.int32)])
            in_background = self._memory.states.background[rows]
            own = int((pool.num_pages[rows] - pool.num_leased[rows])[in_background].sum())
            interactive = rows[~in_background]
            num_rows = len(interactive)
            # Two upper bounds: prefixes may be shared, also by both classes.
            num_pages = min(num_pages - own, int(pool.num_pages[interactive].sum()))
        if len(requests) > requests.num_background:
            self._last_interactive_s = now_s
        most_rows, most_pages = self._rows.note(num_rows, now_s), self._pages.note(num_pages, now_s)
        self.reserve = Reserve(most_rows - num_rows, most_pages - num_pages)

    def choose(
        self, rows: IntArray, chunks: Sequence[Chunk], decode_rows: IntArray, now_s: float
    ) -> IntArray:
        """Indices of the requests that decode beside the work of interactive requests, those that waited longest first.

        Args:
            rows: [B] of the background.
            chunks, decode_rows: the work of interactive requests in the step.
            now_s: the time of the pass.
        """
        self._begin(chunks, decode_rows, now_s)
        order = np.argsort(self._turn_of_row[rows], kind="stable").astype(np.int32)
        row_s, token_s = self._target.decode_costs
        kv_tokens = self._memory.states.num_computed[rows[order]] + 1
        ends_s = self._used_s + np.cumsum(row_s + token_s * kv_tokens)
        most = int(np.searchsorted(ends_s, self._limit_s, side="right"))
        order = order[: max(most, 0 if self._has_interactive else 1)]
        # Distinct turns, so that the order rotates: with equal ones the last rows would be left out again and again.
        self._turn_of_row[rows[order]] = self._num_turns + np.arange(1, len(order) + 1)
        self._num_turns += len(order)
        return order

    def for_prompts(self, chunks: Sequence[Chunk], decode_rows: IntArray, rows: IntArray) -> PromptTime:
        """The time for prompts of the background.

        Args:
            chunks, decode_rows, rows: of `choose`; of the last, those that decode.
        """
        token_s, pair_s, pixel_s = self._target.prompt_costs
        # Also before any prompt was measured: beside interactive requests that is no time to try.
        given_s = 0.0 if self._has_interactive else math.inf
        if token_s or pair_s:
            decode_rows = np.concatenate([decode_rows, rows])
            given_s = max(0.0, self._limit_s - self._predict(chunks, decode_rows, with_prompts=True))
        return PromptTime(
            given_s,
            token_s=token_s,
            pair_s=pair_s,
            page_size=0 if self._has_interactive or len(rows) else self._memory.kv.page_size,
            pixel_s=pixel_s,
            tiles_s=given_s,
        )

    def measured(self, batch: ScheduleBatch, seconds: float) -> None:
        """Learn how wrong predictions are, from a step that took `seconds`; before `StepTarget` learns from it."""
        if not self._requests.num_background or seconds <= 0:
            return
        in_background = sum(req.background for req in batch.reqs)
        if in_background == len(batch) or batch.num_drafts or batch.plan.encodes:
            return
        num_extends, step = batch.num_extends, work_of(batch, 1)
        kv_tokens = int(batch.end[num_extends:].sum())
        predicted_s = self._target.predict(
            len(batch) - num_extends, kv_tokens, step.prefill_tokens, step.prefill_pairs
        )
        if predicted_s <= 0:
            return
        ratio = min(max(seconds / predicted_s, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
        if in_background:
            self._with += _WEIGHT * (ratio - self._with)
        else:
            self._without += _WEIGHT * (ratio - self._without)
            self._with += _FORGETTING * (self._without - self._with)

    def _begin(self, chunks: Sequence[Chunk], decode_rows: IntArray, now_s: float) -> None:
        """The limit of the step, and the part that interactive requests use."""
        target_s = self._target.target_s
        self._has_interactive = bool(chunks or len(decode_rows))
        if self._has_interactive:
            self._used_s = self._predict(chunks, decode_rows)
            self._limit_s = self._used_s * (1 + self._slowdown) / self.error
            if target_s:
                self._limit_s = min(self._limit_s, target_s)
            if chunks or not self._used_s:  # the latter: nothing was measured yet
                self._limit_s = -math.inf
        else:
            self._used_s = self._target.predict(0, 0, with_decodes=True)
            target_s = target_s or NO_TARGET_S
            quiet_s = SHARE_OF_QUIET * (now_s - self._last_interactive_s)
            self._limit_s = max(min(quiet_s, MOST_TARGETS * target_s), target_s, LEAST_FIXED * self._used_s)

    def _predict(
        self, chunks: Sequence[Chunk], decode_rows: IntArray, *, with_prompts: bool = False
    ) -> float:
        num_tokens = sum(chunk.length for chunk in chunks)
        pairs = sum(each.length * each.start + each.length * (each.length + 1) / 2 for each in chunks)
        kv_tokens = int(self._memory.states.num_computed[decode_rows].sum()) + len(decode_rows)
        return self._target.predict(len(decode_rows), kv_tokens, num_tokens, pairs, with_prompts=with_prompts)


class _Peak:
    """The largest of the values of the last `PEAK_S` seconds."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, int]] = deque()  # falling values, each with its time

    def note(self, value: int, now_s: float) -> int:
        """Take the value of now; returns the largest."""
        values = self._values
        while values and values[-1][1] <= value:
            values.pop()
        values.append((now_s, value))
        while values[0][0] < now_s - PEAK_S:
            values.popleft()
        return values[0][1]
