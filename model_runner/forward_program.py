"""`ForwardProgram`: a model's layers for any number of tokens as one call to our CPU library.

Layer by layer, Python makes some 280 calls for a step with prompts, from caches that the kernels have emptied: 6 ms for
16 tokens and 22 ms for 512, while the other threads wait. A decode step is recorded for each batch size instead
(`native_recordings`), but steps with prompts hardly ever have a length twice. Their calls are always the same ones,
though, and so are their addresses if what they allocate lies where the largest step would have it. What is left are
numbers like "tokens" and "tokens times width": each is a constant and so much per token.

So the model is run for several numbers of tokens without computing anything, its calls are only told. If they are the
same but for numbers on a straight line, they are a program with two columns, from which a step's arguments are made;
otherwise, and for models that compute anything in another way, there is none, and the reason is logged.
"""

# Shapes: T tokens of a step, K hidden size.

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..runtime.step_plan import MAX_DRAFT_STEP_TOKENS, ForwardMode
from .arena import Arena
from .attention.backend import BatchLayout, PlannedAttention
from .forward_batch import ForwardBatch
from .kernels.cpu.library import load_library
from .kernels.native_blocks import TILES_FROM
from .native_program import Call, NativeProgram, Traced, told_of_calls, trace
from .sampling_batch import SamplingBatch

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    import numpy.typing as npt

    from ..runtime.device_config import KernelConfig
    from .attention.backend import AttentionBackend
    from .kv_pool import KVPool
    from .models.registry import CausalLM

    Words = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], Tensor]

MAX_TOKENS: Final = 2048
"""Of a step; larger ones are launched call by call, which costs them little. What of the memory for so many tokens no
step has touched takes none."""
_LEAST_TOKENS: Final = (2, TILES_FROM, MAX_DRAFT_STEP_TOKENS + 1)
"""Of a step: the first that will do. Products of block-quantised weights are other calls for fewer tokens, see
`load._tiles_from`."""
_TRIED: Final = tuple(sorted({2, 3, 1025}.union(*((least, least + 1) for least in _LEAST_TOKENS))))
"""Numbers of tokens for which the model is traced, beside the largest."""
_SAME_FOR_ALL: Final = ["p", "f"]
"""Kinds of arguments that must not depend on the number of tokens, see `kernels.cpu.library`."""


