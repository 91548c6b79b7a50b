"""`SamplerBackend`: the protocol of sampler backends, which turn logits into tokens; see `backend_selection`.

`Sampler` does not depend on the backend. All backends give the same tokens, except where two candidates are so close
that the rounding of a logarithm or of a sum decides.
"""

# Shapes: S requests that sample in this step, V tokens of the vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .logits import TokenLogprobs
    from .sampling_batch import Int32s, Int64s, SamplingBatch


class SampledTokens(NamedTuple):
    """One token per row.

    Attributes:
        token_ids: [S] int64.
        finite: [S] bool; where False some logit of the model is NaN or infinite, and the token is arbitrary.
    """

    token_ids: Tensor
    finite: Tensor


class CapturableSampler(Protocol):
    """Sampling of greedy and unfiltered rows that can be recorded in a CUDA graph and replayed with other inputs.

    Attributes:
        table_width: int32 words per row of the table.
    """

    @property
    def table_width(self) -> int: ...

    def results(self, num_rows: int) -> SampledTokens:
        """Memory for results, on the device."""
        ...

    def write_table(self, table: Int32s, batch: SamplingBatch) -> None:
        """Write the table of a batch, on the host, [n, table_width] with n at least `batch.num_rows`.

        Args:
            batch: with greedy rows and unfiltered draws only; the rows after its own are greedy.
        """
        ...

    def sample_rows(self, logits: Tensor, table: Tensor | None, results: SampledTokens) -> None:
        """Queue the sampling of one token per row.

        Args:
            logits: [n, V]; see `SamplerBackend.sample`.
            table: [n, table_width] int32, on the device; None: all rows are greedy.
            results: [n]; written.
        """
        ...


class SamplerBackend(Protocol):
    """A sampler backend; none of its methods waits for the device.

    Attributes:
        recorded_bytes: device memory of its recordings, of each size, the largest first; empty without any.
    """

    @property
    def recorded_bytes(self) -> Sequence[int]: ...

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample one token per row as `batch` asks, and count the tokens of rows with penalties.

        Args:
            logits: [S, V], the last axis contiguous; not modified. Float32, or on a GPU the serving dtype: its
                values are widened first, so the result is that of float32.
        """
        ...

    def logprobs(self, logits: Tensor, indices: Int64s, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Log-probabilities of some rows, from the model's own logits.

        Args:
            logits: as in `sample`.
            indices: [n] into the S rows, on the host.
            token_ids: [S] int64.
            top_k: number of likeliest tokens, 0 for none.
        """
        ...

    def capturable(self) -> CapturableSampler | None:
        """The sampling that can be recorded in a CUDA graph; None: none of it."""
        ...
