"""`LinkThread`: the thread that talks to the other engines of a disaggregated pair, base of both links."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from ....runtime.transport.ipc import Outbox, make_socket

if TYPE_CHECKING:
    from ....runtime.transport.kv_transfer import TransferCommand
    from .connection import Context


class CommandQueue:
    """Commands for a thread that waits on sockets: `wake` is readable while there are some. None ends the thread."""

    def __init__(self, context: Context) -> None:
        self._commands: queue.SimpleQueue[TransferCommand | None] = queue.SimpleQueue()
        self._signal = make_socket(context, zmq.PAIR)
        self._signal.bind(f"inproc://{id(self)}")
        self.wake = make_socket(context, zmq.PAIR)
        self.wake.connect(f"inproc://{id(self)}")

    def put(self, command: TransferCommand | None) -> None:
        """Add a command; called by the other thread."""
        self._commands.put(command)
        with contextlib.suppress(zmq.Again):  # the thread has ended
            self._signal.send(b"", zmq.NOBLOCK)

    def take(self) -> list[TransferCommand | None]:
        """Take all commands."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.wake.recv(zmq.NOBLOCK)
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._commands.get_nowait())
        return taken

    def close_sender(self) -> None:
        """Close the socket of the other thread, after its last `put`."""
        self._signal.close()


class LinkThread:
    """Executes the transfer commands of the scheduler beside its loop; news go to the scheduler's inbox.

    A subclass does its work in `_serve` until `_stops`, and closes its sockets in `_close_sockets`; both run in the
    thread, as everything but `send` and `close`.
    """

    def __init__(self, context: Context, scheduler: str) -> None:
        """`context`: owned by the link from now on. `scheduler`: endpoint of the scheduler's inbox."""
        self._context = context
        self._endpoint = scheduler
        self._commands = CommandQueue(context)
        self._stops = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def send(self, commands: Sequence[TransferCommand]) -> None:
        """Hand the scheduler's commands to the thread; never blocks.

        Raises:
            Exception: the thread has failed, with what it raised. A bug; it ends the process.
        """
        if self._failure is not None:
            raise self._failure
        for command in commands:
            self._commands.put(command)

    def close(self) -> None:
        """End the thread; transfers that are under way fail at the other engine."""
        self._commands.put(None)
        self._thread.join(timeout=5.0)
        self._commands.close_sender()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        self._outbox = Outbox(self._endpoint)
        try:
            self._serve()
        except Exception as error:
            self._failure = error
        finally:
            self._close_sockets()
            self._commands.wake.close()
            self._outbox.close()

    def _serve(self) -> None:
        raise NotImplementedError

    def _close_sockets(self) -> None:
        raise NotImplementedError
