"""`PendingGrammars`: the requests whose grammars are being compiled in the sandbox.

A request with an unknown grammar is sent to the scheduler at once, where it waits at its place by arrival. When the
sandbox has compiled the grammar, the scheduler gets `GrammarReady`; otherwise the request fails with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from ..grammar.backend import GrammarError
from ..grammar.compile.compile_queue import CompileQueue
from ..grammar.compile.worker import CompileResult
from ..runtime.errors import RequestError
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import GrammarReady, SchedulerInput
from .aborter import Aborter
from .generation import Generation, GenerationRequest
from .request_log import LoggedRequest, RequestLog

logger = logging.getLogger(__name__)


class PendingGrammars:
    """One task per generation with an unknown grammar."""

    def __init__(
        self,
        queue: CompileQueue | None,
        log: RequestLog,
        *,
        aborter: Aborter,
        send: Callable[[SchedulerInput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; without a `queue` all grammars are trusted."""
        self._clock = clock
        self._queue = queue
        self._log = log
        self._aborter = aborter
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def checked(self, use: GrammarUse | None) -> GrammarUse | None:
        """`use` as the scheduler gets it: it says whether the grammars are known to compile."""
        if use is None or use.compiles:
            return use
        return replace(use, compiles=self._queue is None or self._queue.compiles(use))

    async def measure(self, use: GrammarUse) -> list[CompileResult]:
        """Compile all grammars of a request that is not sent; [] if none is compiled."""
        return [] if self._queue is None else await self._queue.compile(use)

    def begin(self, generation: Generation, request: GenerationRequest) -> None:
        """Have the grammars of a generation compiled that has just been sent for a request."""
        if request.grammar is not None and not request.grammar.compiles:
            waiting = self._release(generation, request, request.grammar)
            self._tasks[generation.id] = asyncio.get_running_loop().create_task(waiting)

    def ended(self, logged: LoggedRequest) -> None:
        """End the wait of a generation with its last request."""
        if self._tasks and not self._log.choices_of(logged.generation.id):
            task = self._tasks.pop(logged.generation.id, None)
            if task is not None:
                task.cancel()

    async def compile(self, request: GenerationRequest, use: GrammarUse, arrival_s: float) -> None:
        """Wait until the grammars of a request are compiled.

        Args:
            request: has the field that errors name.
            use: its grammars.
            arrival_s: when the time limit began, unless the request says.

        Raises:
            RequestError: they are refused, or cannot be compiled now.
        """
        assert self._queue is not None
        param = request.grammar_param
        received_s = arrival_s if request.received_s is None else request.received_s
        try:
            await self._queue.compile(use, self._clock() - received_s)
        except GrammarError as refused:
            raise RequestError(f"{param}: {refused.message}", param=param, code=refused.code) from None
        except RequestError:
            raise
        except Exception:
            logger.error("compiling a grammar failed param=%s", param, exc_info=True)
            text = "the grammar could not be checked; the server's log has the cause"
            raise RequestError(text, param=param, code="grammar_unavailable", status=500) from None

    async def _release(self, generation: Generation, request: GenerationRequest, use: GrammarUse) -> None:
        error: RequestError | None = None
        try:
            await self.compile(request, use, generation.arrival_s)
        except RequestError as refused:
            error = refused
        # The end of the generation would cancel this task, which ends now in any case.
        self._tasks.pop(generation.id, None)
        if error is not None:
            self._aborter.fail(generation, error, "its grammar was refused")
            return
        generation.grammar_ready_s = self._clock()
        for choice in generation.choices:
            logged = self._log.get(choice.rid)
            if logged is not None and logged.message.grammar is not None:
                logged.message = replace(
                    logged.message, grammar=replace(logged.message.grammar, compiles=True)
                )
                if logged.is_sent:
                    self._send(GrammarReady(logged.rid))
