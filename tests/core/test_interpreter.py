"""The interpreter against results computed by hand, DuckDB, and properties of random dataflows."""

from __future__ import annotations

import ast
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from flow_graphs import FEATURES, Batch, Case, make_case
from roost.dataflow import interpreter as package
from roost.dataflow.flow import Dataflow, Stream
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.interpreter.conditions import compile_condition
from roost.dataflow.operators import SourceKind
from roost.dataflow.schema import StreamSchema, resolve
from roost.errors import DataflowError
from roost.predicate.pairs import PairPredicate

Rows = list[dict[str, Any]]
SCHEMA = {"t": "int64", "k": "string", "v": "int64"}


def start(flow: Dataflow, lateness: int = 0, idle: float | None = None) -> Interpreter:
    return Interpreter(resolve("test", flow.operators), lateness, idle)


def one(flow: Dataflow, rows: Rows, **settings: Any) -> Interpreter:
    """Run the flow of a source ``a`` on one batch, which is all."""
    interpreter = start(flow, **settings)
    interpreter.batch({"a": rows}, 0.0, ["a"])
    return interpreter


def source(flow: Dataflow, name: str = "a") -> Stream:
    return flow.source(name, SCHEMA, time="t")


def table(*rows: tuple[Any, ...], columns: str = "t k v") -> Rows:
    return [dict(zip(columns.split(), row, strict=True)) for row in rows]


def at(*times: int | None, k: str | None = "x") -> Rows:
    return [{"t": time, "k": k, "v": time} for time in times]


def values(rows: Rows, columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns.split()) for row in rows]


def dead(interpreter: Interpreter) -> list[tuple[str, str, int | None]]:
    return [(name, reason, row["t"]) for name, reason, row in interpreter.dead]


