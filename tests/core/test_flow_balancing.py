"""Balancing of a running dataflow: skewed streams, hot keys, and results that do not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flow_runs import FlowRun, as_table, compare, run_case, usable
from roost.dataflow.balancing import early_keys
from roost.dataflow.buckets import BucketMap, bucket_of
from roost.dataflow.colocation import together
from roost.dataflow.flow import Dataflow
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.loads import HeavyKey
from roost.dataflow.schema import FlowGraph, resolve
from roost.runtime.flow_rounds import FLOW_ROUNDS
from roost.runtime.report import build_report
from roost.stages.contract import Report
from roost.stages.flow_routing import maps_of
from roost.stages.flow_subquery import HOT_KEYS, SubqueryStage
from roost.storage.store import Store
from roost.testing import InProcessExecutor

MACHINES = 4
BATCHES = 10
TUPLES = 1_500
KEYS = 600


class Middle:
    """A function that needs all tuples of a window."""

    columns = ("v",)
    type = pa.float64()

    def whole(self, values: pa.Array) -> float:
        return float(np.median(values.to_numpy()))


def sums(function: Any = "sum(v)") -> tuple[Dataflow, FlowGraph]:
    flow = Dataflow("sums")
    source = flow.source("s", {"k": "int64", "v": "int64", "t": "int64"}, time="t")
    source.aggregate({"sum": function}, by="k", size=20, advance=10, name="sums").sink("out")
    return flow, resolve(flow.name, flow.operators, {})


def timed(report: Report) -> Report:
    """Return a report with times that repeat: so much for a task and for a tuple."""
    return replace(report, seconds=1e-2 + 1e-3 * report.rows_in)


def noisy(chance: random.Random, report: Report) -> Report:
    """Return a report with times that have little to do with its tuples."""
    return replace(report, seconds=chance.random() * (1 + report.rows_in))


def skewed(hot: float = 0.0, until: int = BATCHES) -> Iterator[list[dict[str, int]]]:
    """Yield batches of tuples: keys in every fourth bucket have six times as many as others.

    In batches before ``until``, key 7 has a share of its own.
    """
    chance = np.random.default_rng(5)
    keys = np.arange(KEYS)
    weights = np.where(bucket_of([pa.array(keys)], KEYS, 256) % MACHINES == 0, 6.0, 1.0)
    weights /= weights.sum()
    for number in range(BATCHES):
        share = hot if number < until else 0.0
        drawn = chance.choice(KEYS, TUPLES, p=(1.0 - share) * weights + share * (keys == 7))
        times = np.sort(chance.integers(10 * number, 10 * number + 10, TUPLES))
        yield [
            {"k": int(k), "v": int(k) % 13 + row, "t": int(t)}
            for row, (k, t) in enumerate(zip(drawn, times, strict=True))
        ]


def run_flow(
    folder: Path,
    policy: str,
    flow: tuple[Dataflow, FlowGraph],
    hot: float = 0.0,
    layout: str = "auto",
    until: int = BATCHES,
) -> None:
    """Run the stream, and compare with the interpreter."""
    query, graph = flow
    settings = {"round": 1.5, "balance": policy}  # two batches
    oracle = Interpreter(graph)
    run = FlowRun(query, folder, settings=settings, machines=lambda batch: MACHINES)
    run.layout = lambda batch: layout
    run.executor = lambda: InProcessExecutor(measure=timed)
    with run:
        for number, rows in enumerate(skewed(hot, until)):
            ended = ["s"] if number == BATCHES - 1 else []
            oracle.batch({"s": rows}, float(number), ended)
            run.batch({"s": as_table(graph, "s", rows)}, float(number), ended)
    compare(run, oracle)


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    with closing(Store(folder / "state")) as store:
        return [row for _, row in store.items(FLOW_ROUNDS)]


def maps_in(folder: Path) -> list[BucketMap]:
    with closing(Store(folder / "state")) as store:
        return [BucketMap.from_json(*row) for row in store.items(maps_of("sums"))]


def seen(folder: Path) -> list[dict[str, Any]]:
    return [row["balance sums"] for row in rounds_of(folder)]


@pytest.mark.parametrize("policy", ["planner", "greedy"])
def test_a_skewed_stream_is_balanced(policy: str, tmp_path: Path) -> None:
    run_flow(tmp_path, policy, sums())
    found = seen(tmp_path)
    first, last = found[0]["deviation"], found[-1]["deviation"]
    assert first > 0.2 and last < (0.2 if policy == "planner" else 0.5) * first
    with closing(Store(tmp_path / "state")) as store:
        balancing = build_report(store)["dataflow"]["balancing"]
    maps = maps_in(tmp_path)
    moves = [move for one in maps for move in one.moves]
    assert moves and all("from" in move.reason for move in moves)
    owners = [one.owners for one in maps]
    assert len(set(owners)) == 2, "one change settles a constant load"
    assert balancing["sums"]["deviation"] == last and not balancing["sums"]["hot_keys"]


def hot_changes(folder: Path) -> list[str]:
    """Return the reasons for which the keys changed that are aggregated before an exchange."""
    verdicts = [verdict for row in rounds_of(folder) for verdict in row["verdicts"]]
    hot = [one["reason"] for one in verdicts if one["policy"].startswith("hot keys")]
    return [reason for reason in hot if reason != "no other key is hot"]


@pytest.mark.sweep(range(300, 303), 2, 300)
def test_balancing_changes_no_result_of_random_dataflows(seed: int, tmp_path: Path) -> None:
    """Times are random, so that a map changes in many rounds; drivers restart and are killed."""
    case, chance = usable(seed), random.Random(seed)
    run = FlowRun(case.flow, tmp_path, machines=lambda batch: MACHINES)
    run.settings = {"round": 0, "balance": chance.choice(["planner", "greedy"]), "imbalance": 0}
    noise = partial(noisy, chance)
    run.executor = lambda: InProcessExecutor(measure=noise)
    run_case(case, run, chance, kills=1)


def test_balancing_of_random_dataflows_moves_buckets(tmp_path: Path) -> None:
    changes, hot = 0, 0
    for seed in range(300, 304):
        folder = tmp_path / str(seed)
        test_balancing_changes_no_result_of_random_dataflows(seed, folder)
        changes += sum(bool(row["epochs"]) for row in rounds_of(folder))
        hot += len(hot_changes(folder))
    assert changes >= 4 and hot >= 4


def test_without_balancing_no_bucket_moves(tmp_path: Path) -> None:
    run_flow(tmp_path, "off", sums())
    assert not rounds_of(tmp_path)


def test_restarts_change_no_result(tmp_path: Path) -> None:
    """A new driver knows no earlier round, and decides again from the first that it sees."""
    flow, graph = sums()
    oracle = Interpreter(graph)
    run = FlowRun(flow, tmp_path, machines=lambda batch: MACHINES)
    run.settings = {"round": 0, "balance": "planner"}
    run.executor = lambda: InProcessExecutor(measure=timed)
    with run:
        for number, rows in enumerate(skewed()):
            ended = ["s"] if number == BATCHES - 1 else []
            oracle.batch({"s": rows}, float(number), ended)
            run.batch({"s": as_table(graph, "s", rows)}, float(number), ended)
            run.stop()
    compare(run, oracle)
    assert any(row["epochs"] for row in rounds_of(tmp_path))


@pytest.mark.parametrize(
    ("function", "remedy", "named"),
    [
        ("sum(v)", "its tuples are aggregated before the exchange", None),
        (Middle(), "none: the function needs all tuples of the key on one machine", "sum (Middle)"),
    ],
)
def test_a_hot_key_is_reported(
    function: Any, remedy: str, named: str | None, tmp_path: Path
) -> None:
    run_flow(tmp_path, "planner", sums(function), hot=0.5, layout="operator_set")
    with closing(Store(tmp_path / "state")) as store:
        (hot,) = build_report(store)["dataflow"]["balancing"]["sums"]["hot_keys"]
    assert hot["share"] == pytest.approx(0.5, abs=0.05)
    share = hot.pop("share")
    expected = {"subquery": "sums", "operator": "sums", "key": "7", "remedy": remedy}
    assert hot == {**expected, "function": named} and share > 1 / MACHINES
    moves = [move for one in maps_in(tmp_path) for move in one.moves]
    bucket = int(bucket_of([pa.array([7])], 1, 256)[0])
    assert bucket not in {move.bucket for move in moves}, "no machine is better for a hot key"


@pytest.mark.parametrize("layout", ["operator_set", "query_cloud", "operator_cloud"])
def test_tuples_of_a_hot_key_are_aggregated_before_the_exchange(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the other tuples can be balanced; the key is sent as it is again when it has cooled."""
    rows: list[int] = []  # of the busiest machine, by batch
    after = SubqueryStage.after

    def spied(self: SubqueryStage, batch: Any, reports: Any, executor: Any) -> Any:
        rows.append(max(report.rows_in for report in reports[self.name]))
        return after(self, batch, reports, executor)

    monkeypatch.setattr(SubqueryStage, "after", spied)
    run_flow(tmp_path, "planner", sums(), hot=0.5, layout=layout, until=7)
    begun, ended = hot_changes(tmp_path)
    assert begun.startswith("share of the tuples: 7 has 5")
    assert ended == "no key is hot any more"
    assert min(rows[:3]) > TUPLES // 2 > 1.4 * max(rows[3:5]), rows
    assert max(rows[5:7]) < 1.3 * TUPLES // 2 / MACHINES, rows
    with closing(Store(tmp_path / "state")) as store:
        assert store.get(HOT_KEYS, "sums") == []


