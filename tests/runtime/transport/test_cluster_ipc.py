"""Sockets between machines, on the loopback interface."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import zmq

from engine.runtime.errors import ConfigError, RankLostError
from engine.runtime.messages import AbortRequest, Call, FlushCache, SchedulerInput
from engine.runtime.transport import cluster_ipc
from engine.runtime.transport.cluster_ipc import (
    CONTROL,
    PLANS,
    ClusterClient,
    ClusterServer,
    derive_key,
    is_loopback,
    parse_address,
)

DEADLINE_S = 60.0
KEY = derive_key(b"the secret of these machines".ljust(32, b"!"))
DECODER: msgspec.msgpack.Decoder[SchedulerInput] = msgspec.msgpack.Decoder(SchedulerInput)


@pytest.fixture
def address() -> str:
    """See `free_address`."""
    return free_address()


def free_address() -> str:
    """Three ports in a row that are free."""
    return cluster_ipc.free_address("127.0.0.1")


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    with ExitStack() as stack:

        def later(thing: Any) -> Any:
            stack.callback(thing.close)
            return thing

        yield later


def receive(server: ClusterServer[SchedulerInput], count: int) -> list[Any]:
    deadline_s = time.monotonic() + DEADLINE_S
    found: list[Any] = []
    while len(found) < count and time.monotonic() < deadline_s:
        found += server.receive(0.1)
    return found


def poll(client: ClusterClient[SchedulerInput]) -> list[SchedulerInput]:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if messages := client.poll(0.1):
            return messages
    return []


@pytest.mark.parametrize("port", [CONTROL, PLANS])
def test_whoever_holds_the_key_is_heard_and_answered_whoever_starts_first(address, closing, port):
    early = closing(ClusterClient(address, port, "early", KEY, DECODER))
    early.send(Call(1, FlushCache()))
    server = closing(ClusterServer(address, port, KEY, DECODER))
    late = closing(ClusterClient(address, port, "late", KEY, DECODER))

    found = receive(server, 3)
    assert [message for name, message in found if name == "early"] == [None, Call(1, FlushCache())]
    assert [message for name, message in found if name == "late"] == [None]

    server.send_all(["early", "late"], AbortRequest("r1", "test"))

    assert poll(early) == poll(late) == [AbortRequest("r1", "test")]
    assert not early.was_refused()


def test_another_key_is_refused_and_the_client_knows(address, closing):
    server = closing(ClusterServer(address, CONTROL, KEY, DECODER))
    client = closing(ClusterClient(address, CONTROL, "stranger", derive_key(b"another secret"), DECODER))
    deadline_s = time.monotonic() + DEADLINE_S

    while not client.was_refused():
        assert time.monotonic() < deadline_s
        client.poll(0.05)

    assert server.receive(0.2) == []


@pytest.mark.parametrize("encrypted", [True, False])
def test_knowing_the_servers_public_key_or_no_key_at_all_is_not_enough(address, closing, encrypted):
    server = closing(ClusterServer(address, CONTROL, KEY, DECODER))
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.identity = b"stranger"
    if encrypted:
        stranger.curve_serverkey = KEY.public
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    stranger.connect(f"tcp://{address}")
    stranger.send(b"let me in")

    assert monitor.poll(int(DEADLINE_S * 1000))  # thrown out
    assert server.receive(0.2) == []
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    context.term()


def test_steps_do_not_vanish_without_a_peer(address, closing):
    server = closing(ClusterServer(address, PLANS, KEY))

    with pytest.raises(zmq.ZMQError):
        server.send_all(["rank 1"], Call(1, FlushCache()))
    with pytest.raises(RankLostError, match="no connection for steps from rank 1, rank 2"):
        server.wait_for(["rank 2", "rank 1"], 0.05)


def test_a_port_in_use_is_a_configuration_error(address, closing):
    closing(ClusterServer(address, CONTROL, KEY))

    with pytest.raises(
        ConfigError, match=r"cannot listen on 127.0.0.1:\d+ for the other machines: Address already"
    ):
        ClusterServer(address, CONTROL, KEY)


def test_what_does_not_parse_is_dropped_with_an_error_in_the_log(address, closing, caplog):
    server = closing(ClusterServer(address, CONTROL, KEY, DECODER))
    client = closing(ClusterClient(address, CONTROL, "machine 1", KEY, DECODER))
    client._socket.send(msgspec.msgpack.encode(["FromAnotherRelease", 1]))
    client.send(Call(1, FlushCache()))

    assert receive(server, 2) == [("machine 1", None), ("machine 1", Call(1, FlushCache()))]
    assert "dropped a malformed message" in caplog.text and "tag=FromAnotherRelease" in caplog.text


def test_a_stranger_cannot_announce_a_long_message(address, closing):
    closing(ClusterServer(address, CONTROL, KEY, DECODER))
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    long_command = b"\x06" + (2 << 20).to_bytes(8, "big")  # rfc.zeromq.org/spec/37

    with socket.create_connection(parse_address(address), timeout=DEADLINE_S) as stranger:
        stranger.sendall(greeting + long_command)
        while stranger.recv(4096):  # its greeting; then it hangs up, without waiting for the rest
            pass


@pytest.mark.parametrize("side", [ClusterServer, ClusterClient])
def test_a_name_that_nobody_knows_is_a_configuration_error(side):
    arguments = (CONTROL, KEY) if side is ClusterServer else (CONTROL, "machine 1", KEY, DECODER)

    with pytest.raises(
        ConfigError, match="dist_init_addr names 'no.such.host.invalid', which has no address: "
    ):
        side("no.such.host.invalid:5000", *arguments)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:0", "host:65534", "[::1]"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="must be HOST:PORT; that port and the next two are used"):
        parse_address(text)


def test_addresses():
    assert parse_address("10.0.0.1:5000") == ("10.0.0.1", 5000)
    assert parse_address("[fe80::1]:65533") == ("fe80::1", 65533)
    assert [host for host in ("localhost", "127.0.0.2", "::1", "10.0.0.1", "node0") if is_loopback(host)] == [
        "localhost",
        "127.0.0.2",
        "::1",
    ]


def test_a_free_address_can_be_parsed_and_its_ports_taken():
    host, port = parse_address(cluster_ipc.free_address("127.0.0.1"))
    with ExitStack() as stack:
        for offset in range(3):
            stack.enter_context(socket.create_server((host, port + offset)))
    assert parse_address(cluster_ipc.free_address("::1"))[0] == "::1"
