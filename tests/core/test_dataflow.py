"""Dataflows on the in-process executor give the interpreter's rows, each once."""

from __future__ import annotations

import doctest
import gc
import importlib
import json
import math
import pkgutil
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import roost.dataflow
import roost.stages
from flow_runs import FlowRun, RepeatingExecutor, as_table, compare, run_case, usable
from roost import RunConfig
from roost.dataflow.blocks import BUCKET, ORDER, TIME
from roost.dataflow.cuts import CUT
from roost.dataflow.flow import Dataflow, Stream
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.interpreter.watermarks import Watermarks
from roost.dataflow.loading import load_flow
from roost.dataflow.loads import TUPLES
from roost.dataflow.operators import Port, Product, Sink, Union, Window, WindowBy
from roost.dataflow.partials import PANE
from roost.dataflow.schema import OWN_COLUMNS, resolve
from roost.dataflow.watermarks import Progress
from roost.errors import DataflowError
from roost.model.records import TIME_MAX, TIME_MIN
from roost.runtime.flow import RESERVED
from roost.stages.contract import Stage
from roost.stages.decode import MALFORMED, ROW
from roost.stages.flow import FlowSettings, ProgressStage
from roost.stages.flow_subquery import STATE
from roost.storage.files import Files
from roost.storage.store import Store
from roost.testing import InProcessPipeline
from stage_scenario import STEPS

COVERED = {
    "aggregate of aggregate", "diamond", "forever", "function map", "idle", "join", "late",
    "null key", "out-of-order", "product", "self-join", "tuple join", "tuple window", "union",
    "user function",
}  # fmt: skip


@pytest.mark.sweep(range(6), 3, 2000)
def test_random_dataflows_equal_the_interpreter(seed: int, tmp_path: Path) -> None:
    """Drivers restart with other numbers of machines, and stages are repeated alone."""
    case, chance = usable(seed), random.Random(seed)
    machines = [chance.randint(1, 4) for _ in case.batches]
    run = FlowRun(
        case.flow,
        tmp_path,
        machines=lambda number: machines[number],
        executor=lambda: RepeatingExecutor(chance.randrange(1 << 30)),
    )
    run_case(case, run, chance)


@pytest.mark.sweep(range(100, 103), 2, 300)
def test_drivers_killed_at_random_steps_change_nothing(seed: int, tmp_path: Path) -> None:
    case = usable(seed)
    run_case(case, FlowRun(case.flow, tmp_path), random.Random(seed), kills=2)


@pytest.mark.parametrize("step", STEPS)
def test_a_repeated_batch_has_the_same_clock(step: str, tmp_path: Path) -> None:
    """A source without a time column is stamped with it, and it decides who is idle."""
    flow = Dataflow("clock")
    source = flow.source("s", {"k": "int64"})
    source.sink("stamped")
    source.aggregate({"n": "count"}, by="k", size=10, name="sums").sink("counts")
    clocks = [5.0, 12.0, 27.0]
    with FlowRun(flow, tmp_path) as run:
        for number, clock in enumerate(clocks):
            ended = ["s"] if clock == clocks[-1] else []
            run.batch({"s": pa.table({"k": [number]})}, clock, ended, [step])
    found = run.results()
    assert sorted(row["event_time"] for row in found["stamped"]) == [c * 1e6 for c in clocks]
    assert sorted((row["event_time"], row["k"]) for row in found["counts"]) == [
        (0, 0), (10_000_000, 1), (20_000_000, 2)
    ]  # fmt: skip


def test_a_clock_that_goes_back_makes_no_tuple_late(tmp_path: Path) -> None:
    """As after a correction of the host's time, or on another host."""
    flow = Dataflow("clock")
    flow.source("s", {"k": "int64"}).sink("stamped")
    with FlowRun(flow, tmp_path) as run:
        for number, clock in enumerate([9.0, 4.0, 6.0, 10.0]):
            run.batch({"s": pa.table({"k": [number]})}, clock)
            if number % 2:
                run.stop()
    stamped = {row["k"]: row["event_time"] / 1e6 for row in run.results()["stamped"]}
    assert stamped == {0: 9.0, 1: 9.0, 2: 9.0, 3: 10.0}
    assert not run.dead()


def test_random_dataflows_cover_every_operator_and_kind_of_input() -> None:
    found = Counter(feature for seed in range(20) for feature in usable(seed).features)
    assert set(found) >= COVERED, COVERED - set(found)


def follow_watermarks(seed: int) -> Counter[str]:
    """Compare watermarks of a random graph after each of some batches; returns what they cover.

    Sources are often silent for longer than it takes to become idle, and resume.
    """
    graph, chance = usable(seed).graph, random.Random(seed)
    idle, lateness = chance.choice([None, 3.0, 3.0, 3.0]), chance.choice([0, 4, 40])
    sources = {n.name: n.output.unit for n in graph.nodes if not n.inputs and n.output}
    unit = max(sources.values())
    oracle, progress, found = Watermarks(graph, lateness * unit, idle), Progress(), Counter[str]()
    clock, risen = 0.0, dict.fromkeys(sources, False)
    for _ in range(30):
        clock += chance.choice([0.0, 1.0, 3.0])
        arrived: dict[str, list[int]] = {name: [] for name in sources}
        for name in sources:
            if chance.random() < 0.4:
                oldest = max(progress.watermark(name), 0)
                arrived[name] = [oldest + chance.randrange(30) * unit for _ in range(2)]
        ended = [name for name in sources if chance.random() < 0.01]
        newest = {name: max(times) for name, times in arrived.items() if times}
        for name, time in newest.items():
            behind = time - lateness * unit < progress.watermark(name)
            found["resumed behind its watermark"] += risen[name] and behind
        before = progress
        oracle.advance(arrived, clock, ended)
        progress = progress.after(graph, newest, clock, ended, lateness, idle)
        ends = {-math.inf: TIME_MIN, math.inf: TIME_MAX}
        expected = {name: ends.get(mark, mark) for name, mark in oracle.output.items()}
        assert progress.watermarks == expected, (arrived, before)
        for name, mark in expected.items():
            assert mark >= before.watermark(name), name
        for name in sources:
            rose = name not in newest and expected[name] not in (before.watermark(name), TIME_MAX)
            risen[name] = name not in newest and (risen[name] or rose)
            found["idle source rose"] += rose
    return found


@pytest.mark.sweep([], 5, 2000)
def test_watermarks_equal_those_of_the_interpreter(seed: int) -> None:
    follow_watermarks(seed)


def test_watermarks_of_idle_sources_that_resume() -> None:
    found: Counter[str] = Counter()
    for seed in range(200):
        found += follow_watermarks(seed)
    assert min(found["idle source rose"], found["resumed behind its watermark"]) >= 30, found


