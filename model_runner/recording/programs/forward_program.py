"""`ForwardProgram`: a model's layers for any number of tokens as one call to our CPU library.

Without it Python makes some 280 calls, layer by layer, for a step with prompts, with its caches evicted by the kernels:
6 ms for 16 tokens and 22 ms for 512, while the other threads wait. Decode steps are recorded for each batch size
(`native_executor`), but steps with prompts rarely have the same length twice. Their calls are always the same, and so
are the addresses, if every allocation is placed where the largest step has it. Only arguments like "tokens" and "tokens
times width" differ. Each is a constant plus a multiple of T plus, after the last layer's attention, a multiple of W.

So the model is traced for several sizes (T, W): its calls are noted, but not made. If the calls are equal except for
arguments on a plane over (T, W), they become a program with three columns, from which the arguments of a step are
computed. Otherwise, and for models that compute in another way, there is no program, and the reason is logged. Some
kernels change from a number of tokens on; then there is one program for fewer tokens that need logits than this number,
and one for the others.

Rows of images enter between two calls: a step with images runs the calls before that place, puts the rows into the
memory of the embeddings, and runs the rest.
"""

# Shapes: T tokens of a step, W of them need logits (see `ForwardBatch`), K hidden size.

from __future__ import annotations

import ctypes
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from ...adapter_runs import AdapterBatch, AdapterRuns, recorded_plan
from ...attention.backend import BatchLayout, PlannedAttention
from ...distributed.pp_link import NO_LINK, StageLink
from ...forward_batch import FeaturedStates, ForwardBatch, ImageRows, StageStates
from ...kernels.cpu.library import load_library
from ...memory.state_pool import StateBatch, StatePool
from ...states.state_runs import StateRuns, recorded_state_plan
from ..eager_executor import Forward
from .arena import Arena
from .native_program import Call, NativeProgram, Traced, trace, traced_calls
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
    from collections.abc import Sequence

    from ....runtime.config.device_config import KernelConfig
    from ...attention.backend import AttentionBackend
    from ...forward_batch import PlacesImages
    from ...memory.kv_pool import KVPool
    from ...structures.causal_lm import CausalLM
    from .program_planes import Words

logger = logging.getLogger(__name__)

_SAME_FOR_ALL: Final = ["p", "f"]
"""Kinds of arguments that must not depend on the number of tokens, see `kernels.cpu.library`."""


class ProgrammedForward:
    """A model's `forward` that runs as a program where possible; a result is valid until the next call.

    Attributes:
        programs: the programs, each for other steps.
        with_adapters: those for steps with adapters.
        arena: the memory of their intermediate tensors.
    """

    def __init__(
        self,
        model: CausalLM,
        programs: Sequence[ForwardProgram],
        arena: Arena,
        with_adapters: Sequence[ForwardProgram] = (),
    ) -> None:
        self.programs = programs
        self.with_adapters = with_adapters
        self.arena = arena
        self._model = model

    def __call__(self, batch: ForwardBatch) -> Tensor | StageStates | FeaturedStates:
        attention = batch.attention
        num_tokens = len(batch.input_ids)
        size = StepSize(num_tokens, num_tokens if batch.logits_indices is None else len(batch.logits_indices))
        programs = self.programs if batch.adapters is None else self.with_adapters
        program = next((program for program in programs if program.steps.include(size)), None)
        if program is None or not isinstance(attention, PlannedAttention):
            return self._model.forward(batch)
        has_axes = batch.rope_positions is not None and batch.rope_positions.dim() > 1
        if has_axes or not (batch.images is None or program.takes(batch.images)):
            return self._model.forward(batch)
        return program.run(batch, size, attention.plan_addresses)


