"""`TokenChooser`: turns logits into tokens; torch's and Triton's are chosen between in `chooser_selection`.

`Sampler` does not know which of them it has. Both give the same tokens, but where two candidates are so close that the
rounding of a logarithm or of a sum decides.
"""

# Shapes: S requests that sample in this step, V tokens of the vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .logprobs import TokenLogprobs
    from .sampling_batch import Int64s, SamplingBatch


class Choice(NamedTuple):
    """One token of each row.

    Attributes:
        token_ids: [S] int64.
        finite: [S] bool; where False some logit of the model was NaN or infinite, and the token is arbitrary.
    """

    token_ids: Tensor
    finite: Tensor


class TokenChooser(Protocol):
    """Chooses tokens; nothing of it waits for the device."""

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Choice:
        """Choose as `batch` says, and count the tokens of rows with penalties.

        Args:
            logits: [S, V] float32, the last axis contiguous; left as they are.
        """
        ...

    def logprobs(self, logits: Tensor, indices: Int64s, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Log-probabilities of some rows, by the model's own logits.

        Args:
            logits: [S, V] float32, the last axis contiguous.
            indices: [n] into the S rows, on the host.
            token_ids: [S] int64.
            top_k: how many of the likeliest, 0 for none.
        """
        ...