class ProgrammedForward:
    """A model's `forward`, which runs as a program where it can; what it returns stays until the next one.

    Attributes:
        program: that.
    """

    def __init__(self, model: CausalLM, program: ForwardProgram) -> None:
        self.program = program
        self._model = model

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM.forward`."""
        attention = batch.attention
        if self.program.fits(len(batch.input_ids)) and isinstance(attention, PlannedAttention):
            return self.program.run(batch, attention.plan_addresses)
        return self._model.forward(batch)


class _Lines(NamedTuple):
    """Arguments of all calls: `constants` + `slopes` * T.

    Attributes:
        least_tokens: they are not known to hold for fewer.
    """

    least_tokens: int
    constants: Words
    slopes: Words


class ForwardProgram:
    """See the module.

    Attributes:
        program: its calls, with the arguments of the last step.
        arena: what it works in.
    """

    def __init__(
        self,
        program: NativeProgram,
        lines: _Lines,
        *,
        arena: Arena,
        numbers: Tensor,
        hidden: Tensor,
        plan_words: list[Words],
    ) -> None:
        """Take what was traced.

        Args:
            numbers: [3, MAX_TOKENS] int64: where input tokens, positions and slots are read.
            hidden: [MAX_TOKENS, K] where the result is left.
            plan_words: which arguments are the address of the step's attention plan, for each of its plans.
        """
        self.program = program
        self.arena = arena
        self._words = program.words.view(np.int64)
        self._words[:] = lines.constants
        self._least_tokens = lines.least_tokens
        self._changing = lines.slopes.nonzero()[0]
        self._constants = lines.constants[self._changing]
        self._slopes = lines.slopes[self._changing]
        self._numbers = numbers.numpy()
        self._hidden = hidden
        self._plan_words = plan_words

    def fits(self, num_tokens: int) -> bool:
        """Whether it can compute so many."""
        return self._least_tokens <= num_tokens <= len(self._hidden)

    def run(self, batch: ForwardBatch, plan_addresses: list[int]) -> Tensor:
        """[T, K], until the next run; `plan_addresses`: see `PlannedAttention`."""
        num_tokens = len(batch.input_ids)
        columns = batch.input_ids, batch.positions, batch.out_cache_loc
        for numbers, column in zip(self._numbers, columns, strict=True):
            numbers[:num_tokens] = column.numpy()
        self._words[self._changing] = self._constants + self._slopes * num_tokens
        for words, address in zip(self._plan_words, plan_addresses, strict=True):
            self._words[words] = address
        self.program.run()
        return self._hidden[:num_tokens]


class _Blocks:
    """Memory of what a computation allocates, laid out by its first run; then each allocation gets its block again.

    Attributes:
        reason: why that cannot be.
        arena: where the blocks are.
    """

    def __init__(self) -> None:
        self.arena = Arena()
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
            block = self.arena.like(tensor)
            self._blocks.append(self.arena.borrowed(block).view(-1).view(torch.uint8))
            return block
        index, self._next = self._next, self._next + 1
        num_bytes = tensor.nbytes
        if index >= len(self._blocks) or num_bytes > len(self._blocks[index]):
            self.reason = "fewer tokens need more memory"
            return tensor
        return self._blocks[index][:num_bytes].view(tensor.dtype).view(tensor.shape)

    def whole(self, tensor: Tensor) -> Tensor:
        """The same tensor without a claim on its block."""
        return self.arena.borrowed(tensor)


class _Tracer:
    """Runs a model without computing anything."""

    def __init__(
        self, model: CausalLM, kv_pool: KVPool, attention: AttentionBackend, library: ctypes.CDLL
    ) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._library = library
        self.numbers = torch.zeros((3, MAX_TOKENS), dtype=torch.int64)
        self.blocks = _Blocks()
        self.plan_addresses: list[int] = []

    def trace(self, num_tokens: int) -> Traced:
        """The calls for so many tokens."""
        row, none, tokens = (np.array([number], dtype=np.int64) for number in (0, 0, num_tokens))
        with told_of_calls(self._library, lambda function, arguments: None, only_told=True):
            attention = self._attention.plan_step(BatchLayout(row, none, tokens, 1))
        if isinstance(attention, PlannedAttention):
            self.plan_addresses = attention.plan_addresses
        input_ids, positions, out_cache_loc = self.numbers[:, :num_tokens]
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=out_cache_loc,
            attention=attention,
            sample_indices=None,
            sample_rows=torch.from_numpy(row),
            sampled_idx_np=row,
            cut_indices=None,
            cut_idx_np=none,
            sampling=SamplingBatch(0),
            prompt_spans=(),
        )
        return trace(self._library, self.blocks, lambda: self._model.forward(batch))


def _words(traced: Traced) -> Words:
    return np.array([word for call in traced.calls for word in call.words], dtype=np.uint64).view(np.int64)


def _line_through(calls: Sequence[Call], least: Words, least_tokens: int, most: Words) -> _Lines | str:
    """The straight lines through the arguments of the smallest and the largest step; or why there are none."""
    slopes, rest = np.divmod(most - least, MAX_TOKENS - least_tokens)
    kinds = np.array([kind for call in calls for kind in call.function.arguments])
    if rest.any() or slopes[np.isin(kinds, _SAME_FOR_ALL)].any():
        return "its arguments are not so much per token"
    return _Lines(least_tokens, least - slopes * least_tokens, slopes)


def _lines(tracer: _Tracer, largest: Traced, address: int, least_tokens: int) -> _Lines | str:
    """The arguments of steps from so many tokens on, like the largest one whose result is at `address`."""
    lines: _Lines | None = None
    for num_tokens in _TRIED:
        if num_tokens < least_tokens:
            continue
        tracer.blocks.begin_again()
        traced = tracer.trace(num_tokens)
        if traced.reasons or tracer.blocks.reason:
            return ", ".join(dict.fromkeys(filter(None, [*traced.reasons, tracer.blocks.reason])))
        if [call.function for call in traced.calls] != [call.function for call in largest.calls]:
            return f"it calls other functions for {num_tokens} tokens"
        if traced.result.data_ptr() != address:
            return f"its result lies elsewhere for {num_tokens} tokens"
        words = _words(traced)
        if lines is None:
            found = _line_through(traced.calls, words, num_tokens, _words(largest))
            if isinstance(found, str):
                return found
            lines = found
        if (lines.constants + lines.slopes * num_tokens != words).any():
            return f"its arguments for {num_tokens} tokens are not on a line"
    assert lines is not None
    return lines


def _make_program(tracer: _Tracer, library: ctypes.CDLL) -> ForwardProgram | str:
    """A model's program, or why it has none."""
    # First of all for few tokens: what cannot be recorded is computed, if only the first operation of it.
    if reasons := tracer.trace(_LEAST_TOKENS[0]).reasons:
        return ", ".join(dict.fromkeys(reasons))
    tracer.blocks = _Blocks()  # the largest step lays them out
    largest = tracer.trace(MAX_TOKENS)
    if reasons := [reason for reason in (*largest.reasons, tracer.blocks.reason) if reason]:
        return ", ".join(dict.fromkeys(reasons))
    hidden = tracer.blocks.whole(largest.result)
    reasons = []
    for least_tokens in _LEAST_TOKENS:
        lines = _lines(tracer, largest, hidden.data_ptr(), least_tokens)
        if isinstance(lines, str):
            reasons.append(lines)
            continue
        plan_words = [(lines.constants == address).nonzero()[0] for address in tracer.plan_addresses]
        if not all(map(len, plan_words)):
            return "its attention has no plan that could be exchanged"
        return ForwardProgram(
            NativeProgram(library, largest.calls),
            lines,
            arena=tracer.blocks.arena,
            numbers=tracer.numbers,
            hidden=hidden,
            plan_words=plan_words,
        )
    return reasons[0]


def programmed_forward(
    kernels: KernelConfig, *, model: CausalLM, kv_pool: KVPool, attention: AttentionBackend, num_ranks: int
) -> Forward:
    """The model's forward pass, as a program if the configuration wants steps recorded and there is one."""
    if kernels.cuda_graph is False:
        return model.forward
    started_s = time.perf_counter()
    made: ForwardProgram | str
    if num_ranks > 1:
        made = "ranks that share a model wait for each other within a step"
    elif not hasattr(attention, "repeatable_step"):
        made = f"attention by {attention.name} is not a native call"
    else:
        library = load_library()
        made = _make_program(_Tracer(model, kv_pool, attention, library), library)
    if isinstance(made, str):
        logger.info("forward_program=none: %s", made)
        return model.forward
    taken_ms = (time.perf_counter() - started_s) * 1e3
    logger.info("forward_program=native calls=%d traced_ms=%.0f", made.program.num_calls, taken_ms)
    return ProgrammedForward(model, made)
