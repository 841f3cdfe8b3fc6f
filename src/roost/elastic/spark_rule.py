"""Spark's own rule of dynamic allocation, for comparison.

It requests executors while tasks wait for a slot: one after ``BACKLOG_S``, then twice as many each
time that tasks still wait after as long again, up to one slot for each task. An executor without a
task for ``IDLE_S`` is removed. Utilisation plays no part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roost.balance.changes import NoChange
from roost.elastic.decisions import ElasticDecision, Provision, Release
from roost.elastic.group import GroupSnapshot
from roost.elastic.manager import Memory
from roost.model.elastic import ElasticRules

BACKLOG_S = 1.0  # spark.dynamicAllocation.schedulerBacklogTimeout
IDLE_S = 60.0  # spark.dynamicAllocation.executorIdleTimeout


@dataclass(frozen=True)
class SparkRule:
    """The policy ``spark``; it considers no utilisation and waits for no change."""

    rules: ElasticRules

    def decide(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Decide from the tasks of the round."""
        n, rules = group.executors.planned, self.rules
        costs = {s.name: s.busy_s / s.rows for s in group.stages if s.rows > 0}
        load = group.offered(costs, rules.batch_seconds) or 0.0
        needed = min(max(math.ceil(group.tasks / group.slots), rules.min), rules.max)
        # The clock until which executors are not idle for long enough.
        memory = replace(memory, retry=memory.retry if n > needed else group.clock + IDLE_S)
        if n < needed and group.waiting_s >= BACKLOG_S:
            asked = 2 ** int(min(group.waiting_s / BACKLOG_S, 30.0)) - 1
            reason = f"{group.tasks} tasks, some waited for {group.waiting_s:.1f} s"
            return Provision(min(n + asked, needed), load, reason), memory
        if n > needed and group.clock >= memory.retry:
            return Release(needed, load, f"{n - needed} executors idle for {IDLE_S:g} s"), memory
        return NoChange(f"{group.tasks} tasks, none waits"), memory
