"""Global planner: one plan for all machines, computed from the points of every cell."""

from __future__ import annotations

from roost.balance.planner.policy import CostRates, GlobalPlanner, imbalance

__all__ = ["CostRates", "GlobalPlanner", "imbalance"]
