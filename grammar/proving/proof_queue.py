"""`ProofQueue`: the grammars that wait to be compiled, and those that are being compiled.

Short grammars go first, and at most one worker has a long one, so that long compilations delay only each other;
`MAX_LONG_QUEUED` of them may wait, and more are refused at once.

The queue also counts the time of each job that says nothing about its grammar: the start of its worker, and time in
which no worker is ready for any job. A start takes seconds on a busy machine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from ...runtime.grammar_use import GrammarSpec
from ..backend import GrammarError
from .messages import ProofResult

MAX_WORKERS: Final = 2
MAX_QUEUED: Final = 64
MAX_LONG_QUEUED: Final = 8
"""Of them, grammars of more than `LONG_CHARS`: they are compiled one after the other, each for up to the time limit."""
LONG_CHARS: Final = 32_768
"""At most one grammar with more characters is compiled at a time."""


@dataclass(slots=True, kw_only=True, eq=False)
class ProofJob:
    """One grammar to prove.

    Attributes:
        key: of the job; another one than that of the grammar if it is measured.
        done: the result, None for a good grammar.
        num_waiting: requests that wait for it.
        had_company: another proof ran at the same time, so that a timeout says little about the grammar.
        num_lost: workers that were lost with it.
        task: has it compiled; None while it waits.
        is_starting: its worker is being started.
        uncounted_s: time that does not count, up to the last `ProofQueue.account`.
        proving_s: when its worker began to compile it, by the clock of the loop; None before.
        measures: it is compiled, and measured, although its result may be known.
        measured: the result, if it is good.
    """

    spec: GrammarSpec
    key: str
    done: asyncio.Future[GrammarError | None]
    num_waiting: int = 0
    had_company: bool = False
    num_lost: int = 0
    task: asyncio.Task[None] | None = None
    is_starting: bool = False
    uncounted_s: float = 0.0
    proving_s: float | None = None
    measures: bool = False
    measured: ProofResult | None = None

    @property
    def is_long(self) -> bool:
        """Whether the grammar has more than `LONG_CHARS`."""
        return len(self.spec.text) > LONG_CHARS


class ProofQueue:
    """Jobs in the order in which they came.

    Attributes:
        waiting: jobs without a worker.
        running: jobs with a worker, or with one that is being started; at most `MAX_WORKERS`.
    """

    def __init__(self) -> None:
        self.waiting: list[ProofJob] = []
        self.running: list[ProofJob] = []
        self._accounted_s = 0.0  # the time of the last `account`

    def why_full(self, job: ProofJob) -> str:
        """Why there is no room for a job, which would wait for its whole time; "" if there is."""
        num_long = sum(each.is_long for each in self.waiting)
        if len(self.waiting) >= MAX_QUEUED:
            return f"{len(self.waiting)} new grammars wait to be compiled, the limit is {MAX_QUEUED}"
        if job.is_long and num_long >= MAX_LONG_QUEUED:
            return (
                f"{num_long} new grammars of more than {LONG_CHARS:,} characters wait to be compiled, "
                f"the limit is {MAX_LONG_QUEUED}"
            )
        return ""

    def take(self) -> ProofJob | None:
        """Move the job that may run now to `running`: the shortest grammar. None if no job may."""
        if len(self.running) >= MAX_WORKERS:
            return None
        has_long = any(job.is_long for job in self.running)
        ready = [job for job in self.waiting if not (job.is_long and has_long)]
        if not ready:
            return None
        job = min(ready, key=lambda each: len(each.spec.text))
        self.waiting.remove(job)
        self.running.append(job)
        if len(self.running) > 1:
            for each in self.running:
                each.had_company = True
        return job

    def account(self, now_s: float) -> None:
        """Add the time since the last call to what does not count.

        Call it before each begin and end of a start.

        Args:
            now_s: by the clock of the loop.
        """
        passed_s = now_s - self._accounted_s
        self._accounted_s = now_s
        starting = [job for job in self.running if job.is_starting]
        for job in starting:
            job.uncounted_s += passed_s
        if starting and len(starting) == len(self.running):
            for job in self.waiting:
                job.uncounted_s += passed_s
