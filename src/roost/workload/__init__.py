"""Cost of each part of the space: TrioStat statistics, query histogram, calibrated cost model."""

from __future__ import annotations

from roost.workload.cells import CellCounter, CellCounts, query_ranges
from roost.workload.histogram import EulerHistogram
from roost.workload.model import CostModel
from roost.workload.trio import MachineStats, PartitionStats, Trio

__all__ = [
    "CellCounter",
    "CellCounts",
    "CostModel",
    "EulerHistogram",
    "MachineStats",
    "PartitionStats",
    "Trio",
    "query_ranges",
]