def test_a_batch_without_tuples_is_due_when_a_source_becomes_idle() -> None:
    """If that advances a watermark: else nothing would close."""
    flow = Dataflow("idle")
    schema = {"k": "int64", "t": "int64"}
    a, b = flow.source("a", schema, time="t"), flow.source("b", schema, time="t")
    flow.union(a, b).sink("out")
    graph, now = resolve(flow.name, flow.operators), [0.0]
    files = Files("no folder")
    stage = ProgressStage(graph, FlowSettings(0.0, 5.0, {}, files), lambda: now[0])

    def after(newest: dict[str, int], clock: float) -> bool:
        stage.progress = stage.progress.after(graph, newest, clock, (), 0.0, 5.0)
        now[0] = clock
        return stage.due()

    assert not stage.due() and not after({"a": 10, "b": 4}, 0.0)
    assert not after({"a": 20}, 3.0)
    now[0] = 4.9
    assert not stage.due()
    now[0] = 5.0
    assert stage.due()
    assert not after({}, 5.0), "the batch has advanced it"
    assert stage.progress.watermark("out") == 20
    now[0] = 100.0  # no other source is active, so nothing advances
    assert not stage.due()


def tied() -> Dataflow:
    """Return functions and windows that depend on the order of tuples, of all kinds of them."""

    made = pa.schema([("k", pa.int64()), ("v", pa.int64())])

    def twice(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[int]]:
        rows = [row for row in range(batch.num_rows) for _ in range(2)]
        values = [2 * v + n for v in batch["v"].to_pylist() for n in (0, 1)]
        keys = batch["k"].take(pa.array(rows, pa.int64()))
        return pa.RecordBatch.from_arrays([keys, pa.array(values, pa.int64())], schema=made), rows

    flow = Dataflow("ties")
    schema = {"k": "int64", "v": "int64", "t": "int64"}
    a, b = flow.source("a", schema, time="t"), flow.source("b", schema, time="t")
    sums = a.aggregate({"v": "sum(v)"}, by="k", size=2, name="sums")
    whole = b.aggregate({"v": "count"}, by="k", window="forever", advance=2, name="all")
    pairs = a.join(b, "left.k = right.k", size=2, name="pairs").map(
        {"k": pc.field("left_k"), "v": pc.field("left_v") * 100 + pc.field("right_v")}, name="flat"
    )
    crossed = a.product(b, "left.v < right.v", size=1, name="crossed").map(
        {"k": pc.field("right_k"), "v": pc.field("left_v") * 100 + pc.field("right_v")}, name="even"
    )
    doubled = a.map(twice, schema=made, name="twice")
    for name, stream in {
        "source": a, "sums": sums, "all": whole, "flat": pairs, "even": crossed, "twice": doubled,
        "both": flow.union(a.map({"k": pc.field("k"), "v": pc.field("v")}, name="same"), doubled),
    }.items():  # fmt: skip
        ends = {"first": "first(v)", "last": "last(v)", "top": "top(2, k)"}
        stream.aggregate(ends, size=4, name=f"ends {name}").sink(f"ends_{name}")
        window = {"window": "tuples", "size": 3}
        stream.aggregate({"v": "last(v)"}, **window, name=f"third {name}").sink(f"third_{name}")
    met = doubled.join(b, "left.k = right.k", window="tuples", per="key", size=2, name="recent")
    met.sink("met")
    return flow


@pytest.mark.sweep([0], 1, 200)
def test_tuples_of_the_same_time_have_an_order(seed: int, tmp_path: Path) -> None:
    """It depends on no batch or machine; stages are repeated with their input shuffled."""
    flow, chance = tied(), random.Random(seed)
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph, 2)
    run = FlowRun(flow, tmp_path, 2.0, machines=lambda number: 1 + number % 3)
    run.executor = lambda: RepeatingExecutor(chance.randrange(1 << 30))
    with run:
        for number in range(5):
            rows = {
                name: [
                    {"k": chance.randrange(3), "v": chance.randrange(50), "t": 2 * number + late}
                    for late in chance.choices([-3, -2, -1, 0, 1], k=12)
                ]
                for name in "ab"
            }
            ended = ["a", "b"] if number == 4 else []
            oracle.batch(rows, float(number), ended)
            run.batch({name: as_table(graph, name, rows[name]) for name in rows}, 0.0, ended)
            if number % 2:
                run.stop()
    compare(run, oracle)
    assert all(oracle.results.values())


def value_columns() -> dict[str, pa.Array]:
    """Return values of all kinds of types; two of them are equal, and one is null."""
    numbers = pa.array([3, 1, None, 2, 3, 0], pa.int64())
    texts = pa.array(["b", "", None, "b\0", "b", "\0"])
    days = pa.array([3, 1, None, 2, 3, 0], pa.int32())
    return {
        "decimal": numbers.cast(pa.decimal128(30, 2)),
        "date64": days.cast(pa.date32()).cast(pa.date64()),
        "time32": days.cast(pa.time32("s")),
        "duration": numbers.cast(pa.duration("ms")),
        "half": numbers.cast(pa.float64()).cast(pa.float16()),
        "uint64": numbers.cast(pa.uint64()),
        "bytes": texts.cast(pa.binary()),
        "many bytes": texts.cast(pa.large_binary()),
        "fixed bytes": pa.array([b"ba", b"ab", None, b"aa", b"ba", b"a\0"], pa.binary(2)),
        "many texts": texts.cast(pa.large_string()),
        "view": texts.cast(pa.string_view()),
        "dictionary": texts.dictionary_encode(),
        "list": pa.array([[1, 2], [], None, [1], [1, 2], [None]], pa.list_(pa.int64())),
        "struct": pa.array([{"a": n, "b": s} for n, s in zip(numbers.to_pylist(),
                                                             texts.to_pylist(), strict=True)]),
        "null": pa.nulls(6),
    }  # fmt: skip


@pytest.mark.parametrize("kind", value_columns())
def test_columns_of_any_type_have_an_order(kind: str, tmp_path: Path) -> None:
    """Rows without numbers are ordered by content, whatever the order in which they arrive."""
    values = value_columns()[kind]
    table = pa.table({"k": pa.array([0] * 6), "x": values, "t": pa.array([5] * 6)})
    found = []
    for rows in ([0, 1, 2, 3, 4, 5], [4, 3, 5, 0, 2, 1], [5, 2, 1, 4, 3, 0]):
        flow, folder = Dataflow("types"), tmp_path / str(rows[0])
        source = flow.source("s", table.schema, time="t")
        ends = {"first": "first(x)", "last": "last(x)"}
        source.aggregate(ends, by="k", window="tuples", size=2, name="two").sink("twos")
        recent = source.join(
            source, "left.k = right.k", window="tuples", per="key", size=2, name="recent"
        )
        recent.sink("met")
        source.product(source, "left.k <= right.k", size=3, name="product").sink("products")
        run = FlowRun(flow, folder, layout=lambda _: "operator_cloud")
        run.numbered = False
        with run:
            for number, mine in enumerate((rows[:3], rows[3:])):
                some = pa.concat_tables([table.slice(row, 1) for row in mine])
                run.batch({"s": some}, 0.0, ["s"] * number)
        results = {
            sink: sorted(
                repr(list(row.values())[1:])  # without the batch
                for file in (folder / sink).glob("*.parquet")
                for row in pq.read_table(file).to_pylist()
            )
            for sink in ("twos", "met", "products")
        }
        assert len(results["twos"]) == 3 and len(results["products"]) == 36
        found.append(results)
    assert found[0] == found[1] == found[2]


