"""``roost bench synopsis``: quality, size and speed of a synopsis of six months of weather.

One sketch at one budget gives all figures: 2.1 million hourly rows of Brazilian stations with nine
features, built as deltas of 100 thousand rows on one core and folded. Two exceptions: forests use a
sketch of their training rows, and the building is timed without a run. DuckDB runs the same queries
over the rows, in memory with as many threads as the machine has cores, and over a rollup of the
same groups. Times of queries include everything from the call of the reader to the result; no
result is cached, and every query is new.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.common import Measured, Plot, Row
from roost.bench.synopsis_ageing import measure_ageing
from roost.bench.synopsis_cases import (
    FEATURES,
    Draw,
    Oracle,
    RandomQuery,
    Weather,
    batches,
    load_weather,
    served,
    widths_of,
)
from roost.bench.synopsis_engine import measure_engine
from roost.bench.synopsis_forest import measure_forests
from roost.bench.synopsis_models import measure_forecasts, measure_promises
from roost.bench.synopsis_scaling import divide_weather, measure_scaling, spread_of
from roost.bench.synopsis_speed import (
    SITE,
    measure_clients,
    measure_country,
    measure_pictures,
    measure_speed,
    measure_table_2,
    opened,
)
from roost.errors import ConfigError
from roost.synopsis import (
    BinRule,
    SetSpec,
    Synopsis,
    SynopsisResult,
    SynopsisSpec,
    build,
    fit_memory,
    learn_bins,
    merge,
)
from roost.synopsis.bins import Bins, feature_values
from roost.synopsis.records import BinRecords

Part = tuple[Row, Row, dict[str, Plot]]  # keys of the summary, tables, plots
SEED = 2024
ROWS_QUICK = 300_000
DELTA_ROWS = 100_000
#: Bytes per row: the budget of 2.1 million rows is 15.7 MB.
BUDGET_PER_ROW = 7.5
BUDGETS = (0.6, 0.8, 1.0)  # of the budget, for the trade-off
INTERVAL_DAYS = (1, 2, 5, 10)  # for another one
#: Sums by day. Longer prefixes divide the country at the equator, with 1 % of rows in the north.
DENSE = {"interval_days": 1, "prefix_bits": 1}
QUERIES, QUERIES_QUICK = 500, 100
BIN_COUNTS = (16, 29, 48, 96, 192)
EXPERIMENTS = (
    *(
        "sizes",
        "speed",
        "table-2",
        "bounds",
        "intervals",
        "promises",
        "pictures",
        "forecasts",
        "clients",
    ),
    *("sketchlets", "bins", "years", "engine", "forests"),
)
TARGETS = {
    "nrmse_p80": 0.005,
    "bytes_ratio": 8,
    "bytes_growth": 1.1,
    "p50_ms_lookup": 0.15,
    "p50_ms_country": 1.0,
    "p50_ms_relational": 20.0,
    "ratio_vs_duckdb": 50,
    "ratio_vs_rollup": 3,
    "ratio_vs_spark_sql": 500,
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


@dataclass
class _Results:
    """What the experiments have measured; one that fails does not stop the others."""

    summary: Row = field(default_factory=dict)
    plots: dict[str, Plot] = field(default_factory=dict)
    more: Row = field(default_factory=lambda: {"targets": TARGETS, "seconds": {}})
    failed: list[str] = field(default_factory=list)
    only: Sequence[str] = ()

    def add(self, name: str, measure: Callable[[], Part]) -> None:
        """Run an experiment, if it is wanted, and add its keys of the summary, tables and plots."""
        if self.only and name not in self.only:
            return
        started, summary = time.perf_counter(), Row()
        try:
            summary, more, plots = measure()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.summary |= summary
            self.more |= more
            self.plots |= plots
        seconds = time.perf_counter() - started
        self.more["seconds"][name] = seconds
        print(f"roost bench synopsis: {name}: {seconds:.0f} s {summary}", file=sys.stderr)


def run(quick: bool, only: Sequence[str] = ()) -> Measured:
    """Measure all experiments, or some of them, each on the same sketch."""
    weather = load_weather(ROWS_QUICK if quick else None)
    table, schema = weather.table, weather.table.schema
    sites = SetSpec.of(schema, SITE, period_days=30, members=1_000, counters=1_000)
    spec = SynopsisSpec.of(schema, FEATURES, sets=(sites,), **DENSE)
    full = build(table, spec)
    memory = int(BUDGET_PER_ROW * table.num_rows)
    fitted = fit_memory(full, memory)
    synopsis, rate = measure_rate(table, spec, fitted.bins)
    results, rows = _Results(only=only), list[Row]()
    results.add("sizes", lambda: _sizes(weather, synopsis, rate))
    with served(synopsis) as reader, opened(weather, synopsis) as oracle:

        def speed() -> Part:
            return measure_speed(reader, synopsis, weather, oracle, quick), {}, {}

        def table_2() -> Part:
            summary, times = measure_table_2(reader, weather, oracle, quick)
            return summary, {"table_2": times}, {}

        def bounds() -> Part:
            drawn, truths = _drawn(weather, oracle, QUERIES_QUICK if quick else QUERIES)
            results = [query.run_on(reader) for query in drawn]
            broken, widths, by_kind = check_bounds(drawn, results, truths)
            for share in BUDGETS:
                fitted = fit_memory(full, int(share * memory))
                found = trade_off(fitted, drawn, truths, table.nbytes)
                rows.append({"budget": share, **found})
            line = [(row["mb"], row["bound_width"]) for row in rows]
            plot = Plot("median width of a count's bounds, by MB", {"": {"width": line}})
            return {"bounds_broken": broken, **widths}, {"bounds_by_kind": by_kind}, {"": plot}

        def intervals() -> Part:
            found = trade_off_intervals(weather, oracle, synopsis, memory)
            return {}, {"intervals": found}, {}

        results.add("speed", speed)
        results.add("table-2", table_2)
        results.add("bounds", bounds)
        results.add("intervals", intervals)
        results.add(
            "promises",
            lambda: measure_promises(reader, weather, oracle, SEED + 7, quick),
        )
        results.add(
            "pictures",
            lambda: ({}, {"figures_11_12": measure_pictures(reader, weather, quick)}, {}),
        )
        results.add(
            "forecasts",
            lambda: (measure_forecasts(reader, weather, SEED + 2, quick), {}, {}),
        )

    def clients() -> Part:
        summary, found, plots = measure_clients(synopsis, weather, quick)
        return summary, {"figure_10": found}, plots

    def sketchlets() -> Part:
        divided, plot = divide_weather(table, spec, fitted.bins)
        summary, scaled, plots = measure_scaling()
        more = {"figure_6": divided, "spread": spread_of(divided), "figures_8_9": scaled}
        return summary, more, {"-sketchlets": plot} | plots

    def bins() -> Part:
        figure = errors_by_bins(table, spec)
        return {}, {"figure_2": figure}, {"-bins": plot_of_bins(figure)}

    def engine() -> Part:
        summary, seconds = measure_engine(table, quick)
        return summary, {"batch_seconds": seconds}, {}

    def forests() -> Part:
        summary, found = measure_forests(table, spec, BUDGET_PER_ROW, SEED + 3, quick)
        return summary, {"table_3": found}, {}

    results.add("clients", clients)
    results.add("sketchlets", sketchlets)
    results.add("bins", bins)
    results.add("years", lambda: measure_ageing(weather, synopsis, memory, quick))
    results.add("engine", engine)
    results.add("forests", forests)
    if results.failed:
        results.summary["failed"] = results.failed
    return Measured(
        rows,
        results.summary,
        results.plots,
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
        more=results.more,
    )


def _sizes(weather: Weather, synopsis: Synopsis, rate: float) -> Part:
    """Measure errors of bins, bytes, and the graph of the paper's table 1."""
    p80, tail = worst_errors(synopsis.bin_records)
    summary: Row = {
        "nrmse_p80": p80,
        "nrmse_tail": tail,
        "bytes_ratio": weather.table.nbytes / synopsis.nbytes,
        "bytes_ratio_parquet": parquet_bytes(weather.table) / synopsis.nbytes,
        "rows_per_s_per_core": rate,
    }
    table_1 = graph_sizes(weather.table, synopsis)
    return summary, {"table_1": table_1, "bytes_by_part": bytes_by_part(synopsis)}, {}


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


