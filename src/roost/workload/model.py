"""Calibrated cost model: predicts the busy seconds of a machine from its statistics.

``N * Q * R`` ranks machines but is not a time. This model is linear: the busy seconds of a machine
are the sum of its features (partitions, points, candidate pairs), each times a coefficient learnt
online from measured times. Older rounds have exponentially less weight, so the model adapts to a
machine that becomes slower. Coefficients are not negative: more work never takes less time, and a
planner would exploit a model that predicts so.

Errors of measured times are proportional to the times, so observations are weighted by the inverse
square of the time; otherwise only the busiest machines would be fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEATURES_MAX = 8
# Weight of a given prior, in rounds.
PRIOR_ROUNDS = 0.1
# Times below this share of the round's mean are as uncertain as those at it.
FLOOR_SHARE = 0.1
ERROR_MEMORY = 0.8
# Keeps the equations solvable if features are collinear.
RIDGE = 1e-9


class CostModel:
    """Predicts busy seconds and learns from measured ones.

    ``forgetting`` is the factor by which the weight of a round decreases each round, ``prior`` the
    initial coefficients.

    Attributes
    ----------
    coefficients
        Seconds per unit of each feature, not negative.
    error
        Exponentially weighted relative error of the predictions; 1.0 before the first.

    Examples
    --------
    >>> model = CostModel(2)
    >>> work = np.array([[1.0, 1e6], [1.0, 2e6], [1.0, 5e6]])
    >>> for _ in range(3):
    ...     error = model.observe(work, [0.6, 1.1, 2.6])
    >>> model.predict([[1.0, 4e6]]).round(3).tolist()
    [2.1]
    """

    def __init__(
        self, features: int, *, forgetting: float = 0.95, prior: Sequence[float] | None = None
    ) -> None:
        assert 1 <= features <= FEATURES_MAX
        assert 0.0 < forgetting <= 1.0
        assert prior is None or len(prior) == features
        self._forgetting = forgetting
        self._prior = None if prior is None else np.asarray(prior, np.float64)
        self._matrix = np.zeros((features, features))
        self._vector = np.zeros(features)
        self._seen = 0
        self._predicted = False
        self.error = 1.0
        self.coefficients = np.zeros(features) if self._prior is None else self._prior.copy()

    def predict(self, features: ArrayLike) -> NDArray[np.float64]:
        """Predict the busy seconds of each row of features."""
        seconds: NDArray[np.float64] = np.asarray(features, np.float64) @ self.coefficients
        return seconds

    def observe(self, features: ArrayLike, busy_s: ArrayLike) -> float:
        """Learn from the features and measured busy seconds of each machine in one round.

        Returns the relative error of the prediction made before this observation: the sum of the
        differences over the sum of the times.
        """
        rows = np.asarray(features, np.float64).reshape(-1, self._vector.size)
        times = np.asarray(busy_s, np.float64)
        if not times.sum() > 0.0:
            return 0.0
        error = float(np.abs(self.predict(rows) - times).sum() / times.sum())
        if self._seen or self._prior is not None:
            memory = ERROR_MEMORY if self._predicted else 0.0
            self.error = memory * self.error + (1.0 - memory) * error
            self._predicted = True
        self._learn(rows, times)
        return error

    def _learn(self, rows: NDArray[np.float64], times: NDArray[np.float64]) -> None:
        mean = float(times.mean())
        weights = 1.0 / (np.maximum(times, FLOOR_SHARE * mean) ** 2 * times.size)
        matrix = (rows * weights[:, None]).T @ rows
        if not self._seen and self._prior is not None:
            own = PRIOR_ROUNDS * np.diag(np.diag(matrix))
            self._matrix += own
            self._vector += own @ self._prior
        self._matrix = self._forgetting * self._matrix + matrix
        self._vector = self._forgetting * self._vector + rows.T @ (weights * times)
        self._seen += times.size
        self.coefficients = solve_nonnegative(self._matrix, self._vector)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory."""
        return {
            "forgetting": self._forgetting,
            "prior": None if self._prior is None else self._prior.tolist(),
            "matrix": self._matrix.tolist(),
            "vector": self._vector.tolist(),
            "coefficients": self.coefficients.tolist(),
            "seen": self._seen,
            "predicted": self._predicted,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """Invert :meth:`to_json`."""
        vector = np.asarray(data["vector"], np.float64)
        model = cls(vector.size, forgetting=data["forgetting"], prior=data["prior"])
        model._vector = vector
        model._matrix = np.asarray(data["matrix"], np.float64)
        model._seen = data["seen"]
        model._predicted = data["predicted"]
        model.coefficients = np.asarray(data["coefficients"], np.float64)
        model.error = data["error"]
        return model


def solve_nonnegative(
    matrix: NDArray[np.float64], vector: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve non-negative least squares from normal equations.

    With few unknowns, every subset of positive coefficients can be tried: the best solution
    without a negative coefficient is the result.
    """
    # Features differ by orders of magnitude, so each is scaled by its root mean square.
    scale = np.sqrt(np.diag(matrix))
    used = [k for k in range(vector.size) if scale[k] > 0.0]
    scale[scale == 0.0] = 1.0
    scaled = matrix / np.outer(scale, scale) + RIDGE * np.eye(vector.size)
    right = vector / scale
    best, least = np.zeros(vector.size), 0.0
    for chosen in chain.from_iterable(combinations(used, k + 1) for k in range(len(used))):
        places = list(chosen)
        part = np.linalg.solve(scaled[np.ix_(places, places)], right[places])
        # Half the reduction of the squared error relative to predicting zero.
        value = -0.5 * float(part @ right[places])
        if part.min() >= 0.0 and value < least:
            best, least = np.zeros(vector.size), value
            best[places] = part
    result: NDArray[np.float64] = best / scale
    return result