def test_texts_of_any_characters_have_the_order_of_their_bytes(tmp_path: Path) -> None:
    """The order of results begins with their keys, none of which ends another one's encoding."""
    flow = Dataflow("texts")
    source = flow.source("s", {"a": "string", "b": "string", "t": "int64"}, time="t")
    counts = source.aggregate({"n": "count"}, by=["a", "b"], size=5, name="counts")
    lists = counts.aggregate({"all": Both()}, size=5, name="lists")
    lists.sink("out")
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph)
    texts = ["", "\0", "\0\0", "\0\1", "\1", "a", "a\0", "a\0b", "a\1", "b", "\u00e9", "\U0001f600"]
    rows = [{"a": a, "b": b, "t": 1} for a in texts for b in texts]
    random.Random(1).shuffle(rows)
    with FlowRun(flow, tmp_path) as run:
        oracle.batch({"s": rows}, 0.0, ["s"])
        run.batch({"s": as_table(graph, "s", rows)}, 0.0, ["s"])
    compare(run, oracle)
    (row,) = run.results()["out"]
    assert row["all"] == str([(a, b) for a in texts for b in texts])


class Both:
    """A function of all keys, in their order."""

    columns = ("a", "b")
    type = pa.string()

    def whole(self, a: pa.Array, b: pa.Array) -> str:
        return str(list(zip(a.to_pylist(), b.to_pylist(), strict=True)))


# --------------------------------------------------------------------------- figures 4 and 5

LETTERS = {"letter": "string", "t": "int64"}
NUMBERS = {"number": "int64", "t": "int64"}
CONDITION = "left.number mod 2 = 1 and right.letter != 'A'"


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_the_product_of_figures_4_and_5(machines: int, tmp_path: Path) -> None:
    """Numbers are halved and letters capitalised; the window is of 2 time units."""
    flow = Dataflow("figure 4")
    numbers = flow.source("numbers", NUMBERS, time="t").map({"number": pc.field("number") / 2})
    letters = flow.source("letters", LETTERS, time="t").map(
        {"letter": pc.utf8_upper(pc.field("letter"))}
    )
    numbers.product(letters, CONDITION, size=2).sink("product")
    with FlowRun(flow, tmp_path, machines=lambda number: machines) as run:
        for batch in ([0, 1], [2, 3]):
            left = pa.table({"number": [2 * k for k in batch], "t": batch})
            right = pa.table({"letter": ["abcd"[k] for k in batch], "t": batch})
            run.batch({"numbers": left, "letters": right}, 0.0)
    pairs = [(row["left_number"], row["right_letter"]) for row in run.results()["product"]]
    assert sorted(pairs) == [(1, "B"), (1, "C"), (3, "C"), (3, "D")]


@pytest.mark.parametrize(("lateness", "times"), [
    (5.0, [[0, 1], [], [4, 2, 5], [7]]),
    (0.0, [[0, 1], [3], [3, 5], [7]]),  # a tuple is needed until the watermark is at its end
])  # fmt: skip
@pytest.mark.parametrize("machines", [1, 3])
def test_a_join_pairs_tuples_that_differ_by_less_than_its_size(
    machines: int, lateness: float, times: list[list[int]], tmp_path: Path
) -> None:
    """In both directions, in one batch or in two, and after batches that have no tuple."""
    flow = Dataflow("bounds")
    schema = {"k": "int64", "t": "int64"}
    a, b = flow.source("a", schema, time="t"), flow.source("b", schema, time="t")
    a.join(b, "left.k = right.k", size=3, name="join").sink("out")
    with FlowRun(flow, tmp_path, lateness, machines=lambda number: machines) as run:
        for mine in times:
            table = pa.table({"k": [0] * len(mine), "t": pa.array(mine, pa.int64())})
            run.batch({"a": table, "b": table}, 0.0)
    every = [time for mine in times for time in mine]
    found = [(row["left_t"], row["right_t"]) for row in run.results()["out"]]
    assert sorted(found) == sorted((s, t) for s in every for t in every if abs(s - t) < 3)


# --------------------------------------------------------------------------- state


def test_memory_and_disk_stay_bounded_on_an_endless_stream(tmp_path: Path) -> None:
    """After 200 windows there are at most 3 windows' worth of state, and one row per key."""
    flow = Dataflow("endless")
    stream = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    stream.aggregate({"n": "count"}, by="k", size=10, advance=5, name="a").sink("sliding")
    whole = stream.aggregate({"n": "count"}, by="k", window="forever", advance=10, name="f")
    whole.sink("total")
    stream.join(stream, "left.k = right.k", size=10, name="j").sink("joined")
    stream.product(stream, "left.k < right.k - 15", size=10, name="x").sink("products")
    last = stream.aggregate({"n": "last(t)"}, by="k", window="tuples", size=5, advance=2, name="t")
    last.sink("fives")
    met = stream.join(stream, "left.k = right.k", window="tuples", per="key", size=3, name="p")
    met.sink("met")
    stream.aggregate({"n": Whole("k")}, size=10, advance=5, name="w").sink("whole")
    # Windows of several batches, whose files are merged.
    stream.join(stream, "left.k = right.k", size=100, name="long j").sink("long_joined")
    stream.product(stream, "left.k < right.k - 18", size=100, name="long x").sink("long_products")
    for name, function in {"long a": "count", "long w": Whole("k")}.items():
        found = stream.aggregate({"n": function}, by="k", size=100, advance=50, name=name)
        found.sink(f"{name[-1]}_long")
    keys, sizes, memory = 20, [], []
    with FlowRun(flow, tmp_path, history=5) as run:
        for number in range(100):
            times = np.arange(number * 20, number * 20 + 20)  # two windows
            table = pa.table({"k": np.arange(20) * 7 % keys, "t": times})
            run.batch({"s": table}, float(number))
            state = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
            folders = Counter({path.parent: 0 for path in state})
            for path in state:
                folders[path.parent] += path.stat().st_size
            sizes.append([size for _, size in sorted(folders.items())])
            if number in (40, 70, 99):
                gc.collect()
                memory.append((pa.total_allocated_bytes(), len(gc.get_objects())))
    with closing(Store(tmp_path / "state")) as store:
        rows = {
            name: sum(file[1] for _, files in entries for file in files)
            for name, entries in store.items(STATE)
        }
        listed = {file[0] for _, e in store.items(STATE) for _, files in e for file in files}
        needed = {
            name: [file[3] for _, files in entries for file in files]
            for name, entries in store.items(STATE)
            if name in "awjx"
        }
    # A window of 10 has 10 tuples; a join stores both sides.
    assert max(rows["a"], rows["w"]) <= 3 * 10 and max(rows["j"], rows["x"]) <= 3 * 20, rows
    assert all(n <= 3 * 100 * (1 + (k == "long x")) for k, n in rows.items() if "long" in k), rows
    # A file is deleted when its windows close, whether or not it was merged.
    assert needed.keys() == set("awjx")
    assert all(1999 < until <= 1999 + 10 for mine in needed.values() for until in mine), needed
    assert rows["f"] <= 2 * keys, rows
    # Windows of 5 and of 3 tuples of each key.
    assert rows["t"] <= 3 * 5 * keys and rows["p"] <= 3 * 3 * keys, rows
    settled = np.array(sizes[20:])
    assert (settled.max(axis=0) <= 3 * np.median(settled, axis=0)).all()
    assert {path.name for path in (tmp_path / "state" / "flow").glob("*/*")} == listed
    assert (np.array(memory[1:]) <= 1.1 * np.array(memory[0])).all()


