"""`NativeFunction`: a function of the compiled library as Python calls it, and as whoever records calls sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ctypes

OnCall = Callable[["NativeFunction", tuple[Any, ...]], None]


class CallHook(threading.local):
    """Who is told of each call of a library's functions by this thread; usually nobody.

    Attributes:
        dry_run: calls are told and not made, but for questions; for whoever wants to know what would be called.
    """

    on_call: OnCall | None = None
    dry_run: bool = False


class NativeFunction:
    """Calls the library.

    Attributes:
        name: in the library.
        arguments: a letter for each, see `library`.
        recorded_form: address of the function that makes a recorded call of it; None for functions that may not be
            part of a program.
        returns: whether it answers something: such functions are questions and change nothing.
    """

    __slots__ = ("_function", "_tap", "arguments", "name", "recorded_form", "returns")

    def __init__(
        self,
        function: ctypes._NamedFuncPointer,
        arguments: str,
        recorded_form: int | None,
        call_hook: CallHook,
    ) -> None:
        self.name = function.__name__
        self.arguments = arguments
        self.recorded_form = recorded_form
        self.returns = function.restype is not None
        self._function = function
        self._tap = call_hook

    def __call__(self, *arguments: Any) -> Any:
        """Call it, then tell."""
        if self._tap.on_call is None:
            return self._function(*arguments)
        result = None if self._tap.dry_run and not self.returns else self._function(*arguments)
        self._tap.on_call(self, arguments)
        return result
