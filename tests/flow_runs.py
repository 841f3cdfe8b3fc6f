"""Runs dataflows batch by batch on the in-process executor, and compares with the interpreter."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from flow_graphs import Case, make_case
from roost import RunConfig
from roost.balance.changes import NoChange, Resize
from roost.dataflow.flow import Dataflow
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.moves import MapChange, Recreation, window_times
from roost.dataflow.operators import Sink, Source
from roost.dataflow.schema import FlowGraph
from roost.runtime.chain import Chain
from roost.runtime.executor import Executor, SliceInputs
from roost.runtime.flow_rounds import FlowPolicy, FlowSnapshot
from roost.runtime.loop import BatchLoop
from roost.runtime.part import Item
from roost.runtime.pipeline import BasePipeline
from roost.runtime.rounds import Proposal
from roost.stages.contract import Task
from roost.stages.decode import ROW
from roost.stages.flow_routing import stage_of
from roost.stages.slices import Slice
from roost.storage.cache import WorkerCache
from roost.testing import InProcessExecutor, InProcessPipeline
from stage_scenario import STEPS, Killed


@dataclass(frozen=True)
class TableSlice(Slice):
    """Rows of a table, which is part of the slice."""

    table: pa.Table
    first: int
    numbered: bool = True

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        rows = self.table.slice(self.start, self.stop - self.start)
        numbers = pa.array(range(self.first + self.start, self.first + self.stop), pa.int64())
        table = rows.append_column(ROW, numbers) if self.numbered else rows
        return table.select([name for name in table.column_names if name in columns])


@dataclass
class ScriptedPolicy:
    """Proposes what a function returns; None changes nothing."""

    script: Callable[[FlowSnapshot], MapChange | None]
    name: str = "script"

    def propose(self, snapshot: FlowSnapshot) -> Proposal:
        return Proposal(self.script(snapshot) or NoChange("nothing in the script"))


@dataclass
class RandomMoves:
    """Moves random buckets of each subquery now and then; counts what it covers."""

    chance: random.Random
    machines: int = 4
    resizes: bool = True
    covered: Counter[str] = field(default_factory=Counter)

    def policies(self, flow: Dataflow) -> list[FlowPolicy]:
        stateful = [operator.name for operator in flow.operators if operator.stateful]
        return [
            ScriptedPolicy(lambda snapshot, node=name: self._change(snapshot, node), name)
            for name in stateful
        ]

    def _change(self, snapshot: FlowSnapshot, name: str) -> MapChange | None:
        chance = self.chance
        # An operator that shares the map of another one moves with it.
        if name not in snapshot.subqueries or chance.random() < 0.4:
            return None
        status = snapshot.subqueries[name]
        moving = {move.bucket for move in status.map.under_way}
        fewest = 1 + max((move.old for move in status.map.under_way), default=0)
        fewest = max([fewest, *(1 + status.map.owners[bucket] for bucket in moving)])
        count = chance.randint(min(fewest, self.machines), max(fewest, self.machines))
        if not self.resizes:
            count = status.map.machines
        share = chance.choice([0.05, 0.5, 1.0])
        owners = {}
        for bucket, owner in enumerate(status.map.owners):
            if bucket not in moving and (owner >= count or chance.random() < share):
                owners[bucket] = chance.randrange(count)
        protocol = Recreation.STATE
        if status.recreates_windows and chance.random() < 0.7:
            protocol = Recreation.WINDOW
        moved = [bucket for bucket, owner in owners.items() if owner != status.map.owners[bucket]]
        if not moved and count == status.map.machines:
            return None
        self.covered[f"{protocol} moves"] += len(moved)
        self.covered["other number of machines"] += count != status.map.machines
        self.covered["while other buckets move"] += bool(moving and moved)
        if protocol is Recreation.WINDOW and status.newest is not None:
            _, end = window_times(status.node, status.newest)
            self.covered["moves with open windows"] += bool(moved) and end > status.watermark
        return MapChange(name, owners, "random", count, protocol)


@dataclass
class RandomResizes:
    """Proposes another number of machines now and then; counts what it covers."""

    chance: random.Random
    machines: int = 5
    covered: Counter[str] = field(default_factory=Counter)
    wanted: int | None = None
    name: str = "resize"

    def propose(self, snapshot: Any) -> Proposal:
        if self.wanted is None or (snapshot.has_size(self.wanted) and self.chance.random() < 0.6):
            self.wanted = self.chance.randint(1, self.machines)
        if snapshot.has_size(self.wanted):
            return Proposal(NoChange("the layout has this size"))
        if isinstance(snapshot, FlowSnapshot):
            sizes = snapshot.sizes(self.wanted)
            for name, status in snapshot.subqueries.items():
                kind = "up" if sizes[name] > snapshot.machines[name] else "down"
                self.covered[f"resized {kind}"] += sizes[name] != snapshot.machines[name]
                self.covered["resized while buckets move"] += bool(status.map.under_way)
                self.covered["resized with state"] += bool(status.loads.state_bytes.sum())
        return Proposal(Resize(self.wanted, "random"))


@dataclass
class FlowRun:
    """A dataflow in a folder; a driver is killed or restarted between batches, or goes on."""

    flow: Dataflow
    folder: Path
    lateness: float = 0.0
    idle: float | None = None
    machines: Callable[[int], int] = lambda batch: 2
    layout: Callable[[int], str] = lambda batch: "auto"
    executor: Callable[[], Executor] = InProcessExecutor
    policies: Sequence[FlowPolicy] = ()
    resize: FlowPolicy | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: {"round": 0, "balance": "off"})
    pipeline: Callable[..., BasePipeline] | None = None  # in this process by default
    history: int = 10_000
    numbered: bool = True  # whether rows of sources have stable numbers
    number: int = 0
    read: dict[str, int] = field(default_factory=dict)
    _driver: tuple[BasePipeline, BatchLoop] | None = None
    _clock: float = 0.0
    _kill: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the driver; another one follows."""
        if self._driver is not None:
            self._driver[0].__exit__()
        self._driver = None

    def batch(
        self,
        rows: Mapping[str, pa.Table],
        clock: float,
        ended: Sequence[str] = (),
        kill_at: Sequence[str] = (),
    ) -> None:
        """Run a batch; a driver is killed before each of some steps, and another one follows."""
        slices: dict[str, Sequence[Slice]] = {}
        offsets = {}
        for name in (o.name for o in self.flow.operators if isinstance(o, Source)):
            table, first = rows.get(name), self.read.get(name, 0)
            count = 0 if table is None else table.num_rows
            slices[stage_of(name)] = (
                [TableSlice(0, count, table, first, self.numbered)] if count else []
            )
            offsets[stage_of(name)] = [first, first + count]
            self.read[name] = first + count
        self._clock = clock
        for step in [*kill_at, None]:
            self._kill = step
            try:
                self._loop().run(self.number, offsets, SliceInputs(slices), ended)
            except Killed:
                self.stop()
            if step != "intent":  # from then on, the intent has the clock
                self._clock = clock + 1e3
        self.number += 1

    def _loop(self) -> BatchLoop:
        if self._driver is None:
            shared = {"lateness": self.lateness, "idle": self.idle}
            config = RunConfig(
                out={"dir": self.folder, "history": self.history},
                dataflow={
                    **shared,
                    "machines": self.machines(self.number),
                    "layout": self.layout(self.number),
                    **self.settings,
                },
            )
            make = self.pipeline or partial(InProcessPipeline, executor=self.executor())
            pipeline = make(
                config,
                flow=self.flow,
                on_step=self._on_step,
                wall_clock=lambda: self._clock,
                flow_policies=self.policies,
                resize=self.resize,
            )
            try:
                pipeline._take_lock()
                self._driver = pipeline, pipeline._assemble(None, None, None)
            except BaseException:
                pipeline.__exit__()
                raise
        return self._driver[1]

    def _on_step(self, step: str, number: int) -> None:
        if step == self._kill:
            raise Killed

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of each sink."""
        found = {}
        for sink in (o.name for o in self.flow.operators if isinstance(o, Sink)):
            files = sorted((self.folder / sink).glob("*.parquet"))
            found[sink] = [row for file in files for row in rows_of(pq.read_table(file))]
        return found

    def dead(self) -> Counter[tuple[str, str]]:
        """Return how many records each operator rejected, by reason."""
        rows = []
        for file in sorted((self.folder / "dead").glob("*.parquet")):
            rows += pq.read_table(file).to_pylist()
        return Counter((row["origin"], row["reason"]) for row in rows)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows without the batch; times are integers."""
    return [plain(row) for row in table.drop_columns(["batch_id"]).cast(_plain(table)).to_pylist()]


