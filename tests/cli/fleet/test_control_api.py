"""The control endpoint of a fleet: what it says, whom it lets in, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest

from engine.cli.fleet.control_api import ControlApi
from engine.runtime.config.server_config import ServerConfig
from engine.supervisor.fleet.fleet import Fleet, FleetSettings
from engine.supervisor.fleet.server import Status
from engine.tokenizer_manager.http.guards.auth import Keys

NO_KEYS = Keys()


class Server:
    """Serves."""

    where, end = "10.0.0.1", None

    def __init__(self, number: int) -> None:
        self.status = Status(7, "10.0.0.1", "http://127.0.0.1:1", "m", is_well=True)

    def poll(self) -> None:
        return

    drain = kill = poll


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[bytes, bytes]

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


class Setup:
    """An endpoint, and a fleet of two."""

    def __init__(self, keys: Keys = NO_KEYS, *, loopback: bool = True) -> None:
        self.fleet = Fleet(FleetSettings(replicas=2), Server, None)  # type: ignore[arg-type]
        self.api = ControlApi(self.fleet, ServerConfig(), keys, loopback=loopback)

    def serves(self) -> Setup:
        self.fleet.poll(0.0)
        self.fleet.poll(1.0)
        return self

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        received: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            received.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs}
        asyncio.run(self.api(scope, receive, send))
        start, content = received
        return Answer(start["status"], json.loads(content["body"]), dict(start["headers"]))

    def scale(self, body: object, **headers: str) -> Answer:
        return self.ask("POST", "/scale", json.dumps(body).encode(), **headers)


def test_health_is_503_until_a_server_is_ready_and_while_the_fleet_ends():
    setup = Setup()
    assert setup.ask("GET", "/health").status == 503
    answer = setup.serves().ask("GET", "/health")
    assert (answer.status, answer.body) == (200, {"status": "ok", "target": 2, "ready": 2})
    setup.fleet.stop(1.0)
    assert setup.ask("GET", "/health").status == 503
    assert setup.scale({"replicas": 2}).status == 503


def test_replicas_and_scale_say_what_there_is():
    setup = Setup().serves()
    body = setup.ask("GET", "/replicas").body
    assert {name: body[name] for name in ("target", "ready")} == {
        "target": 2,
        "ready": 2,
    }
    assert body["replicas"][1] == {
        "replica": 1,
        "state": "ready",
        "url": "http://127.0.0.1:1",
        "pid": 7,
        "where": "10.0.0.1",
        "failures": 0,
        "last_failure": None,
    }
    assert setup.scale({"replicas": 3}).body["target"] == setup.fleet.target == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON: it is empty"),
        (b"[2]", "it must be an object"),
        (b"{}", "replicas"),
        (b'{"replicas": "2"}', 'replicas is "2", but it must be an integer'),
        (b'{"replicas": true}', "replicas is true, but it must be an integer"),
        (b'{"replicas": 1.5}', "replicas is 1.5, but it must be an integer"),
        (b'{"replicas": 0}', "replicas is 0, but it must lie in [1, 512]"),
        (b'{"replicas": 2, "replicas": 3}', "replicas is there twice"),
        (b'{"replicas": 2, "replica": 3}', '"replica" is no field of /scale; send {"replicas": 2}'),
        (b'{"replicas": 2}' + b" " * 5000, "the body is larger than 4096 bytes"),
    ],
)
def test_a_bad_body_is_refused_and_changes_nothing(body, message):
    setup = Setup().serves()
    answer = setup.ask("POST", "/scale", body)
    assert answer.status == (413 if len(body) > 4096 else 400)
    assert message in answer.message
    assert setup.fleet.target == 2


def test_other_paths_and_methods():
    setup = Setup()
    assert setup.ask("GET", "/v1/models").status == 404
    assert "models are served at the addresses in /replicas" in setup.ask("GET", "/v1/models").message
    wrong = setup.ask("GET", "/scale")
    assert (wrong.status, wrong.headers[b"allow"]) == (405, b"POST")


def test_keys_are_those_of_the_servers():
    setup = Setup(Keys(("sk",), "root")).serves()
    assert setup.ask("GET", "/health").status == 200
    assert setup.ask("GET", "/replicas").status == 401
    assert setup.ask("GET", "/replicas", authorization="Bearer sk").status == 200
    assert setup.scale({"replicas": 3}, authorization="Bearer sk").status == 403
    assert setup.fleet.target == 2
    assert setup.scale({"replicas": 3}, authorization="Bearer root").status == 200


def test_without_an_admin_key_only_this_machine_scales():
    assert Setup(Keys(("sk",))).serves().scale({"replicas": 3}, authorization="Bearer sk").status == 200
    far = Setup(Keys(("sk",)), loopback=False).serves()
    assert far.scale({"replicas": 3}, authorization="Bearer sk").status == 403
    assert Setup(loopback=False).serves().scale({"replicas": 3}).status == 403


def test_web_pages_are_kept_out():
    setup = Setup().serves()
    assert setup.scale({"replicas": 3}, origin="https://example.org").status == 403
    assert setup.ask("GET", "/replicas", host="example.org").status == 403
    assert setup.fleet.target == 2
