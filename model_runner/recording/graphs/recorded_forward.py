"""`RecordedForward`: the forward pass of a recording from `DecodeInputs` in fixed memory, and memory for its result."""

# Shapes: n tokens of a recording, padding included.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...adapter_runs import AdapterBatch, AdapterRuns
from ...forward_batch import ForwardBatch, StageStates
from ...memory.state_pool import StateBatch, StatePool
from ...states.state_runs import StateRuns

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...attention.backend import StepAttention
    from ...distributed.pp_link import StageLink
    from ...memory.kv_pool import KVPool
    from ...memory.slot_table import SlotTable
    from ...structures.causal_lm import CausalLM
    from ...token_relay import TokenRelay
    from .decode_inputs import DecodeInputs

ForwardResult = Tensor | StageStates
"""[n, hidden] of the last pipeline stage, or what the next one gets."""


class RecordedForward(NamedTuple):
    """The parts of a model's forward pass that are the same in all recordings.

    Attributes:
        state_pool: None: the model has no state layers.
        link: to other pipeline stages.
    """

    model: CausalLM
    kv_pool: KVPool
    slot_table: SlotTable
    relay: TokenRelay
    link: StageLink
    state_pool: StatePool | None = None

    def run(
        self,
        inputs: DecodeInputs[Tensor],
        plan_attention: Callable[[], StepAttention],
        *,
        has_adapters: bool = False,
    ) -> tuple[ForwardResult, AdapterRuns | None]:
        """The model's result, and the adapters of its rows.

        Args:
            plan_attention: called when the slots of the new tokens are in the slot table.
        """
        self.slot_table.req_to_token.view(-1).index_copy_(0, inputs.table_indices, inputs.slots)
        adapters = None
        if has_adapters:
            runs = AdapterRuns.recorded(inputs.adapter_plan)
            adapters = AdapterBatch(runs, runs, runs)
        batch = ForwardBatch(
            input_ids=self.relay.input_ids(inputs.known_ids, inputs.rows),
            positions=inputs.positions,
            kv_pool=self.kv_pool,
            out_cache_loc=inputs.out_cache_loc,
            attention=plan_attention(),
            adapters=adapters,
            states=None
            if self.state_pool is None
            else StateBatch(self.state_pool, StateRuns(inputs.state_plan)),
            incoming=self.link.incoming(len(inputs.rows)),
        )
        return self.model.forward(batch), None if adapters is None else adapters.sampled


def first_rows(result: ForwardResult, num: int) -> ForwardResult:
    """The rows of the first tokens."""
    if isinstance(result, Tensor):
        return result[:num]
    return StageStates(result.x[:num], result.residual[:num])


def empty_like(result: ForwardResult) -> ForwardResult:
    """Memory for such a result."""
    if isinstance(result, Tensor):
        return torch.empty_like(result)
    return StageStates(torch.empty_like(result.x), torch.empty_like(result.residual))


def copy_result(target: ForwardResult, source: ForwardResult) -> None:
    """Copy a result to memory made by `empty_like`."""
    if isinstance(target, Tensor):
        assert isinstance(source, Tensor), "a stage has results of one kind"
        target.copy_(source)
        return
    assert isinstance(source, StageStates), "a stage has results of one kind"
    target.x.copy_(source.x)
    target.residual.copy_(source.residual)
