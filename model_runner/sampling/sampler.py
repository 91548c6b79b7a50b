"""`Sampler`: turns logits into tokens and their log-probabilities.

Greedy requests take the exact argmax; of equal logits the first token wins. The others draw by the Gumbel-max trick
with noise that depends on seed, position and token only (see `noise`), so the batch and its order have no effect.
"""

# Shapes: S requests that sample in this step, V tokens of the vocabulary.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.avoided import NOTHING_AVOIDED, AvoidedKernels
from .backend_selection import select_sampler_backend
from .logits import chosen_logprobs, process_logits, token_logprobs
from .rare_sampler import processed_logits, sample_rare
from .sampler_backend import SamplerBackend
from .torch_backend import TorchSamplerBackend

if TYPE_CHECKING:
    from torch import Tensor

    from ...runtime.step_plan import TokenMasks
    from .logits import TokenLogprobs
    from .sampling_batch import LogprobRequest, SamplingBatch
    from .token_counts import TokenCounts


Refused = Callable[[npt.NDArray[np.int64]], "TokenMasks | None"]
"""See `GetMasks.after`."""


class Sampled(NamedTuple):
    """The sampled tokens, on the device.

    Attributes:
        token_ids: [S] int64.
        finite: [S] bool; where False the logits were not finite and the token is arbitrary.
        logprobs: for the requests in `SamplingBatch.logprobs`, with the largest k of them.
        chosen: [n, M] float32, of the tokens that these requests have chosen, at most M each; None if none has.
    """

    token_ids: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None
    chosen: Tensor | None = None


class Sampler:
    """Samples tokens and counts them for the penalties.

    Attributes:
        recorded_bytes: see `SamplerBackend`.
    """

    def __init__(self, counts: TokenCounts, backend: SamplerBackend | None = None) -> None:
        """Take the sampler backend; None: torch's operations."""
        self._counts = counts
        self._backend = backend or TorchSamplerBackend(counts)
        self.recorded_bytes = self._backend.recorded_bytes

    def sample(self, logits: Tensor, batch: SamplingBatch, refused: Refused | None = None) -> Sampled:
        """Sample one token per row.

        Args:
            logits: [S, V]; see `SamplerBackend`.
            refused: the masks of rows that must be sampled again; see `GetMasks.after`. Only on the CPU.
        """
        asked, changed = batch.logprobs, None
        if asked is not None and asked.processed is not None:  # before the penalties count the new tokens
            own = logits.index_select(0, self._counts.buffers.put(asked.processed.indices)).float()
            changed = process_logits(own, asked.processed.batch, self._counts, self._counts.buffers)
        token_ids, finite = self._backend.sample(logits, batch)
        if batch.rare is not None:
            rows = self._counts.buffers.put(batch.rare.indices)
            chosen = sample_rare(logits.index_select(0, rows), batch.rare, self._counts, self._backend)
            token_ids.index_copy_(0, rows, chosen)
        if refused is not None and (masks := refused(token_ids.numpy())) is not None:
            again = batch.rows(masks.indices).with_masks(
                masks._replace(indices=np.arange(len(masks.indices)))
            )
            rows = torch.from_numpy(masks.indices)
            token_ids[rows] = self._backend.sample(logits[rows], again).token_ids
        if asked is None:
            return Sampled(token_ids, finite, None)
        return Sampled(token_ids, finite, *self._logprobs(logits, changed, asked, token_ids))

    def _logprobs(
        self, logits: Tensor, changed: Tensor | None, asked: LogprobRequest, token_ids: Tensor
    ) -> tuple[TokenLogprobs, Tensor | None]:
        """`Sampled.logprobs` and `Sampled.chosen`, from the model's logits or from those of the rows after changes."""
        indices, ids, top_k = (
            np.array(asked.sampled_idx, dtype=np.int64),
            asked.chosen_ids(),
            max(asked.top_k),
        )
        put = self._counts.buffers.put
        if changed is None or asked.processed is None:
            logprobs = self._backend.logprobs(logits, indices, token_ids, top_k)
            rows = None if ids is None else logits.index_select(0, put(indices))
        else:
            own_ids = token_ids.index_select(0, put(indices))
            rows = processed_logits(changed, asked.processed, own_ids)
            logprobs = token_logprobs(rows, own_ids, top_k)
        return logprobs, None if ids is None or rows is None else chosen_logprobs(rows, put(ids))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Log-probabilities of given tokens and of the likeliest; used for prompts.

        Args:
            logits: [n, V], the last axis contiguous; see `SamplerBackend`.
            token_ids: [n] int64.
            top_k: 0 for none.
        """
        every_row = np.arange(len(logits), dtype=np.int64)
        return self._backend.logprobs(logits, every_row, token_ids, top_k)


def make_sampler(
    counts: TokenCounts,
    device: torch.device,
    logits_dtype: torch.dtype = torch.float32,
    record: Callable[[SamplerBackend], SamplerBackend] | None = None,
    avoid: AvoidedKernels = NOTHING_AVOIDED,
) -> Sampler:
    """A sampler with the preferred backend of this device, prepared for logits of this dtype.

    Args:
        record: returns the backend with recordings of what can be recorded; None: there are no recorded decodes.
        avoid: the components to do without.
    """
    backend = select_sampler_backend(counts, device, logits_dtype, avoid)
    return Sampler(counts, backend if record is None else record(backend))
