"""`EagerExecutor`: runs steps of any kind: uploads the inputs in one copy and launches kernel by kernel."""

# Shapes: T new tokens in the batch, W of them need logits, K hidden size.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..adapter_runs import batch_of
from ..distributed.pp_link import NO_LINK, StageLink
from ..forward_batch import FeaturedStates, ForwardBatch, ImageRows, StageStates
from ..input_batch import RELAYED
from ..memory.state_pool import StateBatch, StatePool
from ..states.state_runs import StateRuns
from .executor import ReadRows, RecordedBytes, StepFeatures, StepOutput

if TYPE_CHECKING:
    from ..adapter_runs import AdapterBatch
    from ..attention.backend import AttentionBackend
    from ..input_batch import InputBatch
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from ..memory.slot_table import SlotTable
    from ..request_states import TokenRelay
    from ..structures.causal_lm import CausalLM

Forward = Callable[[ForwardBatch], Tensor | StageStates | FeaturedStates]


class EagerExecutor:
    """A `StepExecutor`; the other executors use it for steps without a recording.

    Attributes:
        forward: the model's own `forward`, or a `ProgrammedForward`. The result is valid until the next step.
        attention: plans the attention of its steps.
        link: to other pipeline stages.
        keeps_features: there is a drafter, so that all tokens are computed after the last layer's attention, too.
        encoder_rows: [R, K] the rows of images; None: the model sees none.
    """

    recorded_bytes = RecordedBytes()
    recorded_decodes = None

    def __init__(
        self,
        *,
        model: CausalLM,
        forward: Forward,
        attention: AttentionBackend,
        kv_pool: KVPool,
        slot_table: SlotTable,
        relay: TokenRelay,
        buffers: InputBuffers,
        state_pool: StatePool | None = None,
        link: StageLink = NO_LINK,
        keeps_features: bool = False,
        encoder_rows: Tensor | None = None,
    ) -> None:
        self.forward = forward
        self.attention = attention
        self._model = model
        self._kv_pool = kv_pool
        self._slot_table = slot_table
        self._relay = relay
        self._buffers = buffers
        self._state_pool = state_pool
        self.link = link
        self.keeps_features = keeps_features
        self.encoder_rows = encoder_rows

    def run(self, batch: InputBatch) -> StepOutput:
        """Uploads are retried once if the device has no memory for them; the rest is not."""
        inputs, rows = self._buffers.retried(self._upload, batch)
        self.link.receive(batch.num_tokens)
        hidden, adapters = self.forward(inputs), inputs.adapters
        if isinstance(hidden, StageStates):
            self.link.send(hidden)
            return StepOutput(None, rows.sampled)
        sampled = None if adapters is None else adapters.sampled
        if not self.keeps_features:
            assert isinstance(hidden, Tensor)
            return rows.output(self._model, hidden, sampled)
        hidden, states = hidden if isinstance(hidden, FeaturedStates) else (hidden, hidden)
        if rows.logits_indices is not None:
            hidden = hidden.index_select(0, rows.logits_indices)
        features = StepFeatures(inputs.input_ids, inputs.positions, inputs.out_cache_loc, states)
        return rows.output(self._model, hidden, sampled)._replace(features=features)

    def _upload(self, batch: InputBatch) -> tuple[ForwardBatch, ReadRows]:
        """The model's input, and the rows that are read of its result, on the device."""
        nothing = batch.cut_indices[:0]
        relayed = np.flatnonzero(batch.input_ids == RELAYED)
        (
            table_indices,
            slots,
            out_cache_loc,
            positions,
            input_ids,
            relayed_indices,
            relayed_rows,
            token_types,
            state_plan,
            rope_positions,
            *read,
        ) = self._buffers.put_all(
            [
                batch.token_rows * self._slot_table.width + batch.positions,
                batch.out_cache_loc.astype(np.int32),
                batch.out_cache_loc,
                batch.positions,
                batch.input_ids.copy(),  # on the CPU the tensor shares the array's memory, and the relay writes to it
                relayed,
                batch.token_rows[relayed],
                nothing if batch.token_types is None else batch.token_types,
                nothing if batch.state_plan is None else batch.state_plan,
                nothing if batch.rope_positions is None else batch.rope_positions.reshape(-1),
                *ReadRows.arrays(batch),
            ]
        )
        self._slot_table.store(table_indices, slots)
        if len(relayed):
            self._relay.fill(input_ids, relayed_indices, relayed_rows)
        rows = ReadRows.of(batch, read)
        inputs = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=out_cache_loc,
            attention=self.attention.plan_step(batch.layout),
            logits_indices=None if self.keeps_features else rows.logits_indices,
            token_types=None if batch.token_types is None else token_types,
            adapters=self._adapters(batch),
            states=self._states(batch, state_plan),
            incoming=self.link.incoming(batch.num_tokens),
            images=self._images(batch),
            rope_positions=None
            if batch.rope_positions is None
            else rope_positions.view(batch.rope_positions.shape),
        )
        return inputs, rows

    def _images(self, batch: InputBatch) -> ImageRows | None:
        if batch.images is None:
            return None
        assert self.encoder_rows is not None, "the plan has images, the model sees none"
        indices, rows = self._buffers.put_all(list(batch.images))
        return ImageRows(indices, self.encoder_rows.index_select(0, rows))

    def _states(self, batch: InputBatch, on_device: Tensor) -> StateBatch | None:
        if batch.state_plan is None:
            return None
        assert self._state_pool is not None, "a model with state layers has a pool"
        return StateBatch(self._state_pool, StateRuns.of(batch.state_plan, on_device))

    def _adapters(self, batch: InputBatch) -> AdapterBatch | None:
        if batch.adapter_slots is None:
            return None
        kept, sampled = batch.logits_indices, batch.sample_indices
        if self.keeps_features and kept is not None:  # the layers keep all tokens
            sampled = kept if sampled is None else kept[sampled]
            kept = None
        return batch_of(batch.adapter_slots, kept, sampled, self._buffers.put)
