"""`RecordedForward`: the forward pass of a recording from `DecodeInputs` in fixed memory, and memory for its result.

`RecordedSampler`: after a recorded decode, greedy rows and unfiltered draws are sampled by a recording, too. Its
recordings are apart from the decodes' own, one for each of their sizes: a step with filters, penalties, masks or
changed logits is then sampled by the usual launches, and its decode is replayed all the same.
"""

# Shapes: n tokens of a recording, padding included; S of them sample in this step.

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...adapter_runs import AdapterBatch, AdapterRuns
from ...forward_batch import FeaturedStates, ForwardBatch, StageStates
from ...memory.state_pool import StateBatch, StatePool
from ...sampling.sampler_backend import SampledTokens
from ...states.state_runs import StateRuns
from .decode_inputs import HostBuffer
from .graph_sizes import RecordingCosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...attention.backend import StepAttention
    from ...distributed.pp_link import StageLink
    from ...memory.kv_pool import KVPool
    from ...memory.slot_table import SlotTable
    from ...request_states import TokenRelay
    from ...sampling.logits import TokenLogprobs
    from ...sampling.sampler_backend import CapturableSampler, SamplerBackend
    from ...sampling.sampling_batch import Int64s, SamplingBatch
    from ...structures.causal_lm import CausalLM
    from ..executor import RecordedDecodes
    from ..graph_device import Replay
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
        result = self.model.forward(batch)
        assert not isinstance(result, FeaturedStates), "no step of a model with a drafter is recorded"
        return result, None if adapters is None else adapters.sampled


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


logger = logging.getLogger(__name__)


class _Graph(NamedTuple):
    """The recordings of one size: of greedy rows only, and of a table; both write `results`, [n]."""

    greedy: Replay
    by_table: Replay
    results: SampledTokens


class RecordedSampler:
    """A `SamplerBackend`; another one samples what is not recorded.

    Attributes:
        recorded_bytes: device memory of the recordings, of each size, the largest first.
        num_replayed: number of replayed samplings.
    """

    def __init__(
        self, decodes: RecordedDecodes, others: SamplerBackend, capturable: CapturableSampler
    ) -> None:
        """Record.

        Args:
            others: samples what is not recorded.
            capturable: the part of `others` that is.
        """
        self.num_replayed = 0
        self._others = others
        self._capturable = capturable
        self._logits, self._sizes, self._device = decodes
        largest, width = self._sizes[-1], capturable.table_width
        self._table = torch.zeros((largest, width), dtype=torch.int32, device=self._logits.device)
        self._staging = cycle([HostBuffer(self._device, self._table.nbytes) for _ in range(2)])
        self._graphs, self.recorded_bytes = self._record()

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample by a recording if one fits; its results are valid until the next step's sampling."""
        is_decode = logits.data_ptr() == self._logits.data_ptr()
        if not is_decode or batch.processes_logits or (batch.draw is not None and batch.draw.filtered):
            return self._others.sample(logits, batch)
        num = batch.num_rows
        size = self._sizes[bisect_left(self._sizes, num)]
        graph = self._graphs[size]
        if batch.draw is None:
            graph.greedy()
        else:
            self._upload(size, batch)
            graph.by_table()
        self.num_replayed += 1
        return SampledTokens(graph.results.token_ids[:num], graph.results.finite[:num])

    def logprobs(self, logits: Tensor, indices: Int64s, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        return self._others.logprobs(logits, indices, token_ids, top_k)

    def capturable(self) -> None:
        return

    def _upload(self, size: int, batch: SamplingBatch) -> None:
        staging = next(self._staging)
        staging.wait_until_read()
        table = staging.memory.view(torch.int32).view(self._table.shape)
        self._capturable.write_table(table[:size].numpy(), batch)
        staging.upload(self._table[:size])

    @torch.inference_mode()
    def _record(self) -> tuple[dict[int, _Graph], list[int]]:
        """The recordings, and the device memory that each size took."""
        costs = RecordingCosts(self._device)
        graphs: dict[int, _Graph] = {}
        for size in reversed(self._sizes):  # smaller recordings reuse the memory of the largest
            logits, table = self._logits[:size], self._table[:size]
            results = self._capturable.results(size)
            greedy, by_table = (
                self._device.capture(partial(self._capturable.sample_rows, logits, lines, results))
                for lines in (None, table)
            )
            graphs[size] = _Graph(greedy, by_table, results)
            costs.end_size()
        logger.info("sampler_graphs=%d %s", 2 * len(graphs), costs)
        return graphs, costs.num_bytes


def recorded_sampler(decodes: RecordedDecodes, backend: SamplerBackend) -> SamplerBackend:
    """A backend with recordings; the same one if it cannot be recorded."""
    capturable = backend.capturable()
    return backend if capturable is None else RecordedSampler(decodes, backend, capturable)
