from __future__ import annotations

import socket
from typing import Any

import pytest

from engine.model_runner.distributed import network_interface
from engine.model_runner.distributed.network_interface import (
    interface_towards,
    use_interface_towards,
    use_loopback,
)


def test_the_interface_is_the_one_with_the_address_that_packets_leave_from():
    assert interface_towards("127.0.0.1", 5000) == "lo"
    assert interface_towards("127.0.1.1", 5000) == "lo"  # as Debian resolves a machine's own name


def test_every_address_of_this_machine_belongs_to_an_interface():
    found = dict(network_interface._addresses())

    assert found["lo"] in (
        socket.inet_pton(socket.AF_INET6, "::1"),
        socket.inet_pton(socket.AF_INET, "127.0.0.1"),
    )
    assert set(found) <= {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("host", ["no.such.host.invalid", "not an address"])
def test_an_unknown_host_leaves_the_choice_to_gloo(host):
    environ: dict[str, str] = {}

    use_interface_towards(host, 5000, environ)

    assert environ == {}


@pytest.mark.parametrize(
    "use", [use_loopback, lambda environ: use_interface_towards("127.0.0.1", 5000, environ)]
)
def test_the_interface_is_taken_unless_the_user_says_otherwise(use: Any):
    environ = {"NCCL_SOCKET_IFNAME": "eth7"}

    use(environ)

    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7"}