def test_the_interpreter_shares_no_code_with_the_engine() -> None:
    """It imports what describes a query, and nothing that evaluates one."""
    found = set()
    for path in Path(package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
    description = {f"roost.dataflow.{name}" for name in ("operators", "schema", "functions")}
    ours = {name for name in found if name and name.startswith("roost")}
    own = {name for name in ours if name.startswith(package.__name__)}
    assert ours - own == {*description, "roost.errors"}


# --------------------------------------------------------------------------- the paper


def test_figures_4_and_5() -> None:
    flow = Dataflow()
    left = flow.source("left", {"ts": "int64", "number": "int64"}, time="ts")
    right = flow.source("right", {"ts": "int64", "letter": "string"}, time="ts")
    left = left.map({"number": pc.divide(pc.field("number"), 2)})
    right = right.map({"letter": pc.utf8_upper(pc.field("letter"))})
    left.product(right, "left.number mod 2 = 1 and right.letter != 'A'", size=2).sink("out")
    interpreter = start(flow)
    for ts in range(4):  # in either order of arrival
        interpreter.batch({"left": [{"ts": ts, "number": 2 * ts}]}, ts)
        interpreter.batch({"right": [{"ts": ts, "letter": "abcd"[ts]}]}, ts)
    assert values(interpreter.results["out"], "ts left_number right_letter") == [
        (1, 1, "B"),
        (2, 1, "C"),
        (3, 3, "C"),
        (3, 3, "D"),
    ]


# --------------------------------------------------------------------------- windows by time


def test_sliding_windows_are_aligned_and_stamped_with_their_start() -> None:
    flow = Dataflow()
    source(flow).aggregate({"n": "count", "sum": "sum(v)"}, size=6, advance=2).sink("out")
    # 0 is in [-4, 2) [-2, 4) [0, 6); 3 is in [-2, 4) [0, 6) [2, 8); 7 is in [2, 8) [4, 10) [6, 12)
    assert values(one(flow, at(0, 3, 7)).results["out"], "t n sum") == [
        (-4, 1, 0), (-2, 2, 3), (0, 2, 3), (2, 2, 10), (4, 1, 7), (6, 1, 7),
    ]  # fmt: skip


def test_tumbling_windows_of_groups_without_empty_ones() -> None:
    flow = Dataflow()
    source(flow).aggregate({"n": "count"}, by="k", size=10).sink("out")
    rows = table((0, "a", 1), (9, "b", 1), (10, "b", 1), (35, "a", 1), (36, "a", 1))
    found = one(flow, rows).results["out"]
    assert values(found, "t k n") == [(0, "a", 1), (0, "b", 1), (10, "b", 1), (30, "a", 2)]


def test_windows_of_negative_times() -> None:
    flow = Dataflow()
    source(flow).aggregate({"n": "count"}, size=5, advance=5).sink("out")
    assert values(one(flow, at(-6, -5, -1, 0)).results["out"], "t n") == [(-10, 1), (-5, 2), (0, 1)]


def test_an_advance_that_does_not_divide_the_size() -> None:
    flow = Dataflow()
    source(flow).aggregate({"n": "count"}, size=5, advance=3).sink("out")
    # windows [-3, 2) [0, 5) [3, 8) [6, 11)
    assert values(one(flow, at(1, 4, 7)).results["out"], "t n") == [(-3, 1), (0, 2), (3, 2), (6, 1)]


def test_a_window_closes_with_the_batch_whose_watermark_reaches_its_end() -> None:
    flow = Dataflow()
    source(flow).aggregate({"n": "count"}, size=10).sink("out")
    interpreter, out = start(flow, lateness=2), []
    for rows in (at(1, 5), at(11), at(9, 12), at(10)):
        interpreter.batch({"a": rows}, 0.0)
        out.append((interpreter.watermarks["aggregate-1"], len(interpreter.results["out"])))
    # The watermark is 3, 9, 10, 10: tuple 9 is in time, and the window closes with its batch.
    assert out == [(0, 0), (0, 0), (10, 1), (10, 1)]
    assert values(interpreter.results["out"], "t n") == [(0, 3)]


def test_keys_are_ordered_by_value() -> None:
    flow = Dataflow()
    columns = {"t": "int64", "n": "int64", "s": "string", "b": "bool"}
    stream = flow.source("a", columns, time="t")
    stream.aggregate({"c": "count"}, by=["n", "s", "b"], size=10).sink("out")
    keys = [(-1, "b", True), (2, "b", False), (2, "b", True), (2, "zz", True), (2, "é", False),
            (10, "a", True)]  # fmt: skip
    rows = [{"t": 0, "n": n, "s": s, "b": b} for n, s, b in reversed(keys)]
    assert values(one(flow, rows).results["out"], "n s b") == keys


# --------------------------------------------------------------------------- tuple windows, forever


def test_tuple_windows_slide_by_their_advance() -> None:
    flow = Dataflow()
    stream = source(flow)
    stream.aggregate(
        {"sum": "sum(v)", "first": "first(v)"}, by="k", window="tuples", size=3, advance=2
    ).sink("out")
    rows = table(
        (1, "a", 1), (2, "b", 10), (3, "a", 2), (4, "a", 4), (5, "a", 8), (6, "b", 20), (7, "a", 16)
    )  # fmt: skip
    # a: 1 2 4, then 4 8 16; b has only two.
    found = one(flow, rows).results["out"]
    assert values(found, "t k sum first") == [(4, "a", 7, 1), (7, "a", 28, 4)]


def test_tuple_windows_wait_until_the_watermark_has_passed() -> None:
    flow = Dataflow()
    source(flow).aggregate({"sum": "sum(v)"}, window="tuples", size=2).sink("out")
    interpreter, counts = start(flow, lateness=5), []
    for rows in (at(3, 8), at(5, 10), at(12), at(14)):  # the watermark is 3, 5, 7, 9
        interpreter.batch({"a": rows}, 0.0)
        counts.append(len(interpreter.results["out"]))
    # 3 and 5 wait until no other 5 can come, 8 and 10 while 9 can.
    assert counts == [0, 0, 1, 1]
    interpreter.batch({"a": at(9)}, 0.0, ["a"])
    assert values(interpreter.results["out"], "t sum") == [(5, 8), (9, 17), (12, 22)]


def test_forever_emits_changed_groups_at_multiples_of_the_advance() -> None:
    flow = Dataflow()
    stream = source(flow)
    stream.aggregate({"n": "count", "sum": "sum(v)"}, by="k", window="forever", advance=10).sink(
        "out"
    )
    interpreter, counts = start(flow), []
    for rows in (
        table((1, "a", 1), (2, "b", 2), (9, "a", 4)),
        table((10, "a", 8)),  # the watermark reaches 10
        table((31, "b", 16)),  # 20 and 30: only a has changed by 20
    ):
        interpreter.batch({"a": rows}, 0.0)
        counts.append(len(interpreter.results["out"]))
    interpreter.batch({}, 0.0, ["a"])
    assert counts == [0, 2, 3]
    assert values(interpreter.results["out"], "t k n sum") == [
        (10, "a", 2, 5), (10, "b", 1, 2), (20, "a", 3, 13), (40, "b", 2, 18),
    ]  # fmt: skip


# --------------------------------------------------------------------------- joins and products


def test_a_self_join_has_each_pair_twice_and_each_tuple_with_itself() -> None:
    flow = Dataflow()
    stream = source(flow)
    stream.join(stream, "left.k = right.k", size=3).sink("out")
    found = one(flow, table((1, "a", 1), (2, "b", 2), (3, "a", 3), (4, "a", 4), (6, "a", 6)))
    pairs = values(found.results["out"], "t left_v right_v")
    # 6 is near 4, but 3 away from 3.
    assert pairs == [
        (1, 1, 1), (2, 2, 2), (3, 1, 3), (3, 3, 1), (3, 3, 3), (4, 3, 4), (4, 4, 3), (4, 4, 4),
        (6, 4, 6), (6, 6, 4), (6, 6, 6),
    ]  # fmt: skip


def test_a_join_emits_a_pair_with_its_second_tuple() -> None:
    flow = Dataflow()
    source(flow, "a").join(
        source(flow, "b"), "left.k = right.k and left.v + right.v > 5", size=10
    ).sink("out")
    interpreter, found = start(flow, lateness=100), []
    for rows in (
        {"a": at(1, 4)},
        {"b": at(3)},  # 4 + 3
        {"b": at(5), "a": at(2)},  # 1 + 5, 4 + 5, 2 + 5; not 2 + 3
    ):
        interpreter.batch(rows, 0.0)
        found.append(values(interpreter.results["out"], "t left_v right_v"))
        interpreter.results["out"].clear()
    assert found == [[], [(4, 4, 3)], [(5, 1, 5), (5, 2, 5), (5, 4, 5)]]


def test_a_join_by_tuples_counts_tuples_of_the_key() -> None:
    flow = Dataflow()
    source(flow, "a").join(
        source(flow, "b"), "left.k = right.k and left.v < 100", window="tuples", size=2, per="key"
    ).sink("out")
    interpreter = start(flow)
    left = table((1, "x", 1), (2, "x", 2), (3, "y", 3), (4, "x", 400), (7, "x", 7))
    right = table((1, "x", 10), (5, "x", 50), (6, "x", 60), (6, "z", 0))
    interpreter.batch({"a": left, "b": right}, 0.0, ["a", "b"])
    # At 5 the last two of x are 2 and 400, of which the condition excludes 400.
    assert values(interpreter.results["out"], "t left_v right_v") == [
        (1, 1, 10), (2, 2, 10), (5, 2, 50), (6, 2, 60), (7, 7, 50), (7, 7, 60),
    ]  # fmt: skip


def test_a_self_join_by_tuples_meets_itself_once() -> None:
    flow = Dataflow()
    stream = source(flow)
    stream.join(stream, "left.k = right.k", window="tuples", size=2, per="key").sink("out")
    found = values(one(flow, at(1, 2, 3)).results["out"], "left_v right_v")
    # Left 3 meets right 1 and 2; right 3 meets left 2 and 3.
    assert found == [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)]


