"""Fakes and oracles, for users' tests and for Roost's own.

:class:`InProcessPipeline` is :class:`roost.Pipeline` without Spark: the same stages, loop, store
and files, with the tasks run one after the other in this process. :func:`brute_force` computes
matches from their definition. :class:`FakeAllocator` has executors without a cluster.
"""

from __future__ import annotations

from roost.runtime.executor import InProcessExecutor
from roost.testing.allocator import FakeAllocator
from roost.testing.oracle import brute_force
from roost.testing.pipeline import InProcessPipeline, check_states

__all__ = [
    "FakeAllocator",
    "InProcessExecutor",
    "InProcessPipeline",
    "brute_force",
    "check_states",
]
