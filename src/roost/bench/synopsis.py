"""``roost bench synopsis``: quality, size and speed of a synopsis of six months of weather.

One sketch at one budget gives all figures: 2.1 million hourly rows of Brazilian stations with nine
features, built as deltas of 100 thousand rows on one core and folded. DuckDB runs the same queries
over the rows, in memory with as many threads as the machine has cores, and over a rollup of the
same groups. Times of queries include everything from Python's call to the result; no result is
cached, and every query is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.common import CORES, Measured, Plot, Row
from roost.bench.synopsis_ageing import measure_ageing
from roost.bench.synopsis_cases import (
    FEATURES,
    Draw,
    Oracle,
    Question,
    Weather,
    batches,
    load_weather,
    widths_of,
)
from roost.bench.synopsis_engine import measure_engine
from roost.bench.synopsis_forest import measure_forests
from roost.bench.synopsis_models import measure_forecasts
from roost.model.arrays import Floats, frozen
from roost.synopsis import (
    BinRule,
    Scope,
    SetSpec,
    Synopsis,
    SynopsisResult,
    SynopsisSpec,
    build,
    cardinality,
    contains,
    correlation,
    density,
    fit_memory,
    frequency,
    learn_bins,
    mean,
    merge,
    quantiles,
    record_batches,
    select,
    stddev,
)
from roost.synopsis.bins import Bins, feature_values
from roost.synopsis.records import BinRecords
from roost.synopsis.sets import NO_SETS
from roost.synopsis.spec import run_keys, split_group_keys

SEED = 2024
ROWS_QUICK = 300_000
DELTA_ROWS = 100_000
#: Bytes per row: the budget of 2.1 million rows is 15.7 MB.
BUDGET_PER_ROW = 7.5
BUDGETS = (0.6, 0.8, 1.0)  # of the budget, for the trade-off
QUERIES, QUERIES_QUICK = 500, 100
TIMED, TIMED_QUICK = 200, 40
SITE = ("lon", "lat")
BIN_COUNTS = (16, 29, 48, 96, 192)
TARGETS = {
    "nrmse_p80": 0.005,
    "bytes_ratio": 8,
    "bytes_growth": 1.1,
    "p50_ms_lookup": 0.15,
    "p50_ms_country": 1.0,
    "p50_ms_relational": 20.0,
    "ratio_vs_duckdb": 50,
    "ratio_vs_rollup": 3,
    "bounds_broken": 0,
    "bound_width": 0.10,
    "rows_per_s_per_core": 1e6,
    "overhead": 1.4,
    "lost": 0,
    "doubled": 0,
    "forecast_ratio_vs_naive": 0.85,
    "forecast_coverage": (0.93, 0.97),
    "rmse_ratio_10pct": 1.02,
    "rmse_ratio_vs_sample": 1.01,
}


def run(quick: bool) -> Measured:
    """Measure all parts."""
    weather = load_weather(ROWS_QUICK if quick else None)
    schema = weather.table.schema
    sites = SetSpec.of(schema, SITE, period_days=30, members=1_000, counters=1_000)
    spec = SynopsisSpec.of(schema, FEATURES, sets=(sites,))
    full = build(weather.table, spec)
    memory = int(BUDGET_PER_ROW * weather.table.num_rows)
    fitted = fit_memory(full, memory)
    synopsis, rate = measure_rate(weather.table, spec, fitted.bins)
    p80, tail = worst_errors(synopsis.bin_records)
    arrow = weather.table.nbytes
    rows: list[Row] = []
    with opened(weather) as (oracle, rollup):
        rollup(synopsis)
        speed = measure_speed(synopsis, weather, oracle, quick)
        draw = Draw(weather, SEED)
        questions = [draw.any() for _ in range(QUERIES_QUICK if quick else QUERIES)]
        truths = [oracle.value(question.sql, question.scope) for question in questions]
        broken, widths, by_kind = check_bounds(synopsis, questions, truths)
        for share in BUDGETS:
            rows.append(trade_off(full, share, memory, questions, truths, arrow))
    # Set sketches cannot be divided by age.
    plain = replace(synopsis, spec=replace(spec, sets=()), sets=NO_SETS)
    ageing, tables, plots = measure_ageing(weather, plain, memory, quick)
    engine, batch_seconds = measure_engine(weather.table, quick)
    summary: Row = {
        "nrmse_p80": p80,
        "nrmse_tail": tail,
        "bytes_ratio": arrow / synopsis.nbytes,
        "bytes_ratio_parquet": parquet_bytes(weather.table) / synopsis.nbytes,
        **speed,
        "bounds_broken": broken,
        **widths,
        "rows_per_s_per_core": rate,
        **ageing,
        **engine,
        **measure_forecasts(synopsis, weather, SEED + 2, quick),
    }
    forest, forests = measure_forests(weather.table, spec, BUDGET_PER_ROW, SEED + 3, quick)
    summary |= forest
    figure = errors_by_bins(weather.table, spec)
    return Measured(
        rows,
        summary,
        plots_of(rows, figure) | plots,
        table={
            "budget": ("budget", ".1f"),
            "MB": ("mb", ",.1f"),
            "ratio": ("bytes_ratio", ".1f"),
            "leaves": ("leaves", ",.0f"),
            "bins of planes": ("planes", ""),
            "width": ("bound_width", ".3f"),
            "random": ("bound_width_random", ".3f"),
            "broken": ("bounds_broken", ",.0f"),
        },
        more={
            "targets": TARGETS,
            "table_1": graph_sizes(weather.table, synopsis),
            "figure_2": figure,
            "table_3": forests,
            "bounds_by_kind": by_kind,
            "bytes_by_part": bytes_by_part(synopsis),
            "batch_seconds": batch_seconds,
            **tables,
        },
    )


def measure_rate(table: pa.Table, spec: SynopsisSpec, bins: Bins) -> tuple[Synopsis, float]:
    """Build deltas and fold them, on one core; returns the synopsis and rows per second."""
    build(table.slice(0, 10_000), spec, bins)  # compiled loops are loaded
    started = time.perf_counter()
    deltas = [build(batch, spec, bins) for batch in batches(table, DELTA_ROWS)]
    folded = merge(deltas)
    return folded, table.num_rows / (time.perf_counter() - started)


def worst_errors(records: BinRecords) -> tuple[float, float]:
    """Return the error that 80 % of the values do not exceed, and the worst bin's."""
    errors = [bin_errors(records, feature) for feature in range(len(records.counts))]
    return max(p80 for p80, _ in errors), max(tail for _, tail in errors)


