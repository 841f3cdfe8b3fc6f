"""Subqueries of a dataflow, and hops, fan-out, channels and cost of its layouts."""

from __future__ import annotations

from itertools import pairwise

import pyarrow.compute as pc
import pytest

from roost import Dataflow
from roost.dataflow.compiler import (
    Layout,
    LayoutCosts,
    fewest_channels,
    layouts,
    split_machines,
    subqueries,
    window_text,
)
from roost.dataflow.compiler import cheapest as cheapest_of
from roost.dataflow.operators import Window, WindowBy
from roost.dataflow.schema import FlowGraph, resolve
from roost.errors import DataflowError
from roost.model.choices import LayoutName
from roost.stages.flow_costs import measure_exchange

SCHEMA = {"k": "int64", "v": "int64", "t": "int64"}


def graph_of(flow: Dataflow) -> FlowGraph:
    return resolve(flow.name, flow.operators)


def figure_1() -> Dataflow:
    """Two Maps, two Filters, a Join and an Aggregate in a row; the Join is of one stream."""
    flow = Dataflow("figure 1")
    calls = flow.source("calls", SCHEMA, time="t")
    mapped = calls.map({"k": pc.field("k"), "v": pc.field("v")}, name="map")
    kept = mapped.filter("v > 0", name="filter")
    pairs = kept.join(kept, "left.k = right.k and left.v < right.v", size=10, name="join")
    narrow = pairs.map({"k": pc.field("left_k")}, name="narrow")
    counts = narrow.aggregate({"n": "count"}, by="k", size=60, advance=10, name="count")
    counts.filter("n > 2", name="many").sink("out")
    return flow


def by_name(found: tuple[Layout, ...]) -> dict[LayoutName, Layout]:
    return {layout.name: layout for layout in found}


def test_figure_1_has_a_prefix_and_two_subqueries() -> None:
    prefix, join, count = subqueries(graph_of(figure_1()))
    assert prefix.operators == ("calls", "map", "filter")
    assert (prefix.inputs, prefix.keys, prefix.buckets, prefix.window) == ((), (), 0, None)
    assert (join.name, join.operators) == ("join", ("join", "narrow"))
    assert (join.inputs, join.keys, join.window) == (("(prefix)",), (("k",), ("k",)), "time 10")
    assert (join.state, join.buckets) == ("tuples of both sides", 256)
    assert (count.operators, count.inputs) == (("count", "many", "out"), ("join",))
    assert (count.keys, count.window, count.state) == ((("k",),), "time 60 by 10", "panes")


def test_figure_1_on_90_machines() -> None:
    """Hops and fan-out are those that section III-A prints."""
    found = layouts(graph_of(figure_1()), 90)
    assert [layout.name for layout in found] == [
        "query_cloud",
        "operator_cloud",
        "operator_set",
        "auto",
    ]
    # The Join's key is that of the Aggregate: auto has no exchange between them.
    assert [layout.hops for layout in found] == [2, 5, 2, 1]
    assert [layout.fan_out for layout in found] == [89, 15, 30, 45]
    assert [layout.channels for layout in found] == [2 * 90 * 89, 5 * 15**2, 2 * 30**2, 45**2]
    assert [[unit.machines for unit in layout.units] for layout in found] == [
        [90],
        [15] * 6,
        [30] * 3,
        [45] * 2,
    ]
    assert [layout.cost for layout in found] == [None] * 4


def chain(stateful: int, stateless: int) -> FlowGraph:
    """A path that begins with one stateless operator and has others after the stateful ones."""
    flow = Dataflow()
    stream = flow.source("s", SCHEMA, time="t").filter("v > 0")
    for _ in range(stateful):
        stream = stream.aggregate({"v": "sum(v)"}, by="k", size=10)
    for _ in range(stateless - 1):
        stream = stream.filter("v > 0")
    stream.sink("out")
    return graph_of(flow)