def test_a_key_remains_hot_until_it_has_half_of_a_fair_share() -> None:
    keys = (HeavyKey("a", 1, 0.3, 11), HeavyKey("b", 2, 0.2, 22), HeavyKey("c", 3, 0.1, 33))

    def decided(*now: int) -> Any:
        return getattr(early_keys("sums", keys, MACHINES, now), "keys", None)

    assert decided() == decided(33) == (11,) and decided(11) is None
    assert decided(22) == decided(11, 22, 33) == (11, 22) and decided(22, 11) is None
    assert early_keys("sums", (), MACHINES, (11,)).reason == "no key is hot any more"


def test_all_tuples_of_an_aggregate_without_a_key_are_hot(tmp_path: Path) -> None:
    flow = Dataflow("total")
    source = flow.source("s", {"k": "int64", "v": "int64", "t": "int64"}, time="t")
    source.aggregate({"sum": "sum(v)"}, size=20, advance=10, name="sums").sink("out")
    run_flow(tmp_path, "planner", (flow, resolve(flow.name, flow.operators)), layout="operator_set")
    assert hot_changes(tmp_path) == ["share of the tuples: (no key) has 100%"]
    with closing(Store(tmp_path / "state")) as store:
        (hot,) = build_report(store)["dataflow"]["balancing"]["sums"]["hot_keys"]
    assert hot["share"] == pytest.approx(1.0)


