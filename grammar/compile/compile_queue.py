"""`CompileQueue`: has new grammars compiled in the sandbox, before the scheduler's process compiles them.

A compilation cannot be interrupted, and its time grows with the square of the size for some schemas. A grammar gets
`grammar_timeout` seconds of CPU time, and is refused for good only if it has used them up. A request waits for
`grammar_timeout` and `GRACE_S`, the time in which its body waited to be read included; then it is refused for now, and
a compilation under way goes on for the next request. The start of the process does not count, for `grammar_timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from ...runtime.errors import RequestError
from ...runtime.grammar_use import GrammarSpec, GrammarUse
from ..backend import GrammarError
from .worker import CompileResult, CompileWorker, WorkerLostError

logger = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 2
MAX_QUEUED: Final = 64
MAX_RESULTS: Final = 1024
LONG_CHARS: Final = 32_768
"""At most one grammar with more characters is compiled at a time: long compilations delay only each other."""
GRACE_S: Final = 0.5
MAX_WALL: Final = 8.0
"""Times the limit of CPU time: the sandbox ends a compilation earlier, so a process that takes longer is replaced."""


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that `num_waiting` requests wait for; `task` compiles it, None while it is in the queue."""

    spec: GrammarSpec
    done: asyncio.Future[CompileResult]
    num_waiting: int = 0
    task: asyncio.Task[None] | None = None


