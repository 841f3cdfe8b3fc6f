"""Compile the loops of dataflows."""

from __future__ import annotations

import numpy as np

from roost.dataflow.groups import group, slide
from roost.dataflow.join import time_ranges


def compile_loops() -> None:
    """Call every loop with a few tuples."""
    codes = np.array([1, 0, 1])
    groups, _ = group(codes)
    low, high = time_ranges(codes, codes, groups.starts, np.arange(3), 2)
    order, windows = slide(codes, np.arange(3), 2, 1, 0, 2)
    assert order.tolist() == [1, 0, 2] and windows.shape[0] == 3
    assert groups.rows.tolist() == [1, 0, 2] and (low <= high).all()
