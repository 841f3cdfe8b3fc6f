"""Balancing of a dataflow's subqueries at the end of a round.

:mod:`roost.dataflow.balancing` makes the decisions; here each subquery gets a policy that shows it
the loads of the last rounds, and reports what it found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from roost.balance.changes import NoChange
from roost.balance.planner import imbalance
from roost.dataflow.balancing import (
    BucketPlanner,
    GreedyPolicy,
    HotKey,
    MapDecision,
    MapPolicy,
    SubqueryLoad,
    early_keys,
    hot_keys,
)
from roost.dataflow.balancing.loads import deviation
from roost.dataflow.colocation import EARLY
from roost.dataflow.loads import BucketLoads
from roost.dataflow.moves import MapChange
from roost.dataflow.operators import Aggregate, WindowBy
from roost.dataflow.schema import Node
from roost.elastic.ring import resized
from roost.model.choices import BucketPolicy
from roost.model.settings import DataflowSettings
from roost.runtime.flow_rounds import FlowPolicy, FlowSnapshot, SubqueryStatus
from roost.runtime.rounds import Proposal
from roost.storage.store import Fact

BALANCING = "flow balancing"  # table of what the last round showed, by subquery
ROUNDS_SEEN = 3


def balancing_policies(
    settings: DataflowSettings,
    nodes: Sequence[Node],
    receiving: Sequence[tuple[Node, str]],
    *,
    resizable: bool,
) -> list[FlowPolicy]:
    """Build the policies of stateful operators.

    ``nodes`` have a bucket map; ``receiving`` are the operators behind an exchange, each with the
    operator whose map sends its tuples. Where the number of machines may change, each map has a
    policy, even if nothing is balanced.
    """
    if settings.balance is BucketPolicy.OFF:
        kept = [SubqueryBalance(node.name, KeepOwners()) for node in nodes]
        return [*kept] if resizable else []
    policy: MapPolicy = BucketPlanner(settings.improvement)
    if settings.balance is BucketPolicy.GREEDY:
        policy = GreedyPolicy(settings.imbalance, settings.improvement)
    hot = [HotKeys(node.name, root) for node, root in receiving if unmergeable(node) is None]
    return [*hot, *(SubqueryBalance(node.name, policy) for node in nodes)]


@dataclass(frozen=True)
class HotKeys:
    """Lets the tuples of the hot keys of one operator be aggregated before its exchange."""

    node: str
    root: str  # operator whose bucket map sends its tuples

    @property
    def name(self) -> str:
        """Name in the record of the round."""
        return f"hot keys {self.node}"

    def propose(self, snapshot: FlowSnapshot) -> Proposal:
        """Decide from the round that has ended."""
        status = snapshot.subqueries[self.root]
        mine = status.keys[self.node]
        return Proposal(early_keys(self.node, mine.heaviest, status.map.machines, mine.hot))


class KeepOwners:
    """Balances nothing: a change of the number of machines moves what it must."""

    def decide(self, load: SubqueryLoad) -> MapDecision:
        """Keep the map."""
        return NoChange("balancing is off")


class SubqueryBalance:
    """Balances the buckets of one subquery.

    It remembers the loads of the last rounds; after a restart it begins with the first one.
    """

    def __init__(self, node: str, policy: MapPolicy) -> None:
        self.name = f"balance {node}"
        self._node, self._policy = node, policy
        self._rounds: deque[BucketLoads] = deque(maxlen=ROUNDS_SEEN)

    def propose(self, snapshot: FlowSnapshot) -> Proposal:
        """Decide from the loads of the last rounds, and record what they show."""
        status = snapshot.subqueries[self._node]
        loads, bucket_map = status.loads, status.map
        wanted = snapshot.wanted[self._node]
        if not loads.busy_s.sum() > 0.0:
            if wanted == bucket_map.machines:
                return Proposal(NoChange("no load"))
            return Proposal(resized(self._load(status, [loads], wanted), KeepOwners()))
        busy = loads.by_machine(bucket_map.owners, bucket_map.machines)
        self._rounds.append(status.load.newest)
        load = self._load(status, self._rounds, wanted)
        same = wanted == bucket_map.machines
        decision = self._policy.decide(load) if same else resized(load, self._policy)
        if snapshot.hot.keys() & status.keys.keys():  # the load of the next round is another one
            self._rounds.clear()
            decision = NoChange("the hot keys changed") if same else decision
        moved = list(decision.owners) if isinstance(decision, MapChange) else []
        found = {
            "busy_s": busy.tolist(),
            "deviation": deviation(busy / load.newest.seconds),
            "imbalance": imbalance(busy),
            "reason": decision.reason,
            "moved_buckets": len(moved),
            "moved_bytes": float(loads.state_bytes[moved].sum()),
            "state_bytes": float(loads.state_bytes.sum()),
            "hot_keys": [key.to_json() for key in self._hot_keys(status, load)],
        }
        return Proposal(decision, {self.name: found}, (Fact(BALANCING, self._node, found),))

    def _hot_keys(self, status: SubqueryStatus, load: SubqueryLoad) -> Iterator[HotKey]:
        """Yield the hot keys of all operators that receive tuples by the map."""
        for name, mine in status.keys.items():
            rounds = (replace(load.newest, keys=mine.heaviest),)
            function = unmergeable(mine.node)
            yield from hot_keys(replace(load, operator=name, rounds=rounds, unmergeable=function))

    def _load(
        self, status: SubqueryStatus, rounds: Iterable[BucketLoads], machines: int
    ) -> SubqueryLoad:
        return replace(status.load, machines=machines, rounds=tuple(rounds))


def unmergeable(node: Node) -> str | None:
    """Return what prevents partial aggregation before the exchange; None if nothing does."""
    operator = node.operator
    if not isinstance(operator, Aggregate):
        return type(operator).__name__
    for function in node.functions:
        if function.kind not in EARLY:
            kind = function.kind if function.user is None else type(function.user).__name__
            return f"{function.name} ({kind})"
    return "window of tuples" if operator.window.by is WindowBy.TUPLES else None