@pytest.mark.parametrize(("s", "stateless"), [(1, 1), (2, 3), (3, 1), (3, 6)])
def test_paths_follow_the_formulas_of_the_cost_model(s: int, stateless: int) -> None:
    l, machines = s + stateless, 360 * 7  # noqa: E741  (the paper's name)
    model = LayoutCosts(alpha=0.5, beta=0.25, rate=1e4)
    found = by_name(layouts(chain(s, stateless), machines, model=model))
    expected = {
        LayoutName.QUERY_CLOUD: (s * machines * (machines - 1), s),
        LayoutName.OPERATOR_CLOUD: ((l - 1) * (machines / l) ** 2, l - 1),
        LayoutName.OPERATOR_SET: (s * (machines / (s + 1)) ** 2, s),
    }
    for name, (channels, hops) in expected.items():
        layout = found[name]
        assert (layout.channels, layout.hops) == (channels, hops)
        assert layout.cost == 0.5 * channels + 0.25 * 1e4 * hops


def test_hops_win_over_channels_at_a_high_rate() -> None:
    """Operator-set has more channels than operator-cloud, and is cheaper from some rate on."""
    graph = graph_of(figure_1())
    for rate, cheapest in ((1.0, LayoutName.OPERATOR_CLOUD), (1e5, LayoutName.OPERATOR_SET)):
        model = LayoutCosts(0.01, 0.1, rate)
        found = layouts(graph, 90, model=model)[:3]
        assert min(found, key=lambda layout: layout.cost or 0.0).name is cheapest
        assert cheapest_of(graph, 90, model) is cheapest
    assert fewest_channels(graph, 90) is LayoutName.OPERATOR_CLOUD


def test_parallel_branches_count_edge_by_edge() -> None:
    """Two aggregates side by side and a join of both: three stateful operators, two hops."""
    flow = Dataflow()
    stream = flow.source("s", SCHEMA, time="t").filter("v > 0")
    a = stream.aggregate({"n": "count"}, by="k", size=10, name="a")
    b = stream.aggregate({"n": "sum(v)"}, by="k", size=10, name="b")
    a.join(b, "left.k = right.k", size=10, name="j").sink("out")
    graph = graph_of(flow)
    assert [sub.inputs for sub in subqueries(graph)] == [
        (),
        ("(prefix)",),
        ("(prefix)",),
        ("a", "b"),
    ]
    found = by_name(layouts(graph, 8))
    for name in (LayoutName.OPERATOR_CLOUD, LayoutName.OPERATOR_SET):
        assert (found[name].hops, found[name].fan_out, found[name].channels) == (2, 4, 4 * 4)
    assert (found[LayoutName.QUERY_CLOUD].hops, found[LayoutName.QUERY_CLOUD].fan_out) == (2, 7)
    # The aggregates share a bucket map, so that the join has no exchange.
    assert (found[LayoutName.AUTO].hops, found[LayoutName.AUTO].channels) == (1, 4 * 4)


def test_reading_is_the_prefix_of_a_query_that_begins_with_a_stateful_operator() -> None:
    flow = Dataflow()
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"n": "count"}, by="k", size=10, name="a").sink("out")
    graph = graph_of(flow)
    assert [sub.operators for sub in subqueries(graph)] == [("s",), ("a", "out")]
    assert [layout.hops for layout in layouts(graph, 4)] == [1, 1, 1, 1]
    assert [layout.channels for layout in layouts(graph, 4)] == [12, 4, 4, 4]


@pytest.mark.parametrize("filtered", [True, False])
def test_a_stateless_query_needs_no_exchange(filtered: bool) -> None:
    flow = Dataflow()
    stream = flow.source("s", SCHEMA, time="t")
    (stream.filter("v > 0") if filtered else stream).sink("out")
    for layout in layouts(graph_of(flow), 4):
        assert (layout.hops, layout.fan_out, layout.channels) == (0, 0, 0)
        assert [unit.machines for unit in layout.units] == [4]


def test_a_union_belongs_to_every_subquery_that_it_merges() -> None:
    flow = Dataflow()
    stream = flow.source("s", SCHEMA, time="t")
    sums = stream.aggregate({"v": "sum(v)"}, by="k", size=10, name="a")
    narrow = stream.map({"k": pc.field("k"), "v": pc.field("v")}, name="narrow")
    flow.union(sums, narrow, name="both").sink("out")
    prefix, a = subqueries(graph_of(flow))
    assert {"narrow", "both", "out"} <= set(prefix.operators)
    assert {"a", "both", "out"} == set(a.operators)


