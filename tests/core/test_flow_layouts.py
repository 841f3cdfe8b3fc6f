"""Dataflows in every layout give the interpreter's rows; ``auto`` sends fewer of them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from test_dataflow import run_case, usable

from flow_runs import FlowRun, RepeatingExecutor, TableSlice, compare
from roost.commands.flow_state import summarize_flow
from roost.dataflow.blocks import TIME
from roost.dataflow.buckets import BucketMap, hash_rows
from roost.dataflow.colocation import aggregates_early, divide, separate, together
from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow, Stream
from roost.dataflow.grids import grid_sides, tiled
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.operators import SourceKind
from roost.dataflow.partials import PANE
from roost.dataflow.schema import FlowGraph, StreamSchema, resolve
from roost.errors import ConfigError, DataflowError
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.runtime.chain import Chain
from roost.runtime.executor import InProcessExecutor
from roost.runtime.flow_layout import FlowLayout, Sample, StageCosts, lay_out, shares
from roost.runtime.flow_sample import _affordable, sample_flow
from roost.runtime.part import Item, Parcel
from roost.stages import flow_early
from roost.stages.contract import Task
from roost.stages.flow_early import EarlyAggregate
from roost.stages.flow_routing import unpacked
from roost.stages.flow_stateless import EvenRouting
from roost.stages.flow_subquery import SEEN, STATE
from roost.stages.slices import Slice
from roost.storage.cache import WorkerCache
from roost.storage.store import Store

FIXED = ("operator_set", "query_cloud", "operator_cloud")
SCHEMA = {"k": "int64", "s": "string", "v": "int64", "t": "int64"}


def graph_of(flow: Dataflow) -> FlowGraph:
    return resolve(flow.name, flow.operators)


# --------------------------------------------------------------------------- results


@pytest.mark.sweep(range(300, 302), 1, 800)
@pytest.mark.parametrize("layout", [*FIXED, "auto"])
def test_every_layout_gives_the_rows_of_the_interpreter(
    layout: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers restart with other numbers of machines, and stages are repeated alone."""
    case, chance = usable(seed), random.Random(seed)
    # Always aggregate before an exchange, also where it does not pay, in several steps.
    monkeypatch.setattr(flow_early, "ROWS_PER_PARTIAL", 0)
    monkeypatch.setattr(flow_early, "ROWS_AT_ONCE", chance.choice([1, 5, 50]))
    machines = [chance.randint(1, 3) for _ in case.batches]
    run = FlowRun(
        case.flow,
        tmp_path,
        machines=lambda number: machines[number],
        layout=lambda number: layout,
        executor=lambda: RepeatingExecutor(chance.randrange(1 << 30)),
    )
    run_case(case, run, chance, kills=1)


@pytest.mark.sweep(range(400, 402), 1, 300)
def test_a_restart_may_change_the_layout(seed: int, tmp_path: Path) -> None:
    """Except for operators that share a bucket map, state is stored alike."""
    case, chance = usable(seed), random.Random(seed)
    layouts = [chance.choice(FIXED) for _ in case.batches[:-1]]
    run = FlowRun(
        case.flow, tmp_path, layout=lambda number: [*layouts[: number + 1], "auto"][number]
    )
    run_case(case, run, chance, kills=1)


def test_a_layout_that_stores_state_by_other_buckets_is_refused(tmp_path: Path) -> None:
    flow, batch = Dataflow("f"), {"s": table(10)}
    stream = flow.source("s", SCHEMA, time="t")
    sums = stream.aggregate({"v": "sum(v)"}, by=["k", "s"], size=5, name="sums")
    sums.join(sums, "left.k = right.k and left.s = right.s", size=5, name="pairs").sink("out")
    with FlowRun(flow, tmp_path) as run:
        run.batch(batch, 0.0)
    with closing(Store(tmp_path / "state")) as store:
        found = summarize_flow(store)
    assert found is not None
    assert [(s.operator, s.epoch, s.buckets) for s in found.subqueries] == [
        ("sums", 0, (128, 128)),
        ("pairs", 0, (128, 128)),
    ]
    refused = FlowRun(flow, tmp_path, layout=lambda number: "query_cloud", number=1)
    with pytest.raises(DataflowError, match="'pairs': its state is stored by the buckets of 'sums"):
        refused.batch({}, 1.0)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataflow\.layout"):
        RunConfig(dataflow={"layout": "operator-set"})


