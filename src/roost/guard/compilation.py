"""Compile the loops of the guard."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from roost.guard import Guard, LiveQueries


def compile_loops() -> None:
    """Call every loop with a few users."""
    guard = Guard(0, users_max=16)
    names = pa.array([f"user-{k}" for k in range(40)])
    guard.block("user-1", 0)
    guard.on_requests(names, np.ones(40, np.bool_), 1)
    codes, rounds = np.arange(40, dtype=np.int32), np.zeros(40, np.int64)
    ranges = np.ones((40, 4), np.int32)
    guard.on_rebalance(
        np.array([[0, 0, 4, 4]], np.int32), LiveQueries(names, codes, rounds, ranges)
    )
    guard.close_round(0, 41)
    assert guard.listing()["users"] > 0, "the guard counted no user"