def test_what_each_operator_stores() -> None:
    flow = Dataflow()
    stream = flow.source("s", SCHEMA, time="t")
    stream.aggregate({"n": "count"}, by="k", window="tuples", size=5, name="rows").sink("a")
    stream.aggregate({"n": "count"}, by="k", window="forever", advance=5, name="ever").sink("b")
    stream.product(stream, "left.v < right.v", size=3, name="grid").sink("c")
    _, rows, ever, grid = subqueries(graph_of(flow))
    assert (rows.state, rows.window) == ("tuples", "tuples 5")
    assert (ever.state, ever.window) == ("one row per key", "forever, every 5")
    assert (grid.keys, grid.grid, grid.buckets) == ((), (16, 16), 256)


def test_a_window_of_one_tick_more_is_shown_as_such() -> None:
    assert window_text(Window(WindowBy.TIME, 60.000001)) == "time 60.000001"
    assert window_text(Window(WindowBy.TIME, 3600.0, 60.0)) == "time 3600 by 60"


@pytest.mark.parametrize(
    ("machines", "costs", "expected"),
    [
        (90, [1, 1, 1], (30, 30, 30)),
        (10, [1, 2, 7], (1, 2, 7)),
        (4, [0, 5], (1, 3)),
        (2, [1, 1, 1], (1, 1, 1)),
        (5, [1, 1, 1], (2, 2, 1)),
        (7, [], ()),
    ],
)
def test_machines_are_divided_by_cost(machines: int, costs: list[float], expected) -> None:
    assert split_machines(machines, costs) == expected


def test_costs_of_operators_add_up_to_those_of_subqueries() -> None:
    costs = {"map": 1.0, "filter": 1.0, "join": 5.0, "narrow": 1.0, "count": 2.0}
    found = by_name(layouts(graph_of(figure_1()), 20, costs))[LayoutName.OPERATOR_SET]
    assert [unit.machines for unit in found.units] == [4, 12, 4]
    assert found.channels == 4 * 12 + 12 * 4


def test_the_explanation_prints_subqueries_and_layouts() -> None:
    found = figure_1().explain(90)
    text = " ".join(str(found).split())
    for words in (
        "join join, narrow (prefix) k 256 time 10 tuples of both sides 45",
        "count count, many, out join k of join time 60 by 10 panes 45",
        "exchanges: (prefix) -> join hops: 1 aggregated before the exchange: none",
        "layout hops fan-out channels query_cloud 2 89 16,020 operator_cloud 5 15 1,125",
        "operator_set 2 30 1,800 auto 1 45 2,025 runs",
    ):
        assert words in text, text
    assert found.runs.name is LayoutName.AUTO
    priced = " ".join(str(figure_1().explain(90, model=LayoutCosts(0.5, 0.5, 1e5))).split())
    assert "layout hops fan-out channels cost" in priced
    assert "operator_set 2 30 1,800 100900 auto 1 45 2,025 51012.5 runs" in priced
    assert "alpha = 0.5 for a channel, beta = 0.5 for sending a tuple" in priced


def test_the_explanation_of_another_layout_has_its_exchanges() -> None:
    found = figure_1().explain(90, layout=LayoutName.OPERATOR_CLOUD)
    path = ["calls", "filter", "join", "narrow", "count", "many"]
    assert found.exchanges == tuple(pairwise(path))
    assert "(prefix) calls, map, filter 15+15 join" in " ".join(str(found).split())
    cheap = figure_1().explain(90, model=LayoutCosts(0.5, 0.5, 1))
    assert cheap.runs.name is LayoutName.OPERATOR_CLOUD


def test_weights_of_exchanges_are_measured() -> None:
    found = measure_exchange(graph_of(figure_1()), 1e6)
    assert found.rate == 1e6
    assert 1e-7 < found.alpha < 1e-1 and 1e-9 < found.beta < 1e-4, found


def test_an_explanation_needs_the_schema_of_points() -> None:
    flow = Dataflow()
    flow.points().sink("out")
    with pytest.raises(DataflowError, match="'points': this run has no points"):
        flow.explain(2)
