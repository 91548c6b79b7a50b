"""`Prover`: compiles new grammars in processes that can be killed, before the scheduler's process compiles them.

A compilation cannot be interrupted, and its time grows with the square of the size for some schemas. The tokenizer
manager has each unknown grammar proved: a `ProofWorker` compiles it and walks some tokens through it within
`grammar_timeout`. The result is kept by the key of the grammar. Only proved grammars reach the scheduler.

A request waits at most `grammar_timeout` for its proof, the time in which its body waited to be read and the time in
the queue included. The start of its process does not count, and neither does time in the queue in which no process is
ready, up to `grammar_timeout` once more: a start takes seconds on a busy machine and says nothing about the grammar.
`ProofQueue` has the order, and counts that time. A proof that no request waits for any more is ended.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from ...runtime.errors import RequestError
from ...runtime.grammar_use import GrammarSpec, GrammarUse
from ..backend import GrammarError
from .known_results import KnownResults
from .messages import ProofResult
from .outage import Outage
from .proof_queue import ProofJob, ProofQueue
from .refusals import copy_of, queue_full, too_large, too_slow, unavailable
from .worker import WorkerLostError

logger = logging.getLogger(__name__)

PROOF_MEMORY_BYTES: Final = 1 << 30
_LOOK_S: Final = 0.01
"""Between two looks at the time that a request has left, during the start of a process."""
_MOST: Final = 0.9
"""Of `grammar_timeout`: a grammar that was compiled for less has waited, and its size is not the cause."""


class Worker(Protocol):
    """What a `ProofWorker` does."""

    async def prove(self, spec: GrammarSpec, timeout_s: float, *, measures: bool = False) -> ProofResult: ...

    async def kill(self) -> None: ...


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
        self._results = KnownResults(clock)
        self._jobs: dict[str, ProofJob] = {}  # without a result yet
        self._queue = ProofQueue()
        self._idle: list[Worker] = []
        self._outage = Outage(clock)
        self._closed = False

    def is_proved(self, use: GrammarUse) -> bool:
        """Whether all grammars of a request are known to be good, so that `prove` returns at once."""
        return all(self._results.has_good(spec.key) for spec in use.specs)

    async def prove(self, use: GrammarUse, waited_s: float = 0.0) -> None:
        """Wait until all grammars of a request have been compiled; returns at once if they are known.

        Args:
            use: of the request.
            waited_s: what the request has used of the time limit.

        Raises:
            GrammarError: a grammar is refused.
            RequestError: 429, too many grammars wait, or they wait too long; 503, proofs are not possible at present.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s - waited_s
        for spec in use.specs:
            if not self._results.check(spec.key):
                await self._prove_spec(spec, deadline_s, measures=False)

    async def measure(self, use: GrammarUse) -> list[ProofResult]:
        """Compile all grammars of a request, also known ones; their measured results.

        Raises:
            GrammarError: a grammar is refused.
            RequestError: as for `prove`.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        jobs = [await self._prove_spec(spec, deadline_s, measures=True) for spec in use.specs]
        return [job.measured or ProofResult() for job in jobs]

    async def _prove_spec(self, spec: GrammarSpec, deadline_s: float, *, measures: bool) -> ProofJob:
        """The job of a grammar, when it is good; requests with the same grammar share it."""
        if asyncio.get_running_loop().time() >= deadline_s:
            raise self._waited()  # before a process is started for it
        key = f"{spec.key} measured" if measures else spec.key
        job = self._jobs.get(key) or self._add_job(spec, key, measures=measures)
        error = await self._wait_for(job, deadline_s)
        if error is not None:
            raise copy_of(error)
        return job

    async def _wait_for(self, job: ProofJob, deadline_s: float) -> GrammarError | None:
        """The result of a job; the last request that stops waiting ends it."""
        job.num_waiting += 1
        try:
            return await self._done_in_time(job, deadline_s)
        except TimeoutError:
            if self._is_slow(job):
                return too_slow(job.spec, self._timeout_s)
            raise self._waited() from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.done.done():
                self._drop(job)

    def _waited(self) -> RequestError:
        return queue_full(
            f"{len(self._queue.waiting)} other new grammars wait to be compiled, and this one was not done within "
            f"{self._timeout_s:g} s",
            self._timeout_s,
        )

    async def _done_in_time(self, job: ProofJob, deadline_s: float) -> GrammarError | None:
        """The result of a job.

        Raises:
            TimeoutError: the deadline has passed, also with the time that does not count.
        """
        self._account()
        uncounted_before_s = job.uncounted_s
        limit_s = deadline_s
        while True:
            try:
                async with asyncio.timeout_at(limit_s):
                    return await asyncio.shield(job.done)  # other requests may wait for it, too
            except TimeoutError:
                self._account()
                extended_s = deadline_s + min(job.uncounted_s - uncounted_before_s, self._timeout_s)
                if extended_s <= limit_s:
                    raise
                limit_s = max(extended_s, limit_s + _LOOK_S)

    def _account(self) -> None:
        self._queue.account(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End all processes; requests that wait get 503."""
        self._closed = True
        tasks, idle = [job.task for job in self._queue.running if job.task is not None], self._idle
        self._idle = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(worker.kill() for worker in idle), return_exceptions=True)
        for job in list(self._jobs.values()):
            self._give_up(job, unavailable("the server is shutting down"))
        self._queue.waiting.clear()

    def _is_slow(self, job: ProofJob) -> bool:
        """Whether a job has been compiled for nearly all of the time limit, and has not just waited."""
        if job.proving_s is None or job not in self._queue.running:
            return False
        return asyncio.get_running_loop().time() - job.proving_s > _MOST * self._timeout_s

    # ------------------------------------------------------------ the queue

    def _add_job(self, spec: GrammarSpec, key: str, *, measures: bool) -> ProofJob:
        if self._closed:
            raise unavailable("the server is shutting down")
        if reason := self._outage.reason:
            raise unavailable(reason)
        job = ProofJob(spec=spec, key=key, done=asyncio.get_running_loop().create_future(), measures=measures)
        if reason := self._queue.why_full(job):
            raise queue_full(reason, self._timeout_s)
        self._jobs[key] = job
        self._queue.waiting.append(job)
        self._dispatch()
        return job

    def _drop(self, job: ProofJob) -> None:
        """End a job that no request waits for."""
        self._forget(job)
        if job in self._queue.waiting:
            self._queue.waiting.remove(job)
        elif job.task is not None:
            job.task.cancel()  # kills the worker

    def _dispatch(self) -> None:
        """Start the jobs that may run now."""
        while not self._closed and (job := self._queue.take()) is not None:
            job.task = asyncio.create_task(self._run(job), name="grammar proof")
            job.task.add_done_callback(functools.partial(self._ended, job))

    async def _run(self, job: ProofJob) -> None:
        try:
            await self._prove_one(job)
        except asyncio.CancelledError:
            self._give_up(job, unavailable("the server is shutting down"))
            if self._closed:
                raise
        except Exception as error:  # a bug here must not leave a request waiting
            logger.exception("the proof of a grammar failed")
            self._give_up(job, unavailable(f"{type(error).__name__}: {error}"))

    def _ended(self, job: ProofJob, _task: asyncio.Task[None]) -> None:
        """The worker of a job is free, or has been killed; also after a task that was cancelled before it began."""
        self._queue.running.remove(job)
        job.task = None
        if job.num_waiting and not job.done.done():  # its worker was lost
            self._queue.waiting.append(job)
        self._dispatch()

    async def _prove_one(self, job: ProofJob) -> None:
        """Prove one grammar in an idle worker, or in a new one."""
        try:
            worker = self._idle.pop() if self._idle else await self._started_worker(job)
        except WorkerLostError as error:
            logger.error("the process that compiles grammars has not started: %s", error)
            self._outage.start_failed(error)
            self._give_up(job, unavailable(self._outage.reason))
            self._give_up_waiting()
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

    async def _started_worker(self, job: ProofJob) -> Worker:
        """A new worker; its start does not count as time of the job."""
        self._account()
        job.is_starting = True
        try:
            return await self._start_worker()
        finally:
            self._account()
            job.is_starting = False

    # ------------------------------------------------------------ results

    def _finish(self, job: ProofJob, error: GrammarError | None, *, is_kept: bool = True) -> None:
        # Measuring does more than compiling: what ends it does not make a good grammar bad.
        if is_kept and not (job.measures and self._results.has_good(job.spec.key)):
            self._results.put(job.spec.key, error)
        self._forget(job)
        if not job.done.done():
            job.done.set_result(error)

    def _give_up(self, job: ProofJob, error: RequestError) -> None:
        """End a job without a result about its grammar."""
        self._forget(job)
        if not job.done.done():
            job.done.set_exception(error)
            job.done.exception()  # the request may be gone; not an error of the loop then

    def _time_out(self, job: ProofJob) -> None:
        logger.warning(
            "grammar refused: key=%s chars=%d timeout_s=%g", job.key, len(job.spec.text), self._timeout_s
        )
        self._finish(job, too_slow(job.spec, self._timeout_s), is_kept=not job.had_company)

    def _count_lost(self, job: ProofJob) -> None:
        """The first time, the job stays without a result and is tried again: there may have been another reason."""
        job.num_lost += 1
        job.proving_s = None
        if job.num_lost == 1:
            return
        logger.warning(
            "the process that compiles grammars was lost: key=%s chars=%d", job.key, len(job.spec.text)
        )
        self._finish(job, too_large(job.spec))
        if self._outage.worker_lost(job.spec.key):
            self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """An outage has begun: end all jobs without a worker."""
        waiting, self._queue.waiting = self._queue.waiting, []
        for job in waiting:
            self._give_up(job, unavailable(self._outage.reason))

    def _forget(self, job: ProofJob) -> None:
        """Requests that come from now on do not share this job."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
