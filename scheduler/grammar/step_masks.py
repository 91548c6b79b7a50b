"""`StepMasks`: the masks of one step, as the runner asks for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...runtime.step_plan import TokenMasks
from ..arrays import BoolArray
from ..batch import ScheduleBatch
from .mask_filler import MaskFiller


class StepMasks:
    """A `GetMasks`."""

    __slots__ = ("_batch", "_filler", "_here", "_settle_earlier")

    def __init__(
        self,
        filler: MaskFiller,
        batch: ScheduleBatch,
        here: Callable[[ScheduleBatch], BoolArray],
        settle_earlier: Callable[[], None],
    ) -> None:
        """Take the parts.

        Args:
            filler: of the scheduler.
            batch: of the step.
            here: which requests of a batch still have their row, [B].
            settle_earlier: settles all steps before it: the masks depend on their tokens.
        """
        self._filler = filler
        self._batch = batch
        self._here = here
        self._settle_earlier = settle_earlier

    def __call__(self) -> TokenMasks | None:
        """See `GetMasks`."""
        self._settle_earlier()
        return self._filler.fill(self._batch, self._here(self._batch))

    def before(self) -> TokenMasks | None:
        """See `GetMasks`."""
        self._settle_earlier()
        return self._filler.fill_unchecked(self._batch, self._here(self._batch))

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        """See `GetMasks`."""
        return self._filler.fill_refused(self._batch, self._here(self._batch), token_ids)
