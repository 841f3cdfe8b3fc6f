"""The benchmark of layouts: equal results, machines that add up, and times that are all counted."""

from __future__ import annotations

import pytest

from roost.bench import strategies
from roost.bench.strategies import MACHINES, REAL, emulated, query, tuples
from roost.dataflow.colocation import divide, separate, together
from roost.dataflow.compiler import layouts
from roost.dataflow.schema import resolve
from roost.model.choices import LayoutName


def test_the_query_has_nine_operators_of_which_three_are_stateful() -> None:
    graph = resolve("q", query().operators)
    operators = [node for node in graph.nodes if node.inputs and node.output is not None]
    assert len(operators) == 9 and sum(node.operator.stateful for node in operators) == 3
    assert [layout.hops for layout in layouts(graph, 60)] == [3, 8, 3, 2]
    assert len(separate(graph)) == 9
    assert {name: one.root for name, one in together(graph).items()} == {"join": "aggregate"}
    assert divide(graph, LayoutName.AUTO).partial == {"aggregate", "aggregate 2"}


@pytest.mark.parametrize("even", [False, pytest.param(True, marks=pytest.mark.full)])
def test_layouts_on_emulated_machines_have_equal_results(
    even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "BATCHES", 3)
    sample = strategies.sampler(20_000, even=even)
    rows = [emulated(layout, 12, 20_000, sample, even=even) for layout in LayoutName]
    assert len({row["results"] for row in rows}) == 1 and rows[0]["results"]
    for row in rows:
        assert row["work"] + row["exchange"] + row["idle"] == pytest.approx(1)
        assert row["work"] > 0 and row["exchange"] > 0 and row["idle"] >= 0
        if row["layout"] != "query_cloud":
            assert sum(row["placed"].values()) == 12
    # More operators are sent to.
    by_layout = {row["layout"]: row for row in rows}
    assert by_layout["operator_cloud"]["exchange_s"] > by_layout["operator_set"]["exchange_s"]


def test_batches_are_the_same_for_every_layout() -> None:
    assert tuples(3, 100).equals(tuples(3, 100))
    assert tuples(3, 100)["t"].to_pylist() == list(range(300, 400))


def test_the_summary_compares_throughputs() -> None:
    speeds = {
        LayoutName.QUERY_CLOUD: 20.0,
        LayoutName.OPERATOR_CLOUD: 10.0,
        LayoutName.OPERATOR_SET: 30.0,
        LayoutName.AUTO: 33.0,
    }
    rows = [
        {"layout": layout.value, "machines": machines, "tuples_per_s": speed}
        for machines in (*MACHINES, REAL)
        for layout, speed in speeds.items()
    ]
    rows[-1]["tuples_per_s"] = 24.0  # auto on the real cores
    found = strategies._summary(rows)
    assert (found["ratio_os_vs_oc"], found["ratio_os_vs_qc"]) == (3.0, 1.5)
    assert found["auto_vs_best"] == 0.8 and found["auto_vs_best_60"] == 1.1