class CompileQueue:
    """The grammars that wait, the results, and the sandbox process. Used on one asyncio loop."""

    def __init__(self, start_worker: Callable[[], Awaitable[CompileWorker]], timeout_s: float) -> None:
        """Start nothing yet; `start_worker`: usually `CompileWorker.start`; `timeout_s`: `grammar_timeout`."""
        self._start_worker = start_worker
        self._timeout_s = timeout_s
        self._results: OrderedDict[str, CompileResult] = OrderedDict()  # by the key of the grammar, as are
        self._jobs: dict[str, _Job] = {}
        self._worker: CompileWorker | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    def compiles(self, use: GrammarUse) -> bool:
        """Whether all grammars of a request are known to compile, so that `compile` returns at once."""
        known = [self._results.get(spec.key) for spec in use.specs]
        return all(result is not None and not result.code for result in known)

    async def compile(self, use: GrammarUse, waited_s: float = 0.0) -> list[CompileResult]:
        """Wait until all grammars of a request have been compiled; returns at once if they are known.

        Args:
            use: of the request.
            waited_s: time that the request has waited already.

        Raises:
            GrammarError: a grammar is refused.
            RequestError: 429, it was not compiled in time beside others; 503, the process for it is not ready.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s + GRACE_S - waited_s
        results = [await self._result(spec, deadline_s) for spec in use.specs]
        for result in results:
            if result.code:
                raise GrammarError(result.message, result.code)
        return results

    def start(self) -> asyncio.Task[None]:
        """Start the process, or return its start; the first grammar need not wait for it then."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="grammar sandbox")
        return self._starting

    async def close(self) -> None:
        """End the process; requests that wait get 503."""
        self._closed = True
        tasks = [task for task in (self._starting, *(job.task for job in self._jobs.values())) if task]
        self._lose_all("the server is shutting down")
        for task in tasks:
            task.cancel()
        if self._worker is not None:
            await self._worker.kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _result(self, spec: GrammarSpec, deadline_s: float) -> CompileResult:
        if (known := self._results.get(spec.key)) is not None:
            self._results.move_to_end(spec.key)
            return known
        loop = asyncio.get_running_loop()
        job = self._jobs.get(spec.key) or self._add(spec, loop.time() >= deadline_s)
        job.num_waiting += 1
        try:
            if self._worker is None:  # its start is not time of the request
                begin_s = loop.time()
                await asyncio.wait({self.start()}, timeout=self._timeout_s)
                deadline_s += loop.time() - begin_s
            async with asyncio.timeout_at(deadline_s):
                result = await asyncio.shield(job.done)  # other requests may wait for it, too
        except TimeoutError:
            raise self._not_in_time() from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and job.task is None and not job.done.done():
                del self._jobs[spec.key]
        if result.lost:
            raise _refused_for_now(503, result.lost)
        return result

    def _add(self, spec: GrammarSpec, is_late: bool) -> _Job:
        num_waiting = sum(job.task is None for job in self._jobs.values())
        if self._closed:
            raise _refused_for_now(503, "the server is shutting down")
        if num_waiting >= MAX_QUEUED:
            why = f"{num_waiting} of them wait, the limit is {MAX_QUEUED}"
            raise _refused_for_now(429, why, self._timeout_s)
        if is_late:
            raise self._not_in_time()
        job = self._jobs[spec.key] = _Job(spec, asyncio.get_running_loop().create_future())
        self._dispatch()
        return job

    def _not_in_time(self) -> RequestError:
        if self._worker is None:
            return _refused_for_now(503, "the process that compiles grammars is starting")
        why = f"this one was not done beside others within {self._timeout_s:g} s"
        return _refused_for_now(429, why, self._timeout_s)

    def _dispatch(self) -> None:
        """Start the compilations that may run now: short grammars first."""
        if self._worker is None and self._jobs:
            self.start()
        while self._worker is not None and not self._closed:
            running = [job for job in self._jobs.values() if job.task is not None]
            has_long = any(len(job.spec.text) > LONG_CHARS for job in running)
            waiting = (job for job in self._jobs.values() if job.task is None)
            job = min(waiting, key=lambda each: len(each.spec.text), default=None)
            if job is None or len(running) >= MAX_AT_ONCE or (has_long and len(job.spec.text) > LONG_CHARS):
                return
            job.task = asyncio.create_task(self._run(job, self._worker), name="grammar compilation")

    async def _start(self) -> None:
        try:
            self._worker = await self._start_worker()
        except Exception as error:  # the next new grammar starts it again
            reason = f"the process that compiles grammars has not started: {error!s:.300}"
            logger.error("%s", reason)
            self._lose_all(reason)
            self._starting = None
        self._dispatch()

    async def _run(self, job: _Job, worker: CompileWorker) -> None:
        """Compile one grammar, also when no request waits for it any more."""
        try:
            async with asyncio.timeout(MAX_WALL * self._timeout_s):
                result = await worker.compile(job.spec)
        except (TimeoutError, WorkerLostError) as error:
            why = str(error) or "it made no progress"
            result = CompileResult(lost=f"the process that compiles grammars was lost: {why}")
            if self._worker is worker:
                self._worker = self._starting = None
            await worker.kill()
        except Exception as error:  # a bug here must not leave a request waiting
            logger.exception("the compilation of a grammar failed")
            result = CompileResult(lost=f"{type(error).__name__}: {error}")
        if result.lost or result.code == "schema_too_complex":
            why = result.lost or result.code
            logger.warning("no grammar: key=%s chars=%d reason=%s", job.spec.key, len(job.spec.text), why)
        if not result.lost:
            self._results[job.spec.key] = result
            if len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
        self._end(job, result)
        self._dispatch()

    def _end(self, job: _Job, result: CompileResult) -> None:
        self._jobs.pop(job.spec.key, None)
        if not job.done.done():
            job.done.set_result(result)

    def _lose_all(self, reason: str) -> None:
        for job in list(self._jobs.values()):
            self._end(job, CompileResult(lost=reason))


def _refused_for_now(status: int, reason: str, retry_after_s: float = 1.0) -> RequestError:
    """The error of a request whose grammar is not compiled now, which is not the fault of the grammar."""
    text = f"new grammars cannot be compiled now: {reason}; try again later"
    code = "queue_full" if status == 429 else "grammar_unavailable"
    return RequestError(text, code=code, status=status, retry_after_s=math.ceil(retry_after_s))