def table(rows: int, keys: int = 3, first: int = 0) -> pa.Table:
    numbers = np.arange(first, first + rows)
    texts = [f"s{n % 2}" for n in numbers.tolist()]
    return pa.table({"k": numbers % keys, "s": texts, "v": numbers, "t": numbers // 4})


# --------------------------------------------------------------------------- omitted exchanges


def summed(stream: Stream, by: list[str], name: str) -> Stream:
    return stream.aggregate({"v": "sum(v)"}, by=by, size=5, name=name)


def changed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["k", "v"])


KV = pa.schema([("k", pa.int64()), ("v", pa.int64())])
K = {"k": pc.field("k"), "v": pc.field("v")}
TOGETHER: dict[str, tuple[Callable[[Dataflow, Stream], Stream], dict[str, str]]] = {
    "same key": (lambda f, s: summed(summed(s, ["k"], "a"), ["k"], "b"), {"b": "a"}),
    "through a filter": (
        lambda f, s: summed(summed(s, ["k"], "a").filter("v > 2"), ["k"], "b"),
        {"b": "a"},
    ),
    "through a map that keeps the key": (
        lambda f, s: summed(summed(s, ["k"], "a").map({**K, "v": pc.field("v") + 1}), ["k"], "b"),
        {"b": "a"},
    ),
    "renamed key": (
        lambda f, s: summed(
            summed(s, ["k"], "a").map({"z": pc.field("k"), "v": pc.field("v")}), ["z"], "b"
        ),
        {"b": "a"},
    ),
    "changed key": (
        lambda f, s: summed(summed(s, ["k"], "a").map({**K, "k": pc.field("k") + 1}), ["k"], "b"),
        {},
    ),
    "swapped columns": (
        lambda f, s: summed(
            summed(s, ["k"], "a").map({"k": pc.field("v"), "v": pc.field("k")}), ["k"], "b"
        ),
        {},
    ),
    "function map": (
        lambda f, s: summed(summed(s, ["k"], "a").map(changed, schema=KV), ["k"], "b"),
        {},
    ),
    "subset of the key behind": (
        lambda f, s: summed(
            s.aggregate({"v": "sum(v)"}, by=["k"], size=5, name="a").join(
                s.aggregate({"w": "max(v)"}, by=["k", "s"], size=5, name="c"),
                "left.k = right.k", size=5, name="j",
            ).map({"k": pc.field("left_k"), "s": pc.field("right_s"), "v": pc.field("left_v")}),
            ["k", "s"], "b",
        ),
        {"c": "a", "j": "a", "b": "a"},
    ),
    "key behind is a subset": (
        lambda f, s: summed(summed(s, ["k", "s"], "a"), ["k"], "b"),
        {},
    ),
    "three in a row": (
        lambda f, s: summed(summed(summed(s, ["k"], "a"), ["k"], "b"), ["k"], "c"),
        {"b": "a", "c": "a"},
    ),
    "union of one operator's streams": (
        lambda f, s: summed(
            f.union(*summed(s, ["k"], "a").split("v > 3")), ["k"], "b"
        ),
        {"b": "a"},
    ),
    "union with a source": (
        lambda f, s: summed(
            f.union(summed(s, ["k"], "a").map(K), s.map(K)), ["k"], "b"
        ),
        {},
    ),
    "self-join": (
        lambda f, s: (a := summed(s, ["k"], "a")).join(a, "left.k = right.k", size=5, name="j"),
        {"j": "a"},
    ),
    "self-join by crossed columns": (
        lambda f, s: (a := s.aggregate({"v": "sum(v)"}, by=["k", "v2"], size=5, name="a")).join(
            a, "left.k = right.v2 and left.v2 = right.k", size=5, name="j"
        ),
        {},
    ),
    "join of two operators": (
        lambda f, s: summed(s, ["k"], "a").join(
            summed(s.filter("v > 1"), ["k"], "b"), "left.k = right.k", size=5, name="j"
        ),
        {"b": "a", "j": "a"},
    ),
    "join of two operators, one of which has a longer key": (
        lambda f, s: summed(s, ["k", "s"], "a").join(
            summed(s, ["k"], "b"), "left.k = right.k", size=5, name="j"
        ),
        {"a": "b", "j": "b"},
    ),
    "join of two operators with keys in another order": (
        lambda f, s: (a := summed(s, ["k", "v2"], "a")).filter("v > 2").join(
            summed(s, ["v2", "s", "k"], "b"),
            "left.k = right.k and left.v2 = right.v2", size=5, name="j",
        ).map({"k": pc.field("left_k"), "v": pc.field("left_v"), "v2": pc.field("right_v2")}).join(
            summed(summed(a, ["k", "v2"], "c"), ["v2", "k"], "d"),
            "left.k = right.k and left.v2 = right.v2", size=5, name="j2",
        ),
        {"b": "a", "j": "a", "c": "a", "d": "a", "j2": "a"},
    ),
    "join of joins": (
        lambda f, s: summed(s, ["k"], "a").join(
            summed(s, ["k"], "b"), "left.k = right.k", size=5, name="j"
        ).map({"k": pc.field("left_k"), "v": pc.field("left_v")}).join(
            summed(s, ["k"], "c").join(summed(s, ["k"], "d"), "left.k = right.k", size=5, name="i"),
            "left.k = right.left_k", size=5, name="o",
        ),
        {"b": "a", "j": "a", "c": "a", "d": "a", "i": "a", "o": "a"},
    ),
    "join of operators that do not follow as many exchanges": (
        lambda f, s: summed(s, ["k"], "a").join(
            summed(summed(s, ["v2"], "b").map({"k": pc.field("v2"), "v": pc.field("v")}).filter(
                "v > 1").map({"k": pc.field("k") + 1, "v": pc.field("v")}), ["k"], "c"),
            "left.k = right.k", size=5, name="j",
        ),
        {},
    ),
    "join by another key": (
        lambda f, s: summed(s, ["k"], "a").join(
            summed(s, ["k"], "b").map({"z": pc.field("k") + 0}), "left.k = right.z", size=5,
            name="j",
        ),
        {},
    ),
    "no key": (lambda f, s: summed(summed(s, [], "a").map({"k": pc.field("v"), "v": pc.field("v")}),
                                   ["k"], "b"), {}),
    "product": (
        lambda f, s: (a := summed(s, ["k"], "a")).product(a, "left.k = right.k", size=5, name="p"),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_an_exchange_is_omitted_exactly_where_tuples_are_together(
    name: str, tmp_path: Path
) -> None:
    build, expected = TOGETHER[name]
    flow = Dataflow("f")
    stream = flow.source("s", {**SCHEMA, "v2": "int64"}, time="t")
    build(flow, stream).sink("out")
    graph = graph_of(flow)
    assert {name: one.root for name, one in together(graph).items()} == expected
    executor = Counting(3)
    oracle = Interpreter(graph, 0, None)
    with FlowRun(flow, tmp_path, executor=lambda: executor, machines=lambda number: 3) as run:
        for number in range(4):
            rows = table(40, 5, 40 * number)
            rows = rows.append_column("v2", pc.subtract(4, rows["k"]))
            run.batch({"s": rows}, float(number))
            oracle.batch({"s": rows.to_pylist()}, float(number), ())
    compare(run, oracle)
    assert sum(map(len, oracle.results.values()))
    sent = {stage.removeprefix("flow:") for stage in executor.sent}
    stateful = {node.name for node in graph.nodes if node.operator.stateful}
    assert sent == {node for node in stateful if divide(graph, LayoutName.AUTO).receives(node)}
    assert stateful - sent == {name for name in expected if not together(graph)[name].sent}


def test_a_join_of_points_and_matches_keeps_its_exchanges() -> None:
    """How many exchanges precede them depends on the plan of the points."""
    flow = Dataflow("own")
    fields = {"k": pa.int64(), "t": pa.int64()}
    schema = StreamSchema(pa.schema(fields), "t")
    counts = [
        stream.aggregate({"n": "count"}, by="k", size=5, name=name)
        for name, stream in {"a": flow.points(), "b": flow.matches()}.items()
    ]
    counts[0].join(counts[1], "left.k = right.k", size=5, name="j").sink("out")
    own = {SourceKind.POINTS: schema, SourceKind.MATCHES: schema}
    assert not together(resolve(flow.name, flow.operators, own))


class Counting(InProcessExecutor):
    """Counts the rows that each stage receives through an exchange."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.sent: Counter[str] = Counter()

    def run_level(
        self, chain: Chain, tasks: Mapping[str, Task], level: int, items: Any
    ) -> list[list[Item]]:
        following = super().run_level(chain, tasks, level, items)
        for item in (item for mine in following for item in mine):
            if isinstance(item, Parcel) and chain.by_name[item.stage].level == level + 1:
                self.sent[item.stage] += item.block.num_rows
        return following


# --------------------------------------------------------------------------- partial aggregation


def run_aggregate(layout: str, functions: dict[str, Any], folder: Path) -> tuple[FlowRun, Counting]:
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate(functions, by="k", size=40, advance=10, name="a").sink("out")
    executor, oracle = Counting(3), Interpreter(graph_of(flow), 0, None)
    run = FlowRun(
        flow, folder, executor=lambda: executor, machines=lambda number: 3,
        layout=lambda number: layout,
    )  # fmt: skip
    with run:
        for number in range(3):
            rows = table(1_200, 4, 1_200 * number)
            run.batch({"s": rows}, float(number))
            oracle.batch({"s": rows.to_pylist()}, float(number), ())
    compare(run, oracle)
    return run, executor


EXACT = {"n": "count", "total": "sum(v)", "mean": "avg(v)", "low": "min(v)", "most": "max(s)",
         "a": "first(s)", "z": "last(v)", "best": "top(2, v)"}  # fmt: skip


def test_partial_aggregation_sends_few_rows_and_changes_no_result(tmp_path: Path) -> None:
    early, few = run_aggregate("auto", EXACT, tmp_path / "auto")
    plain, all_rows = run_aggregate("operator_set", EXACT, tmp_path / "plain")
    assert all_rows.sent["flow:a"] == 3_600
    # A batch has 30 panes of 4 keys; up to 3 tasks read it, and a pane may be in two of them.
    assert few.sent["flow:a"] <= 3 * 4 * 33
    ordered = [sorted(map(repr, run.results()["out"])) for run in (early, plain)]
    assert ordered[0] == ordered[1] and ordered[0]
    for folder in ("auto", "plain"):  # moves start from it; a partial result may end its pane
        with closing(Store(tmp_path / folder / "state")) as store:
            assert store.get(SEEN, "a") == 3_599 // 4


class Largest:
    """A function whose ``partial`` and ``merge`` raise for some values."""

    columns, type = ("v",), pa.int64()

    def partial(self, values: pa.Array) -> tuple[int, bool]:
        found = values.to_pylist()
        if any(value % 100 == 13 for value in found):
            raise ValueError("13")
        return max(found), any(1_200 <= value < 1_300 for value in found)

    def merge(self, states: list[tuple[int, bool]]) -> tuple[int, bool]:
        if any(bad for _, bad in states):
            raise ValueError("1200")
        return max(states)

    def finish(self, state: tuple[int, bool]) -> int:
        return state[0]


WINDOWS = [{"size": 40, "advance": 10}, {"window": "forever", "advance": 40}]


@pytest.mark.parametrize("window", WINDOWS, ids=["time", "forever"])
def test_functions_of_the_user_are_aggregated_before_an_exchange(
    window: dict[str, Any], tmp_path: Path
) -> None:
    """Where they raise, the same records are rejected as without it."""
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"m": Largest(), "n": "count"}, by="k", **window, name="a").sink("out")
    executor, oracle = Counting(3), Interpreter(graph_of(flow), 0, None)
    run = FlowRun(flow, tmp_path, executor=lambda: executor, machines=lambda number: 3)
    with run:
        for number in range(3):
            rows = table(1_200, 4, 1_200 * number)
            run.batch({"s": rows}, float(number))
            oracle.batch({"s": rows.to_pylist()}, float(number), ())
    compare(run, oracle)
    assert len({tuple(row) for _, _, row in oracle.dead}) == 2, "rows, and windows with keys"
    assert len(oracle.results["out"]) > 10
    assert executor.sent["flow:a"] < 600


def test_quantiles_are_aggregated_before_an_exchange_within_their_error(tmp_path: Path) -> None:
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"m": "quantile(v, 0.5)"}, by="k", size=1_500, name="a").sink("out")
    executor = Counting(3)
    with FlowRun(flow, tmp_path, executor=lambda: executor, machines=lambda number: 3) as run:
        for number in range(3):
            run.batch({"s": table(6_000, 2, 6_000 * number)}, float(number), ["s"] * (number == 2))
    assert executor.sent["flow:a"] < 100
    assert len(run.results()["out"]) == 6
    for row in run.results()["out"]:
        middle = 4 * (row["t"] + 750)  # values ascend
        assert abs(row["m"] - middle) <= 0.007 * 6_000 + 2


def test_estimates_do_not_depend_on_the_order_of_blocks(tmp_path: Path) -> None:
    """It differs between attempts, and a repeated batch gives the same values to the last bit."""
    flow = Dataflow("f")
    stream = flow.source("s", {"k": "int64", "v": "double", "t": "int64"}, time="t")
    estimates = {"spread": "stddev(v)", "middle": "quantile(v, 0.5)"}
    stream.aggregate(estimates, by="k", size=10, name="a").sink("out")
    count = 30_000  # of each group, more than a sketch holds exactly
    values, numbers = np.random.default_rng(5).lognormal(0.0, 3.0, count), np.arange(count)
    rows = pa.table({"k": numbers % 4, "v": values, "t": numbers // 4 % 60})
    found = []
    for seed in range(4):
        repeating = partial(RepeatingExecutor, seed)
        with FlowRun(flow, tmp_path / str(seed), executor=repeating) as run:
            run.batch({"s": rows}, 0.0, ["s"])
        found.append(sorted(map(repr, run.results()["out"])))
    assert len(found[0]) == 24
    assert all(one == found[0] for one in found)


def test_results_of_a_subquery_are_aggregated_before_an_exchange(tmp_path: Path) -> None:
    """Not only tuples of a source."""
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    counts = stream.aggregate({"n": "count"}, by=["k", "s"], size=5, advance=1, name="a")
    counts.aggregate({"n": "sum(n)", "groups": "count"}, by="s", size=60, name="b").sink("out")
    executor, oracle = Counting(3), Interpreter(graph_of(flow), 0, None)
    with FlowRun(flow, tmp_path, executor=lambda: executor, machines=lambda number: 3) as run:
        for number in range(3):
            rows, ended = table(600, 12, 600 * number), ["s"] * (number == 2)
            run.batch({"s": rows}, float(number), ended)
            oracle.batch({"s": rows.to_pylist()}, float(number), ended)
    compare(run, oracle)
    groups = sum(row["groups"] for row in oracle.results["out"])
    assert 0 < executor.sent["flow:b"] < groups / 10


def test_distinct_counts_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Thousands of values, of which a HyperLogLog keeps registers only."""
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"d": "distinct(v)"}, by="k", size=2_000, advance=500, name="a").sink("out")
    found = []
    for layout, machines in (("operator_set", 1), ("auto", 3)):
        executor = Counting(3)
        run = FlowRun(
            flow, tmp_path / layout, executor=partial(lambda one: one, executor),
            machines=lambda number, count=machines: count,
            layout=lambda number, name=layout: name,
        )  # fmt: skip
        with run:
            for number in range(3):
                run.batch({"s": table(6_000, 2, 6_000 * number)}, float(number))
        found.append((executor.sent["flow:a"], sorted(map(repr, run.results()["out"]))))
    (every, one), (few, divided) = found
    assert every == 18_000 and few < 100
    assert one == divided and len(one) > 10


def test_windows_of_tuples_and_whole_windows_are_not_aggregated_early() -> None:
    class Whole:
        columns, type = ("v",), pa.int64()

        def whole(self, values: pa.Array) -> int:
            return len(values)

    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"n": "count"}, by="k", window="tuples", size=4, name="tuples").sink("a")
    stream.aggregate({"n": Whole()}, by="k", size=4, name="whole").sink("b")
    stream.aggregate({"n": "count"}, window="forever", advance=4, name="ever").sink("c")
    nodes = graph_of(flow).by_name
    assert [aggregates_early(nodes[n]) for n in ("tuples", "whole", "ever")] == [False, False, True]


