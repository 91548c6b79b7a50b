"""`StepMasks`: the masks of one step, as the runner asks for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...runtime.step_plan import TokenMasks
from ..batch import ScheduleBatch
from .mask_filler import MaskFiller


class MaskMeter:
    """Counts masks, and measures the time of the matchers, also for tokens that needed no mask.

    Attributes:
        num_masks, seconds: totals.
    """

    __slots__ = ("_clock", "num_masks", "seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.num_masks, self.seconds = 0, 0.0

    def measured(self, fill: Callable[[], TokenMasks | None]) -> TokenMasks | None:
        """The result of `fill`."""
        begin_s = self._clock()
        masks = fill()
        self.seconds += self._clock() - begin_s
        self.num_masks += 0 if masks is None else len(masks.indices)
        return masks


class StepMasks:
    """A `GetMasks`."""

    __slots__ = ("_batch", "_filler", "_meter", "_settle_earlier")

    def __init__(
        self, filler: MaskFiller, batch: ScheduleBatch, settle_earlier: Callable[[], None], meter: MaskMeter
    ) -> None:
        """Take the parts.

        Args:
            filler: of the scheduler.
            batch: of the step.
            settle_earlier: settles all steps before it: the masks depend on their tokens.
            meter: of all steps.
        """
        self._filler = filler
        self._batch = batch
        self._settle_earlier = settle_earlier
        self._meter = meter

    def __call__(self) -> TokenMasks | None:
        """See `GetMasks`."""
        self._settle_earlier()
        return self._meter.measured(lambda: self._filler.fill(self._batch))

    def before(self) -> TokenMasks | None:
        """See `GetMasks`."""
        self._settle_earlier()
        return self._meter.measured(lambda: self._filler.fill_unchecked(self._batch))

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        """See `GetMasks`."""
        return self._meter.measured(lambda: self._filler.fill_refused(self._batch, token_ids))
