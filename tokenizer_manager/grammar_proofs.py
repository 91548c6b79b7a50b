"""`GrammarProofs`: the requests whose grammars are being proved.

A request with an unproved grammar is sent to the scheduler at once, where it waits at its place by arrival. Meanwhile
the grammar is compiled in a process of its own, which can be killed (`grammar/proving/`). If that succeeds, the
scheduler is told (`GrammarReady`); otherwise the request fails with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from ..grammar.backend import GrammarError
from ..grammar.proving.messages import ProofResult
from ..runtime.errors import RequestError
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import GrammarReady, SchedulerInput
from .aborter import Aborter
from .generation import Generation, GenerationRequest
from .request_log import LoggedRequest, RequestLog

logger = logging.getLogger(__name__)


class GrammarProver(Protocol):
    """Compiles grammars where a compilation can be ended; `grammar.proving.prover.Prover` implements it."""

    def is_proved(self, use: GrammarUse) -> bool:
        """Whether all grammars are known to compile."""
        ...

    async def prove(self, use: GrammarUse, waited_s: float = 0.0) -> None:
        """Compile the grammars that are not known.

        Args:
            use: of the request.
            waited_s: what the request has used of the time limit.

        Raises:
            GrammarError: one of them cannot be compiled, or not in time.
            RequestError: they cannot be tried now.
        """
        ...

    async def measure(self, use: GrammarUse) -> list[ProofResult]:
        """Compile all grammars, and measure that; [] if it compiles none.

        Raises:
            GrammarError, RequestError: as for `prove`.
        """
        ...


class TrustingProver:
    """Takes every grammar as proved; for a caller that trusts its requests."""

    def is_proved(self, use: GrammarUse) -> bool:
        return True

    async def prove(self, use: GrammarUse, waited_s: float = 0.0) -> None:
        pass

    async def measure(self, use: GrammarUse) -> list[ProofResult]:
        return []


class GrammarProofs:
    """The running proofs: one task per generation."""

    def __init__(
        self,
        prover: GrammarProver,
        log: RequestLog,
        *,
        aborter: Aborter,
        send: Callable[[SchedulerInput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts."""
        self._clock = clock
        self._prover = prover
        self._log = log
        self._aborter = aborter
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def checked(self, use: GrammarUse | None) -> GrammarUse | None:
        """`use` as the scheduler gets it: it says whether the grammars are proved already."""
        if use is None or use.proved:
            return use
        return replace(use, proved=self._prover.is_proved(use))

    async def measure(self, use: GrammarUse) -> list[ProofResult]:
        return await self._prover.measure(use)

    def begin(self, generation: Generation, request: GenerationRequest) -> None:
        """Prove the grammars of a generation that has just been sent for a request."""
        if request.grammar is not None and not request.grammar.proved:
            proof = self._prove(generation, request, request.grammar)
            task = asyncio.get_running_loop().create_task(proof)
            self._tasks[generation.id] = task

    def ended(self, logged: LoggedRequest) -> None:
        """End the proof of a generation with its last request."""
        if self._tasks and not self._log.choices_of(logged.generation.id):
            task = self._tasks.pop(logged.generation.id, None)
            if task is not None:
                task.cancel()

    async def prove(self, request: GenerationRequest, use: GrammarUse, arrival_s: float) -> None:
        """Prove the grammars of a request.

        Args:
            request: has the field that errors name.
            use: its grammars.
            arrival_s: when the time limit began, unless the request says.

        Raises:
            RequestError: they are refused, or cannot be tried now.
        """
        param = request.grammar_param
        received_s = arrival_s if request.received_s is None else request.received_s
        try:
            await self._prover.prove(use, self._clock() - received_s)
        except GrammarError as refused:
            raise RequestError(refused.message, param=param, code=refused.code) from None
        except RequestError:
            raise
        except Exception:
            logger.error("proving a grammar failed param=%s", param, exc_info=True)
            raise RequestError(
                "the grammar could not be checked; the server's log has the cause",
                param=param,
                code="grammar_unavailable",
                status=500,
            ) from None

    async def _prove(self, generation: Generation, request: GenerationRequest, use: GrammarUse) -> None:
        error: RequestError | None = None
        try:
            await self.prove(request, use, generation.arrival_s)
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
                logged.message = replace(logged.message, grammar=replace(logged.message.grammar, proved=True))
                if logged.is_sent:
                    self._send(GrammarReady(logged.rid))
