"""`Fitted`: a cost model fitted to the steps of a real run, and the quality of the fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..runtime.errors import ConfigError
from ..scheduler.batch import StepWork

MIN_STEPS: Final = 12
"""Fewer steps do not determine five coefficients."""
MIN_R_SQUARED: Final = 0.3
"""A model that explains less is no better than the mean step time."""
_LEAST_S: Final = 1e-6  # of a measured step; relative errors need a divisor


class MeasuredStep(NamedTuple):
    """A step of a real run: its work and its duration."""

    work: StepWork
    step_s: float


class FitQuality(NamedTuple):
    """Accuracy of a fitted model on the steps it was fitted to.

    Attributes:
        num_steps: number of these steps.
        r_squared: share of the variance of step times that the model explains; 1 is all.
        median_error, p90_error: of |predicted - measured| / measured.
    """

    num_steps: int
    r_squared: float
    median_error: float
    p90_error: float

    @property
    def is_useless(self) -> bool:
        """Whether the step times depend mainly on causes outside the model."""
        return not self.r_squared >= MIN_R_SQUARED

    def warning(self) -> str:
        """A prominent warning; "" if there is none."""
        if not self.is_useless:
            return ""
        return (
            f"WARNING: the step times are not explained by the work of the steps (R² {self.r_squared:.2f}, at least "
            f"{MIN_R_SQUARED} is needed), so the simulated times mean little; record on a quiet machine, with more and "
            f"more varied requests"
        )

    def text(self) -> str:
        """One line for the user."""
        return (
            f"fitted to {self.num_steps:,} steps: R² {self.r_squared:.3f}, error of a step {self.median_error:.1%} "
            f"(median), {self.p90_error:.1%} (P90)"
        )


class Fitted:
    """step_s = a + b·prefill tokens + c·pairs + d·decode rows + e·KV tokens read, plus a time per swapped token.

    Least squares of the *relative* error: a prefill step takes a hundred times as long as a decode step, and with
    absolute errors the many short steps, which determine TPOT, would have no weight. No coefficient may be negative, so
    that more work never takes less time: the most negative one is set to 0 and the rest fitted again until none is.
    """

    def __init__(self, coefficients: Sequence[float], swapped_token_s: float, quality: FitQuality) -> None:
        self._coefficients = tuple(float(each) for each in coefficients)
        self._swapped_token_s = swapped_token_s
        self.quality = quality

    @classmethod
    def to(
        cls, steps: Sequence[MeasuredStep], *, overhead_s: float = 0.0, swapped_token_s: float = 0.0
    ) -> Fitted:
        """Fit to measured steps.

        Args:
            steps: without the time of swaps.
            overhead_s: the time between two steps: planning, settling, sending.
            swapped_token_s: measured separately, since few steps swap.

        Raises:
            ConfigError: there are too few steps.
        """
        if len(steps) < MIN_STEPS:
            raise ConfigError(
                f"the run has {len(steps)} steps with tokens, but a cost model needs {MIN_STEPS}; record a longer one"
            )
        measured = np.maximum([step.step_s for step in steps], _LEAST_S)
        features = np.array([_features(step.work) for step in steps])
        coefficients = _non_negative(features / measured[:, None], np.ones(len(steps)))
        predicted = features @ coefficients
        relative = np.abs(predicted - measured) / measured
        spread = float(((measured - measured.mean()) ** 2).sum())
        missed = float(((measured - predicted) ** 2).sum())
        quality = FitQuality(
            len(steps),
            1.0 - missed / spread if spread > 0 else float(missed < 1e-12),
            float(np.median(relative)),
            float(np.quantile(relative, 0.9)),
        )
        coefficients[0] += overhead_s
        return cls(coefficients.tolist(), swapped_token_s, quality)

    def step_s(self, work: StepWork) -> float:
        fixed, token, pair, row, kv = self._coefficients
        return (
            fixed
            + token * work.prefill_tokens
            + pair * work.prefill_pairs
            + row * work.decode_rows
            + kv * work.kv_tokens
            + self._swapped_token_s * work.swapped_tokens
        )


def _features(work: StepWork) -> tuple[float, ...]:
    return 1.0, work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.kv_tokens


def _non_negative(
    features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least squares with coefficients of 0 or more; columns are scaled, because pair counts reach millions."""
    scale = np.abs(features).max(axis=0)
    kept = np.flatnonzero(scale > 0)
    result = np.zeros(features.shape[1])
    while kept.size:
        solution = np.linalg.lstsq(features[:, kept] / scale[kept], target, rcond=None)[0]
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            result[kept] = solution / scale[kept]
            break
        kept = np.delete(kept, worst)
    return result