def check_bounds(
    drawn: list[RandomQuery], results: list[SynopsisResult], truths: list[float | None]
) -> tuple[int, Row, dict[str, Row]]:
    """Return the broken bounds, the median width of counts, and both by kind of query.

    The width is that of all counts, of those with recorded constants, and of the others.
    """
    pairs = list(zip(drawn, results, truths, strict=True))
    broken = {id(query) for query, result, truth in pairs if breaks(result, truth)}
    kinds: dict[str, Row] = {}
    for kind in sorted({query.kind for query in drawn}):
        own = [pair for pair in pairs if pair[0].kind == kind]
        own_widths = [
            result.high - result.low
            for _, result, truth in own
            if truth and result.low is not None and result.high is not None
        ]
        failed = sum(id(query) in broken for query, _, _ in own)
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


def _drawn(
    weather: Weather, oracle: Oracle, number: int
) -> tuple[list[RandomQuery], list[float | None]]:
    """Draw random queries, and run them over the rows."""
    random = Draw(weather, SEED)
    drawn = [random.any() for _ in range(number)]
    return drawn, [oracle.value(query.sql, query.scope) for query in drawn]


def trade_off(
    fitted: Synopsis, drawn: list[RandomQuery], truths: list[float | None], arrow: int
) -> Row:
    """Measure the size of a synopsis, and the width of its bounds."""
    results = [query.run(fitted) for query in drawn]
    broken, widths, _ = check_bounds(drawn, results, truths)
    return {
        "mb": fitted.nbytes / 1e6,
        "bytes_ratio": arrow / fitted.nbytes,
        "leaves": fitted.leaf_count,
        "planes": " ".join(map(str, fitted.bins.plane_counts)),
        **widths,
        "bounds_broken": broken,
    }