def test_windows_of_tuples_rewrite_no_state_that_is_much_larger_than_a_batch(
    tmp_path: Path,
) -> None:
    """Each tuple is written a few times, however long its window is."""
    flow = Dataflow("long windows")
    stream = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    window = {"window": "tuples", "size": 100}
    stream.aggregate({"n": "count"}, by="k", advance=50, **window, name="a").sink("counts")
    stream.join(stream, "left.k = right.k", per="key", **window, name="j").sink("joined")
    written: Counter[str] = Counter()
    batches, rows, keys = 40, 40, 10
    with FlowRun(flow, tmp_path) as run:
        for number in range(batches):
            times = np.arange(number * rows, (number + 1) * rows)
            run.batch({"s": pa.table({"k": times % keys, "t": times})}, float(number))
            with closing(Store(tmp_path / "state")) as store:
                for name, entries in store.items(STATE):
                    batch, files = entries[-1]
                    written[name] += sum(file[1] for file in files) * (batch == number)
    # Replacing the state would write half of 1,000 tuples in a batch, 20,000 in all.
    assert batches * rows <= min(written.values()), written
    assert max(written.values()) < 4 * batches * rows, written


def test_large_state_without_end_is_not_rewritten_in_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key is written a few times, and no group that did not change is emitted."""
    monkeypatch.setattr("roost.stages.flow_subquery.WHOLE", 100)
    flow = Dataflow("many keys")
    stream = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    found = stream.aggregate({"n": "count"}, by="k", window="forever", advance=10, name="f")
    found.sink("counts")
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph)
    batches, keys, written, most = 60, 40, 0, 0
    with FlowRun(flow, tmp_path) as run:
        for number in range(batches):
            # New keys, and some of those before; a result for every second batch.
            ks = [*range(number * keys, (number + 1) * keys), *range(0, number * keys, 97)]
            rows = [{"k": k, "t": number * 5} for k in ks]
            ended = ["s"] if number == batches - 1 else []
            oracle.batch({"s": rows}, float(number), ended)
            run.batch({"s": as_table(graph, "s", rows)}, float(number), ended)
            with closing(Store(tmp_path / "state")) as store:
                entries = dict(store.items(STATE))["f"]
            for batch, files in entries:
                written += sum(file[1] for file in files) * (batch == number)
            most = max(most, len(entries))
    compare(run, oracle)
    # Replacing the state would write half of 2,400 rows in a batch, 72,000 in all.
    assert written < 10 * batches * keys and 1 < most <= 4, (written, most)


@pytest.mark.parametrize("seed", range(3))
def test_equal_tuples_of_a_window_are_counted(seed: int, tmp_path: Path) -> None:
    """Rows without numbers that are alike are in no order, and each is used once."""
    flow = Dataflow("equal tuples")
    stream = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    found = stream.aggregate(
        {"n": "count", "last": "last(t)"}, by="k", window="tuples", size=3, advance=2, name="a"
    )
    found.sink("out")
    graph, chance = resolve(flow.name, flow.operators), random.Random(seed)
    oracle = Interpreter(graph, 2)
    with FlowRun(flow, tmp_path, 2.0, machines=lambda batch: 1 + batch % 3) as run:
        run.numbered = False
        for number in range(30):
            times = [number + chance.randint(-2, 0) for _ in range(6)]
            rows = [{"k": chance.randint(0, 1), "t": t} for t in sorted(times)]
            ended = ["s"] if number == 29 else []
            oracle.batch({"s": rows}, float(number), ended)
            run.batch({"s": as_table(graph, "s", rows)}, float(number), ended)
    compare(run, oracle)


@dataclass(frozen=True)
class Recorded:
    """A query whose parts a test changes one by one."""

    column: str = "k"
    unit: str = "int64"
    predicate: str = "k < 9"
    expression: int = 1
    size: float = 10
    function: str = "count"
    user: str = "k"
    by: str = "k"
    condition: str = "left.k = right.k"
    window: str = "time"
    more: bool = False

    def flow(self) -> Dataflow:
        flow = Dataflow("recorded")
        schema = {self.column: self.unit, "k": "int64", "v": "int64", "t": "int64"}
        source = flow.source("s", schema, time="t").filter(self.predicate, name="some")
        columns = {"k": pc.field("k"), "v": pc.field("v") + self.expression}
        mapped = source.map(columns, name="mapped")
        functions = {"n": self.function, "w": Whole(self.user)}
        calls = mapped.aggregate(functions, by=self.by, size=self.size, name="calls")
        per = "key" if self.window == "tuples" else None
        joined = mapped.join(
            mapped, self.condition, window=self.window, per=per, size=5, name="joined"
        )
        joined.sink("joins")
        calls.sink("out")
        if self.more:
            source.filter("v > 1", name="others").sink("more")
        return flow


CHANGES = [
    ({"column": "w"}, "operator 's': changed"),
    ({"column": "v", "unit": "double"}, "operator 's': changed"),
    ({"predicate": "k < 8"}, "operator 'some': changed"),
    ({"expression": 2}, "operator 'mapped': changed"),
    ({"size": 20}, "operator 'calls': changed"),
    ({"function": "sum(v)"}, "operator 'calls': changed"),
    ({"user": "v"}, "operator 'calls': changed"),
    ({"by": "v"}, "operator 'calls': changed"),
    ({"condition": "left.k = right.k and left.v < 5"}, "operator 'joined': changed"),
    ({"window": "tuples"}, "operator 'joined': changed"),
    ({"more": True}, "operator 'others': added"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda given: str(given))
def test_a_changed_query_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with FlowRun(Recorded().flow(), tmp_path) as run:
        run.batch({}, 0.0)
    with pytest.raises(DataflowError, match=f"{message} since the state"):
        FlowRun(Recorded(**change).flow(), tmp_path, number=1).batch({}, 1.0)
    with FlowRun(Recorded().flow(), tmp_path, number=1) as run:  # the same one continues
        run.batch({}, 1.0)


@pytest.mark.parametrize("sink", ["", "a/b", ".hidden", "_staging", "own state", "synopsis"])
def test_a_sink_that_names_no_folder_of_its_own_is_refused(sink: str, tmp_path: Path) -> None:
    flow = Dataflow("f")
    flow.source("s", {"k": "int64", "t": "int64"}, time="t").sink(sink)
    out = {"dir": tmp_path, "state": tmp_path / "own state"}
    with (
        InProcessPipeline(RunConfig(out=out), flow=flow) as pipeline,
        pytest.raises(DataflowError, match=f"operator '{sink}': a sink names a folder"),
    ):
        pipeline._take_lock()
        pipeline._assemble(None, None, None)


def test_a_sink_cannot_have_the_folder_of_any_stage() -> None:
    """Also of those to come."""
    for module in pkgutil.iter_modules(roost.stages.__path__):
        importlib.import_module(f"roost.stages.{module.name}")
    stages = [stage for stage in Stage.__subclasses__() if stage.__module__.startswith("roost.")]
    kinds = {kind for stage in stages for kind in getattr(stage, "kinds", ())}
    assert {"matches", "dead", "synopsis"} <= kinds <= RESERVED


def test_a_refused_query_leaves_no_state(tmp_path: Path) -> None:
    """So the corrected one is no changed one."""

    def flow(sink: str) -> Dataflow:
        made = Dataflow("f")
        made.source("s", {"k": "int64", "t": "int64"}, time="t").sink(sink)
        return made

    with pytest.raises(DataflowError, match="'pairs': a sink names a folder of the output, but"):
        FlowRun(flow("pairs"), tmp_path).batch({}, 0.0)
    with FlowRun(flow("out"), tmp_path) as run:
        run.batch({}, 0.0)


def test_a_query_without_an_operator_is_refused_by_name(tmp_path: Path) -> None:
    with FlowRun(Recorded(more=True).flow(), tmp_path) as run:
        run.batch({}, 0.0)
    with pytest.raises(DataflowError, match="operator 'others': removed since the state"):
        FlowRun(Recorded().flow(), tmp_path, number=1).batch({}, 1.0)


def test_a_function_of_another_type_stops_the_run(tmp_path: Path) -> None:
    flow = Dataflow("f")
    source = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    schema = pa.schema([("k", pa.int64())])
    source.map(lambda batch: batch.select(["t"]), schema=schema, name="wrong").sink("out")
    rows = {"s": pa.table({"k": [1], "t": [1]})}
    with (
        FlowRun(flow, tmp_path) as run,
        pytest.raises(DataflowError, match="operator 'wrong': the function returned"),
    ):
        run.batch(rows, 0.0)


MADE = {
    "descending": (2, [1, 0]), "beyond the input": (2, [0, 3]), "before the input": (2, [-1, 0]),
    "too few": (3, [0, 1]), "too many": (1, [0, 1]), "without numbers": (2, None),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_rows_of_a_map_that_are_of_no_input_row_stop_the_run(name: str, tmp_path: Path) -> None:
    """Else they would get the event time of another row."""
    count, rows = MADE[name]

    def function(batch: pa.RecordBatch) -> Any:
        made = pa.RecordBatch.from_arrays([pa.array(range(count), pa.int64())], ["k"])
        return made if rows is None else (made, rows)

    flow = Dataflow("f")
    source = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    source.map(function, schema=pa.schema([("k", pa.int64())]), name="wrong").sink("out")
    with (
        FlowRun(flow, tmp_path) as run,
        pytest.raises(DataflowError, match=r"'wrong': the function returned \d rows made"),
    ):
        run.batch({"s": pa.table({"k": [1] * 3, "t": [1] * 3})}, 0.0)


NAMED = """
from typing import NamedTuple
import pyarrow as pa
from roost import Dataflow

