"""`NativeProgram`: the calls of a decode step to our CPU library, recorded once and made again by one call.

What CUDA graphs are for a GPU: Python runs a step once, through the same layers and operations as ever, and each call
that reaches the library is made and written down with its arguments. A program is that list; `run_program` of the
library walks it with all threads, in one parallel region (`kernels/cpu/program.cpp`).

Addresses and sizes stay as recorded, so what differs from step to step has to lie in memory that stays where it is, and
what a step makes on its way lies in an `Arena`. A step that computes anything in another way cannot be recorded: every
operation of torch passes by here meanwhile, and only views and new memory are let through as what needs no replay.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from ..kernels.cpu.function import CallHook, NativeFunction, OnCall
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
"""Numbers of this step, which no other step would get."""
_WORD_MASK: Final = (1 << 64) - 1


class Call(NamedTuple):
    """One call of a function of the library.

    Attributes:
        function: whose.
        form: its recorded form.
        words: its arguments as `Word` of program.h.
    """

    function: NativeFunction
    form: int
    words: list[int]


class NativeProgram:
    """Calls with their arguments.

    Attributes:
        num_calls: how many.
        words: the arguments of all calls, one after the other, where the program reads them when it runs.
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

    def run(self) -> None:
        """Make all calls."""
        self._run(self._address, self.num_calls)


class Recorded(NamedTuple):
    """A computation that has been made and, if it could be, recorded.

    Attributes:
        result: what came of it. Where there is a program, its runs leave theirs there, and so does whatever else runs
            in this arena: a new result stays only until the next run or recording.
        program: makes it again; None if there is a reason against it.
        reason_against: which of its operations cannot be recorded.
    """

    result: Tensor
    program: NativeProgram | None
    reason_against: str = ""


class Memory(Protocol):
    """Where what a computation allocates comes from instead; `Arena` is one."""

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype; its numbers are arbitrary."""
        ...


class Traced(NamedTuple):
    """What a computation calls.

    Attributes:
        result: what came of it; empty where it was ended.
        calls: in order, without questions.
        reasons: which of its operations cannot be recorded; none if all can.
    """

    result: Tensor
    calls: list[Call]
    reasons: list[str]


def record(library: ctypes.CDLL, arena: Arena, compute: Callable[[], Tensor]) -> Recorded:
    """Compute once, and record it; everything that `compute` allocates comes from the arena."""
    result, calls, reasons = trace(library, arena, compute, dry_run=False)
    if reasons:
        return Recorded(result, None, ", ".join(dict.fromkeys(reasons)))
    return Recorded(arena.borrowed(result), NativeProgram(library, calls))


def trace(
    library: ctypes.CDLL, memory: Memory, compute: Callable[[], Tensor], *, dry_run: bool = True
) -> Traced:
    """Note what a computation calls.

    Args:
        memory: where all that it allocates comes from.
        dry_run: the calls are not made, so the result's numbers are arbitrary. Operations of torch are, so the first
            one that cannot be recorded ends the computation: the others would be computed for nothing.
    """
    calls: list[Call] = []
    watch = _Watch(memory, ends=dry_run)

    def on_call(function: NativeFunction, arguments: tuple[Any, ...]) -> None:
        if function.returns:  # a question, which is answered now
            return
        if function.recorded_form is None:
            watch.refuse(f"{function.name} of the library")
            return
        words = [_word(*pair) for pair in zip(function.arguments, arguments, strict=True)]
        calls.append(Call(function, function.recorded_form, words))

    result = torch.empty(0)
    with suppress(_NotRecordableError), told_of_calls(library, on_call, dry_run=dry_run), watch:
        result = compute()
    return Traced(result, calls, watch.reasons)


@contextmanager
def told_of_calls(library: ctypes.CDLL, on_call: OnCall, *, dry_run: bool) -> Iterator[None]:
    """This thread's calls of the library are told, or `dry_run`."""
    call_hook: CallHook = vars(library)["call_hook"]
    assert call_hook.on_call is None, "recordings do not nest"
    call_hook.on_call, call_hook.dry_run = on_call, dry_run
    try:
        yield
    finally:
        call_hook.on_call, call_hook.dry_run = None, False


class _NotRecordableError(Exception):
    """Ends a computation that is only told."""


class _Watch(TorchDispatchMode):
    """Sees all operations of torch: memory comes from the arena, views are harmless, all others are reasons.

    What is computed on a tensor's memory without torch, as numpy does, it does not see.
    """

    def __init__(self, memory: Memory, *, ends: bool) -> None:
        """`ends`: the first reason ends the computation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._ends = ends
        self.reasons: list[str] = []

    def refuse(self, reason: str) -> None:
        """Note what cannot be recorded."""
        self.reasons.append(reason)
        if self._ends:
            raise _NotRecordableError(reason)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler otherwise, for more than a second and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._memory.like(result)
        if func in _FROM_HOST or func._schema.is_mutable or not _is_view(result, (args, kwargs)):
            self.refuse(str(func))
        return result


def _is_view(result: Any, arguments: Any) -> bool:
    """Whether all that came out is memory that went in. Some operations, such as reshape, copy only where they must."""
    given = {_memory(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    return all(isinstance(each, Tensor) and _memory(each) in given for each in tree_leaves(result))


def _memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _word(kind: str, argument: Any) -> int:
    """An argument as `Word` of program.h; `kind`: its letter, see `kernels.cpu.library`."""
    if kind == "f":
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument or 0) & _WORD_MASK
