"""Figures since the start of the process: `SchedulerStats` and, of drafts, `DraftStats`; `StepLog`: log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.scheduler_report import SchedulerReport
from ..arrays import IntArray

DRAFT_METHODS: Final = ("forced", "ngram", "suffix", "draft", "eagle3", "mtp")
"""Sources of drafts: a grammar that allows one text, the request's own text, finished answers; and, made by the runner:
a draft model, an EAGLE-3 head, layers of the model that predict further tokens.
"""
FORCED, NGRAM, SUFFIX = range(3)
RUNNER_METHODS: Final = DRAFT_METHODS[3:]
_MAX_POSITION: Final = 8
"""Drafts further from the last token count as this far."""


class DraftStats:
    """Counts of checked and of accepted drafts, by method and position, 1 to _MAX_POSITION."""

    def __init__(self) -> None:
        shape = len(DRAFT_METHODS) * _MAX_POSITION
        self._checked, self._accepted = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)

    def count(self, counts: IntArray, methods: bytes, num_accepted: IntArray) -> None:
        """Count the drafts of a step: [S] numbers of drafts, [D] their methods, [S] numbers of accepted ones."""
        positions = np.arange(len(methods)) - np.repeat(np.cumsum(counts) - counts, counts)
        cells = np.frombuffer(methods, dtype=np.uint8) * _MAX_POSITION + np.minimum(
            positions, _MAX_POSITION - 1
        )
        accepted = cells[positions < np.repeat(num_accepted, counts)]
        self._checked += np.bincount(cells, minlength=len(self._checked))
        self._accepted += np.bincount(accepted, minlength=len(self._checked))

    def checked(self) -> dict[str, int]:
        """Drafts that were checked, by method and position: "suffix 1"."""
        return {name: int(self._checked[cell]) for name, cell in _cells(self._checked)}

    def accepted(self) -> dict[str, int]:
        """The same of the accepted ones; 0 where some were checked."""
        return {name: int(self._accepted[cell]) for name, cell in _cells(self._checked)}


def _cells(counts: npt.NDArray[np.int64]) -> Iterator[tuple[str, int]]:
    for cell in counts.nonzero()[0].tolist():
        method, position = divmod(cell, _MAX_POSITION)
        yield f"{DRAFT_METHODS[method]} {position + 1}", cell


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only grow. `SchedulerReport` has the same names."""

    retracted_reqs: int = 0
    preempted_reqs: int = 0
    timed_out_reqs: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    overruled_tokens: int = 0
    encode_s: float = 0.0
    prompt_host_tokens: int = 0
    prompt_tier_tokens: int = 0
    prompt_received_tokens: int = 0
    drafts: DraftStats = field(default_factory=DraftStats)


logger = logging.getLogger(__name__)


class StepLog:
    """Turns reports into log lines, none for an interval without steps. Rates are relative to the last line."""

    def __init__(self, interval_s: float) -> None:
        """Start with the first report.

        Args:
            interval_s: the least number of seconds between two lines.
        """
        self._interval_s = interval_s
        self._last: SchedulerReport | None = None

    def note(self, report: SchedulerReport) -> None:
        """Take a report. Write a line if the interval is over and steps ran in it."""
        last = self._last
        if last is None:
            self._last = report
            return
        elapsed_s = report.sent_s - last.sent_s
        if elapsed_s < self._interval_s:
            return
        self._last = report
        num_steps = report.totals.num_steps - last.totals.num_steps
        if num_steps == 0:
            return
        prompt_tokens = report.totals.prompt_tokens - last.totals.prompt_tokens
        cached_tokens = report.totals.cached_tokens - last.totals.cached_tokens
        generated_tokens = report.totals.generation_tokens - last.totals.generation_tokens
        logger.info(
            "steps=%d running=%d queue=%d generated_tok_per_s=%.1f prompt_tok_per_s=%.1f kv_used=%.1f%% "
            "kv_cached=%.1f%% cache_hit=%.1f%% retracted=%d busy=%.0f%%",
            num_steps,
            report.num_running_reqs,
            report.num_queue_reqs,
            generated_tokens / elapsed_s,
            prompt_tokens / elapsed_s,
            _percent(report.kv.used_tokens, report.kv.total_tokens),
            _percent(report.kv.cached_tokens, report.kv.total_tokens),
            _percent(cached_tokens, prompt_tokens),
            report.totals.retracted_reqs - last.totals.retracted_reqs,
            _percent(report.totals.step_s - last.totals.step_s, elapsed_s),
        )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
