"""Rounds of an executor group: the elastic policy proposes, and the arbiter checks the limits.

:mod:`roost.elastic` makes the decisions. What they lead to, requests and releases of executors and
the next layout, is for the caller to carry out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roost.balance.changes import NoChange
from roost.dataflow.moves import MapChange
from roost.elastic.decisions import Balance, Cannot, ElasticDecision, Provision, Release
from roost.elastic.group import GroupSnapshot
from roost.elastic.manager import Manager, Memory, SizePolicy
from roost.elastic.placement import SizeDecision
from roost.elastic.spark_rule import SparkRule
from roost.model.choices import ElasticPolicyName
from roost.model.elastic import ElasticRules
from roost.runtime.rounds import AnyDecision, Proposal

ELASTIC = "elastic"


@dataclass(frozen=True)
class GroupRound:
    """An executor group at the end of a round, and what was decided about it so far."""

    group: GroupSnapshot
    rules: ElasticRules
    accepted: Mapping[str, ElasticDecision] = field(default_factory=dict)  # by policy

    def accepting(self, policy: str, decision: AnyDecision) -> GroupRound:
        """Return the snapshot with the decision of a policy; raises ValueError to refuse it."""
        if not isinstance(decision, ElasticDecision):
            raise ValueError("a policy of an executor group changes its size, or balances it")
        if isinstance(decision, Provision | Release | Cannot):
            low, high = self.rules.min, self.rules.max
            if not low <= decision.executors <= high:
                raise ValueError(f"{decision.executors} executors are not from {low} to {high}")
        return replace(self, accepted={**self.accepted, policy: decision})

    @property
    def planned(self) -> int:
        """Executors of the next layout."""
        sizes = (d for d in self.accepted.values() if isinstance(d, Provision | Release | Cannot))
        return next((d.executors for d in sizes), self.group.executors.planned)

    @property
    def changes(self) -> tuple[MapChange, ...]:
        """Changes of bucket maps in a layout of the same size."""
        found = (d.changes for d in self.accepted.values() if isinstance(d, Balance))
        return tuple(change for changes in found for change in changes)


class ElasticPolicy:
    """Proposes a size for the group; ``saved`` is its last record before a restart, or empty."""

    name = ELASTIC

    def __init__(self, policy: SizePolicy, saved: Mapping[str, Any]) -> None:
        self.policy = policy
        self._memory = Memory.from_json(saved[ELASTIC]) if ELASTIC in saved else Memory()

    def waits(self, now: float) -> bool:
        """Return whether requested executors did not arrive, and are not requested again yet."""
        return self._memory.failures > 0 and now < self._memory.retry

    def propose(self, snapshot: GroupRound) -> Proposal:
        """Decide from the round, and record what the policy remembers."""
        decision, self._memory = self.policy.decide(snapshot.group, self._memory)
        return Proposal(decision, {ELASTIC: self._memory.to_json()})


class SharedSizes:
    """Sizes a group as ``algorithm_2`` decided for all groups together.

    The manager gives up executors that do not arrive, and lets the next request wait.
    """

    def __init__(self, rules: ElasticRules) -> None:
        self._rules, self._manager = rules, Manager(rules)
        self.decided: SizeDecision = NoChange("no round is measured")

    def decide(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Return the decision for this group."""
        found, memory = self._manager.decide(group, memory)
        unknown = group.offered({}, self._rules.batch_seconds) is None
        if isinstance(found, Cannot) or unknown:
            return found, memory
        decided = self.decided
        if isinstance(decided, NoChange):
            return decided, memory
        size = min(max(decided.executors, self._rules.min), self._rules.max)
        if size == group.executors.planned:
            return NoChange(decided.reason), memory
        if isinstance(decided, Provision) and group.clock < memory.retry:
            wait_s = memory.retry - group.clock
            return NoChange(f"{decided.reason}; next request in {wait_s:.0f} s"), memory
        return replace(decided, executors=size), memory


def size_policy(rules: ElasticRules) -> SizePolicy:
    """Return the policy that the rules name."""
    match rules.policy:
        case ElasticPolicyName.SPARK:
            return SparkRule(rules)
        case ElasticPolicyName.ALGORITHM_2:
            return SharedSizes(rules)
    return Manager(rules)