def test_joins_by_tuples_wait_for_both_watermarks() -> None:
    flow = Dataflow()
    source(flow, "a").join(
        source(flow, "b"), "left.k = right.k", window="tuples", size=1, per="key"
    ).sink("out")
    interpreter, counts = start(flow), []
    for rows in ({"a": at(1, 5)}, {"b": at(2)}, {"b": at(6)}, {"a": at(7)}):
        interpreter.batch(rows, 0.0)
        counts.append(len(interpreter.results["out"]))
    assert counts == [0, 0, 1, 2]  # the watermark is -inf, 2, 5 and 6
    interpreter.batch({}, 0.0, ["a", "b"])
    pairs = values(interpreter.results["out"], "left_v right_v")
    assert pairs == [(1, 2), (5, 2), (5, 6), (7, 6)]


def test_conditions_of_a_join_decide_about_floats_and_nulls() -> None:
    flow = Dataflow()
    columns = {"t": "int64", "k": "int64", "x": "double"}
    stream = flow.source("a", columns, time="t")
    stream.join(stream, "left.k = right.k and left.x = right.x", size=1).sink("out")
    rows = [{"t": 0, "k": 1, "x": x} for x in (0.5, 0.5, None, math.nan)]
    found = one(flow, rows)
    assert values(found.results["out"], "left_x right_x") == [(0.5, 0.5)] * 4
    assert not found.dead  # a float is no key column


# --------------------------------------------------------------------------- order of tuples


def test_ties_are_broken_by_operator_then_key_then_inputs() -> None:
    flow = Dataflow()
    stream = source(flow)  # number 0
    mapped = stream.map({"k": pc.field("k"), "v": pc.field("v") + 100})  # number 1
    both = flow.union(mapped, stream)
    both.aggregate({"a": "first(v)", "b": "last(v)"}, window="tuples", size=3).sink("out")
    rows = table((5, "a", 1), (5, "a", 2), (5, "a", 3), (4, "a", 4))
    # Order: 4, 104, 1, 2, 3, 101, 102, 103
    assert values(one(flow, rows).results["out"], "t a b") == [(5, 4, 1), (5, 2, 101)]


def test_tuples_of_a_map_are_ordered_by_input_then_index() -> None:
    flow = Dataflow()
    schema = pa.schema([("v", pa.int64()), ("i", pa.int64())])

    def repeat(batch: pa.RecordBatch) -> Any:
        found = batch.column("v").to_pylist()
        rows = [k for k, v in enumerate(found) for _ in range(v)]
        columns = [[found[k] for k in rows], [i for v in found for i in range(v)]]
        return pa.RecordBatch.from_arrays([pa.array(c, pa.int64()) for c in columns], schema=schema), rows  # fmt: skip  # noqa: E501

    source(flow).map(repeat, schema=schema).sink("out")
    rows = table((7, "a", 2), (6, "a", 0), (7, "a", 3), (6, "a", 1))
    assert values(one(flow, rows).results["out"], "t v i") == [
        (6, 1, 0), (7, 2, 0), (7, 2, 1), (7, 3, 0), (7, 3, 1), (7, 3, 2),
    ]  # fmt: skip


def test_the_first_true_predicate_takes_the_tuple() -> None:
    flow = Dataflow()
    streams = source(flow).split("v > 5", "v > 3 or k = 'y'")
    for number, stream in enumerate(streams):
        stream.sink(f"out{number}")
    rows = table((1, "x", 6), (2, "x", 4), (3, "x", None), (4, "y", None), (5, "y", 9))
    found = one(flow, rows).results
    assert [values(found[f"out{k}"], "t") for k in range(3)] == [
        [(1,), (5,)],
        [(2,), (4,)],
        [(3,)],
    ]


# --------------------------------------------------------------------------- late tuples


def test_a_tuple_is_late_by_the_watermark_of_the_previous_batch() -> None:
    flow = Dataflow()
    source(flow).sink("out")
    interpreter = start(flow, lateness=2)
    #   batch        1        2            3
    #   tuples      10   20 9 8 7     17 18 19
    #   watermark    8       18           18     after the batch
    for rows in (at(10), at(20, 9, 8, 7), at(17, 18, 19)):
        interpreter.batch({"a": rows}, 0.0)
    assert values(interpreter.results["out"], "t") == [(10,), (8,), (9,), (20,), (18,), (19,)]
    assert dead(interpreter) == [("a", "late", 7), ("a", "late", 17)]


def test_late_tuples_do_not_advance_a_watermark_and_rows_are_numbered_with_them() -> None:
    flow = Dataflow()
    source(flow).aggregate({"last": "last(v)"}, size=10).sink("out")
    interpreter = start(flow)
    interpreter.batch({"a": table((50, "a", 1))}, 0.0)
    interpreter.batch({"a": table((None, "a", 2), (49, "a", 3), (50, "a", 4), (50, "a", 5))}, 0.0)
    interpreter.batch({}, 0.0, ["a"])
    assert dead(interpreter) == [("a", "null_time", None), ("a", "late", 49)]
    assert values(interpreter.results["out"], "t last") == [(50, 5)]


def test_each_source_has_its_own_watermark_and_operators_the_minimum() -> None:
    flow = Dataflow()
    union = flow.union(source(flow, "a"), source(flow, "b"), name="both")
    union.aggregate({"n": "count"}, size=10, name="windows").sink("out")
    interpreter, marks = start(flow), []
    for rows in ({"a": at(30)}, {"b": at(5)}, {"b": at(12), "a": at(31)}):
        interpreter.batch(rows, 0.0)
        marks.append([interpreter.watermarks[x] for x in ("a", "b", "both", "windows")])
    assert marks == [[30, -math.inf, -math.inf, -math.inf], [30, 5, 5, 0], [31, 12, 12, 10]]
    assert values(interpreter.results["out"], "t n") == [(0, 1)]
    assert not interpreter.dead  # 5 and 12 are older than 30, but not than b's own


