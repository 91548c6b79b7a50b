"""`StackSampler`: a sampling profiler for the threads of this process; it runs on a thread of its own.

It writes the format of flame graphs ("folded" or "collapsed" stacks): a line per distinct stack with its frames, the
outermost first, and its number of samples.

    scheduler;MainThread;runpy:_run_module_as_main;...;engine.scheduler.event_loop:EventLoop.step 412

The first two frames are process and thread, so that the files of several processes make one graph. A frame is a module
and a function: names of code only, never a value. Native code appears as the Python function that called it. The
sampling thread needs the GIL like any other, so a sample may be up to 5 ms late, and finds the other threads where they
last released the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

logger = logging.getLogger(__name__)

SUFFIX: Final = ".folded"
MAX_STACKS: Final = 10_000
"""Distinct stacks that are counted separately; further ones count as `OTHER_STACKS`."""
MAX_DEPTH: Final = 128
OTHER_STACKS: Final = "(other_stacks)"
_UNSAFE: Final = re.compile(r"[;\s]|[^\x20-\x7e]")

Stack = tuple[str, ...]


class StackSampler:
    """Samples `rate_hz` times a second for `duration_s` seconds, or until it is stopped, then writes `path`."""

    def __init__(
        self,
        path: Path,
        process: str,
        *,
        rate_hz: float,
        duration_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start sampling.

        Args:
            path: must not exist; its folder is created. It is renamed into place, readable by its owner only.
            process: name of this process, the first frame of every stack.
        """
        self._path = path
        self._process = process
        self._interval_s = 1.0 / rate_hz
        self._clock = clock
        self._end_s = clock() + duration_s
        self._stopping = threading.Event()
        self._counts: Counter[Stack] = Counter()
        self._labels: dict[int, tuple[CodeType, str]] = {}  # by the id of the code, kept alive here
        self._thread = threading.Thread(target=self._run, name="stack_sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling now and write the file; does not wait for it."""
        self._stopping.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until the file is written."""
        self._thread.join(timeout_s)

    # ------------------------------------------------------------ its thread

    def _run(self) -> None:
        next_s = self._clock()
        while True:
            # Samples that were missed without the GIL, or during a suspend, are not made up for.
            next_s = max(next_s + self._interval_s, self._clock())
            wait_s = min(next_s, self._end_s) - self._clock()
            if self._stopping.wait(max(0.0, wait_s)) or self._clock() >= self._end_s:
                break
            self._sample()
        try:
            self._write()
        except OSError as error:
            logger.warning("no profile in %s: %s", self._path, error)

    def _sample(self) -> None:
        """Count the stack of every other thread. It keeps no reference to a frame or its variables."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident == self._thread.ident:
                continue
            stack = (_clean(names.get(ident, "unknown thread")), *self._labels_of(frame))
            if stack not in self._counts and len(self._counts) >= MAX_STACKS:
                stack = (OTHER_STACKS,)
            self._counts[stack] += 1

    def _labels_of(self, innermost: FrameType) -> list[str]:
        """A thread's frames, the outermost first; of a deep stack only the innermost."""
        labels: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None and len(labels) < MAX_DEPTH:
            code = frame.f_code
            known = self._labels.get(id(code))
            if known is None:
                known = self._labels[id(code)] = (code, _label(frame))
            labels.append(known[1])
            frame = frame.f_back
        labels.reverse()
        return labels

    def _write(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._path.with_name(f"{self._path.name}.part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                for stack, count in self._counts.most_common():
                    file.write(f"{';'.join((self._process, *stack))} {count}\n")
            part.rename(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def _label(frame: FrameType) -> str:
    code = frame.f_code
    module = frame.f_globals.get("__name__")
    place = module if isinstance(module, str) else os.path.basename(code.co_filename)
    return _clean(f"{place}:{code.co_qualname}")


def _clean(name: str) -> str:
    """A name without characters that have a meaning in the format."""
    return _UNSAFE.sub("_", name)
