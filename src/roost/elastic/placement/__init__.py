"""Placement: which executor group runs which operator, and how many executors each group has.

The policies are pure: a snapshot in, a typed decision with its reason out. The same objects run in
the simulator.
"""

from __future__ import annotations

from typing import Protocol

from roost.elastic.placement.best import Best
from roost.elastic.placement.pairs import Algorithm1, Static
from roost.elastic.placement.series import LoadSeries
from roost.elastic.placement.sizes import Algorithm2, SizeDecision
from roost.elastic.placement.snapshot import (
    ExecutorGroup,
    OperatorLoad,
    OperatorMove,
    Place,
    PlacementDecision,
    PlacementSnapshot,
)


class PlacementPolicy(Protocol):
    """Maps operators to executor groups."""

    def decide(self, snapshot: PlacementSnapshot) -> PlacementDecision:
        """Return the decision of a round."""


__all__ = [
    "Algorithm1",
    "Algorithm2",
    "Best",
    "ExecutorGroup",
    "LoadSeries",
    "OperatorLoad",
    "OperatorMove",
    "Place",
    "PlacementDecision",
    "PlacementPolicy",
    "PlacementSnapshot",
    "SizeDecision",
    "Static",
]
