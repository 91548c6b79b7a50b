"""`RecordedSampler`: after a recorded decode, greedy rows and unfiltered draws are sampled by a recording, too.

Its recordings are apart from the decodes' own, one for each of their sizes: a step with filters, penalties, masks or
changed logits is then sampled by the usual launches, and its decode is replayed all the same.
"""

# Shapes: n rows of a recorded decode, padding included; S of them sample in this step.

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...sampling.sampler_backend import SampledTokens
from .host_buffer import HostBuffer
from .recording_costs import RecordingCosts

if TYPE_CHECKING:
    from torch import Tensor

    from ...sampling.logprobs import TokenLogprobs
    from ...sampling.sampler_backend import CapturableSampler, SamplerBackend
    from ...sampling.sampling_batch import Int64s, SamplingBatch
    from ..executor import RecordedDecodes
    from ..graph_device import Replay

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
