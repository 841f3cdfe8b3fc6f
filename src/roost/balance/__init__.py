"""Who does what: plans that give every cell to a machine, and strategies that make them."""

from __future__ import annotations

from roost.balance.plan import Partition, Plan, Router
from roost.balance.strategies import Strategy, initial_plan

__all__ = ["Partition", "Plan", "Router", "Strategy", "initial_plan"]
