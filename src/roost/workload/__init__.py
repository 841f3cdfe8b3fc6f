"""What each piece of space costs: TrioStat, what it is compared with, and the calibrated model."""

from __future__ import annotations

from roost.workload.aqwa import AqwaStats, EulerHistogram
from roost.workload.cells import CellCounter, CellCounts, overlap_counts, query_ranges
from roost.workload.model import CostModel
from roost.workload.trio import AxisStats, MachineStats, PartitionStats, Trio

__all__ = [
    "AqwaStats",
    "AxisStats",
    "CellCounter",
    "CellCounts",
    "CostModel",
    "EulerHistogram",
    "MachineStats",
    "PartitionStats",
    "Trio",
    "overlap_counts",
    "query_ranges",
]
