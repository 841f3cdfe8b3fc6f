"""Which executor group runs which operator of a run: policies decide from the load of rounds.

An operator is a stage of a dataflow behind an exchange, with the stages that run in its tasks.
Sources are not placed. A mapping is recorded with the round that decided it, so a restart continues
with it. It is no routing: a change moves no state, and every batch gives the same results under
any mapping.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from roost.balance.changes import NoChange
from roost.dataflow.balancing import SubqueryLoad
from roost.elastic.group import StageLoad
from roost.elastic.placement import (
    Algorithm1,
    Best,
    ExecutorGroup,
    LoadSeries,
    OperatorLoad,
    OperatorMove,
    Place,
    PlacementPolicy,
    PlacementSnapshot,
    Static,
)
from roost.errors import ConfigError
from roost.model.choices import PlacementName
from roost.model.elastic import DEFAULT_GROUP
from roost.runtime.rounds import AnyDecision, Proposal, arbitrate
from roost.stages.contract import Stage
from roost.stages.flow_routing import node_of
from roost.stages.flow_stateless import StatelessStage
from roost.stages.flow_subquery import SubqueryStage

PLACEMENT = "placement"
POLICIES: dict[PlacementName, PlacementPolicy] = {
    PlacementName.STATIC: Static(),
    PlacementName.ALGORITHM_1: Algorithm1(),
    PlacementName.BEST: Best(),
}


@dataclass(frozen=True)
class MappingRound:
    """Operators and groups at the end of a round, and the mapping of the batches to come."""

    seen: PlacementSnapshot
    mapping: Mapping[str, str]

    def accepting(self, policy: str, decision: AnyDecision) -> MappingRound:
        """Return the snapshot with a decision; raises ValueError to refuse it."""
        if isinstance(decision, NoChange):
            return self
        if not isinstance(decision, Place):
            raise ValueError(f"{policy} maps operators to executor groups, and does nothing else")
        present = {group.name for group in self.seen.groups if group.executors}
        for move in decision.moves:
            if move.after not in present:
                raise ValueError(f"group {move.after!r} has no executor")
        moved = {move.operator: move.after for move in decision.moves}
        return replace(self, mapping={**self.mapping, **moved})


@dataclass(frozen=True)
class Mapper:
    """Proposes groups for operators without one, then what its policy decides."""

    policy: PlacementPolicy
    name = PLACEMENT

    def propose(self, snapshot: MappingRound) -> Proposal:
        """Decide from the round."""
        unplaced = len(snapshot.mapping) < len(snapshot.seen.operators)
        return Proposal((Static() if unplaced else self.policy).decide(snapshot.seen))


class OperatorPlacement:
    """The mapping of a run; ``saved`` is the record of the last round, or empty.

    ``named`` has the groups of operators that the settings name.

    Operators that the settings do not name get a group from the first round that was measured, if
    there is a policy; until then they run in the default group.
    """

    def __init__(
        self,
        policy: PlacementName,
        groups: Sequence[str],
        named: Mapping[str, str],
        saved: Mapping[str, Any],
    ) -> None:
        self._policy, self.groups, self._named = POLICIES.get(policy), groups, named
        self._saved: Mapping[str, str] = saved.get("mapping", {})
        self._series = LoadSeries()
        if "series" in saved:
            self._series = LoadSeries.from_json(saved["series"])
        self._roots: dict[str, str] = {}  # operators by the nodes that run in their tasks
        self.mapping: Mapping[str, str] = {}

    def begin(self, stages: Sequence[Stage]) -> None:
        """Find the operators of a run; continue with the last mapping."""
        self._roots = {
            s.node.name: node_of(s.buckets) for s in stages if isinstance(s, SubqueryStage)
        }
        self._roots |= {s.node.name: s.node.name for s in stages if isinstance(s, StatelessStage)}
        operators = set(self._roots.values())
        for name in self._named:
            if name not in operators:
                known = ", ".join(sorted(operators)) or "the dataflow has none"
                raise ConfigError("elastic.groups.operators", name, f"one of {known}")
        if self._policy is None:
            self.mapping = {**dict.fromkeys(operators, DEFAULT_GROUP), **self._named}
            return
        known_groups = {n: g for n, g in self._saved.items() if g in self.groups}
        self.mapping = {
            name: group
            for name, group in {**self._named, **known_groups}.items()
            if name in operators
        }

    def group_of(self, node: str) -> str:
        """Return the group of a stage, by the node that it begins with."""
        return self.mapping.get(self._roots.get(node, ""), DEFAULT_GROUP)

    def observe(self, stages: Sequence[StageLoad], seconds: float) -> None:
        """Note the loads of a round, in slots."""
        found: dict[str, list[StageLoad]] = defaultdict(list)
        for one in stages:
            found[self._roots.get(one.name, one.name)].append(one)
        together = [
            replace(mine[0], name=name, busy_s=sum(one.busy_s for one in mine))
            for name, mine in sorted(found.items())
        ]
        self._series = self._series.observed(together, seconds, 1)

    def loads(self, groups: Sequence[ExecutorGroup], slots: int) -> PlacementSnapshot:
        """Return the load of all stages in executors; those that are not placed count, too."""
        operators = tuple(
            OperatorLoad(one.name, tuple(load / slots for load in one.series))
            for one in self._series.operators()
        )
        mapping = {one.name: self.mapping.get(one.name, DEFAULT_GROUP) for one in operators}
        return PlacementSnapshot(operators, tuple(groups), mapping)

    def snapshot(
        self, groups: Sequence[ExecutorGroup], loads: Sequence[SubqueryLoad] = ()
    ) -> PlacementSnapshot:
        """Return what policies see: the load of operators and the size of groups, in slots."""
        state = {one.subquery: float(one.newest.state_bytes.sum()) for one in loads}
        placed = set(self._roots.values())
        operators = tuple(one for one in self._series.operators(state) if one.name in placed)
        names = {one.name for one in operators}
        mapping = {name: group for name, group in self.mapping.items() if name in names}
        return PlacementSnapshot(operators, tuple(groups), mapping)

    def end_round(self, seen: PlacementSnapshot, *, settled: bool) -> dict[str, Any]:
        """Decide; returns the record of the round.

        Nothing is decided unless the groups have been ``settled``: an executor that is about to be
        replaced is no reason to move operators.
        """
        moves: tuple[OperatorMove, ...] = ()
        reason = "a change of the executors was not in force for the whole round"
        row: dict[str, Any] = {"decision": NoChange.__name__, "reason": reason}
        if self._policy is None:
            row["reason"] = "the settings name the groups"
        elif settled and seen.operators:
            before = MappingRound(seen, self.mapping)
            (verdict,), after = arbitrate(before, [Mapper(self._policy)])
            decision = verdict.proposal.decision
            row = {"decision": type(decision).__name__, **verdict.to_json()}
            if isinstance(decision, Place) and after.mapping != self.mapping:
                moves = decision.moves
            self.mapping = after.mapping
        return {
            **row,
            "moves": [asdict(move) for move in moves],
            "mapping": dict(self.mapping),
            "loads": {one.name: one.series[-1] for one in seen.operators if one.series},
            "series": self._series.to_json(),
        }
