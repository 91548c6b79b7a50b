"""`StepMasks`: the masks of one step, as the runner asks for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...runtime.step_plan import TokenMasks
from ..batch import ScheduleBatch
from ..records.decision_log import RefusedToken
from .mask_filler import Clock, MaskFiller


class MaskMeter:
    """Counts masks, and measures the time of the matchers, also for tokens that needed no mask.

    Attributes:
        num_masks, seconds: totals.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_masks, self.seconds = 0, 0.0

    def measured(self, fill: Callable[[Clock], TokenMasks | None]) -> TokenMasks | None:
        """The result of `fill`, which gets the clock."""
        begin_s = self._clock()
        masks = fill(self._clock)
        self.seconds += self._clock() - begin_s
        self.num_masks += 0 if masks is None else len(masks.indices)
        return masks


class StepMasks:
    """A `GetMasks`.

    Attributes:
        refused: see `Settled`; complete when the result of the step is there.
    """

    __slots__ = ("_batch", "_filler", "_meter", "_num_rounds", "_settle_earlier", "refused")

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
        self._num_rounds = 0  # of a multi-step decode, that have begun
        self.refused: list[RefusedToken] = []

    def __call__(self) -> TokenMasks | None:
        self._settle_earlier()
        self._num_rounds += 1
        return self._meter.measured(lambda clock: self._filler.fill(self._batch, clock))

    def before(self) -> TokenMasks | None:
        self._settle_earlier()
        self._num_rounds += 1
        return self._meter.measured(lambda clock: self._filler.fill_unchecked(self._batch, clock))

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        found: list[RefusedToken] = []
        self._filler.find_refused(token_ids.tolist(), found)
        self._add(found)

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        found: list[RefusedToken] = []
        masks = self._meter.measured(
            lambda clock: self._filler.fill_refused(self._batch, token_ids, found, clock)
        )
        self._add(found)
        return masks

    def _add(self, found: list[RefusedToken]) -> None:
        """Rounds after the first one follow its token; they have no drafts."""
        done = self._num_rounds - 1
        self.refused += [each._replace(offset=done) for each in found] if done else found