class ForwardProgram:
    """A model's layers as a program; see the module.

    Attributes:
        steps: the steps that it can compute.
        program: its calls, with the arguments of the last step.
        image_place: where rows of images enter; None: the model takes none.
    """

    def __init__(
        self,
        steps: Steps,
        program: NativeProgram,
        planes: Planes,
        *,
        numbers: Tensor,
        result: Tensor | StageStates,
        plan_words: list[Words],
        adapters: AdapterBatch | None,
        states: StateBatch | None = None,
        image_place: _ImagePlace | None = None,
    ) -> None:
        """Take the traced calls.

        Args:
            numbers: [5, MAX_TOKENS] int64: the memory of the input tokens, positions, slots, logits indices and token
                types.
            result: of the largest step: the memory to which results are written.
            plan_words: for each attention plan of the step, the indices of the arguments that hold its address.
            adapters: the memory of the plans of adapters; None: the program is for steps without.
            states: the memory of the plan of state layers; None: the model has none.
        """
        self.steps = steps
        self.program = program
        self._words = program.words.view(np.int64)
        self._words[:] = planes.constants
        self._changing = planes.changing()
        self._planes = planes.of(self._changing)
        self._numbers = numbers.numpy()
        self._result = result
        self._plan_words = plan_words
        self._adapters = adapters
        self._states = states
        self.image_place = image_place

    def takes(self, images: PlacesImages) -> bool:
        """Whether rows of images enter only where the program has a place for them."""
        place = self.image_place
        return place is not None and isinstance(images, ImageRows) and images.num_parts(place.size) == 1

    def run(self, batch: ForwardBatch, size: StepSize, plan_addresses: list[int]) -> Tensor | StageStates:
        """Compute a step; the result is valid until the next run. `plan_addresses`: see `PlannedAttention`."""
        *numbers, logits_indices, token_types = self._numbers
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        columns = batch.input_ids, positions, batch.out_cache_loc
        for row, column in zip(numbers, columns, strict=True):
            row[: size.tokens] = column.numpy()
        # None: all rows are copied in order; this is rare and costs two copies.
        logits_indices[: size.num_logits] = (
            np.arange(size.tokens) if batch.logits_indices is None else batch.logits_indices.numpy()
        )
        token_types[: size.tokens] = 0 if batch.token_types is None else batch.token_types.numpy()
        if self._adapters is not None and batch.adapters is not None:
            _copy_plan(self._adapters.tokens, batch.adapters.tokens)
            _copy_plan(self._adapters.kept, batch.adapters.kept)
        if self._states is not None and batch.states is not None:
            plan = batch.states.runs.plan
            self._states.runs.plan[: len(plan)] = plan
        self._words[self._changing] = self._planes.at(size)
        for words, address in zip(self._plan_words, plan_addresses, strict=True):
            self._words[words] = address
        if batch.images is None or self.image_place is None:
            self.program.run()
        else:
            self.program.run(0, self.image_place.num_calls)
            batch.images.place(self.image_place.embedded(size.tokens))
            self.program.run(self.image_place.num_calls)
        if isinstance(self._result, StageStates):
            x, residual = self._result.x, self._result.residual
            return StageStates(x[: size.tokens], residual[: size.tokens])
        return self._result[: size.num_logits]


def _copy_plan(to: AdapterRuns, runs: AdapterRuns) -> None:
    to.plan[: len(runs.plan)] = runs.plan


class _ImagePlace:
    """A `PlacesImages` that notes where a traced model calls it, and puts nothing there.

    Attributes:
        num_calls: the calls before that place; 0: it was not called.
        address, size: of the embeddings.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        """Take the list to which the calls are added."""
        self._calls = calls
        self.num_calls = self.address = self.size = 0
        self._dtype = torch.float32

    def place(self, embedded: Tensor) -> Tensor:
        self.num_calls, self.address = len(self._calls), embedded.data_ptr()
        self.size, self._dtype = embedded.shape[1], embedded.dtype
        return embedded

    def add_after(self, layer_id: int, residual: Tensor) -> Tensor:
        return residual

    def embedded(self, num_tokens: int) -> Tensor:
        """The embeddings of a step, [T, hidden]; the memory is the arena's."""
        num_bytes = num_tokens * self.size * self._dtype.itemsize
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.address))
        return torch.from_numpy(memory).view(self._dtype).view(num_tokens, self.size)