def test_watermarks_of_aggregates_are_the_start_of_the_oldest_open_window() -> None:
    flow = Dataflow()
    stream = source(flow)
    stream.aggregate({"n": "count"}, size=6, advance=2, name="sliding").sink("out0")
    stream.aggregate({"n": "count"}, window="forever", advance=4, name="forever").sink("out1")
    stream.aggregate({"n": "count"}, window="tuples", size=2, name="tuples").sink("out2")
    interpreter, marks = start(flow), []
    for time in (-7, 6, 7, 8, 12):
        interpreter.batch({"a": at(time)}, 0.0)
        marks.append([interpreter.watermarks[x] for x in ("sliding", "forever", "tuples")])
    # Windows [-12, -6), [2, 8), [2, 8), [4, 10), [8, 14) are open.
    assert marks == [[-12, -4, -7], [2, 8, 6], [2, 8, 7], [4, 12, 8], [8, 16, 12]]


# --------------------------------------------------------------------------- the end of sources


def test_the_end_of_a_source_closes_windows_over_it() -> None:
    flow = Dataflow()
    a, b = source(flow, "a"), source(flow, "b")
    a.aggregate({"n": "count"}, size=10).sink("out0")
    flow.union(a, b).aggregate({"n": "count"}, size=10).sink("out1")
    interpreter = start(flow)
    interpreter.batch({"a": at(1), "b": at(1)}, 0.0, ["a"])
    assert values(interpreter.results["out0"], "t n") == [(0, 1)]
    assert interpreter.results["out1"] == []  # b continues
    interpreter.batch({"a": at(100), "b": at(2)}, 0.0, ["b"])
    assert values(interpreter.results["out1"], "t n") == [(0, 3)]
    assert dead(interpreter) == [("a", "late", 100)]


# --------------------------------------------------------------------------- idle sources


def idle_union(lateness: int = 0) -> Interpreter:
    flow = Dataflow()
    union = flow.union(source(flow, "a"), source(flow, "b"), name="both")
    union.aggregate({"n": "count"}, size=10, name="windows").sink("out")
    return start(flow, lateness=lateness, idle=3.0)


def test_an_idle_source_holds_no_operator_back() -> None:
    interpreter = idle_union()
    #   clock       0     1     2.9    3     4        5
    #   a           1    12     14    25    26       27
    #   b           2     -     -     -   24 25      26
    #   union       1     2     2     25    25       26
    steps = [(0.0, at(1), at(2)), (1.0, at(12), []), (2.9, at(14), []), (3.0, at(25), []),
             (4.0, at(26), at(24, 25)), (5.0, at(27), at(26))]  # fmt: skip
    marks, counts = [], []
    for clock, a, b in steps:
        interpreter.batch({"a": a, "b": b}, clock)
        marks.append(interpreter.watermarks["both"])
        counts.append(len(interpreter.results["out"]))
    assert marks == [1, 2, 2, 25, 25, 26]
    assert counts == [0, 0, 0, 2, 2, 2]
    assert values(interpreter.results["out"], "t n") == [(0, 2), (10, 2)]
    assert dead(interpreter) == [("b", "late", 24)]


def test_the_first_batch_starts_the_time_of_a_source_without_tuples() -> None:
    interpreter = idle_union()
    for clock, marks in ((10.0, -math.inf), (12.0, -math.inf), (13.0, 13)):
        interpreter.batch({"a": at(int(clock))}, clock)
        assert interpreter.watermarks["both"] == marks


def test_late_tuples_leave_a_source_idle() -> None:
    interpreter = idle_union()
    for clock in range(4):
        interpreter.batch({"a": at(10 * clock), "b": at(0) if clock == 0 else []}, float(clock))
    interpreter.batch({"a": at(40), "b": at(20)}, 4.0)
    assert interpreter.watermarks["both"] == 40  # b brought only a late tuple
    interpreter.batch({"a": at(50), "b": at(45)}, 5.0)
    assert interpreter.watermarks["both"] == 45  # b holds the union back again
    assert dead(interpreter) == [("b", "late", 20)]


def test_nothing_advances_while_all_sources_are_idle() -> None:
    interpreter = idle_union()
    interpreter.batch({"a": at(15), "b": at(5)}, 0.0)
    interpreter.batch({}, 50.0)
    assert interpreter.watermarks["both"] == 5
    interpreter.batch({"b": at(7)}, 51.0)  # a is idle, b is not
    assert interpreter.watermarks["both"] == 7
    assert not interpreter.dead and not interpreter.results["out"]


def test_an_idle_source_is_not_overtaken_by_the_end_of_another() -> None:
    interpreter = idle_union()
    interpreter.batch({"a": at(15), "b": at(5)}, 0.0)
    interpreter.batch({}, 50.0, ["a"])
    assert interpreter.watermarks["both"] == 5
    interpreter.batch({"b": at(6)}, 51.0)
    assert not interpreter.dead


def test_windows_before_a_join_close_when_the_join_ceases_to_wait() -> None:
    flow = Dataflow()
    windows = source(flow, "a").aggregate({"n": "count"}, by="k", size=6, advance=2, name="w")
    windows.join(source(flow, "b"), "left.k = right.k", size=5, name="j").sink("out")
    interpreter = start(flow, idle=3.0)
    #   clock    0        3                  4
    #   a       10        -             103 104      103 may be in [98, 104), which is before 100
    #   b       10      100                101
    #   a's      10     104                104
    #   w's       6     100                100
    #   j's       6     100                100
    interpreter.batch({"a": at(10), "b": at(10)}, 0.0)
    assert [interpreter.watermarks[x] for x in "abwj"] == [10, 10, 6, 6]
    interpreter.batch({"b": at(100)}, 3.0)
    assert [interpreter.watermarks[x] for x in "abwj"] == [104, 100, 100, 100]
    pairs = values(interpreter.results["out"], "t left_t right_t")
    assert pairs == [(10, 6, 10), (10, 8, 10), (10, 10, 10)]
    interpreter.batch({"a": at(103, 104), "b": at(101)}, 4.0)
    assert dead(interpreter) == [("a", "late", 103)]
    interpreter.batch({}, 5.0, ["a", "b"])
    assert sorted(values(interpreter.results["out"], "left_t right_t"))[3:] == [
        (100, 100), (100, 101), (102, 100), (102, 101), (104, 100), (104, 101),
    ]  # fmt: skip