def test_tuples_with_rare_keys_are_sent_as_they_are(tmp_path: Path) -> None:
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"n": "count"}, by="v", size=4, name="a").sink("out")
    executor = Counting(1)
    with FlowRun(flow, tmp_path, executor=lambda: executor) as run:
        run.batch({"s": table(400)}, 0.0, ["s"])
    assert executor.sent["flow:a"] == 400 and len(run.results()["out"]) == 400
    # 2 and 3 tuples for each key: no partial results, and nothing else.
    node = graph_of(flow).by_name["a"]
    for each, pays in ((2, False), (3, True)):
        numbers = pa.array(np.arange(600) // each)
        rows = pa.table({"v": numbers, TIME: pa.array(np.zeros(600, np.int64))})
        early = EarlyAggregate(node)
        blocks = [*early.add(rows), *early.flush()]
        assert [PANE in block.column_names for block in blocks] == [pays]
        assert sum(block.num_rows for block in blocks) == (600 // each if pays else 600)


# --------------------------------------------------------------------------- machines


def test_rows_for_stateless_stages_are_dealt_evenly_and_by_their_values() -> None:
    rows = table(10_000, 7).append_column("__time", pa.array(np.arange(10_000) // 4))
    routing = EvenRouting(0, 8)
    cache = WorkerCache()
    dealt = dict(routing.split("p", rows, cache))
    sizes = [dealt[k].num_rows for k in range(8)]
    assert sum(sizes) == 10_000 and max(sizes) < 1.15 * min(sizes)
    shuffled = rows.take(pa.array(np.random.default_rng(1).permutation(10_000)))
    again = dict(routing.split("p", shuffled, cache))
    for machine in range(8):
        values = [sorted(unpacked([found[machine]])["v"].to_pylist()) for found in (dealt, again)]
        assert values[0] == values[1]


def path_of_nine() -> FlowGraph:
    flow = Dataflow("nine")
    stream = flow.source("s", SCHEMA, time="t").map(K, name="m").filter("v > 0", name="f")
    pairs = summed(stream, ["k"], "a").map(K, name="m2")
    joined = pairs.join(pairs, "left.v = right.v", size=5, name="j").filter("left_v > 0", name="f2")
    renamed = joined.map({"k": pc.field("left_k"), "v": pc.field("left_v")}, name="m3")
    summed(renamed, ["k"], "b").filter("v > 0", name="f3").sink("out")
    return graph_of(flow)


def laid_out(layout: str, machines: int, slots: int, seconds: dict[str, float]) -> dict[str, int]:
    graph, name = path_of_nine(), LayoutName(layout)
    return shares(
        replace(graph, division=divide(graph, name)), name, machines, slots, Sample(seconds)
    )


def test_operator_cloud_has_a_stage_for_each_operator() -> None:
    """The first operator runs where the source is read."""
    assert separate(path_of_nine()) == ["s", "f", "a", "m2", "j", "f2", "m3", "b", "f3"]


def test_machines_are_divided_by_the_measured_cost() -> None:
    seconds = {"m": 1.0, "f": 1.0, "a": 4.0, "m2": 2.0, "j": 10.0, "f2": 1.0, "m3": 1.0, "b": 2.0}
    assert laid_out("query_cloud", 4, 2, seconds) == {"a": 12, "j": 12, "b": 12}
    # The busiest of 12 machines has 22 of 256 buckets, of 13 machines 20.
    assert laid_out("operator_set", 7, 2, seconds) == {"a": 6, "j": 13, "b": 2}
    assert laid_out("operator_set", 1, 2, seconds) == {"a": 1, "j": 1, "b": 1}
    assert laid_out("operator_set", 4, 2, {}) == {"a": 4, "j": 4, "b": 4}
    cloud = laid_out("operator_cloud", 10, 2, seconds)
    assert sum(cloud.values()) == 30 and min(cloud.values()) == 1
    assert max(cloud, key=lambda name: cloud[name]) == "j"
    # Levels run one after the other: no stage of ``auto`` leaves a core idle.
    assert laid_out("auto", 2, 2, seconds) == {"a": 2, "j": 2, "b": 2}
    assert laid_out("auto", 7, 2, seconds) == {"a": 6, "j": 13, "b": 2}


def test_a_sample_run_divides_machines_and_a_restart_repeats_it(tmp_path: Path) -> None:
    """Two Aggregates, of which one has most of the work; the sample is measured once."""

    class Slow:
        columns, type = ("v",), pa.int64()

        def partial(self, values: pa.Array) -> int:
            return sum(hash(str(value)) % 2 for value in range(60_000))

        def merge(self, states: list[int]) -> int:
            return sum(states)

        def finish(self, state: int) -> int:
            return state

    flow = Dataflow("f")
    source = flow.source("s", SCHEMA, time="t", path="generate:calls,rows=10")
    source.aggregate({"n": Slow()}, by="k", size=50, name="slow").sink("a")
    source.aggregate({"n": "count"}, by="k", size=50, name="fast").sink("b")
    slices = {"flow:s": [TableSlice(0, 400, table(400), 0)]}
    found = sample_flow(flow, slices, divide(graph_of(flow), LayoutName.OPERATOR_SET))
    assert found is not None and set(found.seconds) == {"s", "slow", "fast"}
    assert found.seconds["slow"] > 4 * found.seconds["fast"] > 0

    def machines(sample: Callable[[Division], Sample | None]) -> dict[str, int]:
        with closing(Store(tmp_path / "state")) as store:
            layout = lay_out(store, graph_of(flow), LayoutName.OPERATOR_SET, 5, 2, sample)
            tables = [layout.bucket_table(store, layout.graph.by_name[n]) for n in ("slow", "fast")]
            assert [t.at(t.epoch).machines for t in tables if t] == list(layout.machines.values())
            return dict(layout.machines)

    first = machines(lambda layout: found)
    assert sum(first.values()) == 10 and first["slow"] >= 6
    assert machines(lambda layout: pytest.fail("sampled again")) == first


@pytest.mark.parametrize(("seconds", "read"), [(0.0, 1_000), (1e9, 5_000)])
def test_a_sample_run_reads_as_many_rows_as_it_can(seconds: float, read: int) -> None:
    """A third of them is a batch; a source with fewer rows is read completely."""
    flow = Dataflow("f")
    large, small = (flow.source(name, SCHEMA, time="t") for name in ("l", "s"))
    flow.union(large, small).aggregate({"n": "count"}, by="k", size=50, name="counts").sink("a")
    sizes = {"flow:l": (3_000, 2_000), "flow:s": (300,)}
    slices = {
        stage: [TableSlice(0, rows, table(rows), 0) for rows in each]
        for stage, each in sizes.items()
    }
    found = sample_flow(flow, slices, limit_s=seconds)
    assert found is not None and found.rows == (read + 300) // 3


@pytest.mark.parametrize(
    ("limit", "read", "runs"),
    [(6.0, 4_000, 1), (10.0, 4_000, 2), (14.0, 4_000, 3), (99.0, 9_000, 3)],
)
def test_a_large_sample_is_better_than_several_small_ones(
    limit: float, read: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes a second for 1,000 rows; only time that is left is used for more runs."""
    now = 0.0

    def run(slices: Mapping[str, Sequence[Slice]]) -> None:
        nonlocal now
        now += sum(item.rows for item in slices["flow:s"]) / 1_000

    clock = SimpleNamespace(process_time=lambda: now)
    monkeypatch.setattr("roost.runtime.flow_sample.time", clock)
    monkeypatch.setattr("roost.runtime.flow_sample.RUNS", 3)
    given = {"flow:s": [TableSlice(0, 9_000, table(9_000), 0)]}
    found, count = _affordable(run, given, limit)
    assert (sum(item.rows for item in found["flow:s"]), count) == (read, runs)


def test_a_sample_run_includes_what_exchanges_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickling a block takes a second on either side, whatever its rows: every machine pays it.

    Two readers send a block to each of two machines.
    """
    ticks = itertools.count()
    clock = SimpleNamespace(process_time=lambda: float(next(ticks)))
    monkeypatch.setattr("roost.runtime.executor.time", clock)
    flow = Dataflow("f")
    source = flow.source("s", SCHEMA, time="t", path="generate:calls,rows=10")
    source.aggregate({"n": "count"}, by="k", size=50, name="counts").sink("a")
    slices = {"flow:s": [TableSlice(0, 400, table(400), 0)]}
    found = sample_flow(flow, slices, divide(graph_of(flow), LayoutName.OPERATOR_SET))
    assert found is not None
    for name in ("s", "counts"):
        assert found.seconds[name] == pytest.approx(2.0, abs=0.1)
        assert found.fixed[name] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("fixed", "shared"), [(0.0, ["b"]), (0.5, [])])
def test_auto_shares_tasks_unless_every_machine_pays_too_much_for_it(
    fixed: float, shared: list[str], tmp_path: Path
) -> None:
    """An exchange costs a second, and an operator some time on every machine that has it."""
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    summed(summed(stream, ["k"], "a"), ["k"], "b").sink("out")

    def sample(division: Division) -> Sample:
        seconds = {
            "s": 1.0,
            "a": 9.0 if division.shared else 9.5,
            "b": 1.0 if division.shared else 1.5,
        }
        return Sample(seconds, fixed={"a": fixed, "b": fixed}, rows=100)

    def chosen(sample: Callable[[Division], Sample | None], machines: int = 12) -> list[str]:
        with closing(Store(tmp_path / f"state {machines}")) as store:
            graph = graph_of(flow)
            found = lay_out(store, graph, LayoutName.AUTO, machines, 2, sample, rate=100)
            assert set(found.machines) == {"a", "b"} - set(found.graph.stages.shared)
            return sorted(found.graph.stages.shared)

    assert chosen(sample) == shared
    assert chosen(lambda division: pytest.fail("sampled again")) == shared
    # With a task for each core, sharing costs no more.
    assert chosen(lambda division: pytest.fail("sampled"), 2) == ["b"]


def test_a_sample_separates_the_cost_that_does_not_depend_on_rows() -> None:
    found = Sample({"a": 3.0}, fixed={"a": 1.0}, rows=100).scaled(1_000)
    assert found.seconds == {"a": 21.0} and found.fixed == {"a": 1.0}
    graph = path_of_nine()
    costs = StageCosts.of(found, graph, [["m"], ["a", "b"]])
    assert costs.machines([7, 10]) == [0.0, 1.0 + 20.0 * 26 / 256]  # 26 buckets of 256
    rows = StageCosts.of(Sample({"m": 21.0}, fixed={"m": 1.0}), graph, [["m"]])
    assert rows.machines([10]) == [3.0]


def test_points_and_streams_cannot_be_sampled() -> None:
    flow = Dataflow("f")
    flow.points().sink("out")
    assert sample_flow(flow, {}) is None
    flow = Dataflow("f")
    flow.source("s", SCHEMA, time="t").sink("out")
    assert sample_flow(flow, {"flow:s": []}) is None


# --------------------------------------------------------------------------- grids


@pytest.mark.parametrize(("left", "right", "sides"), [
    (1, 1, (16, 16)), (4, 1, (32, 8)), (1, 4, (8, 32)), (1000, 1, (256, 1)), (3, 0, (256, 1)),
])  # fmt: skip
def test_the_sides_of_a_grid_follow_the_rates(left: int, right: int, sides) -> None:
    assert grid_sides(left, right) == sides


def test_the_bucket_map_of_a_product_has_the_grid_of_its_rates(tmp_path: Path) -> None:
    """Those of the sample run, also after a restart."""
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.product(stream, "left.k < right.k", size=5, name="p").sink("out")
    layout = FlowLayout(graph_of(flow), {"p": 2}, {"p": (100, 1)})
    with closing(Store(tmp_path)) as store:
        for _ in range(2):
            table = layout.bucket_table(store, layout.graph.by_name["p"])
            assert table is not None and table.grid == grid_sides(100, 1) == (128, 2)
            assert len(set(np.asarray(table.current.owners).reshape(128, 2)[:, 0])) == 2


@pytest.mark.parametrize("machines", [1, 2, 3, 7, 16, 60])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (9, 1), (1, 200)])
def test_machines_own_rectangles_of_a_grid(machines: int, left: int, right: int) -> None:
    grid = grid_sides(left, right)
    buckets = tiled(machines, grid, left, right)
    buckets.check_invariants()
    cells = np.asarray(buckets.owners).reshape(grid)
    sizes = []
    for machine in range(machines):
        rows, columns = np.nonzero(cells == machine)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert height * width == rows.size, "a rectangle"
        sizes.append(rows.size)
    assert max(sizes) <= 2.5 * 256 / machines


def sent_tuples(buckets: BucketMap, grid: tuple[int, int], left: int, right: int) -> float:
    """Return how many tuples all machines receive, by counting rows and columns."""
    cells = np.asarray(buckets.owners).reshape(grid)
    of_left = sum(len(set(row)) for row in cells.tolist()) / grid[0] * left
    return float(of_left + sum(len(set(row)) for row in cells.T.tolist()) / grid[1] * right)


@pytest.mark.parametrize(("left", "right"), [(1, 1), (16, 1), (1, 64)])
def test_sides_by_rates_send_fewer_tuples_than_a_square(left: int, right: int) -> None:
    grid = grid_sides(left, right)
    mine = sent_tuples(tiled(16, grid, left, right), grid, left, right)
    dealt = sent_tuples(BucketMap.even(16), (16, 16), left, right)
    assert mine <= dealt  # a column for each machine is best for (1, 64)
    # With rectangles of p by q machines, p * q = 16, the least is 2 * sqrt(16 * left * right),
    # or all of the smaller side to each machine.
    assert mine <= 1.3 * min(2 * np.sqrt(16 * left * right), left + 16 * right, 16 * left + right)


def test_a_machine_with_several_cells_receives_and_stores_a_tuple_once(tmp_path: Path) -> None:
    flow = Dataflow("f")
    left, right = (flow.source(name, SCHEMA, time="t") for name in ("l", "r"))
    left.product(right, "left.v = right.v", size=1_000, name="p").sink("out")
    executor = Counting(1)
    rows = {"l": table(300), "r": table(60)}
    with FlowRun(flow, tmp_path, executor=lambda: executor, machines=lambda number: 6) as run:
        run.batch(rows, 0.0)
        run.batch({}, 1.0)
    with closing(Store(tmp_path / "state")) as store:
        owners = BucketMap.from_json(*store.last("flow buckets p")).owners
        (entry,) = [entry for entry in store.get(STATE, "p") if entry[1]]
        assert sum(file[1] for file in entry[1]) == 360, "each tuple is stored once"
    cells = np.asarray(owners).reshape(16, 16)
    at = [rows[side].append_column("__time", rows[side]["t"]) for side in ("l", "r")]
    expected = 0
    for side, block in enumerate(at):
        hashes = hash_rows([block[name] for name in SCHEMA], block.num_rows) % np.uint64(16)
        lines = cells if side == 0 else cells.T
        expected += sum(len(set(lines[int(h)].tolist())) for h in hashes)
    assert executor.sent["flow:p"] == expected
    assert len(run.results()["out"]) == 60


@pytest.mark.parametrize(("condition", "times"), [("left.k = right.k", 1), ("left.k = right.v", 2)])
def test_a_stream_joined_with_itself_is_sent_and_stored_once(
    condition: str, times: int, tmp_path: Path
) -> None:
    """If both sides have the same key columns; otherwise a tuple is in two buckets."""
    flow = Dataflow("f")
    stream = flow.source("s", SCHEMA, time="t")
    stream.join(stream, condition, size=2, name="j").sink("out")
    executor, oracle = Counting(2), Interpreter(graph_of(flow), 0, None)
    run = FlowRun(flow, tmp_path, executor=lambda: executor, machines=lambda number: 3)
    with run:
        for number in range(2):
            rows = table(60, 7, 60 * number)
            run.batch({"s": rows}, float(number))
            oracle.batch({"s": rows.to_pylist()}, float(number), ())
    compare(run, oracle)
    with closing(Store(tmp_path / "state")) as store:
        batches = store.get(STATE, "j")
    assert executor.sent["flow:j"] == 120 * times
    # The window has no more than the last 8 of 60 tuples.
    assert 0 < sum(file[1] for _, files in batches for file in files) <= 8 * times
