"""`DraftModel`: a second, smaller model that drafts (`--speculative draft`), with its KV in the pages of the first.

It runs like the model itself, by a `StepExecutor` of its own over further tensors of the KV pool: the slot table of the
requests serves both.
"""

# Shapes: n requests with drafts, T tokens of a run, V tokens of the model's vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F

from ..input_batch import InputBatch
from ..sampling.sampling_batch import SamplingBatch

if TYPE_CHECKING:
    from torch import Tensor

    from ..recording.executor import StepExecutor
    from .lag import Run, Tokens

Int64s = npt.NDArray[np.int64]

_NOTHING: Final[Int64s] = np.empty(0, dtype=np.int64)


class DraftModel:
    """A `DraftModule`; see the module."""

    keeps_drafts = True

    def __init__(
        self, executor: StepExecutor, own_vocab_size: int, vocab_size: int, *, stores_only: bool
    ) -> None:
        """Take the parts.

        Args:
            executor: runs the draft model.
            stores_only: see `Decoder`; the weights after the keys of the last layer are most of a small draft model.
            own_vocab_size, vocab_size: of the draft model, and of the model that samples: files pad them differently.
        """
        self._executor = executor
        self._last_id = own_vocab_size - 1
        self._vocab_size = vocab_size
        self._stores_only = stores_only

    def start(self, row: int, prefix_loc: Int64s) -> None:
        """Nothing to do: it needs the tokens only."""

    def keep(self, batch: InputBatch, states: Tensor, valid: Int64s) -> None:
        """Nothing to do, as above."""

    def wait(self, tokens: Tokens) -> None:
        """Nothing to do, as above."""

    def compute(self, run: Run, states: Tensor | None = None) -> None:
        self._executor.run(self._batch(run, samples=False))

    def logits(self, run: Run, *, first: bool) -> Tensor:
        logits = self._executor.run(self._batch(run, samples=True)).logits
        assert logits is not None, "the batch samples"
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return F.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size]

    def _batch(self, run: Run, *, samples: bool) -> InputBatch:
        """The batch of a run; it samples after the last token of each request, or does not sample."""
        layout = run.layout()
        decodes = samples and not layout.num_extends
        return InputBatch(
            layout=layout,
            token_rows=run.token_rows,
            positions=run.positions,
            out_cache_loc=run.out_cache_loc,
            input_ids=np.minimum(run.input_ids.cpu().numpy(), self._last_id),
            logits_indices=None if decodes else _NOTHING if self._stores_only and not samples else run.lasts,
            sample_indices=None,
            sampled_idx=np.arange(len(run.rows)) if samples else _NOTHING,
            cut_indices=_NOTHING,
            cut_idx=_NOTHING,
            sampling=SamplingBatch(0),
            prompt_spans=(),
            drafts=None,
        )