class _Blocks:
    """The allocations of a computation: the first run lays out blocks, and further runs get the same blocks.

    Attributes:
        reason: why this is not possible; empty if it is.
    """

    def __init__(self, arena: Arena) -> None:
        """Take the arena that holds the blocks."""
        self._arena = arena
        self.reason = ""
        self._blocks: list[Tensor] = []
        self._next: int | None = None

    def begin_again(self) -> None:
        """Start a further run: the next allocation gets the first block."""
        self._next = 0
        self.reason = ""

    def like(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        if not tensor.is_contiguous():
            self.reason = "it allocates a tensor that is not contiguous"
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

    def whole(self, result: Tensor | StageStates) -> Tensor | StageStates:
        """The same result without ownership of its blocks."""
        return self._arena.result(result)


class _Tracer:
    """Traces a model: runs it without computing anything."""

    def __init__(
        self,
        model: CausalLM,
        kv_pool: KVPool,
        attention: AttentionBackend,
        library: ctypes.CDLL,
        arena: Arena,
        *,
        has_adapters: bool,
        has_token_types: bool,
        state_pool: StatePool | None,
        link: StageLink,
    ) -> None:
        self._link = link
        self._has_token_types = has_token_types
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._library = library
        self.arena = arena
        self.adapters: AdapterBatch | None = None
        if has_adapters:
            tokens, kept = (AdapterRuns.recorded(recorded_plan(MAX_TOKENS)) for _ in range(2))
            self.adapters = AdapterBatch(tokens, kept, kept)
        self.states: StateBatch | None = None
        if state_pool is not None:
            self.states = StateBatch(state_pool, StateRuns(recorded_state_plan(MAX_TOKENS)))
        self.numbers = torch.zeros((5, MAX_TOKENS), dtype=torch.int64)
        self.plan_addresses: list[int] = []
        self.image_place = _ImagePlace(())

    def trace(self, size: StepSize, blocks: _Blocks) -> Traced[Tensor | StageStates]:
        """The calls of a step of this size.

        Raises:
            NoProgramError: some operations are not library calls, or need other memory than the blocks.
        """
        row, none, tokens = (np.array([number], dtype=np.int64) for number in (0, 0, size.tokens))
        with traced_calls(self._library, lambda function, arguments: None, dry_run=True):
            attention = self._attention.plan_step(BatchLayout(row, none, tokens, 1))
        if isinstance(attention, PlannedAttention):
            self.plan_addresses = attention.plan_addresses
        input_ids, positions, out_cache_loc = self.numbers[:3, : size.tokens]
        calls: list[Call] = []
        self.image_place = _ImagePlace(calls)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=out_cache_loc,
            attention=attention,
            logits_indices=self.numbers[3, : size.num_logits],
            token_types=self.numbers[4, : size.tokens] if self._has_token_types else None,
            adapters=self.adapters,
            states=self.states,
            incoming=self._link.incoming(size.tokens),
            images=self.image_place,
        )

        def compute() -> Tensor | StageStates:
            result = self._model.forward(batch)
            if isinstance(result, FeaturedStates):
                raise NoProgramError("it has features of several layers")
            return result

        traced = trace(self._library, blocks, compute, calls=calls)
        if reasons := [*traced.reasons, *filter(None, [blocks.reason])]:
            raise NoProgramError(", ".join(dict.fromkeys(reasons)))
        return traced


def _words(traced: Traced[Tensor | StageStates]) -> Words:
    return np.array([word for call in traced.calls for word in call.words], dtype=np.uint64).view(np.int64)


def _addresses(result: Tensor | StageStates) -> list[int]:
    tensors = [result] if isinstance(result, Tensor) else [result.x, result.residual]
    return [tensor.data_ptr() for tensor in tensors]


