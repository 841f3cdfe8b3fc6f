"""``roost bench operators``: dataflow operators against Spark's own, and alone on many machines.

Against Spark's windowed aggregation and stream-stream join (:mod:`roost.bench.call_contest`), each
metric is the worst of its cases. Spark has no stream-stream join without an equality, so the
Product runs alone. Map, Aggregate, Join and Product run on 1 to 40 emulated machines against the
offered load, and on one and two real cores beside them (:mod:`roost.bench.operator_scaling`). A
skewed stream runs on a cluster that grows, against Spark (:mod:`roost.bench.growth`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.bench.call_contest import DRIVER_MEMORY, compare, start_session, worst
from roost.bench.calls import HEAVY_S, CallCase
from roost.bench.common import CORES, Measured, Plot, Row
from roost.bench.growth import case_of, grow, summary_of
from roost.bench.operator_scaling import BUCKETS, OPERATORS, best, on_cores, scale
from roost.engine.session import make_session

AGGREGATE, SLIDING, JOIN = (
    "ratio_aggregate_vs_spark", "ratio_sliding_vs_spark", "ratio_join_vs_spark",
)  # fmt: skip
TARGETS = {
    AGGREGATE: 1.2, SLIDING: 3.0, JOIN: 5.0, "comparisons_per_s": 2e8, "scaling_20_to_40": 1.9,
}  # fmt: skip
DISTRICTS = "rate=10000,districts=100"
DISORDER_S = 20
MACHINES = (1, 2, 5, 10, 20, 40)
LOADS = (0.5, 1.0, 1.5)
# Tuples of one machine under full load.
SHARES = {"map": 50_000, "aggregate": 200_000, "join": 50_000, "product": 12_000}
REPEATS = 3


def cases(quick: bool) -> list[CallCase]:
    """Return the queries that are compared with Spark's.

    Call rates are such that the windows of a case close, at sizes that Spark finishes.
    """
    few = 10 if quick else 1
    disordered = f"{DISTRICTS},disorder={DISORDER_S}"

    def heavy(name: str, callers: int, rows: int) -> CallCase:
        calls = f"rate={rows / 5_000},callers={callers}"
        return CallCase(name, SLIDING, calls, rows, rows // 4, "src", 3600, 60, 0, HEAVY_S)

    return [
        CallCase(
            "calls by district, tumbling", AGGREGATE, DISTRICTS,
            4_000_000 // few, 500_000 // few, "district", 10, 10,
        ),
        CallCase(
            "calls by district", SLIDING, disordered,
            1_000_000 // few, 125_000 // few, "district", 60, 10, DISORDER_S,
        ),
        heavy("heavy customers, 10 thousand", 10_000, 60_000 // few),
        heavy("heavy customers, 1 million", 1_000_000, 30_000 // few),
        CallCase(
            "two calls", JOIN, "rate=1000,callers=1000000,skew=zipf:0.5",
            400_000 // few, 100_000 // few,
        ),
    ]  # fmt: skip


def run(quick: bool) -> Measured:
    """Measure all parts."""
    rows = against_spark(cases(quick), 1 if quick else REPEATS)
    shares = {name: share // 10 if quick else share for name, share in SHARES.items()}
    machines, loads = ((1, 2, 4), (1.0,)) if quick else (MACHINES, LOADS)
    for operator in OPERATORS:
        rows += scale(operator, shares[operator.name], machines, loads)
    rows += real_cores(shares)
    rows += grow(case_of(quick))
    summary = summarise(rows)
    return Measured(
        rows,
        summary,
        plots(rows),
        table={
            "part": ("part", ""),
            "case": ("case", ""),
            "machines": ("machines", ""),
            "load": ("load", ""),
            "per second": ("per_s", ",.0f"),
            "Spark": ("spark_per_s", ",.0f"),
            "ratio": ("ratio", ".2f"),
            "busiest task": ("busiest_task_share", ".0%"),
        },
        table_rows=[_shown(row) for row in rows],
        more={"setup": {"buckets": BUCKETS, "cores": CORES, "targets": TARGETS}},
    )


def against_spark(given: Sequence[CallCase], repeats: int) -> list[Row]:
    """Compare all cases in one Spark session."""
    spark = start_session()
    try:
        with tempfile.TemporaryDirectory(prefix="roost-operators-") as name:
            return [
                compare(spark, case, Path(name) / str(number), repeats)
                for number, case in enumerate(given)
            ]
    finally:
        spark.stop()


def real_cores(shares: Mapping[str, int]) -> list[Row]:
    """Measure all operators on Spark with one core, then with two."""
    rows = []
    for cores in range(1, CORES + 1):
        spark: Any = make_session(f"local[{cores}]", {"spark.driver.memory": DRIVER_MEMORY})
        try:
            rows += [on_cores(one, cores, spark, shares[one.name]) for one in OPERATORS]
        finally:
            spark.stop()
    return rows


def summarise(rows: Sequence[Row]) -> Row:
    """Return the worst of each metric's cases, and which targets were missed."""
    scaling = {}
    for operator in OPERATORS:
        few, many = (best(rows, operator.name, machines) for machines in (20, 40))
        if few is not None and many is not None:
            scaling[operator.name] = many / few
    summary: Row = {key: worst(rows, key) for key in (AGGREGATE, SLIDING, JOIN)}
    summary["growth"] = summary_of(rows)
    summary["comparisons_per_s"] = best(rows, "product", 1)
    summary["scaling_20_to_40"] = min(scaling.values(), default=None)
    missed = [
        key for key, target in TARGETS.items() if summary[key] is not None and summary[key] < target
    ]
    return {**summary, "scaling_by_operator": scaling, "buckets": BUCKETS, "missed": missed}


def plots(rows: Sequence[Row]) -> dict[str, Plot]:
    """Return a plot of the cases against Spark, and one of the operators by offered load."""
    contest: dict[str, Any] = {"roost": {}, "spark": {}}
    for row in rows:
        if row["part"] == "spark":
            for system, bars in contest.items():
                bars[row["case"].replace(", ", ",\n")] = row[f"{system}_rows_per_s"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["part"] == "emulated":
            panel = panels.setdefault(f"{row['operator']}: {row['unit']}/s", {})
            line = panel.setdefault(f"{row['machines']} machines", [])
            line.append((row["offered_per_s"], row["per_s"]))
    return {
        "": Plot(
            f"calls per second, {CORES} cores", {"same files, same results": contest}, log=True
        ),
        "-scaling": Plot("throughput by offered load, emulated machines", panels, columns=2),
    }


def _shown(row: Row) -> Row:
    machines = row.get("machines", row.get("cores"))
    return {
        **row,
        "case": row.get("case", row.get("operator")),
        "machines": machines,
        "per_s": row.get("per_s", row.get("roost_rows_per_s")),
        "spark_per_s": row.get("spark_rows_per_s"),
    }
