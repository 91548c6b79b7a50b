"""`LinkThread`: the thread that talks to the other engines of a disaggregated pair, base of both links; its sockets.

Between prefill and decode engines: ROUTER at the prefill engine (`Listener`), DEALER at the decode engines (`connect`).
On a loopback address they are plain; elsewhere they are encrypted, and both sides must hold the same `ClusterKey`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import zmq
import zmq.auth.thread

from ....runtime.errors import ConfigError
from ....runtime.transport.cluster_ipc import ClusterKey, OnlyThisKey, numeric_address, tcp
from ....runtime.transport.ipc import Outbox, make_socket

if TYPE_CHECKING:
    from ....runtime.transport.kv_transfer import TransferCommand


Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


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

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; transfers that are under way fail at the other engine."""
        self._commands.put(None)
        self._thread.join(timeout_s)
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


class Listener:
    """The prefill engine's socket."""

    def __init__(self, context: Context, host: str, port: int, key: ClusterKey | None) -> None:
        """Bind it.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._authenticator: Any = None
        self.socket = make_socket(context, zmq.ROUTER)
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        if key is not None:
            self._authenticator = zmq.auth.thread.ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=OnlyThisKey(key))
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = key.public, key.secret
        try:
            numeric = numeric_address(host)
            self.socket.ipv6 = ":" in numeric
            self.socket.bind(tcp(numeric, port))
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {host}:{port} for decode engines: {error.strerror or error}; set another "
                "--bootstrap-port"
            ) from None

    def close(self) -> None:
        """Stop listening."""
        self.socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()


def connect(
    context: Context, address: str, port: int, name: str, key: ClusterKey | None
) -> tuple[Socket, Socket]:
    """A decode engine's socket to a prefill engine, and the socket that reports when it is connected.

    Args:
        address: of the prefill engine, numeric.
        port: its `--bootstrap-port`.
        name: of the decode engine; no two have the same.
    """
    dealer = make_socket(context, zmq.DEALER)
    dealer.identity = name.encode()
    dealer.immediate = True  # messages to an engine that is not there are not kept for its successor
    dealer.ipv6 = ":" in address
    if key is not None:
        dealer.curve_serverkey = dealer.curve_publickey = key.public
        dealer.curve_secretkey = key.secret
    monitor = dealer.get_monitor_socket(MONITORED)  # before it connects: no event is missed
    dealer.connect(tcp(address, port))
    return dealer, monitor
