"""`Prover`: compiles new grammars in processes that can be killed, before the scheduler's process compiles them.

A compilation cannot be interrupted, and its time grows with the square of the size for some schemas. The tokenizer
manager has each unknown grammar proved: a `ProofWorker` compiles it and walks some tokens through it within
`grammar_timeout`. The result is kept by the key of the grammar. Only proved grammars reach the scheduler.

A request waits at most `grammar_timeout` for its proof, the time in the queue included. The start of its process does
not count, and neither does time in the queue in which no process is ready, up to `grammar_timeout` once more: a start
takes seconds on a busy machine and says nothing about the grammar. Short grammars go first, and at most one worker has
a long one, so that long compilations delay only each other; `MAX_LONG_QUEUED` of them may wait, and more are refused at
once. A proof that no request waits for any more is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from ...runtime.errors import RequestError
from ...runtime.grammar_use import GrammarSpec, GrammarUse
from ..backend import GrammarError
from .messages import ProofResult
from .refusals import copy_of, queue_full, too_slow, unavailable
from .worker import WorkerLostError

logger = logging.getLogger(__name__)

MAX_WORKERS: Final = 2
MAX_QUEUED: Final = 64
MAX_LONG_QUEUED: Final = 8
"""Of them, grammars of more than `LONG_CHARS`: they are compiled one after the other, each for up to the time limit."""
MAX_RESULTS: Final = 1024
BAD_RESULT_S: Final = 600.0
"""How long a refused grammar is refused without a new proof."""
MAX_LOST: Final = 3
LOST_WINDOW_S: Final = 60.0
UNAVAILABLE_S: Final = 60.0
"""How long all new grammars get 503, after `MAX_LOST` workers were lost with different grammars in `LOST_WINDOW_S`."""
LONG_CHARS: Final = 32_768
"""At most one grammar with more characters is compiled at a time."""
START_FAILED_S: Final = 10.0
"""The same, after a worker that did not start."""
PROOF_MEMORY_BYTES: Final = 1 << 30
_LOOK_S: Final = 0.01
"""Between two looks at the time that a request has left, during the start of a process."""
_MOST: Final = 0.9
"""Of `grammar_timeout`: a grammar that was compiled for less has waited, and its size is not the cause."""


class Worker(Protocol):
    """What a `ProofWorker` does."""

    async def prove(self, spec: GrammarSpec, timeout_s: float, *, measures: bool = False) -> ProofResult: ...

    async def kill(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One grammar to prove.

    Attributes:
        num_waiting: requests that wait for it.
        had_company: another proof ran at the same time, so that a timeout says little about the grammar.
        num_lost: workers that were lost with it.
        is_starting: its worker is being started.
        lost_s: time that does not count, up to the last `Prover._account`.
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
    is_starting: bool = False
    lost_s: float = 0.0
    proving_s: float | None = None
    measures: bool = False
    measured: ProofResult | None = None

    @property
    def is_long(self) -> bool:
        return len(self.spec.text) > LONG_CHARS


@dataclass(slots=True)
class _Results:
    """The last `MAX_RESULTS` results by key; those of refused grammars expire."""

    clock: Callable[[], float]
    entries: OrderedDict[str, tuple[GrammarError | None, float]] = field(default_factory=OrderedDict)

    def put(self, key: str, error: GrammarError | None) -> None:
        self.entries[key] = (error, self.clock() + BAD_RESULT_S)
        self.entries.move_to_end(key)
        if len(self.entries) > MAX_RESULTS:
            self.entries.popitem(last=False)

    def check(self, key: str) -> bool:
        """Whether the grammar is known to be good.

        Raises:
            GrammarError: it is known to be bad.
        """
        known = self.entries.get(key)
        if known is None:
            return False
        error, expires_s = known
        if error is None:
            self.entries.move_to_end(key)
            return True
        if self.clock() < expires_s:
            raise copy_of(error)
        del self.entries[key]
        return False


class Prover:
    """Proves grammars one after the other in at most `MAX_WORKERS` processes. Used on one asyncio loop."""

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[Worker]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            start_worker: usually `ProofWorker.start` with the model's `ProofSetup`.
            timeout_s: the setting `grammar_timeout`.
            clock: seconds, for results that expire.
        """
        self._start_worker = start_worker
        self._timeout_s = timeout_s
        self._clock = clock
        self._results = _Results(clock)
        self._jobs: dict[str, _Job] = {}
        self._queue: list[_Job] = []
        self._running: dict[_Job, asyncio.Task[None]] = {}
        self._idle: list[Worker] = []
        self._accounted_s = 0.0  # the loop's clock at the last `_account`
        self._lost: OrderedDict[str, float] = OrderedDict()  # keys that lost a worker, and when
        self._unavailable_until_s = -1.0
        self._unavailable_reason = ""
        self._closed = False

    def is_proved(self, use: GrammarUse) -> bool:
        """Whether all grammars of a request are known to be good, so that `prove` returns at once."""
        return all(
            (known := self._results.entries.get(spec.key)) is not None and known[0] is None
            for spec in use.specs
        )

    async def prove(self, use: GrammarUse) -> None:
        """Wait until all grammars of a request have been compiled; returns at once if they are known.

        Raises:
            GrammarError: a grammar is refused.
            RequestError: 429, too many grammars wait, or they wait too long; 503, proofs are not possible at present.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        for spec in use.specs:
            key = spec.key
            if self._results.check(key):
                continue
            job = self._jobs.get(key) or self._add_job(spec, key)
            error = await self._wait_for(job, deadline_s)
            if error is not None:
                raise copy_of(error)

    async def measure(self, use: GrammarUse) -> list[ProofResult]:
        """Compile all grammars of a request, also known ones; their measured results.

        Raises:
            GrammarError: a grammar is refused.
            RequestError: as for `prove`.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        results = []
        for spec in use.specs:
            key = f"{spec.key} measured"
            job = self._jobs.get(key) or self._add_job(spec, key, measures=True)
            error = await self._wait_for(job, deadline_s)
            if error is not None:
                raise copy_of(error)
            results.append(job.measured or ProofResult())
        return results

    async def _wait_for(self, job: _Job, deadline_s: float) -> GrammarError | None:
        """The result of a job; the last request that stops waiting ends it."""
        job.num_waiting += 1
        try:
            return await self._done_in_time(job, deadline_s)
        except TimeoutError:
            if self._is_slow(job):
                return too_slow(job.spec, self._timeout_s)
            raise queue_full(
                f"{len(self._queue)} other new grammars wait to be compiled, and this one was not done within "
                f"{self._timeout_s:g} s",
                self._timeout_s,
            ) from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.done.done():
                self._drop(job)

    async def _done_in_time(self, job: _Job, deadline_s: float) -> GrammarError | None:
        """The result of a job.

        Raises:
            TimeoutError: the deadline has passed, also with the time that does not count.
        """
        self._account()
        lost_before_s = job.lost_s
        limit_s = deadline_s
        while True:
            try:
                async with asyncio.timeout_at(limit_s):
                    return await asyncio.shield(job.done)  # other requests may wait for it, too
            except TimeoutError:
                self._account()
                extended_s = deadline_s + min(job.lost_s - lost_before_s, self._timeout_s)
                if extended_s <= limit_s:
                    raise
                limit_s = max(extended_s, limit_s + _LOOK_S)

    def _account(self) -> None:
        """Add the time since the last call to the lost time of jobs; called before each start and end of a start."""
        now_s = asyncio.get_running_loop().time()
        passed_s = now_s - self._accounted_s
        self._accounted_s = now_s
        starting = [job for job in self._running if job.is_starting]
        for job in starting:
            job.lost_s += passed_s
        if starting and len(starting) == len(self._running):
            for job in self._queue:
                job.lost_s += passed_s

    async def close(self) -> None:
        """End all processes; requests that wait get 503."""
        self._closed = True
        tasks, idle = list(self._running.values()), self._idle
        self._idle = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(worker.kill() for worker in idle), return_exceptions=True)
        for job in list(self._jobs.values()):
            self._give_up(job, unavailable("the server is shutting down"))
        self._queue.clear()

    def _is_slow(self, job: _Job) -> bool:
        """Whether a job has been compiled for nearly all of the time limit, and has not just waited."""
        if job.proving_s is None or job not in self._running:
            return False
        return asyncio.get_running_loop().time() - job.proving_s > _MOST * self._timeout_s

    # ------------------------------------------------------------ the queue

    def _add_job(self, spec: GrammarSpec, key: str, *, measures: bool = False) -> _Job:
        if self._closed:
            raise unavailable("the server is shutting down")
        if self._clock() < self._unavailable_until_s:
            raise unavailable(self._unavailable_reason)
        job = _Job(spec=spec, key=key, done=asyncio.get_running_loop().create_future(), measures=measures)
        self._check_room(job)
        self._jobs[key] = job
        self._queue.append(job)
        self._dispatch()
        return job

    def _check_room(self, job: _Job) -> None:
        """Refuse a job at once that would wait for its whole time."""
        num_long = sum(each.is_long for each in self._queue)
        if len(self._queue) >= MAX_QUEUED:
            which, count, most = "new grammars", len(self._queue), MAX_QUEUED
        elif job.is_long and num_long >= MAX_LONG_QUEUED:
            which, count, most = (
                f"new grammars of more than {LONG_CHARS:,} characters",
                num_long,
                MAX_LONG_QUEUED,
            )
        else:
            return
        raise queue_full(f"{count} {which} wait to be compiled, the limit is {most}", self._timeout_s)

    def _drop(self, job: _Job) -> None:
        """End a job that no request waits for."""
        self._jobs.pop(job.key, None)
        if job in self._queue:
            self._queue.remove(job)
        elif job in self._running:
            self._running[job].cancel()  # kills the worker

    def _dispatch(self) -> None:
        """Start the jobs that may run now, the shortest grammar first."""
        while self._queue and not self._closed and len(self._running) < MAX_WORKERS:
            has_long = any(job.is_long for job in self._running)
            ready = [job for job in self._queue if not (job.is_long and has_long)]
            if not ready:
                return
            job = min(ready, key=lambda each: len(each.spec.text))
            self._queue.remove(job)
            if self._running:
                for other in (job, *self._running):
                    other.had_company = True
            self._running[job] = asyncio.create_task(self._run(job), name="grammar proof")

    async def _run(self, job: _Job) -> None:
        try:
            await self._prove_one(job)
        except asyncio.CancelledError:
            self._give_up(job, unavailable("the server is shutting down"))
            if self._closed:
                raise
        except Exception as error:  # a bug here must not leave a request waiting
            logger.exception("the proof of a grammar failed")
            self._give_up(job, unavailable(f"{type(error).__name__}: {error}"))
        finally:
            del self._running[job]
            self._dispatch()

    async def _prove_one(self, job: _Job) -> None:
        """Prove one grammar in an idle worker, or in a new one."""
        try:
            worker = self._idle.pop() if self._idle else await self._started_worker(job)
        except WorkerLostError as error:
            logger.error("the process that compiles grammars has not started: %s", error)
            reason = f"the process that compiles grammars has not started: {error}"
            self._block(reason, START_FAILED_S)
            self._give_up(job, unavailable(reason))
            return
        kept = False
        job.proving_s = asyncio.get_running_loop().time()
        try:
            result = await worker.prove(job.spec, self._timeout_s, measures=job.measures)
            job.measured = result
            self._finish(job, GrammarError(result.message, result.code) if result.code else None)
            self._idle.append(worker)
            kept = True
        except TimeoutError:
            self._time_out(job)
        except WorkerLostError:
            self._count_lost(job)
        finally:
            if not kept:
                await worker.kill()

    async def _started_worker(self, job: _Job) -> Worker:
        """A new worker; its start does not count as time of the job."""
        self._account()
        job.is_starting = True
        try:
            return await self._start_worker()
        finally:
            self._account()
            job.is_starting = False

    # ------------------------------------------------------------ results

    def _finish(self, job: _Job, error: GrammarError | None, *, is_kept: bool = True) -> None:
        if is_kept:
            self._results.put(job.spec.key, error)
        self._jobs.pop(job.key, None)
        if not job.done.done():
            job.done.set_result(error)

    def _give_up(self, job: _Job, error: RequestError) -> None:
        """End a job without a result about its grammar."""
        self._jobs.pop(job.key, None)
        if not job.done.done():
            job.done.set_exception(error)
            job.done.exception()  # the request may be gone; not an error of the loop then

    def _time_out(self, job: _Job) -> None:
        logger.warning(
            "grammar refused: key=%s chars=%d timeout_s=%g", job.key, len(job.spec.text), self._timeout_s
        )
        self._finish(job, too_slow(job.spec, self._timeout_s), is_kept=not job.had_company)

    def _count_lost(self, job: _Job) -> None:
        """Try once more in a new worker: the worker may have been lost for another reason."""
        job.num_lost += 1
        job.proving_s = None
        if job.num_lost == 1:
            self._queue.append(job)
            return
        logger.warning(
            "the process that compiles grammars was lost: key=%s chars=%d", job.key, len(job.spec.text)
        )
        now_s = self._clock()
        self._lost[job.key] = now_s
        self._lost.move_to_end(job.key)
        while next(iter(self._lost.values())) < now_s - LOST_WINDOW_S:
            self._lost.popitem(last=False)
        self._finish(
            job,
            GrammarError(
                f"the grammar has {len(job.spec.text):,} characters and takes too much memory to compile; simplify it",
                "schema_too_complex",
            ),
        )
        if len(self._lost) >= MAX_LOST:
            self._lost.clear()
            self._block(
                f"the process that compiles grammars was lost {MAX_LOST} times within {LOST_WINDOW_S:.0f} s",
                UNAVAILABLE_S,
            )

    def _block(self, reason: str, duration_s: float) -> None:
        """Refuse new grammars for a while; known ones are not affected."""
        self._unavailable_until_s = self._clock() + duration_s
        self._unavailable_reason = reason
        waiting: Iterable[_Job] = list(self._queue)
        self._queue.clear()
        for job in waiting:
            self._give_up(job, unavailable(reason))
