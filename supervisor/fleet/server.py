"""`Server`: one `engine serve` of a fleet, wherever it runs; and `LocalServers`, which starts them on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ...launch.child.server_record import running_servers
from .tied_process import TiedProcess


class ServerEnd(NamedTuple):
    """How a server ended.

    Attributes:
        exit_code: 2 means that the user can correct it; negative for a signal; None: unknown, its machine is gone.
        cause: follows its name: `was killed by SIGKILL`.
    """

    exit_code: int | None
    cause: str


class Server(Protocol):
    """One process of `engine serve`."""

    @property
    def pid(self) -> int | None:
        """Of the process, on its machine; None while it is unknown."""
        ...

    @property
    def where(self) -> str:
        """Its machine, or what it waits for."""
        ...

    @property
    def url(self) -> str | None:
        """Where it listens; None until it does."""
        ...

    @property
    def model(self) -> str | None:
        """The model's name in requests; None until it listens."""
        ...

    @property
    def end(self) -> ServerEnd | None:
        """How it ended; None while it runs."""
        ...

    def terminate(self) -> None:
        """Tell it to drain and end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Servers(Protocol):
    """Starts servers at one kind of place.

    Attributes:
        num_places: servers for which there is a device at the same time; None: no limit is known.
    """

    num_places: int | None

    def start(self, number: int, share: int) -> Server:
        """Start a server.

        Args:
            number: of the replica; each has the lowest that is free.
            share: of the machine's cores and memory it takes the `share`-th part.
        """
        ...

    def look(self) -> str:
        """Learn what has happened. Why there are no more servers at all; "" if there may be."""
        ...


class ServerCommand(NamedTuple):
    """The command line of a server.

    Attributes:
        module: `python -m module`.
        arguments: its arguments, of the replica with this number and its share of the machine.
        env: variables to set; by the number of the replica.
    """

    module: str
    arguments: Callable[[int, int], list[str]]
    env: Callable[[int], dict[str, str]]


class LocalServer:
    """A server on this machine, found by its record once it listens."""

    where = "this machine"

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it."""
        command = [sys.executable, "-P", "-m", module, *arguments]
        self._process = TiedProcess(command, env, is_silent=True)
        self._url: str | None = None
        self._model: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str | None:
        if self._url is None:
            self._find()
        return self._url

    @property
    def model(self) -> str | None:
        return self._model

    @property
    def end(self) -> ServerEnd | None:
        code = self._process.exit_code
        return None if code is None else ServerEnd(code, self._process.describe_end())

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def _find(self) -> None:
        for record in running_servers():
            if record.pid == self.pid and record.url:
                self._url, self._model = record.url, record.model


class LocalServers:
    """Starts servers on this machine."""

    def __init__(self, command: ServerCommand, num_places: int | None = None) -> None:
        self.num_places = num_places
        self._command = command

    def start(self, number: int, share: int) -> LocalServer:
        command = self._command
        return LocalServer(command.module, command.arguments(number, share), command.env(number))

    def look(self) -> str:
        return ""
