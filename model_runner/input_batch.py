"""`InputBatch`: the arrays of one step on the host, complete when constructed; `DraftRows`: the drafts to make for it.

`BatchBuilder` makes it for every step, independent of the executor. A `StepExecutor` copies its arrays to the memory
that the model reads (`ForwardBatch`): to new device memory, or to the fixed memory of a recording.
"""

# Shapes: B requests, T new tokens in the batch, W of them need logits, S requests that sample in this step, R rows of
# logits.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from .attention.backend import BatchLayout
    from .pooling.pooler import PooledChunk
    from .sampling.draft_batch import DraftBatch
    from .sampling.sampling_batch import SamplingBatch
    from .vision.encoder_rows import ImageTokens

Int64s = npt.NDArray[np.int64]

RELAYED: Final = -1
"""In `InputBatch.input_ids`: the host does not know the token yet; the `TokenRelay` holds it."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens that get log-probabilities from a chunk.

    Attributes:
        batch_idx: the request's index in the batch.
        start: index, among the W, of the token that predicts the first of them; the others follow one by one.
        targets: [n] int64, the tokens, device.
        top_k: number of likeliest tokens to report for each.
        chosen: further tokens to report for each.
    """

    batch_idx: int
    start: int
    targets: Tensor
    top_k: int
    chosen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step. Arrays are on the host; only `prompt_spans` and `drafts` hold device tensors.

    Attributes:
        layout: the requests and their lengths.
        token_rows: [T] the pool row of each token.
        positions: [T].
        out_cache_loc: [T] the KV slots of the tokens. They are not in the slot table yet.
        input_ids: [T], or `RELAYED`.
        logits_indices: [W] ascending, the tokens that need logits or hidden states, at least one per request; None:
            all T.
        sample_indices: [R] indices, among the W, of the tokens to sample after: the last token of each sampling
            request, and one more per draft; None if these are all W in order.
        sampled_idx: [S] the sampling requests' indices in the batch.
        cut_indices: [n] index, among the W, of the last token of each request that does not sample because its prompt
            continues in a later step.
        cut_idx: [n] the batch indices of these requests.
        sampling: how to sample the next tokens.
        prompt_spans: the prompt logprobs that requests of the batch ask for.
        drafts: the step's drafts, to verify them; None without any.
        pooled: the chunks of pooling requests with tokens that these requests need.
        token_types: [T] for models with a table of them; None: all are 0.
        adapter_slots: [T] the adapter slot of each token; None: all use the base model.
        state_plan: [1 + 4 * n] the plan of the state layers, see `state_runs`; None: the model has none.
        images: the tokens that take rows of the encoder, and the rows; None: there are none.
        rope_positions: [T], or [3, T] in steps with `images`: positions by which heads turn; None: `positions`.
    """

    layout: BatchLayout
    token_rows: Int64s
    positions: Int64s
    out_cache_loc: Int64s
    input_ids: Int64s
    logits_indices: Int64s | None
    sample_indices: Int64s | None
    sampled_idx: Int64s
    cut_indices: Int64s
    cut_idx: Int64s
    sampling: SamplingBatch
    prompt_spans: tuple[PromptSpan, ...]
    drafts: DraftBatch | None
    pooled: tuple[PooledChunk, ...] = ()
    token_types: Int64s | None = None
    adapter_slots: Int64s | None = None
    state_plan: Int64s | None = None
    images: ImageTokens | None = None
    rope_positions: Int64s | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def samples_all(self) -> bool:
        """Whether the step reads the logits of all T tokens in order and nothing else: decodes, also with drafts."""
        is_plain = not self.prompt_spans and self.images is None
        return self.logits_indices is None and self.sample_indices is None and is_plain


class DraftRows(NamedTuple):
    """The drafts that a plan asks for, of n requests with k drafts each; host arrays.

    Attributes:
        rows: [n] pool rows.
        positions: [n] position of the last token, which is the step's first input token; the drafts follow it.
        counts: [n] number of drafts, at least 1.
        out_cache_loc: [sum of counts] KV slots of the last token and of all drafts but the last, request after request.
        input_ids: [n] the last tokens; `RELAYED` where only the `TokenRelay` has them.
    """

    rows: Int64s
    positions: Int64s
    counts: Int64s
    out_cache_loc: Int64s
    input_ids: Int64s
