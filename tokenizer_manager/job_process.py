"""`JobProcess`: a process of its own for work on a client's content, under limits of CPU time, time and memory.

Such work may be slow, may crash a library, or may hold the GIL for minutes. In the tokenizer manager all streams would
wait for it; this process is ended instead, and the next job starts another one. It is started by the first job, holds
no state, and answers one job after the other over its standard streams: `serve_jobs` is its side. A failed process says
nothing about the engine, therefore the tokenizer manager starts it and not the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Final

import setproctitle

from ..launch.child.child import die_with
from ..runtime.errors import QueueFullError

MAX_WALL: Final = 8.0
"""Times the limit of CPU time: a job ends after it on a busy machine, or if the process hangs."""
_NICENESS: Final = 10
_LENGTH: Final = struct.Struct("<I")
_LIMIT: Final = struct.Struct("<d")


class JobLostError(Exception):
    """The process ended in a job: the job is beyond a limit, or has crashed a library."""


class JobProcess:
    """The process, as its parent sees it."""

    def __init__(self, module: str, *, name: str, max_waiting: int) -> None:
        """Start nothing yet.

        Args:
            module: calls `serve_jobs`.
            name: of the jobs, in errors.
            max_waiting: most jobs at a time.
        """
        self._module = module
        self._name = name
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=module.rpartition(".")[2])
        self._process: subprocess.Popen[bytes] | None = None
        self._num_waiting = 0

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first job, and after its end."""
        return None if self._process is None else self._process.pid

    async def ask(self, job: bytes, limit_s: float, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
        """The answer to a job that takes at most `limit_s` of CPU time.

        Args:
            job: its bytes.
            limit_s: its CPU time.
            is_wanted: asked on a thread before the job begins.

        Raises:
            JobLostError: the process has ended, or the job is not wanted any more.
            QueueFullError: too many jobs wait.
        """
        if self._num_waiting >= self._max_waiting:
            raise QueueFullError(f"{self._num_waiting} other {self._name} wait; retry later", 1)
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._ask_if, is_wanted, job, limit_s)
        finally:
            self._num_waiting -= 1

    def _ask_if(self, is_wanted: Callable[[], bool], job: bytes, limit_s: float) -> bytes:
        if not is_wanted():
            raise JobLostError
        return self.ask_now(job, limit_s)

    def ask_now(self, job: bytes, limit_s: float) -> bytes:
        """As `ask`, on the calling thread; no other job may run."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # closes its streams
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(MAX_WALL * limit_s, process.kill)
        timer.start()
        try:
            _write(process.stdin, _LIMIT.pack(limit_s) + job)
            return _read(process.stdout)
        except (OSError, EOFError) as error:
            self._end()
            raise JobLostError from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, str(os.getpid())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def serve_jobs(title: str, memory_bytes: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer jobs until the standard input is closed.

    Args:
        title: of the process.
        memory_bytes: of address space.
        answer: to one job. `MemoryError` and other exceptions end the process.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the parent ends this process
    die_with(int(sys.argv[1]))
    setproctitle.setproctitle(title)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError):
        while True:
            message = _read(jobs)
            [limit_s] = _LIMIT.unpack_from(message)
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
            try:
                reply = answer(message[_LIMIT.size :])
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
            _write(replies, reply)


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(_LENGTH.pack(len(content)) + content)
    file.flush()


def _read(file: IO[bytes]) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side has closed, perhaps within the message.
    """
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    [size] = _LENGTH.unpack(head)
    content: bytes = file.read(size)
    if len(content) < size:
        raise EOFError
    return content
