"""What a fleet and its process that talks to Ray tell each other about servers, which have a key each."""

from __future__ import annotations

from ...runtime.config.log_config import LogConfig
from ...runtime.transport.message_base import Message


class JoinRay(Message, frozen=True):
    """To the broker, first: `folder` is for the files of a Ray that is started here."""

    log: LogConfig
    folder: str


class StartServer(Message, frozen=True):
    """To the broker: a server, once there is a place for it.

    Attributes:
        needs: of a place, in Ray's units.
        takes_host: it listens at its machine's address if that is another machine.
    """

    key: int
    module: str
    arguments: list[str]
    env: dict[str, str]
    needs: dict[str, float]
    takes_host: bool

    def __repr__(self) -> str:
        return f"StartServer({self.key}, needs={self.needs})"  # `env` has keys


class StopServer(Message, frozen=True):
    """To the broker: have a server drain and end."""

    key: int


class KillServer(Message, frozen=True):
    """To the broker: end a server at once."""

    key: int


class Joined(Message, frozen=True):
    """From the broker: Ray is there."""

    address: str
    machines: str


class NoRay(Message, frozen=True):
    """From the broker: an error that the user can fix."""

    message: str


class ServerSeen(Message, frozen=True):
    """From the broker: what is new about a server; `where` is its machine or what it waits for."""

    key: int
    where: str
    pid: int | None = None
    url: str | None = None
    model: str | None = None


class ServerGone(Message, frozen=True):
    """From the broker: a server, or its actor, has ended."""

    key: int
    exit_code: int | None
    cause: str


ToBroker = JoinRay | StartServer | StopServer | KillServer
FromBroker = Joined | NoRay | ServerSeen | ServerGone
