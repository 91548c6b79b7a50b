"""`SignalQueue`: the signals that mean "stop", caught while a supervisor runs and handed to it in order."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalQueue:
    """Catches the signals that mean "stop" within its `with` block, and wakes a `select` on it.

    Attributes:
        received: the signals so far, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._close = weakref.finalize(self, _close_all, self._reader, self._writer)
        self._old_handlers: dict[signal.Signals, _Handler] = {}
        self._old_wakeup_fd = -1

    def fileno(self) -> int:
        """Readable when a signal has come since `clear_wakeup`."""
        return self._reader

    def clear_wakeup(self) -> None:
        """Make it unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def __enter__(self) -> SignalQueue:
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in _STOP_SIGNALS:
            # `nohup` sets SIGHUP to be ignored, and it stays ignored.
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._close()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(signum))


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