def _make_program(tracer: _Tracer, library: ctypes.CDLL, steps: Steps) -> ForwardProgram:
    """The program of these steps.

    Raises:
        NoProgramError: their arguments are not linear in T and W.
    """
    blocks = _Blocks(tracer.arena)
    largest = tracer.trace(steps.largest, blocks)  # lays the blocks out
    result = blocks.whole(largest.result)
    functions = [call.function for call in largest.calls]
    image_place = tracer.image_place

    def words_of(size: StepSize) -> Words:
        if size == steps.largest:
            return _words(largest)
        blocks.begin_again()
        traced = tracer.trace(size, blocks)
        if [call.function for call in traced.calls] != functions:
            raise NoProgramError(f"it calls other functions for {size}")
        if _addresses(traced.result) != _addresses(result):
            raise NoProgramError(f"its result has another address for {size}")
        if tracer.image_place.address != image_place.address:
            raise NoProgramError(f"its embeddings have another address for {size}")
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
        raise NoProgramError("its attention has no plan argument that could be replaced")
    return ForwardProgram(
        steps,
        NativeProgram(library, largest.calls),
        planes,
        numbers=tracer.numbers,
        result=result,
        plan_words=plan_words,
        adapters=tracer.adapters,
        states=tracer.states,
        image_place=image_place if image_place.num_calls else None,
    )


def _make_programs(tracer: _Tracer, library: ctypes.CDLL) -> list[ForwardProgram]:
    """A model's programs.

    Raises:
        NoProgramError: the model has none.
    """
    # First with few tokens: a torch operation that cannot be recorded is computed before it ends the trace.
    tracer.trace(StepSize(LEAST_TOKENS, 1), _Blocks(tracer.arena))
    reasons = []
    for border in BORDERS:
        try:
            return [_make_program(tracer, library, steps) for steps in Steps.beside(border)]
        except NoProgramError as error:
            reasons.append(str(error))
    raise NoProgramError(reasons[0])


def _make_forward(
    model: CausalLM,
    kv_pool: KVPool,
    attention: AttentionBackend,
    num_ranks: int,
    *,
    has_adapters: bool,
    has_token_types: bool,
    state_pool: StatePool | None,
    link: StageLink,
) -> ProgrammedForward:
    if num_ranks > 1:
        raise NoProgramError("tensor-parallel ranks wait for each other within a step")
    if attention.repeatable() is None:
        raise NoProgramError(f"attention by {attention.name} is not a native call")
    library = load_library()
    arena = Arena()
    make_tracer = partial(
        _Tracer,
        model,
        kv_pool,
        attention,
        library,
        arena,
        has_token_types=has_token_types,
        state_pool=state_pool,
        link=link,
    )
    programs = _make_programs(make_tracer(has_adapters=False), library)
    with_adapters: Sequence[ForwardProgram] = ()
    if has_adapters:
        try:
            with_adapters = _make_programs(make_tracer(has_adapters=True), library)
        except NoProgramError as error:
            logger.info("forward_program=none of steps with adapters: %s", error)
    return ProgrammedForward(model, programs, arena, with_adapters)


def programmed_forward(
    kernels: KernelConfig,
    *,
    model: CausalLM,
    kv_pool: KVPool,
    attention: AttentionBackend,
    num_ranks: int,
    has_token_types: bool = False,
    has_adapters: bool = False,
    state_pool: StatePool | None = None,
    link: StageLink = NO_LINK,
) -> Forward:
    """The model's forward pass; as a program if the configuration enables recorded steps and there is a program.

    Args:
        has_token_types: the model has a table of them, so steps may bring some.
        link: has the memory of what arrives from another pipeline stage.
    """
    if kernels.record_steps is False:
        return model.forward
    started_s = time.perf_counter()
    try:
        made = _make_forward(
            model,
            kv_pool,
            attention,
            num_ranks,
            has_adapters=has_adapters,
            has_token_types=has_token_types,
            state_pool=state_pool,
            link=link,
        )
    except NoProgramError as error:
        logger.info("forward_program=none: %s", error)
        return model.forward
    logger.debug(
        "forward_program=native calls=%d programs=%d traced_ms=%.0f",
        made.programs[0].program.num_calls,
        len(made.programs),
        (time.perf_counter() - started_s) * 1e3,
    )
    return made
