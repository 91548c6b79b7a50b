"""`ForwardProgram`: a model's layers for any number of tokens as one call to our CPU library.

Layer by layer, Python makes some 280 calls for a step with prompts, from caches that the kernels have emptied: 6 ms for
16 tokens and 22 ms for 512, while the other threads wait. A decode step is recorded for each batch size instead
(`native_executor`), but steps with prompts hardly ever have a length twice. Their calls are always the same ones,
though, and so are their addresses if what they allocate lies where the largest step would have it. What is left are
numbers like "tokens" and "tokens times width": each is a constant and so much per token, or, behind the last layer's
attention, per wanted token (see `ForwardBatch`).

So the model is run for several numbers of both without computing anything, its calls are only told. If they are the
same but for numbers on a plane over the two, they are a program with three columns, from which a step's arguments are
made; otherwise, and for models that compute anything in another way, there is none, and the reason is logged. Kernels
may be other ones from a number of tokens on; then there is a program for fewer wanted tokens than that, and one for
others.
"""

# Shapes: T tokens of a step, W of them wanted, K hidden size.

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from ..attention.backend import BatchLayout, PlannedAttention
from ..forward_batch import ForwardBatch
from ..kernels.cpu.library import load_library
from .arena import Arena
from .eager_executor import Forward
from .native_program import NativeProgram, Traced, told_of_calls, trace
from .program_planes import (
    BORDERS,
    LEAST_TOKENS,
    MAX_TOKENS,
    NOT_PER_TOKEN,
    NoProgramError,
    Planes,
    Steps,
    StepSize,
)

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from ...runtime.config.device_config import KernelConfig
    from ..attention.backend import AttentionBackend
    from ..memory.kv_pool import KVPool
    from ..models.registry import CausalLM
    from .program_planes import Words

logger = logging.getLogger(__name__)

_SAME_FOR_ALL: Final = ["p", "f"]
"""Kinds of arguments that must not depend on numbers of tokens, see `kernels.cpu.library`."""


