"""Load balancing: plans that assign every cell to a machine, and policies that change them."""

from __future__ import annotations

from roost.balance.plan import Partition, Plan, Router
from roost.balance.strategies import initial_plan

__all__ = ["Partition", "Plan", "Router", "initial_plan"]
