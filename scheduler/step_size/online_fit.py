"""`OnlineFit`: a linear model of measured seconds that is learned while the engine runs.

Least squares with forgetting, in plain floats and a fixed order of operations: the same measurements give bit-identical
coefficients on every machine, and a replay depends on it. One measurement costs some microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

KEPT: Final = 0.97
"""Factor on the weight of old measurements at each new one; about the last 30 measurements count."""
_TRUSTED_AFTER: Final = 8  # measurements; with fewer, outliers cannot be recognized
_MAX_SURPRISE: Final = (
    2.0  # a measurement counts as at most this many times the prediction, and at least 1 / it
)
_ALWAYS_SOLVED: Final = 16  # measurements after each of which the coefficients are computed
_DAMPING: Final = 0.01
_LEAST_S: Final = 1e-6  # of a step; errors are relative, and need a divisor


class OnlineFit:
    """seconds = Σ coefficient · feature.

    - Errors are relative to the measured time, so that short steps are fitted as well as long ones.
    - No coefficient is negative: more work never takes less time.
    - A measurement far from the prediction is clipped (`_MAX_SURPRISE`). A step that another program delayed changes
      little; when the machine has become slower, the fit follows within some steps.
    - A coefficient without information in recent measurements keeps its value: each solution is drawn to the previous
      one, and the more so the *stiffer* the coefficient is. So a thousand steps with one request do not change what was
      learned from steps with many.
    """

    def __init__(self, stiffness: Sequence[float], *, solve_interval: int = 1) -> None:
        """Begin with all coefficients 0.

        Args:
            stiffness: of each coefficient. While the measurements do not separate two features, the time is attributed
                to the one with the smaller stiffness.
            solve_interval: measurements from one solution to the next, after the first `_ALWAYS_SOLVED`.
        """
        self._stiffness = tuple(_DAMPING * each for each in stiffness)
        size = len(self._stiffness)
        self._products = [[0.0] * size for _ in range(size)]  # of features with each other: weighted sums
        self._targets = [0.0] * size  # of features with seconds
        self._solve_interval = solve_interval
        self._count = 0
        self.coefficients: tuple[float, ...] = (0.0,) * size

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; 0 before the first measurement."""
        return sum(a * b for a, b in zip(self.coefficients, features, strict=True))

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Take a measurement."""
        if seconds <= 0:
            return  # no information
        self._count += 1
        seconds = max(seconds, _LEAST_S)
        expected = seconds
        if self._count > _TRUSTED_AFTER:
            expected = max(self.predict(features), _LEAST_S)
            seconds = min(max(seconds, expected / _MAX_SURPRISE), expected * _MAX_SURPRISE)
        scale = 1.0 / expected
        scaled = [feature * scale for feature in features]
        target = seconds * scale
        targets = self._targets
        for i, (value, row) in enumerate(zip(scaled, self._products, strict=True)):
            targets[i] = targets[i] * KEPT + value * target
            for j in range(i + 1):
                row[j] = row[j] * KEPT + value * scaled[j]
        if self._count <= _ALWAYS_SOLVED or not self._count % self._solve_interval:
            self._solve()

    def _solve(self) -> None:
        """Fit all coefficients; while one is negative, set the most negative one to 0 and fit the rest."""
        solution = [0.0] * len(self.coefficients)
        kept = [idx for idx, row in enumerate(self._products) if row[idx] > 0]
        for idx in set(range(len(solution))).difference(kept):
            solution[idx] = self.coefficients[idx]  # never measured, or so long ago that its weight is 0
        while kept:
            values = self._fit(kept)
            worst = min(range(len(kept)), key=values.__getitem__)
            if values[worst] >= 0:
                for idx, value in zip(kept, values, strict=True):
                    solution[idx] = value
                break
            del kept[worst]
        self.coefficients = tuple(solution)

    def _fit(self, kept: list[int]) -> list[float]:
        """The damped normal equations of some features, scaled so that their diagonal is 1."""
        scales = [self._products[idx][idx] ** -0.5 for idx in kept]
        matrix, target = [], []
        for i, idx in enumerate(kept):
            row = [self._products[max(idx, other)][min(idx, other)] for other in kept]
            matrix.append([value * scales[i] * scale for value, scale in zip(row, scales, strict=True)])
            matrix[i][i] += self._stiffness[idx]
            drawn_to = self._stiffness[idx] * self.coefficients[idx] / scales[i]
            target.append(self._targets[idx] * scales[i] + drawn_to)
        return [value * scale for value, scale in zip(_solved(matrix, target), scales, strict=True)]


def _solved(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination in place; without pivoting, since the matrix is symmetric and positive definite."""
    size = len(target)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            target[j] -= factor * target[i]
    for i in reversed(range(size)):
        for k in range(i + 1, size):
            target[i] -= matrix[i][k] * target[k]
        target[i] /= matrix[i][i]
    return target
