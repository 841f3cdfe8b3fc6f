"""Samples of a source, from which bounds and costs are learned before the stream begins."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa

from roost.model.arrays import Floats
from roost.model.columns import convert


class Sampled(Protocol):
    """A source of points that can be sampled."""

    def sample(self, columns: list[str]) -> pa.Table:
        """Return these columns of some rows."""


def sampled_positions(source: Sampled, x: str, y: str) -> tuple[Floats, Floats]:
    """Return the finite positions of a sample."""
    sample = source.sample([x, y])
    columns = (convert(sample[name], pa.float64())[0] for name in (x, y))
    xs, ys = (column.to_numpy(zero_copy_only=False) for column in columns)
    known = np.isfinite(xs) & np.isfinite(ys)
    return xs[known], ys[known]
