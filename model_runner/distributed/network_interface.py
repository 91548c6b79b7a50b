"""Chooses the network interface that gloo and NCCL use between ranks, if the user has not chosen one.

By default gloo uses the address of this machine's host name, which many systems resolve to loopback (Debian writes
127.0.1.1 into /etc/hosts). Ranks of two machines would then announce loopback addresses to each other. The interface
from which machine 0 is reached connects the machines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final

INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_LOOPBACK_NAMES: Final = ("lo", "lo0")
_SIOCGIFCONF: Final = 0x8912  # linux/sockios.h: all IPv4 addresses of this machine, as an array of `ifreq`
_IFREQ: Final = struct.Struct("16s4x4s16x")  # name; family and port; IPv4 address; the rest of a union
_MAX_ADDRESSES: Final = 1024


def use_loopback(environ: MutableMapping[str, str] | None = None) -> None:
    """Let gloo and NCCL use loopback, which suffices for the ranks of one machine. The user's choice is kept."""
    names = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES]
    if names:
        _choose(names[0], environ)


def use_interface_towards(host: str, port: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Let gloo and NCCL use the interface from which `host` is reached, if it is found. The user's choice is kept."""
    name = interface_towards(host, port)
    if name is not None:
        _choose(name, environ)


def interface_towards(host: str, port: int) -> str | None:
    """The interface with the source address of packets to `host`; None: unknown.

    On the machine that has this address itself it is the interface of the address, although packets do not leave it.
    """
    with contextlib.suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: nothing is sent
            own = socket.inet_pton(family, probe.getsockname()[0].partition("%")[0])
        return next((name for name, packed in _addresses() if packed == own), None)
    return None


def _choose(name: str, environ: MutableMapping[str, str] | None) -> None:
    for variable in INTERFACE_VARIABLES:
        (os.environ if environ is None else environ).setdefault(variable, name)


def _addresses() -> Iterator[tuple[str, bytes]]:
    """The addresses of this machine with the names of their interfaces; empty if the system is not Linux."""
    if sys.platform != "linux":
        return
    import array
    import fcntl

    buffer = array.array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        used, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for label, packed in _IFREQ.iter_unpack(buffer.tobytes()[:used]):
        yield label.rstrip(b"\0").decode().partition(":")[0], packed  # an alias has a label like eth0:1
    with contextlib.suppress(OSError):  # the file does not exist without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, bytes.fromhex(digits)
