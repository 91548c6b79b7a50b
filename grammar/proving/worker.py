"""`ProofWorker`: one proving process, as the tokenizer manager sees it.

All other processes of the engine are started by its supervisor. This one is not: it is killed as a matter of course,
by a time limit of one request, and its end is no failure of the engine. It starts with the first grammar, holds no
state, and dies with the tokenizer manager, so the supervisor has nothing to decide about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Final

import msgspec

from ...runtime.grammar_use import GrammarSpec
from ...runtime.transport.message_base import Message
from .messages import (
    FRAME_LENGTH,
    FromProver,
    ProofRequest,
    ProofResult,
    ProofSetup,
    ProverReady,
    frame,
)

START_TIMEOUT_S: Final = 60.0
_MODULE: Final = __package__ or "engine.grammar.proving"
_DECODER: Final[msgspec.msgpack.Decoder[FromProver]] = msgspec.msgpack.Decoder(FromProver)
# Pools of threads would map address space, which is limited, and take cores from the engine.
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class WorkerLostError(Exception):
    """The process has ended, or has not started."""


class ProofWorker:
    """One process and its socket. Used on one asyncio loop, by one proof at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: ProofSetup) -> ProofWorker:
        """Start a process and wait until it can work.

        The process dies with the calling thread, which must therefore be that of the loop.

        Raises:
            WorkerLostError: it cannot; the text says why.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, str(os.getpid())],
                    env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stdin=theirs.fileno(),
                    stdout=2,  # standard output belongs to the command line
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                raise WorkerLostError(f"it cannot be started: {error}") from error
        ours.setblocking(False)
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await worker._ask(setup)
        except TimeoutError:
            await worker.kill()
            raise WorkerLostError(f"it was not ready after {START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await worker.kill()
            raise
        if not isinstance(answer, ProverReady) or answer.error:
            await worker.kill()
            raise WorkerLostError(answer.error if isinstance(answer, ProverReady) else "it is out of step")
        return worker

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def prove(self, spec: GrammarSpec, timeout_s: float, *, measures: bool = False) -> ProofResult:
        """Compile one grammar; `measures`: see `ProofRequest`.

        Raises:
            TimeoutError: it takes longer; the process still works, kill it.
            WorkerLostError: the process has ended.
        """
        async with asyncio.timeout(timeout_s):
            answer = await self._ask(ProofRequest(spec, measures))
        if not isinstance(answer, ProofResult):
            raise WorkerLostError("it is out of step")
        return answer

    async def kill(self) -> None:
        """End the process and wait until it is gone."""
        self._writer.close()
        if self._process.poll() is None:  # else its id may belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(asyncio.to_thread(self._process.wait))
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _ask(self, message: Message) -> FromProver:
        try:
            self._writer.write(frame(message))
            await self._writer.drain()
            (length,) = FRAME_LENGTH.unpack(await self._reader.readexactly(FRAME_LENGTH.size))
            return _DECODER.decode(await self._reader.readexactly(length))
        except (OSError, EOFError) as error:  # an incomplete read is an EOFError
            raise WorkerLostError("it has ended") from error
