"""`FeatureHead`: a network over features; `HeadPrograms`: its drafts on the CPU, each as one call to our library.

A number of tokens, and of tokens that need drafts, is recorded when it first occurs: that computes the drafts, too. A
step's first draft reads what has waited, so it has more tokens than drafts; the others have one token each.
"""

# Shapes: T tokens, W of them need drafts, n requests with drafts, F and K numbers of a feature and of a state (equal in
# all heads), N tokens that the head can draft.

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

import torch

from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from ..forward_batch import FeaturedStates, ForwardBatch
from ..kernels.cpu.library import load_library
from ..recording.programs.arena import Arena
from ..recording.programs.native_program import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..attention.backend import RepeatableAttention
    from ..memory.kv_pool import KVPool
    from ..recording.programs.native_program import NativeProgram

logger = logging.getLogger(__name__)

MAX_TOKENS: Final = MAX_DRAFT_STEP_TOKENS
"""Largest T of a program: the most of a step with drafts."""
MAX_PROGRAMS: Final = 256
"""Programs that are kept. Steps of many requests have many numbers of tokens; the longest unused program is dropped."""


class FeatureHead(Protocol):
    """The network of a `FeatureModule`.

    Attributes:
        token_ids: [N] int64, the model's id of each token that it can draft; None: it can draft all.
    """

    token_ids: Tensor | None

    def entered(self, features: Tensor) -> Tensor:
        """[T, F] features of the model -> [T, K], what the network reads in their place."""
        ...

    def store(self, token_ids: Tensor, before: Tensor, batch: ForwardBatch) -> None:
        """Store the keys and values of pairs.

        Args:
            token_ids: [T] int64.
            before: [T, K] `entered` of the feature of the token before each, or a state from `predict`. May be
                overwritten.
            batch: positions and slots of the pairs, with the pool of the network.
        """
        ...

    def predict(self, token_ids: Tensor, before: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Store pairs as `store` does, and predict what follows the tokens of `batch.logits_indices`, or all.

        Returns:
            states in the place of `entered` features of these tokens, [W, K]; and logits, [W, N].
        """
        ...


class HeadPrograms:
    """Native programs (`NativeProgram`), see the module. All read the same memory.

    Attributes:
        max_tokens: largest T; more tokens are computed call by call. 0 if this head cannot be recorded.
        num_replayed: drafts that were replayed, without the recorded ones.
    """

    def __init__(
        self, head: FeatureHead, kv_pool: KVPool, attention: RepeatableAttention, like: Tensor
    ) -> None:
        """Take the parts; `like`: a tensor [..., K] in the dtype of features."""
        self.max_tokens = MAX_TOKENS
        self.num_replayed = 0
        self._head, self._kv_pool, self._attention = head, kv_pool, attention
        self._library, self._arena = load_library(), Arena()
        self._numbers = torch.zeros((7, MAX_TOKENS), dtype=torch.int64)
        self._before = like.new_zeros((MAX_TOKENS, like.shape[-1]))
        self._programs: dict[tuple[int, int, bool], tuple[NativeProgram, FeaturedStates]] = {}

    def predict(self, columns: Sequence[Tensor], before: Tensor, *, first: bool) -> tuple[Tensor, Tensor]:
        """Draft; the results are valid until the next call.

        Args:
            columns: int64; [T] ids, positions and slots of pairs; [n] the tokens that need drafts, rows, prefix_lens
                and extend_lens, see `BatchLayout`.
            before: [T, K] features if `first`, else states, see `FeatureHead.predict`, which has the same results.
        """
        num_tokens, num_wanted = len(columns[0]), len(columns[3])
        self._numbers[-1].zero_()  # no tokens after those of the requests
        for row, column in zip(self._numbers, columns, strict=True):
            row[: len(column)] = column
        self._before[:num_tokens] = before
        key = num_tokens, num_wanted, first
        if (known := self._programs.pop(key, None)) is not None:
            self._programs[key] = program, result = known  # now the last
            program.run()
            self.num_replayed += 1
            return result.features, result.hidden
        recorded = record(self._library, self._arena, lambda: self._compute(*key))
        if recorded.program is None:
            self.max_tokens = num_tokens - 1  # some matmuls have other kernels from a number of tokens on
            logger.info(
                "draft_recordings=%d tokens: not recordable: %s", self.max_tokens, recorded.reason_against
            )
        else:
            self._programs[key] = recorded.program, recorded.result
            if len(self._programs) > MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return recorded.result.features, recorded.result.hidden

    def _compute(self, num_tokens: int, num_wanted: int, first: bool) -> FeaturedStates:
        """Logits and states; this is recorded, including the planning of attention."""
        input_ids, positions, out_cache_loc, wanted, *lengths = self._numbers[:, :num_tokens]
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            kv_pool=self._kv_pool,
            out_cache_loc=out_cache_loc,
            attention=self._attention.repeatable_step(*lengths),
            logits_indices=None if num_wanted == num_tokens else wanted[:num_wanted],
        )
        before = self._before[:num_tokens]
        # A head may overwrite what it gets, and return it.
        before = self._head.entered(before) if first else before
        after, logits = self._head.predict(input_ids, before * 1.0, batch)
        return FeaturedStates(logits, after)
