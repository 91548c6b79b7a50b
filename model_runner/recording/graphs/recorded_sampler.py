"""`RecordedSampler`: after a recorded decode, greedy rows and unfiltered draws are sampled by a recording, too.

Its recordings are apart from the decodes' own, one for each of their sizes: a step with filters, penalties, masks or
changed logits is then sampled by the usual launches, and its decode is replayed all the same.
"""

# Shapes: n rows of a recorded decode, padding included; S of them sample in this step.

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...sampling.sampler_backend import SampledTokens

if TYPE_CHECKING:
    from torch import Tensor

    from ...sampling.logprobs import TokenLogprobs
    from ...sampling.sampler_backend import CapturableSampler, SamplerBackend
    from ...sampling.sampling_batch import Int32s, Int64s, SamplingBatch
    from ..executor import RecordedDecodes
    from ..graph_device import Replay

logger = logging.getLogger(__name__)


class _Graph(NamedTuple):
    """The recordings of one size: of greedy rows only, and of a table; both write `results`, [n]."""

    greedy: Replay
    by_table: Replay
    results: SampledTokens


class _Staging:
    """One of the two host buffers of the table; see `DecodeInputMemory`."""

    def __init__(self, memory: Tensor, width: int) -> None:
        self.memory = memory.view(torch.int32).view(-1, width)
        self.table: Int32s = self.memory.numpy()
        self.wait_until_read: Callable[[], None] = lambda: None


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
        num_bytes = self._table.nbytes
        self._staging = [_Staging(self._device.staging(num_bytes), width) for _ in range(2)]
        self._graphs, self.recorded_bytes = self._record()

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """See `SamplerBackend`. What a recording writes is valid until the next step's sampling."""
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
        """See `SamplerBackend`."""
        return self._others.logprobs(logits, indices, token_ids, top_k)

    def capturable(self) -> None:
        """See `SamplerBackend.capturable`."""
        return

    def _upload(self, size: int, batch: SamplingBatch) -> None:
        staging = self._staging.pop(0)
        self._staging.append(staging)
        staging.wait_until_read()  # its copy of two steps ago has ended, unless more steps are in flight
        self._capturable.write_table(staging.table[:size], batch)
        staging.wait_until_read = self._device.upload(self._table[:size], staging.memory[:size])

    @torch.inference_mode()
    def _record(self) -> tuple[dict[int, _Graph], list[int]]:
        """The recordings, and the device memory that each size took."""
        free_bytes, started_s = [self._device.free_bytes()], time.perf_counter()
        graphs: dict[int, _Graph] = {}
        for size in reversed(self._sizes):  # smaller recordings reuse the memory of the largest
            logits, table = self._logits[:size], self._table[:size]
            results = self._capturable.results(size)
            greedy, by_table = (
                self._device.capture(partial(self._capturable.choose, logits, lines, results))
                for lines in (None, table)
            )
            graphs[size] = _Graph(greedy, by_table, results)
            free_bytes.append(self._device.free_bytes())
        recorded_bytes = [before - after for before, after in pairwise(free_bytes)]
        logger.info(
            "sampler_graphs=%d record_s=%.1f graphs_mib=%.0f",
            2 * len(graphs),
            time.perf_counter() - started_s,
            sum(recorded_bytes) / (1 << 20),
        )
        return graphs, recorded_bytes
