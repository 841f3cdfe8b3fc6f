"""Rounds of a dataflow: policies see the load of buckets, and may change bucket maps.

A round is an interval of the batches' clock, and at least one batch. Verdicts, the policies'
memories and the next bucket maps are recorded in one transaction; the next batch uses the maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from roost.balance.changes import Decision, Resize
from roost.dataflow.balancing import EarlyKeys, SubqueryLoad
from roost.dataflow.buckets import BucketMap
from roost.dataflow.loads import BucketLoads, HeavyKey, KeyMeter, LoadMeter, MachineLoad
from roost.dataflow.moves import (
    MapChange,
    MoveForecast,
    Recreation,
    cheaper,
    has_time_windows,
    planned_move,
    window_times,
)
from roost.dataflow.schema import Node
from roost.runtime.records import last_round
from roost.runtime.rounds import AnyDecision, CommittedBatch, Proposer, arbitrate, memories
from roost.stages.contract import Batch
from roost.stages.flow_routing import FLOW, BucketTable, KeyRouting
from roost.stages.flow_stateless import StatelessStage
from roost.stages.flow_subquery import HOT_KEYS, SubqueryStage
from roost.storage.store import Fact, Store

FLOW_ROUNDS = "flow rounds"  # table of the rounds
# Moving a bucket costs more than reading its state: the map grows, and files are opened.
PER_BUCKET_S = 1e-4


@dataclass(frozen=True)
class ReceivedKeys:
    """The heaviest keys that an operator receives, and those aggregated before its exchange."""

    node: Node
    heaviest: tuple[HeavyKey, ...]
    hot: tuple[int, ...] = ()


@dataclass(frozen=True)
class SubqueryStatus:
    """What policies see of a subquery: its map, and its load in the round."""

    node: Node
    map: BucketMap
    loads: BucketLoads
    newest: int | None  # newest event time on any input
    watermark: int  # of the input
    speed: float  # event time per second of the clock; 0 if it is not known
    read_speed: float  # bytes per second of state that is not in memory
    recreates_windows: bool  # whether buckets may move without their state
    keys: Mapping[str, ReceivedKeys]  # by operator: several may receive tuples by the map

    def changed(self, change: MapChange) -> BucketMap:
        """Return the next map; raises ValueError if the change is not possible."""
        if change.protocol is Recreation.WINDOW and not self.recreates_windows:
            raise ValueError(f"{self.node.name!r} cannot recreate windows")
        count = self.map.machines if change.machines is None else change.machines
        moves = []
        for bucket, machine in sorted(change.owners.items()):
            old = self.map.owners[bucket] if 0 <= bucket < self.map.buckets else -1
            if old == machine:
                continue
            protocol = change.protocol or self.protocol(bucket)
            if old >= count:
                protocol = Recreation.STATE  # the old owner is not there to compute a window
            owners = old, machine
            moves.append(
                planned_move(self.node, bucket, owners, protocol, self.newest, change.reason)
            )
        if not moves and count == self.map.machines:
            raise ValueError("the map has these owners already")
        return self.map.moved(moves, count)

    @property
    def load(self) -> SubqueryLoad:
        """The load of the round, as a policy of the bucket map sees it."""
        # Tasks that wait for a core take longer than the round, but none is busy for longer.
        busy = self.loads.by_machine(self.map.owners, self.map.machines)
        seconds = max(self.loads.seconds, float(busy.max()))
        return SubqueryLoad(
            self.node.name,
            self.map,
            self.map.machines,
            (replace(self.loads, seconds=seconds),),
            PER_BUCKET_S + np.asarray(self.loads.state_bytes) / self.read_speed,
            frozenset(move.bucket for move in self.map.under_way),
            self.node.name,
        )

    def protocol(self, bucket: int) -> Recreation:
        """Return the cheaper protocol to move a bucket."""
        if not self.recreates_windows or not 0 <= bucket < self.map.buckets:
            return Recreation.STATE
        return cheaper(self.forecast(bucket))

    def forecast(self, bucket: int) -> MoveForecast:
        """Return what the cost of moving a bucket is predicted from."""
        loads, speed = self.loads, self.speed
        window_s = shared_s = math.inf
        if self.newest is not None and speed > 0:
            switch, end = window_times(self.node, self.newest)
            window_s = max(end - self.watermark, 0) / speed
            shared_s = (end - switch) / speed
        return MoveForecast(
            float(loads.state_bytes[bucket]),
            self.read_speed,
            float(loads.tuples[bucket]) / loads.seconds if loads.seconds else 0.0,
            loads.tuple_bytes,
            loads.seconds / loads.batches if loads.batches else 0.0,
            window_s,
            shared_s,
        )


@dataclass(frozen=True)
class FlowSnapshot:
    """What policies see at the end of a round of a dataflow.

    ``machines`` are those of every stage behind an exchange, ``wanted`` those that it should have;
    they differ after a :class:`Resize`.
    """

    subqueries: Mapping[str, SubqueryStatus]
    clock: float  # of the last batch
    machines: Mapping[str, int]
    wanted: Mapping[str, int]
    sizes: Callable[[int], Mapping[str, int]]  # of the stages in a layout of so many machines
    accepted: Mapping[str, AnyDecision] = field(default_factory=dict)  # by policy
    after: Mapping[str, BucketMap] = field(default_factory=dict)  # maps of the next round
    hot: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # keys, where they change

    def has_size(self, machines: int) -> bool:
        """Return whether all stages have their machines of a layout of so many."""
        return self.machines == self.sizes(machines)

    def accepting(self, policy: str, decision: AnyDecision) -> FlowSnapshot:
        """Return the snapshot with the decision of a policy; raises ValueError to refuse it."""
        after, hot = dict(self.after), dict(self.hot)
        if isinstance(decision, MapChange):
            name = decision.subquery
            if name not in self.subqueries:
                raise ValueError(f"there is no subquery {name!r}")
            if name in after:
                raise ValueError(f"another policy changed the bucket map of {name!r}")
            after[name] = self.subqueries[name].changed(decision)
            if decision.machines not in (None, self.machines[name]) and self.is_resized(name):
                # A later run with other settings changes the number of machines again.
                after[name] = replace(after[name], configured=after[name].machines)
        elif isinstance(decision, EarlyKeys):
            hot[decision.operator] = decision.keys
        elif isinstance(decision, Resize):
            if decision.machines < 1:
                raise ValueError(f"a dataflow needs a machine, not {decision.machines}")
            return replace(self, wanted=self.sizes(decision.machines))
        elif not isinstance(decision, Decision):
            raise ValueError("a policy of a dataflow changes no executors")
        accepted = {**self.accepted, policy: decision}
        return replace(self, accepted=accepted, after=after, hot=hot)

    def is_resized(self, name: str) -> bool:
        """Return whether a stage should have another number of machines."""
        return self.wanted[name] != self.machines[name]


FlowPolicy = Proposer[FlowSnapshot]


@dataclass
class FlowRounds:
    """Measures the load of buckets, and ends the rounds of a dataflow."""

    store: Store
    stages: Sequence[SubqueryStage]
    even: Sequence[StatelessStage]  # on machines of their own
    policies: Sequence[FlowPolicy]  # in the order in which they propose
    length: float  # in seconds of the batches' clock
    read_speed: Callable[[], float]  # measures bytes per second that are not in memory
    # Machines that layouts should have from the next batch on, without waiting for a round's end.
    wanted: Callable[[], int] | None = None
    records: str = FLOW_ROUNDS

    def __post_init__(self) -> None:
        last = last_round(self.store, FLOW_ROUNDS) or {}
        self.number = int(last.get("round", -1)) + 1
        models = last.get("models", {})
        self._meters = {
            stage.node.name: LoadMeter(table.current.buckets, models.get(stage.node.name))
            for stage, table in self._tables
        }
        self._keys = {stage.node.name: KeyMeter() for stage in self._receiving}
        self.loads: tuple[SubqueryLoad, ...] = ()  # of the last round
        self._opened: float | None = None
        self._times: dict[str, tuple[float, int]] = {}  # clock and newest time, first known

    def after_batch(self, done: CommittedBatch) -> None:
        """Note a batch; end the round if it is long enough."""
        batch = done.batch
        clock = float(batch.choices[FLOW]["clock"])
        for stage, table in self._tables:
            name, routing = stage.node.name, batch.routings[stage.name]
            assert isinstance(routing, KeyRouting)
            if routing.map.owners == table.current.owners:
                self._meters[name].add(clock, self._loads(stage, batch))
                for one in self._sharing(stage):
                    if one.node.name in self._keys:
                        observed = batch.outcomes[one.name].observed
                        self._keys[one.node.name].add(load for load, _ in observed)
            if stage.seen is not None:
                self._times.setdefault(name, (clock, stage.seen))
        if self._opened is None:
            self._opened = clock
        resized = self.wanted is not None and self.machines != self.sizes(self.wanted())
        if clock - self._opened >= self.length or resized:
            self._end_round(batch, clock)

    @property
    def _tables(self) -> list[tuple[SubqueryStage, BucketTable]]:
        """Return the stages that have a bucket map, with their maps."""
        return [(stage, stage.table) for stage in self.stages if stage.table is not None]

    @property
    def _receiving(self) -> list[SubqueryStage]:
        """Return the stages behind an exchange, also those that share the map of another one."""
        return [stage for stage in self.stages if stage.graph.stages.receives(stage.node.name)]

    @property
    def machines(self) -> dict[str, int]:
        """Machines of each stage behind an exchange, in the batches to come."""
        found = {stage.node.name: table.current.machines for stage, table in self._tables}
        even = {s.node.name: s.table.at(s.table.epoch).machines for s in self.even}
        return found | even

    def sizes(self, machines: int) -> dict[str, int]:
        """Return the machines of each stage in a layout of so many."""
        found = {stage.node.name: table.size_of(machines) for stage, table in self._tables}
        return found | {s.node.name: s.table.size_of(machines) for s in self.even}

    def _sharing(self, stage: SubqueryStage) -> list[SubqueryStage]:
        """Return the stages that use the bucket map of a stage, with itself."""
        return [one for one in self.stages if one.buckets == stage.name]

    def _loads(self, stage: SubqueryStage, batch: Batch) -> list[tuple[MachineLoad, float]]:
        """Return the loads of a stage's machines, with those of the stages that share its map."""
        return [load for one in self._sharing(stage) for load in batch.outcomes[one.name].observed]

    def _status(
        self, stage: SubqueryStage, table: BucketTable, batch: Batch, clock: float
    ) -> SubqueryStatus:
        node, speed = stage.node, 0.0
        since, first = self._times.get(node.name, (clock, 0))
        if stage.seen is not None and clock > since:
            speed = (stage.seen - first) / (clock - since)
        keys = {
            one.node.name: ReceivedKeys(one.node, self._keys[one.node.name].heaviest(), one.hot)
            for one in self._sharing(stage)
            if one.node.name in self._keys
        }
        return SubqueryStatus(
            node,
            table.current,
            self._meters[node.name].loads(keys[node.name].heaviest),
            stage.seen,
            batch.outcomes[FLOW].result.input_watermark(node),
            speed,
            self._read_speed,
            has_time_windows(node) and not stage.graph.stages.several(node.name),
            keys,
        )

    @cached_property
    def _read_speed(self) -> float:
        return self.read_speed()

    def _end_round(self, batch: Batch, clock: float) -> None:
        found = {
            stage.node.name: self._status(stage, table, batch, clock)
            for stage, table in self._tables
        }
        self.loads = tuple(status.load for status in found.values() if status.loads.busy_s.any())
        machines = self.machines
        seen = FlowSnapshot(found, clock, machines, machines, self.sizes)
        verdicts, decided = arbitrate(seen, self.policies)
        after = decided.after
        row = {
            "round": self.number,
            "batch_id": batch.number,
            "clock": clock,
            "epochs": {name: one.epoch for name, one in after.items()},
            "models": {name: meter.model.to_json() for name, meter in self._meters.items()},
            "verdicts": [verdict.to_json() for verdict in verdicts],
            **memories(verdicts),
        }
        changed = [(t, after[t.node.name]) for _, t in self._tables if t.node.name in after]
        maps = [table.fact(new) for table, new in changed]
        resized = [s.table for s in self.even if decided.is_resized(s.node.name)]
        maps += [even.fact(even.epoch + 1, decided.wanted[even.node.name]) for even in resized]
        more = (fact for v in verdicts for fact in v.proposal.facts)
        hot = [Fact(HOT_KEYS, name, list(keys)) for name, keys in decided.hot.items()]
        self.store.record(Fact(FLOW_ROUNDS, self.number, row), *maps, *hot, *more)
        for table, new in changed:
            table.epoch = new.epoch
        for even in resized:
            even.epoch += 1
        for stage in self._receiving:
            stage.hot = decided.hot.get(stage.node.name, stage.hot)
        for meter in self._meters.values():
            meter.start()
        self._keys = {name: KeyMeter() for name in self._keys}
        self.number += 1
        self._opened = clock
