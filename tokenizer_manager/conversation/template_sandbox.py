"""`TemplateSandbox`: the Jinja environment that chat templates run in.

Templates come with model files and are untrusted code. Jinja's immutable sandbox blocks access to Python internals;
this one also bounds the cost of one rendering:

- CPU time of the rendering thread, checked at every iteration of a loop, every call and every operator that makes a
  value (`RenderBudget`); time during which the thread waits for a core or for the GIL does not count;
- the size of a value made by an operator, by `~`, by a `set` or macro block, by a width, or by `replace` and `join`.

Not bounded: the sum over all variables (the time limit is what bounds it, at some hundred MB), a single step inside
Python (sorting a long list, `tojson` of a deep value), and what Jinja does before rendering: the size of the template
is the model file's. For untrusted model files, run the process with a memory limit.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_RENDER_CPU_S: Final = 2.0
_MIN_POLL_S: Final = 0.001  # between two polls of the CPU time
MAX_VALUE_CHARS: Final = 64 << 20
_MAX_ITEMS: Final = 1 << 20  # of a list
_MAX_INT_BITS: Final = 4096
_MAX_WIDTH: Final = 10_000

_WIDTH: Final = re.compile(r"\d{5,}|\*")
_SPEC: Final = re.compile(r":[^{}]*(?:\d{5,}|\{)")
"""A replacement field whose width is large, or comes from another field."""

_WIDE_FILTERS: Final = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
_WIDE_METHODS: Final = ("center", "expandtabs", "ljust", "rjust", "zfill")


class LimitError(Exception):
    """Rendering exceeded a limit on time or size."""


class CpuTimeError(LimitError):
    """Rendering took more than `MAX_RENDER_CPU_S`."""


class AbandonedError(Exception):
    """The result of a rendering is not wanted any more."""


class RenderBudget:
    """The CPU time of one rendering, and whether its result is still wanted.

    CPU time of a thread never passes faster than wall time. Therefore the CPU clock, which is a system call, is read
    only when so much wall time has passed that the limit may be exceeded.

    Attributes:
        wanted: set to False by any thread, it ends the rendering at its next check.
    """

    __slots__ = ("_begun_s", "_cpu_clock", "_next_poll_s", "_wall_clock", "wanted")

    def __init__(
        self,
        cpu_clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wanted = True
        self._cpu_clock = cpu_clock
        self._wall_clock = wall_clock
        self._begun_s = 0.0
        self._next_poll_s = 0.0

    def begin(self) -> None:
        """Start to count, on the thread that renders."""
        self._begun_s = self._cpu_clock()
        self._next_poll_s = self._wall_clock() + MAX_RENDER_CPU_S

    def check(self) -> None:
        """Return if the rendering may go on.

        Raises:
            CpuTimeError: it has taken too much CPU time.
            AbandonedError: its result is not wanted any more.
        """
        if not self.wanted:
            raise AbandonedError
        now_s = self._wall_clock()
        if now_s <= self._next_poll_s:
            return
        left_s = MAX_RENDER_CPU_S - (self._cpu_clock() - self._begun_s)
        if left_s < 0:
            raise CpuTimeError(f"more than {MAX_RENDER_CPU_S:g} s of CPU time")
        self._next_poll_s = now_s + max(left_s, _MIN_POLL_S)


class _Rendering(threading.local):
    """The rendering of each thread: one environment serves several threads.

    Before the first one there is no budget: Jinja computes no constant expressions while it compiles, since an
    expression that fails then is left for the rendering.
    """

    def __init__(self) -> None:
        self.budget = RenderBudget()
        self.budget.wanted = False


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox. Checks the clock and sizes wherever template code can spend time or memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rendering = _Rendering()
        for name in _WIDE_FILTERS:
            self.filters[name] = self._narrow(self.filters[name])
        self.filters["format"] = self._checked_before(self.filters["format"], check_percent)
        self.filters["replace"] = self._checked_before(self.filters["replace"], _check_replace)
        self.filters["join"] = self._checked_before(self.filters["join"], _check_join)

    def start_clock(self, budget: RenderBudget) -> None:
        """Begin a rendering on this thread."""
        self._rendering.budget = budget
        budget.begin()

    def check_clock(self) -> None:
        """As `RenderBudget.check`, for the rendering of this thread."""
        self._rendering.budget.check()

    # ------------------------------------------------------------ what compiled templates call

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call something for the template: `(context, function, *arguments)`."""
        self.check_clock()
        function, arguments = args[1], args[2:]
        owner = getattr(
            getattr(function, "__wrapped__", function), "__self__", None
        )  # the sandbox wraps `format`
        if isinstance(owner, str):
            _check_method(getattr(function, "__name__", ""), owner, arguments, kwargs)
        return super().call(*args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Apply one of `intercepted_binops`."""
        self.check_clock()
        match operator:
            case "+":
                _check_sum(left, right)
            case "*":
                _check_product(left, right)
            case "%" if isinstance(left, str):
                check_percent(left)
            case "**":
                _check_power(left, right)
        return super().call_binop(context, operator, left, right)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, with a check of the clock; Jinja makes a list of them for `loop.length`."""
        for item in items:
            self.check_clock()
            yield item

    def joined(self, *parts: Any) -> str:
        """The result of `~`."""
        return self.concat([str(part) for part in parts])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # Jinja has "".join here
        """The output of a block of template code that is kept as a value."""
        parts = list(parts)
        _check_size(sum(map(len, parts)))
        return "".join(parts)

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        """Jinja's hook between parsing and compiling: loops and `~` are rewritten to call `each` and `joined`."""
        return super()._generate(_Bounding().visit(source), name, filename, defer_init)

    # ------------------------------------------------------------ filters

    def _narrow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # also copies the attributes that Jinja sets on a filter
        def narrow(*args: Any, **kwargs: Any) -> Any:
            self.check_clock()
            for value in (*args[1:], *kwargs.values()):
                _check_width(value)
            return function(*args, **kwargs)

        return narrow

    def _checked_before(self, function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_clock()
            # Jinja passes some filters its own state first.
            check(*args[hasattr(function, "jinja_pass_arg") :], **kwargs)
            return function(*args, **kwargs)

        return checked


class _Bounding(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template so that its loops and concatenations are bounded."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802  (Jinja's interface)
        self.generic_visit(node)
        node.iter = _call("each", [node.iter], node)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node)


def _call(method: str, arguments: Sequence[jinja2.nodes.Node], at: jinja2.nodes.Node) -> jinja2.nodes.Call:
    """A call of one of the environment's methods."""
    place = {"lineno": at.lineno, "environment": at.environment}
    function = jinja2.nodes.EnvironmentAttribute(method, **place)
    return jinja2.nodes.Call(function, list(arguments), [], None, None, **place)


# ---------------------------------------------------------------- sizes


def check_percent(pattern: object, *_: object, **__: object) -> None:
    """Refuse `%` formats with huge widths.

    Raises:
        LimitError: the format has one.
    """
    if any(_WIDTH.search(part) for part in re.findall(r"%[^a-zA-Z%]*", str(pattern))):
        raise LimitError("it uses a format with a huge width")


def _check_size(size: int) -> None:
    if size > MAX_VALUE_CHARS:
        raise LimitError(f"it makes a value of more than {MAX_VALUE_CHARS} characters")


def _check_width(value: object) -> None:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise LimitError(f"it uses a width of {value}")


def _check_sum(left: Any, right: Any) -> None:
    if hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_length(len(left) + len(right), left)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise LimitError("it uses * for what could be a huge value")
        return
    sequence, count = (left, right) if hasattr(left, "__len__") else (right, left)
    if hasattr(sequence, "__len__") and isinstance(count, int):
        _check_length(len(sequence) * count, sequence)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INT_BITS:
        raise LimitError("it uses ** for what could be a huge value")


def _check_length(length: int, sequence: object) -> None:
    if isinstance(sequence, str):
        _check_size(length)
    elif length > _MAX_ITEMS:
        raise LimitError(f"it makes a list of more than {_MAX_ITEMS} items")


def _check_replace(text: object, old: object, new: object, *_: object, **__: object) -> None:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + text.count(old) * (len(new) - len(old)))


def _check_join(value: object, d: object = "", attribute: object = None) -> None:
    if hasattr(value, "__len__"):
        _check_size(len(value) * len(str(d)))
    if attribute is None and isinstance(value, list | tuple):
        _check_size(sum(len(item) for item in value if isinstance(item, str)))


def _check_method(name: str, owner: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Refuse calls of a string's method that could make a huge one."""
    if name in _WIDE_METHODS:
        for value in (*arguments, *keywords.values()):
            _check_width(value)
    elif name in ("format", "format_map"):
        if _SPEC.search(owner):
            raise LimitError("it uses a format with a huge width")
    elif name == "replace" and len(arguments) >= 2:
        _check_replace(owner, *arguments)
    elif name == "join" and len(arguments) == 1 and isinstance(arguments[0], list | tuple):
        _check_join(arguments[0], owner)