def test_the_floor_inverts_all_windows_on_the_path() -> None:
    flow = Dataflow()
    inner = source(flow, "a").aggregate({"n": "count"}, by="k", window="forever", advance=10)
    outer = inner.aggregate({"n": "count"}, by="k", size=9, advance=4)
    flow.union(outer.map({"n": pc.field("n")}), source(flow, "b").map({"n": pc.field("v")}),
               name="both").sink("out")  # fmt: skip
    interpreter = start(flow, idle=3.0)
    interpreter.batch({"a": at(0), "b": at(0)}, 0.0)
    interpreter.batch({"b": at(97)}, 3.0)
    # Windows from 97 on begin at 100; [96, 105) is over at 105; forever stamps 110 from 100 on.
    assert interpreter.watermarks["a"] == 100
    assert interpreter.watermarks["both"] == 97
    interpreter.batch({"a": at(99, 100)}, 4.0)
    assert dead(interpreter) == [("a", "late", 99)]


def test_an_idle_source_has_the_greatest_floor_of_its_paths() -> None:
    flow = Dataflow()
    a, b, c = (source(flow, name) for name in "abc")
    flow.union(a, b, name="ab").sink("out0")
    flow.union(a, c, name="ac").sink("out1")
    interpreter = start(flow, idle=3.0)
    interpreter.batch({name: at(0) for name in "abc"}, 0.0)
    interpreter.batch({"b": at(20), "c": at(30)}, 3.0)
    assert [interpreter.watermarks[x] for x in ("a", "ab", "ac")] == [30, 20, 30]
    interpreter.batch({"a": at(29, 30)}, 4.0)
    assert dead(interpreter) == [("a", "late", 29)]


# --------------------------------------------------------------------------- dead-letter records


def test_null_keys_are_rejected_by_each_operator_input() -> None:
    flow = Dataflow()
    stream = source(flow)
    stream.aggregate({"n": "count"}, by="k", size=10, name="groups").sink("out0")
    stream.aggregate({"n": "count"}, size=10, name="all").sink("out1")
    stream.join(stream, "left.k = right.k", size=10, name="pairs").sink("out2")
    stream.product(stream, "left.v = right.v", size=10, name="product").sink("out3")
    found = one(flow, table((1, "a", 1), (2, None, 2)))
    assert dead(found) == [("groups", "null_key", 2), ("pairs", "null_key", 2),
                           ("pairs", "null_key", 2)]  # fmt: skip
    assert values(found.results["out0"], "k n") == [("a", 1)]
    assert values(found.results["out1"], "n") == [(2,)]
    assert len(found.results["out2"]) == 1
    assert len(found.results["out3"]) == 2


