"""`NativeProgram`: the calls of a decode step to our CPU library, recorded once and replayed by one call.

It is the CPU's counterpart of a CUDA graph. Python runs a step once, through the usual layers and operations; each
library call is made and noted with its arguments. The program is the list of these calls. `run_program` of the library
executes it with all threads, in one parallel region (`kernels/cpu/program.cpp`).

Addresses and sizes stay as recorded. So inputs that differ between steps must be in fixed memory, and intermediate
tensors are in an `Arena`. A step that computes in another way cannot be recorded: all torch operations are intercepted
during a recording. Views and allocations need no replay, some become calls of the library (`torch_calls`), and all
others are reasons against a recording.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...forward_batch import FeaturedStates, StageStates
from .torch_calls import TorchCalls

if TYPE_CHECKING:
    from ...kernels.cpu.library import CallHook, NativeFunction, OnCall
    from .arena import Arena

_ALLOCATIONS: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
_FROM_HOST: Final = frozenset({torch.ops.aten.lift_fresh.default})
"""Operations with values of this step, which a replay would not update."""
_WORD_MASK: Final = (1 << 64) - 1

Result = TypeVar("Result", bound=Tensor | StageStates | FeaturedStates)


class Call(NamedTuple):
    """One call of a function of the library.

    Attributes:
        function: the called function.
        form: its recorded form.
        words: its arguments as `Word` of program.h.
    """

    function: NativeFunction
    form: int
    words: list[int]


class NativeProgram:
    """Calls with their arguments.

    Attributes:
        num_calls: number of calls.
        words: the arguments of all calls, one after the other; the program reads them when it runs.
    """

    def __init__(self, library: ctypes.CDLL, calls: Sequence[Call]) -> None:
        counts = np.array([len(call.words) for call in calls], dtype=np.uint64)
        self.words = np.array([word for call in calls for word in call.words], dtype=np.uint64)
        self._calls = np.empty((len(calls), 2), dtype=np.uint64)
        self._calls[:, 0] = [call.form for call in calls]
        self._calls[:, 1] = self.words.ctypes.data + 8 * (np.cumsum(counts) - counts)
        self.num_calls = len(calls)
        self._run = library.run_program
        self._address = self._calls.ctypes.data

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Make the calls from `first` to before `last`; None: to the end."""
        last = self.num_calls if last is None else last
        self._run(self._address + first * self._calls.itemsize * 2, last - first)


class RecordedProgram(NamedTuple, Generic[Result]):
    """A computation that was made and, if possible, recorded.

    Attributes:
        result: its result. Runs of the program write to the same memory, and so do other programs of the arena: a
            result is valid until the next run or recording.
        program: repeats the computation; None if there is a reason against it.
        reason_against: the operations that cannot be recorded.
    """

    result: Result
    program: NativeProgram | None
    reason_against: str = ""


class Memory(Protocol):
    """The allocator used during a recording; `Arena` is one."""

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype; its values are arbitrary."""
        ...


class Traced(NamedTuple, Generic[Result]):
    """The library calls of a computation.

    Attributes:
        result: its result; an empty tensor if the computation was ended early.
        calls: the calls in order, without those that return a value.
        reasons: the operations that cannot be recorded; empty if all can.
    """

    result: Result
    calls: list[Call]
    reasons: list[str]


def record(library: ctypes.CDLL, arena: Arena, compute: Callable[[], Result]) -> RecordedProgram[Result]:
    """Compute once and record it; all memory that `compute` allocates comes from the arena."""
    result, calls, reasons = trace(library, arena, compute, dry_run=False)
    if reasons:
        return RecordedProgram(result, None, ", ".join(dict.fromkeys(reasons)))
    return RecordedProgram(arena.result(result), NativeProgram(library, calls))


def trace(
    library: ctypes.CDLL,
    memory: Memory,
    compute: Callable[[], Result],
    *,
    dry_run: bool = True,
    calls: list[Call] | None = None,
) -> Traced[Result]:
    """Note the library calls of a computation.

    Args:
        memory: the allocator for all its tensors.
        dry_run: the calls are not made, so the result's values are arbitrary. Operations of torch are executed, so
            the first one that cannot be recorded ends the computation: the rest would be useless work.
        calls: a list to which the calls are added when they are made.
    """
    calls = [] if calls is None else calls
    watch = _Watch(memory, TorchCalls(library, memory.like), ends=dry_run)

    def on_call(function: NativeFunction, arguments: tuple[Any, ...]) -> None:
        if function.returns:  # a query, which is answered now
            return
        if function.recorded_form is None:
            watch.refuse(f"{function.name} of the library")
            return
        words = [_word(*pair) for pair in zip(function.arguments, arguments, strict=True)]
        calls.append(Call(function, function.recorded_form, words))

    result: Any = torch.empty(0)
    with suppress(_NotRecordableError), traced_calls(library, on_call, dry_run=dry_run), watch:
        result = compute()
    return Traced(result, calls, watch.reasons)


@contextmanager
def traced_calls(library: ctypes.CDLL, on_call: OnCall, *, dry_run: bool) -> Iterator[None]:
    """Report this thread's library calls to `on_call`; with `dry_run` they are not made."""
    call_hook: CallHook = vars(library)["call_hook"]
    assert call_hook.on_call is None, "recordings do not nest"
    call_hook.on_call, call_hook.dry_run = on_call, dry_run
    try:
        yield
    finally:
        call_hook.on_call, call_hook.dry_run = None, False


class _NotRecordableError(Exception):
    """Ends a computation with `dry_run` early."""


class _Watch(TorchDispatchMode):
    """Intercepts all torch operations: allocations use the arena, views are accepted, some become calls of the library,
    all others are reasons against.

    Computations on a tensor's memory without torch, for example by numpy, are not detected.
    """

    def __init__(self, memory: Memory, calls: TorchCalls, *, ends: bool) -> None:
        """Start without reasons; with `ends`, the first reason ends the computation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._calls = calls
        self._ends = ends
        self.reasons: list[str] = []

    def refuse(self, reason: str) -> None:
        """Note an operation that cannot be recorded."""
        self.reasons.append(reason)
        if self._ends:
            raise _NotRecordableError(reason)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True: otherwise torch would import its compiler, which takes more than a second and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (computed := self._calls.compute(func, args, kwargs)) is not None:
            return computed
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._memory.like(result)
        if func in _FROM_HOST or func._schema.is_mutable or not _is_view(result, (args, kwargs)):
            self.refuse(str(func))
        return result


def _is_view(result: Any, arguments: Any) -> bool:
    """Whether all results are memory of the arguments. Some operations, such as reshape, copy only if necessary."""
    given = {_memory(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    return all(isinstance(each, Tensor) and _memory(each) in given for each in tree_leaves(result))


def _memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _word(kind: str, argument: Any) -> int:
    """An argument as `Word` of program.h; `kind`: its letter, see `kernels.cpu.library`."""
    if kind == "f":
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument or 0) & _WORD_MASK
