"""`CompileWorker`: the sandbox process, as its parent sees it.

The tokenizer manager starts it, not the supervisor: it holds no state, and its end is no failure of the engine. Its
standard input is a control socket. Each message on it carries one end of a new socket, on which a `GrammarSpec` is
answered by a `CompileResult`; each side ends its message by a shutdown.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Final

import msgspec

from ...models.source import ModelSource
from ...runtime.grammar_use import GrammarKind, GrammarSpec
from ...runtime.transport.message_base import Message

START_TIMEOUT_S: Final = 60.0
# Pools of threads would map address space, which is limited, and take cores from the engine.
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class SandboxSetup(Message, frozen=True):
    """The tokenizer and the vocabulary of the logits; the limits of a compilation.

    Attributes:
        limit_s: CPU time.
        memory_bytes: in addition to the memory of the process that is ready.
    """

    source: ModelSource
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limit_s: float
    memory_bytes: int = 1 << 30


class CompileResult(Message, frozen=True):
    """The end of a compilation.

    Attributes:
        code, message: of the `GrammarError`; "" if the grammar compiles.
        forced_share: of the tokens of a short answer, in [0, 1]; None if no short answer is known.
        lost: why there is no result, which is not the grammar; "" if there is.
    """

    code: str = ""
    message: str = ""
    compile_s: float = 0.0
    forced_share: float | None = None
    lost: str = ""


class WorkerLostError(Exception):
    """The process has ended, or has not started; this says nothing about a grammar."""


class CompileWorker:
    """One sandbox process; `pid`: its process id."""

    def __init__(self, setup: SandboxSetup) -> None:
        """Start the process. It dies with the calling thread, which must therefore be that of the loop."""
        own_pid, arguments = str(os.getpid()), msgspec.json.encode(setup)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.sandbox", own_pid, arguments],
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=theirs.fileno(),
                stdout=2,  # standard output belongs to the command line
                process_group=0,
            )
        self.pid = self._process.pid

    @classmethod
    async def start(cls, setup: SandboxSetup) -> CompileWorker:
        """Start a process and wait until it can compile.

        Raises:
            WorkerLostError: it cannot; the text says why.
            TimeoutError: it was not ready after `START_TIMEOUT_S`.
        """
        worker = cls(setup)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if lost := (await worker.compile(GrammarSpec(GrammarKind.REGEX, "a"))).lost:
                    raise WorkerLostError(lost)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def compile(self, spec: GrammarSpec) -> CompileResult:
        """Compile one grammar, beside others, and fill some masks.

        Raises:
            WorkerLostError: the process has ended.
        """
        return await asyncio.to_thread(self._ask, spec)

    async def kill(self) -> None:
        """End the process, with all compilations, and wait until it is gone."""
        if self._process.poll() is None:  # else its id may belong to another process
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.shield(asyncio.to_thread(self._process.wait))
        self._control.close()

    def _ask(self, spec: GrammarSpec) -> CompileResult:
        ours, theirs = socket.socketpair()
        try:
            with ours, ours.makefile("rb") as file:
                with theirs:
                    socket.send_fds(self._control, [b"?"], [theirs.fileno()])
                ours.sendall(msgspec.msgpack.encode(spec))
                ours.shutdown(socket.SHUT_WR)
                return msgspec.msgpack.decode(file.read(), type=CompileResult)
        except (OSError, msgspec.DecodeError) as error:
            raise WorkerLostError("it has ended") from error
