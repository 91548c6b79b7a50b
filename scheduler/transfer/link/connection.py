"""Sockets between prefill and decode engines: ROUTER at the prefill engine, DEALER at the decode engines.

On a loopback address they are plain; elsewhere they are encrypted, and both sides must hold the same `ClusterKey`.
"""

from __future__ import annotations

from typing import Any, Final

import zmq
import zmq.auth.thread

from ....runtime.errors import ConfigError
from ....runtime.transport.cluster_ipc import ClusterKey, OnlyThisKey, numeric_address, tcp
from ....runtime.transport.ipc import make_socket

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


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