def bin_errors(records: BinRecords, feature: int) -> tuple[float, float]:
    """Return both for one feature: RMSE of a bin over the feature's max - min."""
    counts = records.counts[feature, 1:]
    at = counts > 0
    counts = counts[at]
    means = records.sums[feature, 1:][at] / counts
    spread = np.sqrt(np.maximum(records.squares[feature, 1:][at] / counts - means**2, 0.0))
    span = records.highs[feature, 1:].max() - records.lows[feature, 1:][at].min()
    errors = spread / span
    order = np.argsort(errors)
    reached = np.searchsorted(np.cumsum(counts[order]), 0.8 * counts.sum())
    return float(errors[order][reached]), float(errors.max())


@contextmanager
def opened(weather: Weather) -> Iterator[tuple[Oracle, Callable[[Synopsis], None]]]:
    """Open DuckDB with the rows, and a function that adds the rollup of a synopsis' groups."""
    with duckdb.connect() as connection:
        connection.execute(f"set threads = {CORES}")
        yield (
            Oracle(weather, connection),
            lambda synopsis: _roll_up(synopsis, weather.sites, connection),
        )


def _roll_up(synopsis: Synopsis, sites: Floats, connection: duckdb.DuckDBPyConnection) -> None:
    """Create a table with one row per group: keys, and the sums of every pair of features."""
    layout = synopsis.spec.layout
    x, y = np.ascontiguousarray(sites.T)
    keys, steps = np.empty(x.size, np.int64), np.empty(x.size, np.int64)
    run_keys(frozen(x), frozen(y), frozen(np.zeros(x.size, np.int64)), layout, keys, steps)
    prefixes = split_group_keys(keys >> synopsis.spec.rest_bits)[0]
    cells = pa.table({"site": np.arange(x.size, dtype=np.int32), "cell": prefixes})
    connection.register("cells", cells)
    columns = ["cell", f"us // {layout.bucket_us} as bucket"]
    columns.append(f"us // {layout.slot_us} % {synopsis.spec.slots} as slot")
    for a, first in enumerate(FEATURES):
        for second in FEATURES[a + 1 :]:
            both = f"filter (where {first} is not null and {second} is not null)"
            terms = {"n": "1", "x": first, "y": second, "xx": f"{first} * {first}"}
            terms |= {"yy": f"{second} * {second}", "xy": f"{first} * {second}"}
            for key, term in terms.items():
                wide = term.replace(first, f"{first}::double").replace(second, f"{second}::double")
                columns.append(f"sum({wide}) {both} as {key}_{first}_{second}")
    connection.execute(
        f"create table rollup as select {', '.join(columns)} from weather join cells using (site) "
        "group by 1, 2, 3"
    )