def trade_off_intervals(
    weather: Weather, oracle: Oracle, synopsis: Synopsis, memory: int
) -> list[Row]:
    """Measure bounds and country-wide correlations by the interval of the totals, at one budget.

    Short intervals leave less to scan where a time range cuts them, and take more bytes, so that
    planes have fewer bins. With the length of a bucket there are no totals.
    """
    table, rows = weather.table, list[Row]()
    drawn, truths = _drawn(weather, oracle, QUERIES_QUICK)
    for days in INTERVAL_DAYS:
        try:
            own = replace(synopsis.spec, interval_days=days)
            fitted = fit_memory(build(table, own), memory)
        except ConfigError as error:
            rows.append({"interval_days": days, "refused": str(error)})
            continue
        found = trade_off(fitted, drawn, truths, table.nbytes)
        with served(fitted) as reader:
            times = measure_country(reader, synopsis, weather, oracle, quick=True)
        rows.append({"interval_days": days, **found, **times})
    return rows


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


def plot_of_bins(figure: list[Row]) -> Plot:
    """Draw the errors by rule and number of bins."""
    lines = {
        rule.value: [
            (bins, max(r["nrmse_p80"] for r in figure if (r["rule"], r["bins"]) == (rule, bins)))
            for bins in BIN_COUNTS
        ]
        for rule in BinRule
    }
    return Plot("error of 80 % of the values, worst feature, by bins", {"": lines}, log=True)