class ProgrammedForward:
    """A model's `forward`, which runs as a program where it can; what it returns stays until the next one.

    Attributes:
        programs: those, each for other steps.
        arena: what they work in.
    """

    def __init__(self, model: CausalLM, programs: Sequence[ForwardProgram], arena: Arena) -> None:
        self.programs = programs
        self.arena = arena
        self._model = model

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM.forward`."""
        attention = batch.attention
        num_tokens = len(batch.input_ids)
        size = StepSize(num_tokens, num_tokens if batch.wanted is None else len(batch.wanted))
        program = next((program for program in self.programs if program.steps.include(size)), None)
        if program is None or not isinstance(attention, PlannedAttention):
            return self._model.forward(batch)
        return program.run(batch, size, attention.plan_addresses)


class ForwardProgram:
    """See the module.

    Attributes:
        steps: which it can compute.
        program: its calls, with the arguments of the last step.
    """

    def __init__(
        self,
        steps: Steps,
        program: NativeProgram,
        planes: Planes,
        *,
        numbers: Tensor,
        hidden: Tensor,
        plan_words: list[Words],
    ) -> None:
        """Take what was traced.

        Args:
            numbers: [4, MAX_TOKENS] int64: where input tokens, positions, slots and wanted tokens are read.
            hidden: [W, K] of the largest step: where the result is left.
            plan_words: which arguments are the address of the step's attention plan, for each of its plans.
        """
        self.steps = steps
        self.program = program
        self._words = program.words.view(np.int64)
        self._words[:] = planes.constants
        self._changing = planes.changing()
        self._planes = planes.of(self._changing)
        self._numbers = numbers.numpy()
        self._hidden = hidden
        self._plan_words = plan_words

    def run(self, batch: ForwardBatch, size: StepSize, plan_addresses: list[int]) -> Tensor:
        """[W, K], until the next run; `plan_addresses`: see `PlannedAttention`."""
        *numbers, wanted = self._numbers
        columns = batch.input_ids, batch.positions, batch.out_cache_loc
        for row, column in zip(numbers, columns, strict=True):
            row[: size.tokens] = column.numpy()
        # All of them are taken in order, which is rare and costs two copies.
        wanted[: size.wanted] = np.arange(size.tokens) if batch.wanted is None else batch.wanted.numpy()
        self._words[self._changing] = self._planes.at(size)
        for words, address in zip(self._plan_words, plan_addresses, strict=True):
            self._words[words] = address
        self.program.run()
        return self._hidden[: size.wanted]


class _Blocks:
    """Memory of what a computation allocates, laid out by its first run; then each allocation gets its block again.

    Attributes:
        reason: why that cannot be.
    """

    def __init__(self, arena: Arena) -> None:
        """`arena`: where the blocks are."""
        self._arena = arena
        self.reason = ""
        self._blocks: list[Tensor] = []
        self._next: int | None = None

    def begin_again(self) -> None:
        """The next allocation is the first one of a further run."""
        self._next = 0
        self.reason = ""

    def like(self, tensor: Tensor) -> Tensor:
        """See `Memory`."""
        if not tensor.numel():
            return tensor
        if not tensor.is_contiguous():
            self.reason = "it allocates what is not contiguous"
            return tensor
        if self._next is None:
            block = self._arena.like(tensor)
            self._blocks.append(self._arena.borrowed(block).view(-1).view(torch.uint8))
            return block
        index, self._next = self._next, self._next + 1
        num_bytes = tensor.nbytes
        if index >= len(self._blocks) or num_bytes > len(self._blocks[index]):
            self.reason = "fewer tokens need more memory"
            return tensor
        return self._blocks[index][:num_bytes].view(tensor.dtype).view(tensor.shape)

    def whole(self, tensor: Tensor) -> Tensor:
        """The same tensor without a claim on its block."""
        return self._arena.borrowed(tensor)


class _Tracer:
    """Runs a model without computing anything."""

    def __init__(
        self, model: CausalLM, kv_pool: KVPool, attention: AttentionBackend, library: ctypes.CDLL
    ) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._library = library
        self.arena = Arena()
        self.numbers = torch.zeros((4, MAX_TOKENS), dtype=torch.int64)
        self.plan_addresses: list[int] = []

    def trace(self, size: StepSize, blocks: _Blocks) -> Traced:
        """The calls of such a step.

        Raises:
            NoProgramError: some of them are no calls of the library, or need memory beside the blocks.
        """
        row, none, tokens = (np.array([number], dtype=np.int64) for number in (0, 0, size.tokens))
        with told_of_calls(self._library, lambda function, arguments: None, dry_run=True):
            attention = self._attention.plan_step(BatchLayout(row, none, tokens, 1))
        if isinstance(attention, PlannedAttention):
            self.plan_addresses = attention.plan_addresses
        input_ids, positions, out_cache_loc = self.numbers[:3, : size.tokens]
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=out_cache_loc,
            attention=attention,
            wanted=self.numbers[3, : size.wanted],
        )
        traced = trace(self._library, blocks, lambda: self._model.forward(batch))
        if reasons := [*traced.reasons, *filter(None, [blocks.reason])]:
            raise NoProgramError(", ".join(dict.fromkeys(reasons)))
        return traced


def _words(traced: Traced) -> Words:
    return np.array([word for call in traced.calls for word in call.words], dtype=np.uint64).view(np.int64)


def _make_program(tracer: _Tracer, library: ctypes.CDLL, steps: Steps) -> ForwardProgram:
    """The program of these steps.

    Raises:
        NoProgramError: their calls are not so much per token.
    """
    blocks = _Blocks(tracer.arena)
    largest = tracer.trace(steps.largest, blocks)  # lays the blocks out
    hidden = blocks.whole(largest.result)
    functions = [call.function for call in largest.calls]

    def words_of(size: StepSize) -> Words:
        if size == steps.largest:
            return _words(largest)
        blocks.begin_again()
        traced = tracer.trace(size, blocks)
        if [call.function for call in traced.calls] != functions:
            raise NoProgramError(f"it calls other functions for {size}")
        if traced.result.data_ptr() != hidden.data_ptr():
            raise NoProgramError(f"its result lies elsewhere for {size}")
        return _words(traced)

    planes = Planes.through(steps, words_of)
    kinds = np.array([kind for function in functions for kind in function.arguments])
    if np.isin(kinds[planes.changing()], _SAME_FOR_ALL).any():
        raise NoProgramError(NOT_PER_TOKEN)
    for size in steps.tried():
        if (planes.at(size) != words_of(size)).any():
            raise NoProgramError(f"{NOT_PER_TOKEN}: {size}")
    plan_words = [(planes.constants == address).nonzero()[0] for address in tracer.plan_addresses]
    if not all(map(len, plan_words)):
        raise NoProgramError("its attention has no plan that could be exchanged")
    return ForwardProgram(
        steps,
        NativeProgram(library, largest.calls),
        planes,
        numbers=tracer.numbers,
        hidden=hidden,
        plan_words=plan_words,
    )


def _make_programs(tracer: _Tracer, library: ctypes.CDLL) -> list[ForwardProgram]:
    """A model's programs.

    Raises:
        NoProgramError: it has none.
    """
    # First of all for few tokens: what cannot be recorded is computed, if only the first operation of it.
    tracer.trace(StepSize(LEAST_TOKENS, 1), _Blocks(tracer.arena))
    reasons = []
    for border in BORDERS:
        try:
            return [_make_program(tracer, library, steps) for steps in Steps.beside(border)]
        except NoProgramError as error:
            reasons.append(str(error))
    raise NoProgramError(reasons[0])


def _make_forward(
    model: CausalLM, kv_pool: KVPool, attention: AttentionBackend, num_ranks: int
) -> ProgrammedForward:
    if num_ranks > 1:
        raise NoProgramError("ranks that share a model wait for each other within a step")
    if attention.repeatable() is None:
        raise NoProgramError(f"attention by {attention.name} is not a native call")
    library = load_library()
    tracer = _Tracer(model, kv_pool, attention, library)
    return ProgrammedForward(model, _make_programs(tracer, library), tracer.arena)


def programmed_forward(
    kernels: KernelConfig, *, model: CausalLM, kv_pool: KVPool, attention: AttentionBackend, num_ranks: int
) -> Forward:
    """The model's forward pass, as a program if the configuration wants steps recorded and there is one."""
    if kernels.record_steps is False:
        return model.forward
    started_s = time.perf_counter()
    try:
        made = _make_forward(model, kv_pool, attention, num_ranks)
    except NoProgramError as error:
        logger.info("forward_program=none: %s", error)
        return model.forward
    logger.info(
        "forward_program=native calls=%d programs=%d traced_ms=%.0f",
        made.programs[0].program.num_calls,
        len(made.programs),
        (time.perf_counter() - started_s) * 1e3,
    )
    return made
