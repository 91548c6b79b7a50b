"""`NativeFunction`: a callable function of the compiled library; its calls can be recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ctypes

OnCall = Callable[["NativeFunction", tuple[Any, ...]], None]


class Tap(threading.local):
    """The callback that receives the calls of a library's functions made by this thread; usually None.

    Attributes:
        only_told: calls are reported but not made, except functions that return a value (a dry run).
    """

    on_call: OnCall | None = None
    only_told: bool = False


class NativeFunction:
    """Calls the library.

    Attributes:
        name: name in the library.
        arguments: one letter per argument, see `library`.
        recorded_form: address of the function that makes a recorded call; None for functions that cannot be part of a
            program.
        returns: it returns a value; such functions have no side effects.
    """

    __slots__ = ("_function", "_tap", "arguments", "name", "recorded_form", "returns")

    def __init__(
        self, function: ctypes._NamedFuncPointer, arguments: str, recorded_form: int | None, tap: Tap
    ) -> None:
        self.name = function.__name__
        self.arguments = arguments
        self.recorded_form = recorded_form
        self.returns = function.restype is not None
        self._function = function
        self._tap = tap

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, then report the call."""
        if self._tap.on_call is None:
            return self._function(*arguments)
        result = None if self._tap.only_told and not self.returns else self._function(*arguments)
        self._tap.on_call(self, arguments)
        return result