def test_a_map_rejects_the_rows_for_which_it_fails() -> None:
    flow = Dataflow()
    schema = pa.schema([("v", pa.int64())])

    def half(batch: pa.RecordBatch) -> pa.RecordBatch:
        found = batch.column("v").to_pylist()
        return pa.RecordBatch.from_arrays([pa.array([12 // v for v in found])], schema=schema)

    stream = source(flow)
    stream.map(half, schema=schema, name="function").sink("out0")
    stream.map({"v": pc.divide_checked(pc.scalar(12), pc.field("v"))}, name="expression").sink(
        "out1"
    )
    found = one(flow, table((1, "a", 4), (2, "a", 0), (3, "a", 3)))
    assert values(found.results["out0"], "t v") == [(1, 3), (3, 4)]
    assert found.results["out1"] == found.results["out0"]
    assert dead(found) == [("function", "function_failed", 2), ("expression", "function_failed", 2)]


class Mean:
    columns = ("v",)
    type = pa.float64()

    def partial(self, v: pa.Array) -> tuple[int, int]:
        found = v.to_pylist()
        if 99 in found:
            raise ValueError("99")
        return sum(x for x in found if x), len(found)

    def merge(self, states: Sequence[tuple[int, int]]) -> tuple[int, int]:
        if sum(s for s, _ in states) == 50:
            raise ValueError("50")
        return sum(s for s, _ in states), sum(n for _, n in states)

    def finish(self, state: tuple[int, int]) -> float:
        return 1 / state[0] if state[1] == 2 else state[0] / state[1]


class Joined:
    columns = ("k", "v")
    type = pa.string()

    def whole(self, k: pa.Array, v: pa.Array) -> str:
        if len(k) == 3:
            raise ValueError("3")
        return " ".join(f"{a}{b}" for a, b in zip(k.to_pylist(), v.to_pylist(), strict=True))


def test_functions_of_the_user_and_their_failures() -> None:
    flow = Dataflow()
    source(flow).aggregate({"mean": Mean()}, by="k", size=10, name="means").sink("out")
    rows = table(
        (1, "a", 4), (2, "a", None), (3, "a", 5),  # 9 over 3 rows: nulls count
        (1, "b", 99), (2, "b", 6),  # the partial result of 99 fails: only this row is rejected
        (1, "c", 50),  # merge fails
        (1, "d", 0), (2, "d", 0),  # finish fails
    )  # fmt: skip
    found = one(flow, rows)
    assert values(found.results["out"], "t k mean") == [(0, "a", 3.0), (0, "b", 6.0)]
    assert [tuple(row.values()) for _, _, row in found.dead] == [(1, "b", 99), (0, "c"), (0, "d")]
    assert {record[:2] for record in found.dead} == {("means", "function_failed")}


def test_whole_receives_the_rows_of_a_window_in_tuple_order() -> None:
    flow = Dataflow()
    source(flow).aggregate({"all": Joined()}, size=10, name="whole").sink("out")
    rows = table((3, "c", 3), (1, "a", None), (11, "x", 1), (12, "x", 2), (13, "x", 3))
    found = one(flow, rows)
    assert values(found.results["out"], "t all") == [(0, "aNone c3")]
    assert dead(found) == [("whole", "function_failed", 10)]


WRONG = ["text", 1.5, np.float32(2.5), 1 << 70, pa.scalar(1, pa.int32())]


@pytest.mark.parametrize("result", WRONG)
def test_a_result_of_another_type_stops_the_run(result: Any) -> None:
    class Wrong:
        columns = ("v",)
        type = pa.int64()

        def whole(self, v: pa.Array) -> Any:
            return result

    flow = Dataflow()
    source(flow).aggregate({"n": Wrong()}, size=10, name="wrong").sink("out")
    with pytest.raises(DataflowError, match=r"wrong.*int64"):
        one(flow, at(1))


def test_a_map_that_returns_another_type_stops_the_run() -> None:
    schema = pa.schema([("v", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"v": 1}], schema)
    wrong = [batch.cast(pa.schema([("v", pa.int32())])), None, batch.slice(0, 0), (batch, [1])]
    for result in wrong:
        flow = Dataflow()
        source(flow).map(lambda _, found=result: found, schema=schema, name="wrong").sink("out")
        with pytest.raises(DataflowError, match="wrong"):
            one(flow, at(1))


# --------------------------------------------------------------------------- functions

VALUES = {"t": "int64", "i": "int64", "x": "double", "s": "string", "b": "bool"}


def aggregate(functions: dict[str, str], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    flow = Dataflow()
    flow.source("a", VALUES, time="t").aggregate(functions, size=100).sink("out")
    (row,) = one(flow, table(*rows, columns="t i x s b")).results["out"]
    return row


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("count", 5),
        ("count(i)", 4),
        ("sum(i)", 2**53 + 6),
        ("sum(x)", 0.75),
        ("avg(i)", (2**53 + 6) / 4),
        ("avg(x)", 0.1875),
        ("min(i)", 1),
        ("max(i)", 2**53 + 1),
        ("min(s)", "a"),
        ("max(s)", "é"),
        ("min(b)", False),
        ("max(b)", True),
        ("min(x)", -1.0),
        ("max(x)", 1e300),
        ("distinct(i)", 3),
        ("distinct(s)", 3),
        ("quantile(i, 0.5)", 2.0),
        ("quantile(i, 0.3)", 2.0),
        ("quantile(i, 0.0)", 1.0),
        ("quantile(i, 1.0)", 2.0**53),
        ("first(i)", 2),
        ("last(i)", 1),
        ("first(s)", "zz"),
    ],
)
def test_functions(function: str, expected: Any) -> None:
    rows = [
        (5, 1, -1e300, None, None),
        (1, 2, None, "zz", True),
        (3, 2**53 + 1, 1e300, "a", False),
        (4, None, 1.75, "é", True),
        (2, 2, -1.0, "a", None),
    ]
    if function in ("min(x)", "max(x)"):
        rows[0] = (5, 1, 0.0, None, None)
    found = aggregate({"f": function}, rows)["f"]
    assert found == expected and type(found) is type(expected)


def test_exact_sums_are_rounded_once() -> None:
    many = [(0, 0, 0.1, "", True)] * 10
    assert aggregate({"f": "sum(x)"}, many)["f"] == math.fsum([0.1] * 10) == 1.0
    assert aggregate({"f": "stddev(i)"}, [(0, i, 0.0, "", True) for i in (2, 4, 4, 6)])["f"] == (
        pytest.approx(math.sqrt(8 / 3), rel=1e-15)
    )
    huge = [(0, 0, 1.7e308, "", True)] * 3
    assert aggregate({"a": "sum(x)", "b": "avg(x)"}, huge) == {"t": 0, "a": math.inf, "b": 1.7e308}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([math.nan, 1.0], {"sum": "nan", "avg": "nan", "min": 1.0, "max": "nan", "stddev": "nan"}),
        ([math.inf, 1.0], {"sum": math.inf, "avg": math.inf, "min": 1.0, "max": math.inf}),
        ([math.inf, -math.inf], {"sum": "nan", "min": -math.inf}),
        ([math.nan, math.nan], {"min": "nan", "distinct": 1}),
        ([2.5], {"stddev": None, "avg": 2.5}),
        ([None, None], {"sum": None, "avg": None, "min": None, "max": None, "stddev": None,
                        "distinct": 0, "count": 0, "first": None, "last": None}),
    ],
)  # fmt: skip
def test_functions_of_special_values(numbers: list[Any], expected: dict[str, Any]) -> None:
    rows = [(k, 0, x, "", True) for k, x in enumerate(numbers)]
    found = aggregate({name: f"{name}(x)" for name in expected}, rows)
    for name, value in expected.items():
        assert math.isnan(found[name]) if value == "nan" else found[name] == value, name


def test_top_has_the_rows_with_the_greatest_values() -> None:
    rows = [(3, 1, 2.0, "a", None), (1, 2, 2.0, "b", None), (2, 3, math.nan, "c", None),
            (4, 4, None, "d", None), (5, 5, 1.0, "e", None)]  # fmt: skip
    found = aggregate({"top": "top(3, x)", "none": "top(1, b)"}, rows)
    assert [row["s"] for row in found["top"]] == ["c", "b", "a"]
    assert found["top"][1] == {"t": 1, "i": 2, "x": 2.0, "s": "b", "b": None}
    assert found["none"] is None


# --------------------------------------------------------------------------- event times


def test_timestamps_are_microseconds_and_windows_seconds() -> None:
    flow = Dataflow()
    time = pa.timestamp("us", "UTC")
    stream = flow.source("a", pa.schema([("at", time), ("end", time)]), time="at")
    stream.aggregate({"n": "count", "last": "max(end)"}, size=60).sink("out")
    stream.filter("end >= '1970-01-01T00:02:00Z'").sink("late")
    rows = [{"at": 59_999_999, "end": 120_000_000}, {"at": 60_000_000, "end": 1}]
    found = one(flow, rows)
    assert values(found.results["out"], "at n last") == [(0, 1, 120_000_000), (60_000_000, 1, 1)]
    assert found.results["late"] == rows[:1]


def test_records_without_a_time_have_the_clock_of_their_batch() -> None:
    flow = Dataflow()
    flow.source("a", {"v": "int64"}).sink("out")
    interpreter = start(flow)
    interpreter.batch({"a": [{"v": 1}]}, 1.5)
    interpreter.batch({"a": [{"v": 2}]}, 2.0)
    assert values(interpreter.results["out"], "event_time v") == [(1_500_000, 1), (2_000_000, 2)]


def test_points_of_the_run_bring_their_own_times() -> None:
    flow = Dataflow()
    flow.points().sink("out")
    own = StreamSchema(pa.schema([("time", pa.int64())]), "time")
    interpreter = Interpreter(resolve("test", flow.operators, {SourceKind.POINTS: own}))
    interpreter.batch({"points": [{"time": 7}]}, 100.0)
    assert interpreter.results["out"] == [{"time": 7}]


# --------------------------------------------------------------------------- conditions

PAIR = pa.schema([("i", pa.int64()), ("j", pa.int64()), ("x", pa.float64()), ("s", pa.string()),
                  ("b", pa.bool_()), ("t", pa.timestamp("us", "UTC"))])  # fmt: skip
LEFT = {"i": 7, "j": None, "x": 2.5, "s": "late night", "b": True, "t": 1_000_000}
RIGHT = {"i": -7, "j": 2**63 - 1, "x": math.nan, "s": "é", "b": None, "t": 3_500_000}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("left.i = 7 and not left.i != 7", True),
        ("left.j = 1 or left.i = 7", True),
        ("left.j = 1 or left.i = 8", False),
        ("not (left.j = 1 and left.i = 7)", False),
        ("not (left.j = 1 and left.i = 8)", True),
        ("left.j is null and left.i is not null", True),
        ("left.i mod 4 = 3 and right.i % 4 = -3", True),
        ("left.x * 2 = 5 and 2 + 3 * left.i = 23 and (2 + 3) * left.i = 35", True),
        ("left.i - 1 - 1 = 5 and left.i / 2 = 3.5 and -left.i = right.i", True),
        ("left.i / 0 = 1 or not left.i / 0 = 1", False),
        ("left.i mod 0 = 1 or not left.i mod 0 = 1", False),
        ("right.j + 1 > 0 or not right.j + 1 > 0", False),
        ("right.j > 9.2233720368547758e18", False),
        ("abs(right.i - left.i) between 13.5 and 14", True),
        ("right.x = right.x or right.x < 1 or right.x >= 1", False),
        ("right.x != right.x and not right.x < 1", True),
        ("left.s has 'NIGHT' and left.s has all ('late', 'night')", True),
        ("left.s has any ('day', 'late') and not left.s has 'nigh'", True),
        ("left.s < right.s and right.s = 'é'", True),
        ("left.i in (1, 7) and left.i not in (1, 2)", True),
        ("left.j in (1) or left.j not in (1)", False),
        ("left.b and not right.b", False),
        ("left.b = true and right.b is null", True),
        ("right.t - left.t = 2.5 and left.t < right.t", True),
        ("left.t = '1970-01-01T00:00:01Z' and right.t > '1970-01-01T00:00:03.4999999'", True),
        ("left.t in ('1970-01-01', '1970-01-01T00:00:01')", True),
        ("left.i not between 1 and 6 and not left.i not between 1 and 7", True),
        ("`left.i` = 7 and `right.b` is null", True),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    assert compile_condition(text, PAIR, PAIR)(LEFT, RIGHT) is expected


@pytest.mark.sweep(range(3), 2, 20)
def test_conditions_equal_those_of_the_engine(seed: int) -> None:
    drawn = random.Random(seed)
    integers = [None, -3, 0, 1, 2, 7, 2**53 + 1, 2**63 - 1, -(2**63)]
    floats = [None, math.nan, math.inf, -0.0, 0.5, 2.0, -7.25, 2.0**53, 2.0**63]
    choices = {"i": integers, "j": integers, "x": floats, "s": [None, "", "a", "late a", "é", "zz"],
               "b": [None, True, False], "t": [None, 0, 1, 2_500_000, -1]}  # fmt: skip
    rows = [{name: drawn.choice(some) for name, some in choices.items()} for _ in range(12)]
    numbers = ["left.i", "right.i", "left.j", "right.j", "left.x", "right.x", "3", "0.5", "-2"]
    times, texts = ["left.t", "right.t"], ["left.s", "right.s"]

    def term(depth: int) -> str:
        if depth == 0 or drawn.random() < 0.3:
            return drawn.choice([*numbers, f"({times[0]} - {times[1]})"])
        if drawn.random() < 0.2:
            return drawn.choice(["abs({})", "-({})"]).format(term(depth - 1))
        symbol = drawn.choice(["+", "-", "*", "/", "%", "mod"])
        return f"({term(depth - 1)} {symbol} {term(depth - 1)})"

    def condition(depth: int) -> str:
        symbol = drawn.choice(["=", "!=", "<", "<=", ">", ">="])
        if depth and drawn.random() < 0.5:
            inner = drawn.choice([" and ", " or "]).join(condition(depth - 1) for _ in range(2))
            return f"{drawn.choice(['', 'not '])}({inner})"
        name = drawn.choice(numbers[:6])
        return drawn.choice(
            [f"{name} {symbol} {term(2)}", f"{name} - 1 between {term(1)} and {term(1)}",
             f"{name} not in (1, 7, 0.5)", f"{name} {symbol} 7", f"{name} is null",
             f"{drawn.choice(times)} {symbol} '1970-01-01T00:00:00.000001Z'",
             f"{times[0]} {symbol} {times[1]}", f"{texts[0]} {symbol} {texts[1]}",
             f"{drawn.choice(texts)} {symbol} 'late a'", f"{drawn.choice(texts)} has 'LATE'",
             "left.b", "left.b = right.b"]
        )  # fmt: skip

    given = pa.Table.from_pylist(rows, PAIR)
    left, right = np.divmod(np.arange(len(rows) ** 2), len(rows))
    for _ in range(150):
        text = condition(2)
        found = PairPredicate(text, PAIR, PAIR).evaluate(given, given, left, right)
        decide = compile_condition(text, PAIR, PAIR)
        expected = [decide(rows[a], rows[b]) for a, b in zip(left, right, strict=True)]
        assert found.tolist() == expected, text


# --------------------------------------------------------------------------- DuckDB


@pytest.mark.sweep(range(4), 2, 20)
def test_sliding_aggregates_and_joins_equal_duckdb(seed: int) -> None:
    drawn = random.Random(seed)
    rows = table(
        *[
            (drawn.randint(-20, 40), drawn.choice("abc"), drawn.choice([None, 1, 2, 5]))
            for _ in range(60)
        ]
    )
    advance = drawn.randint(1, 5)
    size, near = advance + drawn.randint(0, 7), drawn.randint(1, 6)
    flow = Dataflow()
    stream = source(flow)
    stream.aggregate(
        {"n": "count", "c": "count(v)", "s": "sum(v)"}, by="k", size=size, advance=advance
    ).sink("windows")
    stream.join(stream, "left.k = right.k and left.v < right.v", size=near).sink("pairs")
    found = start(flow, lateness=100)
    for first in range(0, 60, 15):
        found.batch({"a": rows[first : first + 15]}, 0.0)
    found.batch({}, 0.0, ["a"])
    given = pa.Table.from_pylist(rows)  # noqa: F841 - read by the queries
    windows = duckdb.sql(
        f"""select w, k, count(*), count(v), sum(v)::bigint from given,
            (select range * {advance} as w from range(-60, 61))
            where t >= w and t < w + {size} group by w, k order by w, k"""
    ).fetchall()
    pairs = duckdb.sql(
        f"""select greatest(a.t, b.t), a.t, b.t, a.v, b.v from given a join given b
            on a.k = b.k and a.v < b.v and abs(a.t - b.t) < {near} order by all"""
    ).fetchall()
    assert values(found.results["windows"], "t k n c s") == windows
    assert sorted(values(found.results["pairs"], "t left_t right_t left_v right_v")) == pairs


# --------------------------------------------------------------------------- random dataflows


def run(
    case: Case, batches: Sequence[Batch] | None = None, idle: float | None = None
) -> Interpreter:
    interpreter = Interpreter(case.graph, case.lateness, idle)
    for batch in case.batches if batches is None else batches:
        interpreter.batch(batch.rows, batch.clock, batch.ended)
    return interpreter


def contents(interpreter: Interpreter) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Return the rows of the sinks and the dead-letter records without order."""
    results = {name: Counter(map(repr, rows)) for name, rows in interpreter.results.items()}
    return results, Counter(map(repr, interpreter.dead))


def ended(case: Case) -> list[Batch]:
    """Return the batches of a case, the last of which ends all sources."""
    *others, last = case.batches
    sources = tuple(last.rows)
    return [*others, Batch(last.rows, last.clock, sources)]


@pytest.mark.sweep(range(8), 4, 400)
def test_rows_of_a_batch_may_come_in_any_order(seed: int) -> None:
    """Rows with equal event times stay in order: their row numbers break ties."""
    case = make_case(seed)
    times = {node.name: node.output.time for node in case.graph.nodes if node.output is not None}
    batches = []
    for batch in case.batches:
        rows = {
            name: sorted(found, key=lambda row: row.get(times[name]) or 0)
            for name, found in batch.rows.items()
        }
        batches.append(Batch(rows, batch.clock, batch.ended))
    assert contents(run(case, batches, case.idle)) == contents(run(case, None, case.idle))


@pytest.mark.sweep(range(8), 4, 400)
def test_unordered_functions_do_not_depend_on_row_numbers(seed: int) -> None:
    case = make_case(seed)
    if any(node.ordered for node in case.graph.nodes):
        return
    drawn = random.Random(seed)
    batches = [
        Batch({n: drawn.sample(r, len(r)) for n, r in b.rows.items()}, b.clock, b.ended)
        for b in case.batches
    ]
    assert contents(run(case, batches, case.idle)) == contents(run(case, None, case.idle))


@pytest.mark.sweep(range(8), 4, 400)
def test_results_do_not_depend_on_batches_if_nothing_is_late(seed: int) -> None:
    case = make_case(seed, idle=False, late=False)
    if "clock" in case.features:
        return
    drawn = random.Random(seed)
    expected = run(case, ended(case))
    assert not any(record.reason == "late" for record in expected.dead)
    groups: list[list[Batch]] = [[]]
    for batch in ended(case):
        if groups[-1] and drawn.random() < 0.5:
            groups.append([])
        groups[-1].append(batch)
    for parts in (groups, [case.batches[:-1] + ended(case)[-1:]]):
        merged = [
            Batch(
                {name: [row for part in some for row in part.rows[name]] for name in some[0].rows},
                some[-1].clock,
                tuple(name for part in some for name in part.ended),
            )
            for some in parts
        ]
        assert contents(run(case, merged)) == contents(expected)


@pytest.mark.sweep(range(8), 4, 400)
def test_idle_sources_change_only_what_is_late(seed: int) -> None:
    case = make_case(seed)
    batches = ended(case)
    busy, idle = run(case, batches), run(case, batches, case.idle)
    late = [sum(record.reason == "late" for record in x.dead) for x in (busy, idle)]
    assert late[0] <= late[1]
    if late[0] == late[1]:
        assert contents(busy) == contents(idle)


@pytest.mark.sweep(range(8), 4, 400)
def test_a_batch_without_rows_changes_nothing(seed: int) -> None:
    case = make_case(seed)
    batches = [part for batch in case.batches for part in (batch, Batch({}, batch.clock))]
    assert contents(run(case, batches, case.idle)) == contents(run(case, None, case.idle))


def test_random_dataflows_cover_all_features() -> None:
    found: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    rows = 0
    for seed in range(200):
        case = make_case(seed)
        found.update(case.features)
        interpreter = run(case, None, case.idle)
        reasons.update({record.reason for record in interpreter.dead})
        rows += any(interpreter.results.values())
    assert not FEATURES - set(found)
    assert min(found.values()) >= 3, found
    assert set(reasons) == {"late", "null_key", "null_time", "function_failed"}
    assert rows > 150


def test_cases_are_deterministic() -> None:
    for seed in range(10):
        first, second = make_case(seed), make_case(seed)
        assert repr(first.batches) == repr(second.batches)
        assert contents(run(first)) == contents(run(second))
