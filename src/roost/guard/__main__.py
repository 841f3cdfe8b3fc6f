"""Compile the loops of the guard once: ``python -m roost.guard``.

As for the kernel: without this the first batch of a fresh installation waits for the compiler.
"""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from roost.guard import Guard, LiveQueries


def warm() -> int:
    """Run every compiled function on a few users; returns how many are known then."""
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
    return int(guard.listing()["users"])


if __name__ == "__main__":
    started = time.perf_counter()
    assert warm() > 0
    print(f"guard compiled in {time.perf_counter() - started:.1f} s")
