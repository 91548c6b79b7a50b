"""`NativeFunction`: a callable function of the compiled library; its calls can be recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ctypes

OnCall = Callable[["NativeFunction", tuple[Any, ...]], None]


class CallHook(threading.local):
    """The callback that receives the calls of a library's functions made by this thread; usually None.

    Attributes:
        dry_run: calls are reported but not made, except those of functions that return a value.
    """

    on_call: OnCall | None = None
    dry_run: bool = False


class NativeFunction:
    """Calls the library.

    Attributes:
        name: name in the library.
        arguments: one letter per argument, see `library`.
        recorded_form: address of the function that makes a recorded call; None for functions that cannot be part of a
            program.
        returns: it returns a value; such functions have no side effects.
    """

    __slots__ = ("_call_hook", "_function", "arguments", "name", "recorded_form", "returns")

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
        self._call_hook = call_hook

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, then report the call."""
        if self._call_hook.on_call is None:
            return self._function(*arguments)
        result = None if self._call_hook.dry_run and not self.returns else self._function(*arguments)
        self._call_hook.on_call(self, arguments)
        return result
