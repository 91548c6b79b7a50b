"""`SchedulerStats`: totals since the start of the process; `Scheduler.report` adds the current figures."""

from __future__ import annotations

from dataclasses import dataclass


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
