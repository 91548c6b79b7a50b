"""`Faults`: what a mirror device has seen that would be wrong, slow or undefined on a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal, NamedTuple

Kind = Literal[
    "wait",  # the host waits for the device while serving, other than by `Event.synchronize`
    "wait in a capture",
    "upload in a capture",  # a recording repeats the copy from a host address
    "event in a capture",
    "staged copy",  # torch copies through temporary memory: other dtype, or strides
    "pageable copy",  # says non_blocking, and is not
    "stall",  # a launch waits for a step before it
    "host tensor",  # in an operation on the device
    "compiled while serving",
    "compiled in a capture",
    "grid",
    "form",  # an operator's result has another shape or dtype than its meta kernel says
    "red zone",  # written outside an allocation
]

_NUM_FRAMES = 3


class Fault(NamedTuple):
    """One place that is wrong; `where`: the product's innermost frames, `module:line`."""

    kind: Kind
    detail: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail} at {self.where}"


class Faults:
    """The faults so far, each place once.

    Attributes:
        serving: False while a model is loaded: waits and compilations are no faults then.
    """

    def __init__(self) -> None:
        self.serving = False
        self._found: Counter[Fault] = Counter()
        self._may_wait = 0
        self._may_not_stall = 0

    def add(self, kind: Kind, detail: object = "") -> None:
        self._found[Fault(kind, str(detail), _where())] += 1

    def wait(self, what: str) -> None:
        """The host waits for the device in a way that no launch may."""
        if self.serving and not self._may_wait:
            self.add("wait", what)

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        self._may_wait += 1
        try:
            yield
        finally:
            self._may_wait -= 1

    @contextmanager
    def launching(self) -> Iterator[None]:
        """A step is launched while one runs, for which the launch may not wait."""
        self._may_not_stall += 1
        try:
            yield
        finally:
            self._may_not_stall -= 1

    def stall(self) -> None:
        """The host waits for an event that has not happened yet."""
        if self._may_not_stall:
            self.add("stall")

    def take(self) -> list[Fault]:
        """All faults so far, which are forgotten: for tests that plant them."""
        found = list(self._found)
        self._found.clear()
        return found

    def check(self) -> None:
        """Raise an `AssertionError` that lists the faults, if there are any."""
        lines = [f"{count} x {fault}" for fault, count in self._found.items()]
        assert not lines, "faults on the mirror:\n" + "\n".join(lines)


def _where() -> str:
    frame: FrameType | None = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("engine."):
            found.append(f"{module.removeprefix('engine.')}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