def test_hot_keys_of_an_operator_that_adopts_a_bucket_map(tmp_path: Path) -> None:
    """A Join lets two Aggregates share a bucket map; the key is hot for the second one only.

    Other keys are too rare to be aggregated before the exchange.
    """
    flow = Dataflow("joined")
    source = flow.source("s", {"k": "int64", "v": "int64", "t": "int64"}, time="t")
    others = source.filter("k != 7").aggregate({"sum": "sum(v)"}, by="k", size=5, name="sums")
    ends = source.aggregate({"end": "last(v)"}, by="k", size=5, name="ends")
    others.join(ends, "left.k = right.k", size=5, name="join").sink("out")
    graph = resolve(flow.name, flow.operators)
    assert together(graph)["ends"].root == "sums"
    run_flow(tmp_path, "planner", (flow, graph), hot=0.3)
    (begun,) = hot_changes(tmp_path)
    assert begun.startswith("share of the tuples: 7 has ")
    with closing(Store(tmp_path / "state")) as store:
        assert len(store.get(HOT_KEYS, "ends")) == 1 and not store.get(HOT_KEYS, "sums")
        (hot,) = build_report(store)["dataflow"]["balancing"]["sums"]["hot_keys"]
    assert (hot["subquery"], hot["operator"], hot["key"]) == ("sums", "ends", "7")
    assert hot["share"] == pytest.approx(0.3, abs=0.05) and hot["remedy"].endswith("the exchange")
