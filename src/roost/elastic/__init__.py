"""Elasticity: how many executors a group should have, and which buckets move when that changes.

The policies are pure: a snapshot of a round and a memory in, a typed decision with its reason and
the next memory out. The same objects run in the simulator.
"""

from __future__ import annotations

from roost.elastic.decisions import Balance, Cannot, ElasticDecision, Provision, Release
from roost.elastic.group import Executors, GroupSnapshot, StageLoad
from roost.elastic.manager import Manager, Memory, SizePolicy
from roost.elastic.ring import Ring, resized
from roost.elastic.spark_rule import SparkRule
from roost.model.elastic import ElasticRules

__all__ = [
    "Balance",
    "Cannot",
    "ElasticDecision",
    "ElasticRules",
    "Executors",
    "GroupSnapshot",
    "Manager",
    "Memory",
    "Provision",
    "Release",
    "Ring",
    "SizePolicy",
    "SparkRule",
    "StageLoad",
    "resized",
]