def _plain(table: pa.Table) -> pa.Schema:
    return pa.schema([_plain_field(f) for f in table.schema if f.name != "batch_id"])


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


def _plain_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(type_):
        return pa.int64()
    if pa.types.is_list(type_):
        return pa.list_(_plain_type(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([_plain_field(type_.field(k)) for k in range(type_.num_fields)])
    return type_


def plain(value: Any) -> Any:
    """Return a value that equals itself: NaN is a text."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def as_table(graph: FlowGraph, source: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows with integer times as a table of a source's schema."""
    output = graph.by_name[source].output
    assert output is not None
    operator = graph.by_name[source].operator
    columns = {}
    for column in output.columns:
        if isinstance(operator, Source) and operator.time is None and column.name == output.time:
            continue
        values = [row.get(column.name) for row in rows]
        if pa.types.is_temporal(column.type):
            columns[column.name] = pa.array(values, pa.int64()).cast(column.type)
        else:
            columns[column.name] = pa.array(values, column.type)
    return pa.table(columns)


def compare(run: FlowRun, oracle: Interpreter) -> None:
    """Check that the engine's rows equal those of the interpreter, each once.

    Columns with ``approx`` in their name are estimates, which are exact for few values, or depend
    on the order of additions.
    """
    found = run.results()
    for sink, expected in oracle.results.items():
        mine = sorted(map(_comparable, found[sink]), key=lambda pair: (pair[0], repr(pair[1])))
        theirs = sorted(
            (_comparable(plain(row)) for row in expected), key=lambda pair: (pair[0], repr(pair[1]))
        )
        exact = Counter(key for key, _ in mine), Counter(key for key, _ in theirs)
        assert exact[0] == exact[1], (
            f"{sink}: missing {exact[1] - exact[0]}, unexpected {exact[0] - exact[1]}"
        )
        for (key, a), (_, b) in zip(mine, theirs, strict=True):
            assert all(map(_close, a, b)), f"{sink}: {key} has {a} instead of {b}"
    dead = Counter((record.operator, record.reason) for record in oracle.dead)
    assert run.dead() == dead, f"rejected {run.dead()} instead of {dead}"


def key_of(row: Any) -> str:
    """Return a row as text that can be sorted and counted."""
    return json.dumps(row, sort_keys=True, default=repr)


def _comparable(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    exact = {name: value for name, value in row.items() if "approx" not in name}
    rest = [value for name, value in sorted(row.items()) if "approx" in name]
    return key_of(exact), rest


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return bool(a == b)


def units(case: Case) -> set[int]:
    return {node.output.unit for node in case.graph.nodes if node.output is not None}


def oracle_of(case: Case) -> Interpreter:
    oracle = Interpreter(case.graph, case.lateness, case.idle)
    for batch in case.batches:
        oracle.batch(batch.rows, batch.clock, batch.ended)
    return oracle


def run_case(case: Case, run: FlowRun, chance: random.Random, kills: int = 0) -> None:
    """Run a case; drivers end between batches, and up to ``kills`` times in each."""
    (unit,) = units(case)
    run.lateness, run.idle = case.lateness / unit, case.idle
    with run:
        for batch in case.batches:
            rows = {name: as_table(case.graph, name, given) for name, given in batch.rows.items()}
            steps = [chance.choice(STEPS) for _ in range(chance.randint(0, kills))]
            run.batch(rows, batch.clock, batch.ended, steps)
            if chance.random() < 0.5:
                run.stop()
    compare(run, oracle_of(case))


def usable(seed: int, *, slow: bool = False) -> Case:
    """Return the first case from a seed on whose sources have one unit of event time."""
    while len(units(make_case(seed, slow=slow))) > 1:
        seed += 1
    return make_case(seed, slow=slow)


class RepeatingExecutor(InProcessExecutor):
    """Runs every part twice, the second time on its items in another order.

    So does Spark if an executor is lost after an exchange: a stage is repeated alone, and its
    blocks arrive in another order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(3)
        self._random = random.Random(seed)

    def run_level(
        self, chain: Chain, tasks: Mapping[str, Task], level: int, items: Sequence[Sequence[Item]]
    ) -> list[list[Item]]:
        super().run_level(chain, tasks, level, items)
        shuffled = [self._random.sample(list(mine), len(mine)) for mine in items]
        return super().run_level(chain, tasks, level, shuffled)
