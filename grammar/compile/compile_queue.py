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
from .worker import CompileResult, CompileWorker, WorkerLostError

logger = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 2
MAX_QUEUED: Final = 64
MAX_RESULTS: Final = 1024
LONG_CHARS: Final = 32_768
"""At most one grammar with more characters is compiled at a time: long compilations delay only each other."""
GRACE_S: Final = 0.5
MAX_WALL: Final = 60.0
"""Times the limit of CPU time: a compilation that takes longer makes no progress, and its process is replaced."""

Key = tuple[str, bool]
"""Of a compilation: the key of the grammar, and whether it is measured."""


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar without a result, which `num_waiting` requests wait for; `task` compiles it, None while it waits.

    `done`: the result, or why there is none.
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
        loop = asyncio.get_running_loop()
        result: CompileResult | str | None = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        else:
            job = self._jobs.get(key) or self._add(key, spec, deadline_s)
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
                    del self._jobs[key]
        if isinstance(result, str):
            raise _unavailable(result)
        if result.code:
            raise GrammarError(result.message, result.code)
        return result

    def _add(self, key: Key, spec: GrammarSpec, deadline_s: float) -> _Job:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise _unavailable("the server is shutting down")
        if loop.time() >= deadline_s:
            raise self._not_in_time()
        if self._num_waiting >= MAX_QUEUED:
            raise self._queue_full(f"the limit is {MAX_QUEUED}")
        job = self._jobs[key] = _Job(key, spec, loop.create_future())
        self._dispatch()
        return job

    @property
    def _num_waiting(self) -> int:
        return sum(job.task is None for job in self._jobs.values())

    def _not_in_time(self) -> RequestError:
        if self._worker is None:
            return _unavailable("the process that compiles grammars is starting")
        return self._queue_full(f"this one was not done within {self._timeout_s:g} s")

    def _queue_full(self, why: str) -> RequestError:
        """429; after the time limit, the compilations of now have ended."""
        return RequestError(
            f"{self._num_waiting} new grammars wait to be compiled, {why}; try again later",
            code="queue_full",
            status=429,
            retry_after_s=math.ceil(self._timeout_s),
        )

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
        except (OSError, WorkerLostError) as error:  # the next new grammar starts it again
            logger.error("the process that compiles grammars has not started: %s", error)
            self._end_all(f"the process that compiles grammars has not started: {error}")
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


def _unavailable(reason: str) -> RequestError:
    """503: no new grammar can be compiled at present, which is no fault of the request."""
    text = f"new grammars cannot be compiled now: {reason}; try again later"
    return RequestError(text, code="grammar_unavailable", status=503, retry_after_s=1)
