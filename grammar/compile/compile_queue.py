"""`CompileQueue`: has new grammars compiled in the sandbox, before the scheduler's process compiles them.

A compilation cannot be interrupted, and its time grows with the square of the size for some schemas. A grammar gets
`grammar_timeout` seconds of CPU time, and is refused for good only if it has used them up. A request waits for
`grammar_timeout` and `GRACE_S`, the time in which its body waited to be read included; then it is refused for now, and
a compilation under way goes on: the request may come again for its result, which is kept by the key of the grammar.
The start of the process does not count, for up to `grammar_timeout`.
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
from .worker import CompilationLostError, CompileResult, CompileWorker, WorkerLostError

logger = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 2
MAX_QUEUED: Final = 64
MAX_RESULTS: Final = 1024
LONG_CHARS: Final = 32_768
"""At most one grammar with more characters is compiled at a time: long compilations delay only each other."""
GRACE_S: Final = 0.5
MAX_WALL: Final = 8.0
"""Times the limit of CPU time: the sandbox ends a compilation earlier, so one that takes longer is that of a process
that makes no progress; it is replaced."""

Key = tuple[str, bool]
"""Key of a compilation: the key of the grammar, and whether it is measured."""


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar without a result: `num_waiting` requests wait for `done`, the result or why there is none.

    `task` compiles it; None while it waits in the queue.
    """

    key: Key
    spec: GrammarSpec
    done: asyncio.Future[CompileResult | str]
    num_waiting: int = 0
    task: asyncio.Task[None] | None = None


class CompileQueue:
    """The grammars that wait, the results, and the sandbox process. Used on one asyncio loop."""

    def __init__(self, start_worker: Callable[[], Awaitable[CompileWorker]], timeout_s: float) -> None:
        """Start nothing yet; `start_worker`: usually `CompileWorker.start`; `timeout_s`: `grammar_timeout`."""
        self._start_worker = start_worker
        self._timeout_s = timeout_s
        self._results: OrderedDict[Key, CompileResult] = OrderedDict()
        self._jobs: dict[Key, _Job] = {}
        self._worker: CompileWorker | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    def compiles(self, use: GrammarUse) -> bool:
        """Whether all grammars of a request are known to compile, so that `compile` returns at once."""
        known = [self._results.get((spec.key, False)) for spec in use.specs]
        return all(result is not None and not result.code for result in known)

    async def compile(
        self, use: GrammarUse, waited_s: float = 0.0, *, measures: bool = False
    ) -> list[CompileResult]:
        """Wait until all grammars of a request have been compiled; returns at once if they are known.

        Args:
            use: of the request.
            waited_s: time that the request has waited already.
            measures: measure the grammars, too.

        Raises:
            GrammarError: a grammar is refused.
            RequestError: 429, it was not compiled in time beside others; 503, the process for it is not ready.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s + GRACE_S - waited_s
        return [await self._result((spec.key, measures), spec, deadline_s) for spec in use.specs]

    def start(self) -> asyncio.Task[None]:
        """Start the process, or return its start; the first grammar need not wait for it then."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="grammar sandbox")
        return self._starting

    async def close(self) -> None:
        """End the process; requests that wait get 503."""
        self._closed = True
        tasks = [task for task in (self._starting, *(job.task for job in self._jobs.values())) if task]
        self._end_all("the server is shutting down")
        for task in tasks:
            task.cancel()
        if self._worker is not None:
            await self._worker.kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ requests

    async def _result(self, key: Key, spec: GrammarSpec, deadline_s: float) -> CompileResult:
        result: CompileResult | str | None = self._results.get(key)
        if result is None:
            result = await self._wait(self._jobs.get(key) or self._add(key, spec, deadline_s), deadline_s)
        else:
            self._results.move_to_end(key)
        if isinstance(result, str):
            raise _refused_for_now(503, result)
        if result.code:
            raise GrammarError(result.message, result.code)
        return result

    def _add(self, key: Key, spec: GrammarSpec, deadline_s: float) -> _Job:
        loop = asyncio.get_running_loop()
        num_waiting = sum(job.task is None for job in self._jobs.values())
        if self._closed:
            raise _refused_for_now(503, "the server is shutting down")
        if num_waiting >= MAX_QUEUED:
            why = f"{num_waiting} of them wait, the limit is {MAX_QUEUED}"
            raise _refused_for_now(429, why, self._timeout_s)
        if loop.time() >= deadline_s:
            raise self._not_in_time()
        job = self._jobs[key] = _Job(key, spec, loop.create_future())
        self._dispatch()
        return job

    async def _wait(self, job: _Job, deadline_s: float) -> CompileResult | str:
        loop = asyncio.get_running_loop()
        job.num_waiting += 1
        try:
            if self._worker is None:  # its start is not time of the request
                begin_s = loop.time()
                await asyncio.wait({self.start()}, timeout=self._timeout_s)
                deadline_s += loop.time() - begin_s
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.shield(job.done)  # other requests may wait for it, too
        except TimeoutError:
            raise self._not_in_time() from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and job.task is None and not job.done.done():
                del self._jobs[job.key]

    def _not_in_time(self) -> RequestError:
        if self._worker is None:
            return _refused_for_now(503, "the process that compiles grammars is starting")
        why = f"this one was not done beside others within {self._timeout_s:g} s"
        return _refused_for_now(429, why, self._timeout_s)

    # ------------------------------------------------------------ compilations

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
            self._end_all(reason)
            self._starting = None
        self._dispatch()

    async def _run(self, job: _Job, worker: CompileWorker) -> None:
        """Compile one grammar, also when no request waits for it any more."""
        try:
            async with asyncio.timeout(MAX_WALL * self._timeout_s):
                result = await worker.compile(job.spec, measures=job.key[1])
            if result.code == "schema_too_complex":
                logger.warning("grammar refused: key=%s chars=%d", job.spec.key, len(job.spec.text))
            self._results[job.key] = result
            if len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
            self._end(job, result)
        except CompilationLostError as error:
            logger.warning("a compilation was lost: key=%s reason=%s", job.spec.key, error)
            self._end(job, str(error))
        except (TimeoutError, WorkerLostError) as error:
            logger.error("the process that compiles grammars was lost: %s", error)
            if self._worker is worker:
                self._worker = self._starting = None
            await worker.kill()
            self._end(job, "the process that compiles grammars was lost")
        except Exception as error:  # a bug here must not leave a request waiting
            logger.exception("the compilation of a grammar failed")
            self._end(job, f"{type(error).__name__}: {error}")
        self._dispatch()

    def _end(self, job: _Job, outcome: CompileResult | str) -> None:
        self._jobs.pop(job.key, None)
        if not job.done.done():
            job.done.set_result(outcome)

    def _end_all(self, reason: str) -> None:
        for job in list(self._jobs.values()):
            self._end(job, reason)


def _refused_for_now(status: int, reason: str, retry_after_s: float = 1.0) -> RequestError:
    """The error of a request whose grammar is not compiled now, which is not the fault of the grammar."""
    return RequestError(
        f"new grammars cannot be compiled now: {reason}; try again later",
        code="queue_full" if status == 429 else "grammar_unavailable",
        status=status,
        retry_after_s=math.ceil(retry_after_s),
    )