class Ends(NamedTuple):
    low: int
    high: int

class Range:
    columns, type = ("v",), pa.int64()

    def partial(self, values):
        return Ends(min(values.to_pylist()), max(values.to_pylist()))

    def merge(self, states):
        return Ends(min(s.low for s in states), max(s.high for s in states))

    def finish(self, state):
        return state.high - state.low

flow = Dataflow("named states")
source = flow.source("s", {"k": "int64", "v": "int64", "t": "int64"}, time="t")
source.aggregate({"n": Range()}, by="k", size=10, name="ranges").sink("out")
"""


def test_states_may_have_a_class_of_the_dataflows_file(tmp_path: Path) -> None:
    """No worker can import it, so such states are pickled by value."""
    path = tmp_path / "named_states.py"
    path.write_text(NAMED)
    run = FlowRun(load_flow(f"{path}:flow"), tmp_path / "out")
    with run:
        run.batch({"s": pa.table({"k": [1, 2], "v": [4, 1], "t": [3, 4]})}, 0.0)
    run.flow = load_flow(f"{path}:flow")  # another driver reads the states of the first one
    with run:
        run.batch({"s": pa.table({"k": [1, 1], "v": [9, 3], "t": [5, 14]})}, 1.0, ["s"])
    found = [tuple(row.values()) for row in run.results()["out"]]
    assert sorted(found) == [(0, 1, 5), (0, 2, 0), (10, 1, 0)]


class WrongFinish:
    """A function whose results are no integers of 64 bits."""

    columns = ("k",)
    type = pa.int64()

    def __init__(self, result: object) -> None:
        self.result = result

    def partial(self, keys: pa.Array) -> int:
        return len(keys)

    def merge(self, states: list[int]) -> int:
        return sum(states)

    def finish(self, state: int) -> object:
        return self.result


class WrongWhole(WrongFinish):
    """The same, of all tuples of a window."""

    def whole(self, keys: pa.Array) -> object:
        return self.result


WRONG = ["text", 1.5, np.float32(2.5), 1 << 70, True, pa.scalar(1, pa.int32())]


@pytest.mark.parametrize("make", [WrongFinish, WrongWhole])
@pytest.mark.parametrize("result", WRONG, ids=map(repr, WRONG))
def test_an_aggregate_function_of_another_type_stops_the_run(
    result: object, make: Callable[[object], object], tmp_path: Path
) -> None:
    """It is not a failure of single rows, which would be dead letters."""
    flow = Dataflow("f")
    source = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    source.aggregate({"n": make(result)}, size=5, name="wrong").sink("out")
    rows = {"s": pa.table({"k": [1], "t": [1]})}
    with (
        FlowRun(flow, tmp_path) as run,
        pytest.raises(DataflowError, match=r"operator 'wrong', column 'n': .*another type than"),
    ):
        run.batch(rows, 0.0, ["s"])


def test_all_columns_of_stages_are_known() -> None:
    """A column of the user with such a name is refused."""
    assert {TIME, ORDER, BUCKET, PANE, CUT, TUPLES, ROW, MALFORMED} == OWN_COLUMNS


def test_a_key_may_have_any_name_that_is_not_refused(tmp_path: Path) -> None:
    """State has columns of its own for each function, which must not replace a key."""
    flow = Dataflow("names")
    source = flow.source("s", {"0.n": "int64", "1.limbs": "string", "t": "int64"}, time="t")
    functions = {"n": "count", "z": "sum(`0.n`)"}
    source.aggregate(functions, by=["0.n", "1.limbs"], size=4, advance=2, name="a").sink("out")
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph)
    with FlowRun(flow, tmp_path) as run:
        for number in range(3):
            rows = [{"0.n": n % 4, "1.limbs": "ab"[n % 2], "t": 2 * number} for n in range(9)]
            oracle.batch({"s": rows}, 0.0, ["s"] * (number == 2))
            run.batch({"s": as_table(graph, "s", rows)}, 0.0, ["s"] * (number == 2))
    compare(run, oracle)


def test_a_sum_beyond_64_bits_is_rejected(tmp_path: Path) -> None:
    flow = Dataflow("large")
    source = flow.source("s", {"k": "int64", "v": "int64", "t": "int64"}, time="t")
    source.aggregate({"v": "sum(v)", "mean": "avg(v)"}, by="k", size=9, advance=3).sink("out")
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph)
    with FlowRun(flow, tmp_path) as run:
        for number in range(2):
            rows = [{"k": k, "v": 1 << (60 + k), "t": 5 * number + k} for k in range(3)] * 3
            oracle.batch({"s": rows}, 0.0, ["s"] * number)
            run.batch({"s": as_table(graph, "s", rows)}, 0.0, ["s"] * number)
    compare(run, oracle)
    assert run.dead() and len(run.results()["out"]) > 5
    file, *_ = (tmp_path / "dead").glob("*.parquet")
    row = pq.read_table(file).to_pylist()[0]
    assert "exceeds 64 bits" in row["detail"] and json.loads(row["record"]).keys() == {"t", "k"}


@pytest.mark.parametrize("begin", [-50, 0, 1_700_000_000_000_000])
@pytest.mark.parametrize("layout", ["operator_set", "auto"])
def test_a_source_that_begins_later(begin: int, layout: str, tmp_path: Path) -> None:
    """Until then no watermark is known, and every operator waits for it."""
    flow = Dataflow("later")
    schema = {"k": "int64", "v": "int64", "t": "int64"}
    a, b = flow.source("a", schema, time="t"), flow.source("b", schema, time="t")
    both = flow.union(a, b, name="both")
    for name, functions in {
        "slid": {"n": "count", "v": "sum(v)"},
        "merged": {"low": "min(v)", "end": "last(v)", "distinct": "distinct(v)"},
        "whole": {"n": Whole("v")},
        "own": {"n": Tens()},
    }.items():
        both.aggregate(functions, by="k", size=6, advance=2, name=name).sink(f"{name}_out")
    both.aggregate({"low": "min(v)"}, by="k", window="forever", advance=1, name="all").sink("ever")
    both.aggregate({"v": "sum(v)"}, by="k", window="tuples", size=2, name="two").sink("twos")
    lows = a.aggregate({"low": "min(v)"}, by="k", size=2, name="lows")
    a.join(b, "left.k = right.k", size=4, name="pairs").sink("joined")
    lows.join(b, "left.k = right.k", size=4, name="mixed").sink("mixed_out")
    graph = resolve(flow.name, flow.operators)
    oracle, chance = Interpreter(graph), random.Random(begin)
    with FlowRun(flow, tmp_path, layout=lambda _: layout) as run:
        for number in range(6):
            rows = {
                name: [
                    {"k": n % 2, "v": chance.randrange(9), "t": begin + 4 * number + n}
                    for n in range(4)
                ]
                for name in (["a"] if number < 3 else ["a", "b"])
            }
            ended = ["a", "b"] if number == 5 else []
            oracle.batch(rows, float(number), ended)
            run.batch({n: as_table(graph, n, mine) for n, mine in rows.items()}, 0.0, ended)
            if number % 2:
                run.stop()
    compare(run, oracle)
    assert all(oracle.results.values())


@pytest.mark.parametrize("sign", [1, -1])
def test_event_times_beyond_62_bits_are_rejected(sign: int, tmp_path: Path) -> None:
    """The ends of their windows would not have 64 bits; the greatest would end the source."""
    flow = Dataflow("far")
    source = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    long = 2**61
    source.aggregate({"n": "count"}, by="k", size=9, advance=3, name="short").sink("short_out")
    source.aggregate({"n": "last(t)"}, by="k", size=long, name="long").sink("long_out")
    source.aggregate({"n": "count"}, by="k", window="forever", advance=long, name="all").sink(
        "sums"
    )
    source.join(source, "left.k = right.k", size=long, name="pairs").sink("pairs_out")
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph)
    far = [0, 5, 2**62 - 1, 2**62, 2**63 - 1]
    times = [far[:2], far[3:], far[2:3]] if sign > 0 else [[-t for t in reversed(far)], [1], [2]]
    times = [[-(2**63), *times[0]], *times[1:]]
    with FlowRun(flow, tmp_path) as run:
        for number, mine in enumerate(times):
            rows = [{"k": 0, "t": t} for t in mine]
            ended = ["s"] if number == 2 else []
            oracle.batch({"s": rows}, 0.0, ended)
            run.batch({"s": as_table(graph, "s", rows)}, 0.0, ended)
    compare(run, oracle)
    assert run.dead() == {("s", "wrong_type"): 3}
    assert all(len(rows) > 1 for rows in oracle.results.values())


class Tens:
    """A function that raises for a tuple with 13, and for a window whose sum is 50."""

    columns = ("v",)
    type = pa.int64()

    def partial(self, values: pa.Array) -> int:
        if 13 in values.to_pylist():
            raise ValueError("13")
        return sum(values.to_pylist())

    def merge(self, states: list[int]) -> int:
        return sum(states)

    def finish(self, state: int) -> int:
        return 1 // (state - 50)


@pytest.mark.parametrize("layout", ["operator_set", "auto"])
def test_what_dead_letter_records_contain(layout: str, tmp_path: Path) -> None:
    """Each has the columns that the operator reads, its event time, and why it was rejected."""

    def sevens(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 7 in batch["v"].to_pylist():
            raise KeyError("seven")
        return batch.select(["v"])

    flow = Dataflow("rejected")
    columns = {"k": "string", "v": "int64", "at": "timestamp[us, tz=UTC]"}
    source = flow.source("s", columns, time="at")
    source.map(sevens, schema=pa.schema([("v", pa.int64())]), name="sevens").sink("mapped")
    source.aggregate({"n": Tens()}, by="k", size=10, name="tens").sink("sums")

    def table(*rows: tuple[str | None, int, int | None]) -> pa.Table:
        times = pa.array([None if row[2] is None else row[2] * 1_000_000 for row in rows])
        return pa.table({"k": pa.array([row[0] for row in rows], pa.string()),
                         "v": [row[1] for row in rows],
                         "at": times.cast(pa.timestamp("us", "UTC"))})  # fmt: skip

    with FlowRun(flow, tmp_path, layout=lambda _: layout) as run:
        rows = table(("a", 13, 1), ("a", 5, 2), (None, 3, 3), ("b", 50, 4), ("c", 7, 5))
        run.batch({"s": rows}, 0.0)
        run.batch({"s": table(("a", 1, 4), ("a", 2, None), ("d", 2, 6))}, 1.0, ["s"])
    found = [pq.read_table(file) for file in (tmp_path / "dead").glob("*.parquet")]
    records = [
        (row["batch_id"], row["origin"], row["reason"], row["detail"], json.loads(row["record"]))
        for row in pa.concat_tables(found).to_pylist()
    ]
    at = "1970-01-01 00:00:0{}+00:00".format
    null, failed = "a key column is null: k", "function_failed"
    late = "at is before the watermark"
    assert sorted(records, key=repr) == [
        (0, "sevens", failed, "KeyError: 'seven'", {"k": "c", "v": 7, "at": at(5)}),
        (0, "tens", failed, "ValueError: 13", {"at": at(1), "k": "a", "v": 13}),
        (0, "tens", "null_key", null, {"v": 3, "at": at(3)}),
        (1, "s", "late", late, {"k": "a", "v": 1, "at": at(4)}),
        (1, "s", "null_time", "at is null", {"k": "a", "v": 2}),
        (1, "tens", failed, "ZeroDivisionError: integer division or modulo by zero",
         {"at": at(0), "k": "b"}),
    ]  # fmt: skip


def test_the_examples_in_the_docstrings_hold() -> None:
    modules = pkgutil.walk_packages(roost.dataflow.__path__, "roost.dataflow.")
    names = [module.name for module in modules] + ["roost.runtime.flow_layout"]
    found = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert not [name for name, result in found.items() if result.failed]
    assert sum(result.attempted > 0 for result in found.values()) >= 6


# --------------------------------------------------------------------------- refused flows


def stream_of(flow: Dataflow, name: str = "s", **columns: str) -> Stream:
    return flow.source(name, {"k": "int64", "v": "double", "t": "int64", **columns}, time="t")


def cycle(flow: Dataflow) -> None:
    stream_of(flow)
    flow.add(Union("a", (Port("b"),)))
    flow.add(Union("b", (Port("a"),)))


class Whole:
    """A function of the user over a column, with something that it holds."""

    def __init__(
        self, *column: str, held: object = None, type_: object = None, columns: object = None
    ) -> None:
        self.columns = columns or column
        self.type = type_ or pa.int64()
        self.held = held

    def whole(self, values: pa.Array) -> int:
        return len(values)


REFUSED: dict[str, tuple[Callable[[Dataflow], object], str]] = {
    "unknown column of a key": (
        lambda f: stream_of(f).aggregate({"n": "count"}, by="x", size=5, name="a"),
        "operator 'a', column 'x': unknown column",
    ),
    "unknown column of a function": (
        lambda f: stream_of(f).aggregate({"n": "sum(x)"}, size=5, name="a"),
        "operator 'a', column 'x': unknown column",
    ),
    "unknown column of a predicate": (
        lambda f: stream_of(f).split("x > 5", name="a"),
        "operator 'a': predicate 'x > 5': unknown attribute x",
    ),
    "unknown column of an expression": (
        lambda f: stream_of(f).map({"y": pc.field("x") + 1}, name="a"),
        r"operator 'a', column 'y': .*unknown column 'x' \(known: k, v, t\)$",
    ),
    "unknown column of a condition": (
        lambda f: stream_of(f).join(stream_of(f, "r"), "left.k = right.x", size=5, name="a"),
        "operator 'a': condition .*: unknown attribute right.x",
    ),
    "unknown column of a product": (
        lambda f: stream_of(f).product(stream_of(f, "r"), "left.x < right.k", size=5, name="a"),
        "operator 'a': condition .*: unknown attribute left.x",
    ),
    "unknown column of a user's function": (
        lambda f: stream_of(f).aggregate({"n": Whole("x")}, size=5, name="a"),
        "operator 'a', column 'x': unknown column",
    ),
    "unknown time column": (
        lambda f: f.source("s", {"t": "int64"}, time="x"),
        "operator 's', column 'x': unknown column",
    ),
    "wrong type of a time column": (
        lambda f: f.source("s", {"t": "double"}, time="t"),
        "operator 's', column 't': expected a timestamp",
    ),
    "wrong type of a predicate": (
        lambda f: stream_of(f, w="string").split("w > 5", name="a"),
        "operator 'a': predicate 'w > 5': attribute w has type string",
    ),
    "wrong type of a condition": (
        lambda f: stream_of(f, w="string").join(
            stream_of(f, "r"), "left.k = right.k and left.w < right.v", size=5, name="a"
        ),
        r"operator 'a': condition .*: cannot compare these types: left.w \(string\), right.v",
    ),
    "wrong type of an expression": (
        lambda f: stream_of(f, w="string").map({"y": pc.field("w") + 1}, name="a"),
        r"operator 'a', column 'y': .*input types \(string, int8\)$",
    ),
    "expression that a literal narrows": (
        lambda f: stream_of(f).map({"y": pc.field("k") * 2.5}, name="a"),
        r"operator 'a', column 'y': .*\(k, 2.5\) has type float, because pyarrow narrows a literal",
    ),
    "wrong type of a key": (
        lambda f: stream_of(f).aggregate({"n": "count"}, by="v", size=5, name="a"),
        "operator 'a', column 'v': a key must be",
    ),
    "wrong type of a function": (
        lambda f: stream_of(f, w="string").aggregate({"n": "sum(w)"}, size=5, name="a"),
        "operator 'a', column 'w'",
    ),
    "unknown function": (
        lambda f: stream_of(f).aggregate({"n": "median(v)"}, size=5, name="a"),
        r"operator 'a', column 'n': 'median\(v\)' is not a function: .* quantile .*top\(n, column",
    ),
    "type of a user's function that is a text": (
        lambda f: stream_of(f).aggregate({"n": Whole("v", type_="int64")}, size=5, name="a"),
        "operator 'a', column 'n': the type of a function is a pyarrow type .*, not 'int64'",
    ),
    "columns of a user's function that are no names": (
        lambda f: stream_of(f).aggregate({"n": Whole(columns=5)}, size=5, name="a"),
        "operator 'a', column 'n': the columns of a function are names, not 5",
    ),
    "schema of expressions": (
        lambda f: stream_of(f).map({"y": pc.field("k")}, schema=pa.schema([]), name="a"),
        "operator 'a': a schema is for a function",
    ),
    "window of a boolean": (
        lambda f: stream_of(f).aggregate({"n": "count"}, size=True, name="a"),
        "operator 'a': size of True",
    ),
    "window of zero": (
        lambda f: stream_of(f).aggregate({"n": "count"}, size=0, name="a"),
        "operator 'a': size of 0",
    ),
    "window of more than 62 bits": (
        lambda f: stream_of(f).aggregate({"n": "count"}, size=2**62, name="a"),
        "operator 'a': size of 4611686018427387904; expected a whole number of units from 1 to",
    ),
    "window of a text": (
        lambda f: stream_of(f).aggregate({"n": "count"}, size="5", name="a"),  # type: ignore[arg-type]
        "operator 'a': size of '5'",
    ),
    "advance of zero": (
        lambda f: stream_of(f).aggregate({"n": "count"}, size=5, advance=0, name="a"),
        "operator 'a': advance of 0",
    ),
    "window of zero of a join": (
        lambda f: stream_of(f).join(stream_of(f, "r"), "left.k = right.k", size=0, name="a"),
        "operator 'a': size of 0",
    ),
    "advance of zero of a window without end": (
        lambda f: stream_of(f).aggregate({"n": "count"}, window="forever", advance=0, name="a"),
        "operator 'a': advance of 0",
    ),
    "advance greater than size": (
        lambda f: stream_of(f).aggregate({"n": "count"}, size=5, advance=6, name="a"),
        "operator 'a': advance 6 is greater than size 5",
    ),
    "join without equality": (
        lambda f: stream_of(f).join(stream_of(f, "r"), "left.k < right.k", size=5, name="a"),
        "operator 'a': a Join needs an equality",
    ),
    "join by an equality that is no key": (
        lambda f: stream_of(f).join(stream_of(f, "r"), "left.v = right.v", size=5, name="a"),
        "operator 'a', column 'v': a Join needs an equality .*; double = double is no equality",
    ),
    "union of different schemas": (
        lambda f: f.union(stream_of(f), stream_of(f, "r", w="string"), name="a"),
        "operator 'a', column 'w': streams of different schemas",
    ),
    "column of a type without rows": (
        lambda f: stream_of(f).map(len, schema=pa.schema([("x", pa.string_view())]), name="a"),
        "operator 'a', column 'x': a column of type string_view; expected string$",
    ),
    "column of partial results": (
        lambda f: stream_of(f).map({"__0.n": pc.field("k")}, name="a"),
        "operator 'a', column '__0.n': a column of this name is Roost's own",
    ),
    "union with a stream of another dataflow": (
        lambda f: f.union(stream_of(f), stream_of(Dataflow("other")), name="a"),
        "operator 'a': reads 's' of another dataflow",
    ),
    "join with a stream of another dataflow": (
        lambda f: stream_of(f).join(
            stream_of(Dataflow("other")), "left.k = right.k", size=5, name="a"
        ),
        "operator 'a': reads 's' of another dataflow",
    ),
    "product with a stream of another dataflow": (
        lambda f: stream_of(f).product(
            stream_of(Dataflow("other")), "left.k < right.k", size=5, name="a"
        ),
        "operator 'a': reads 's' of another dataflow",
    ),
    "column of Roost's own": (
        lambda f: stream_of(f).map({"__time": pc.field("k")}, name="a"),
        "operator 'a', column '__time': a column of this name is Roost's own",
    ),
    "result with a column of Roost's own": (
        lambda f: stream_of(f, batch_id="int64"),
        "operator 'out', column 'batch_id': a column of this name is Roost's own",
    ),
    "cycle": (cycle, "form a cycle"),
    "duplicate name": (
        lambda f: [stream_of(f), stream_of(f)],
        "operator 's': duplicate name",
    ),
    "function that does not pickle": (
        lambda f: stream_of(f).map(
            lambda batch, lock=threading.Lock(): batch,  # noqa: B008
            schema=pa.schema([("k", pa.int64())]),
            name="a",
        ),
        "operator 'a': .*does not pickle",
    ),
    "aggregate function that does not pickle": (
        lambda f: stream_of(f).aggregate(
            {"n": Whole("v", held=threading.Lock())}, size=5, name="a"
        ),
        "operator 'a', column 'n': .*does not pickle",
    ),
    "tuple window over the whole stream in a join": (
        lambda f: stream_of(f).join(
            stream_of(f, "r"), "left.k = right.k", window="tuples", size=5, name="a"
        ),
        "operator 'a': a window of tuples over the whole stream; use per='key'",
    ),
    "tuple window in a product": (
        lambda f: f.add(
            Product("a", (stream_of(f).port, stream_of(f, "r").port), "left.k = right.k",
                    Window(WindowBy.TUPLES, 5))
        ),
        "operator 'a': a window of tuples over the whole stream; a Product has time windows only",
    ),
}  # fmt: skip


def test_an_expression_may_be_float_if_the_user_says_so() -> None:
    """By a cast, or by the type of a column; else it is a double, whatever the literal."""
    flow = Dataflow("f")
    columns = {
        "tenths": pc.field("k").cast("double") * 0.5,
        "more": pc.field("k") * 0.1,
        "cast": (pc.field("k") * 0.5).cast("float"),
    }
    stream_of(flow).map(columns, name="doubles").sink("a")
    stream_of(flow, "r", w="float").map({"w": pc.field("w") * 0.5}, name="float").sink("b")
    graph = resolve(flow.name, flow.operators)
    made = graph.by_name["doubles"].output
    assert made is not None
    assert [str(type_) for type_ in made.columns.types] == ["int64", "double", "double", "float"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_dataflow_is_refused_with_operator_and_column(name: str) -> None:
    build, message = REFUSED[name]
    flow = Dataflow("wrong")
    with pytest.raises(DataflowError, match=message):
        build(flow)
        flow.add(Sink("out", (Port("s"),)))
        resolve(flow.name, flow.operators)