def rollup_sql(question: Question, synopsis: Synopsis) -> str:
    """Return a correlation over the rollup; buckets that the range cuts count in full."""
    pair = "_".join(sorted(question.features, key=FEATURES.index))
    layout, scope = synopsis.spec.layout, question.scope
    assert isinstance(scope.since, int) and isinstance(scope.until, int) and scope.hours
    start, stop = (hour * 3_600_000_000 // layout.slot_us for hour in scope.hours)
    word = "and" if start < stop else "or"
    n, x, y, xx, yy, xy = (f"sum({key}_{pair})" for key in ("n", "x", "y", "xx", "yy", "xy"))
    cov = f"({xy} - {x} * {y} / {n})"
    var = f"sqrt(({xx} - {x} * {x} / {n}) * ({yy} - {y} * {y} / {n}))"
    return (
        f"select {cov} / {var} from rollup where bucket between {scope.since // layout.bucket_us} "
        f"and {(scope.until - 1) // layout.bucket_us} and (slot >= {start} {word} slot < {stop})"
    )


def timed_ms(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call."""
    started = time.perf_counter()
    call()
    return 1000.0 * (time.perf_counter() - started)


def measure_speed(synopsis: Synopsis, weather: Weather, oracle: Oracle, quick: bool) -> Row:
    """Time local, country-wide and relational queries; the first of each kind is not counted."""
    draw = Draw(weather, SEED + 1)
    number = TIMED_QUICK if quick else TIMED
    lookups: dict[str, Callable[[str, Scope], Any]] = {
        "mean": lambda name, scope: mean(synopsis, name, scope),
        "stddev": lambda name, scope: stddev(synopsis, name, scope),
        "correlation": lambda name, scope: correlation(synopsis, name, "temp_c", scope),
        "quantile": lambda name, scope: quantiles(synopsis, name, [0.5], scope),
        "density": lambda name, scope: density(synopsis, name, [1.0], scope, 1.0),
    }
    sets: dict[str, Callable[[dict[str, float], Scope], Any]] = {
        "contains": lambda site, scope: contains(synopsis, site, scope),
        "cardinality": lambda site, scope: cardinality(synopsis, SITE, scope),
        "frequency": lambda site, scope: frequency(synopsis, site, scope),
    }
    times: dict[str, list[float]] = {kind: [] for kind in (*lookups, *sets, "relational")}
    for _ in range(number + 1):
        (name,) = draw.features(1)
        scope = draw.local()
        for kind, lookup in lookups.items():
            times[kind].append(timed_ms(lambda: lookup(name, scope)))  # noqa: B023 - called here
        site = dict(zip(SITE, draw.rng.choice(weather.sites).tolist(), strict=True))
        for kind, query in sets.items():
            span = Scope(since=scope.since, until=scope.until)
            times[kind].append(timed_ms(lambda: query(site, span)))  # noqa: B023
        times["relational"].append(timed_ms(lambda: list(record_batches(select(synopsis, scope)))))  # noqa: B023
    country: dict[str, list[float]] = {"own": [], "duckdb": [], "rollup": []}
    for _ in range(number + 1):
        question = draw.country()
        sql = rollup_sql(question, synopsis)
        country["own"].append(timed_ms(lambda: question.run(synopsis)))  # noqa: B023
        country["duckdb"].append(timed_ms(lambda: oracle.value(question.sql, question.scope)))  # noqa: B023
        country["rollup"].append(timed_ms(lambda: oracle.connection.execute(sql).fetchall()))  # noqa: B023
    p50 = {kind: median(values[1:]) for kind, values in (times | country).items()}
    return {
        "p50_ms_lookup": max(p50[kind] for kind in (*lookups, *sets)),
        **{f"p50_ms_{kind}": p50[kind] for kind in (*lookups, *sets)},
        "p50_ms_country": p50["own"],
        "p50_ms_relational": p50["relational"],
        "ratio_vs_duckdb": p50["duckdb"] / p50["own"],
        "ratio_vs_rollup": p50["rollup"] / p50["own"],
    }


def check_bounds(
    synopsis: Synopsis, questions: list[Question], truths: list[float | None]
) -> tuple[int, Row, dict[str, Row]]:
    """Return the broken bounds, the median width of counts, and both by kind of query.

    The width is that of all counts, of those with recorded constants, and of the others.
    """
    pairs = [
        (question, question.run(synopsis), truth)
        for question, truth in zip(questions, truths, strict=True)
    ]
    broken = {id(question) for question, result, truth in pairs if breaks(result, truth)}
    kinds: dict[str, Row] = {}
    for kind in sorted({question.kind for question in questions}):
        own = [pair for pair in pairs if pair[0].kind == kind]
        own_widths = [
            result.high - result.low
            for _, result, truth in own
            if truth and result.low is not None and result.high is not None
        ]
        failed = sum(id(question) in broken for question, _, _ in own)
        width = median(own_widths) if own_widths else 0.0
        kinds[kind] = {"queries": len(own), "broken": failed, "median_width": width}
    widths: Row = {"bound_width": median(widths_of(pairs))}
    for key, recorded in (("recorded", True), ("random", False)):
        own = [pair for pair in pairs if pair[0].recorded is recorded]
        widths[f"bound_width_{key}"] = median(widths_of(own))
    return len(broken), widths, kinds


def breaks(result: SynopsisResult, truth: float | None) -> bool:
    """Return whether a true value is outside its bounds."""
    if truth is None or truth != truth:
        return False
    if result.low is None or result.high is None:
        return True
    slack = 1e-12 * abs(truth)  # DuckDB rounds, too
    return not result.low - slack <= truth <= result.high + slack


def trade_off(
    full: Synopsis,
    share: float,
    memory: int,
    questions: list[Question],
    truths: list[float | None],
    arrow: int,
) -> Row:
    """Measure the width of bounds at a share of the budget."""
    fitted = fit_memory(full, int(share * memory))
    broken, widths, _ = check_bounds(fitted, questions, truths)
    return {
        "budget": share,
        "mb": fitted.nbytes / 1e6,
        "bytes_ratio": arrow / fitted.nbytes,
        "leaves": fitted.leaf_count,
        "planes": " ".join(map(str, fitted.bins.plane_counts)),
        **widths,
        "bounds_broken": broken,
    }


def graph_sizes(table: pa.Table, synopsis: Synopsis) -> Row:
    """Compare the graph of all values with that of the bins, as the paper's table 1."""
    bins = synopsis.bins
    values = [
        np.nan_to_num(feature_values(table[name].combine_chunks(), feature, None), nan=-1e9)
        for name, feature in zip(FEATURES, synopsis.spec.features, strict=True)
    ]
    exact = [np.unique(column, return_inverse=True)[1] for column in values]
    codes = [np.searchsorted(edges, v) for edges, v in zip(bins.edges, values, strict=True)]
    position = np.asarray(table["lon"]) * 1000.0 + np.asarray(table["lat"])
    place = np.unique(position, return_inverse=True)[1]
    sizes: Row = {}
    for name, columns in (("full", exact), ("quantised", codes)):
        ordered = sorted(columns, key=lambda column: int(column.max()))
        vertices, edges, leaves = _count_graph([*ordered, place])
        nbytes = table.nbytes if name == "full" else synopsis.nbytes
        sizes[name] = {"vertices": vertices, "edges": edges, "leaves": leaves, "bytes": nbytes}
    return sizes


def _count_graph(planes: list[Any]) -> tuple[int, int, int]:
    """Return vertices, edges (to parents and to the next sibling) and leaves of a hierarchy."""
    paths = np.zeros(planes[0].size, np.int64)
    vertices, edges, parents = 0, 0, 1
    for plane in planes:
        paths = np.unique(paths * (int(plane.max()) + 1) + plane, return_inverse=True)[1]
        level = int(paths.max()) + 1
        vertices += level
        edges += level + level - parents
        parents = level
    return vertices, edges, parents


def errors_by_bins(table: pa.Table, spec: SynopsisSpec) -> list[Row]:
    """Measure the error of each feature by rule and number of bins, as the paper's figure 2."""
    sample = table.take(np.arange(0, table.num_rows, 10))
    found = []
    for rule in BinRule:
        for bins in BIN_COUNTS:
            settings = {"features": spec.features, "bins": bins, "rule": rule}
            own = SynopsisSpec(**settings)  # type: ignore[arg-type]
            records = build(sample, own, learn_bins(sample, own)).bin_records
            for feature, name in enumerate(FEATURES):
                p80, tail = bin_errors(records, feature)
                row = {"rule": rule.value, "bins": bins, "feature": name}
                found.append({**row, "nrmse_p80": p80, "nrmse_tail": tail})
    return found


def bytes_by_part(synopsis: Synopsis) -> Row:
    """Return the bytes of each part of the state."""
    parts: Row = {}
    for name, array in synopsis.arrays().items():
        key = name if name.startswith("groups.") else name.split(".")[0]
        key = "leaves.words" if name == "leaves.words" else key
        parts[key] = parts.get(key, 0) + array.nbytes
    return parts


def parquet_bytes(table: pa.Table) -> int:
    """Return the size of the rows as Parquet with zstd."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return int(sink.getvalue().size)


def plots_of(rows: list[Row], figure: list[Row]) -> dict[str, Plot]:
    """Draw the trade-off, and the errors by bins."""
    line = [(row["mb"], row["bound_width"]) for row in rows]
    lines = {
        rule.value: [
            (bins, max(r["nrmse_p80"] for r in figure if (r["rule"], r["bins"]) == (rule, bins)))
            for bins in BIN_COUNTS
        ]
        for rule in BinRule
    }
    return {
        "": Plot("median width of a count's bounds, by MB of the synopsis", {"": {"width": line}}),
        "-bins": Plot("error of 80 % of the values, worst feature, by bins", {"": lines}, log=True),
    }
