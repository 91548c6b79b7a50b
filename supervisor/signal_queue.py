"""`SignalQueue`: the signals that mean "stop", caught while a supervisor runs and handed to it in order."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType
from typing import Final

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalQueue:
    """Catches the signals that mean "stop", and wakes a selector that watches it.

    Attributes:
        received: the signals so far, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def fileno(self) -> int:
        """Readable when a signal has come since `clear_wakeup`."""
        return self._reader.fileno()

    def clear_wakeup(self) -> None:
        """Make it unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def __enter__(self) -> SignalQueue:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {
            signum: signal.signal(signum, self._on_signal)
            for signum in _STOP_SIGNALS
            # `nohup` ignores SIGHUP on purpose.
            if not (signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN)
        }
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(signum))
