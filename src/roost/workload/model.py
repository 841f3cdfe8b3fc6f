"""The calibrated model: how many seconds a machine will be busy, from its statistics.

``N * Q * R`` ranks machines but is no time. Here the busy seconds of a machine are a sum of its
features (partitions, points, pairs to look at, ...), each times a coefficient that is learnt
while the system runs, from the times that the machines measured. Old rounds count less and less,
so the model follows a machine that becomes slower. No coefficient is below zero: more work never
takes less time, and a plan made from a model that says so would chase it.

A time is uncertain by a share of itself, so small machines are weighed up: otherwise only the
busiest would be fitted, and ranks among the others would be left to chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEATURES_MAX = 8
# How much a given prior weighs, in rounds.
PRIOR_ROUNDS = 0.1
# Times below this share of the round's mean are as uncertain as those at it.
FLOOR_SHARE = 0.1
ERROR_MEMORY = 0.8
ROWS_PER_FEATURE = 3
# Keeps features that always go together from making the equations unsolvable.
RIDGE = 1e-9


class CostModel:
    """Predicts busy seconds and learns from measured ones.

    Parameters
    ----------
    features
        Number of features of a machine.
    forgetting
        What a round still weighs one round later.
    prior
        Coefficients to begin with, in seconds per unit of each feature.

    Attributes
    ----------
    coefficients
        Seconds per unit of each feature, none below zero.
    error
        Relative error of the predictions, the last rounds' weighing most; 1.0 before there is any.

    Examples
    --------
    >>> model = CostModel(2)
    >>> work = np.array([[1.0, 1e6], [1.0, 2e6], [1.0, 5e6]])
    >>> for _ in range(3):
    ...     error = model.observe(work, [0.6, 1.1, 2.6])
    >>> model.predict([[1.0, 4e6]]).round(3).tolist(), model.ready
    ([2.1], True)
    """

    def __init__(
        self,
        features: int,
        *,
        forgetting: float = 0.95,
        prior: Sequence[float] | None = None,
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

    @property
    def features(self) -> int:
        """Number of features of a machine."""
        return int(self._vector.size)

    @property
    def ready(self) -> bool:
        """Whether enough was seen for the coefficients to mean something."""
        return self._seen >= ROWS_PER_FEATURE * self.features

    def predict(self, features: ArrayLike) -> NDArray[np.float64]:
        """Busy seconds of each row of features."""
        seconds: NDArray[np.float64] = np.asarray(features, np.float64) @ self.coefficients
        return seconds

    def observe(self, features: ArrayLike, busy_s: ArrayLike) -> float:
        """Learn from one round.

        Parameters
        ----------
        features
            A row for each machine.
        busy_s
            What each machine measured.

        Returns
        -------
        float
            Relative error of what the model would have said before it saw the times: the sum of
            the differences over the sum of the times.
        """
        rows = np.asarray(features, np.float64).reshape(-1, self.features)
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
        """Plain data for the state directory."""
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
        """Inverse of :meth:`to_json`."""
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
    """Least squares without negative coefficients, from normal equations.

    With so few unknowns every set of them that may be above zero can be tried: the best that
    comes out without a negative one is the answer.
    """
    # Features differ by many orders of magnitude; each is measured in its own root mean square.
    scale = np.sqrt(np.diag(matrix))
    used = [k for k in range(vector.size) if scale[k] > 0.0]
    scale[scale == 0.0] = 1.0
    scaled = matrix / np.outer(scale, scale) + RIDGE * np.eye(vector.size)
    right = vector / scale
    best, least = np.zeros(vector.size), 0.0
    for size in range(1, len(used) + 1):
        for chosen in combinations(used, size):
            places = list(chosen)
            part = np.linalg.solve(scaled[np.ix_(places, places)], right[places])
            # Half the fall of the squared error below that of predicting zero.
            value = -0.5 * float(part @ right[places])
            if part.min() >= 0.0 and value < least:
                best, least = np.zeros(vector.size), value
                best[places] = part
    result: NDArray[np.float64] = best / scale
    return result
