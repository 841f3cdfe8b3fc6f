"""Balancing of a dataflow: which machine should own which bucket, decided from measured loads.

The policies are pure: a snapshot of one subquery in, a :class:`MapChange` or a refusal out.
"""

from __future__ import annotations

from roost.dataflow.balancing.greedy import GreedyPolicy
from roost.dataflow.balancing.hot_keys import EarlyKeys, HotKey, Remedy, early_keys, hot_keys
from roost.dataflow.balancing.loads import MapDecision, MapPolicy, SubqueryLoad
from roost.dataflow.balancing.planner import BucketPlanner

__all__ = [
    "BucketPlanner",
    "EarlyKeys",
    "GreedyPolicy",
    "HotKey",
    "MapDecision",
    "MapPolicy",
    "Remedy",
    "SubqueryLoad",
    "early_keys",
    "hot_keys",
]
