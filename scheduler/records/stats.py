"""`SchedulerStats`: totals since the start of the process; `StepLog`: a log line per interval, made of reports."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...runtime.scheduler_report import SchedulerReport


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
