"""``roost bench swarm``: all strategies on a moving load, with increasing numbers of queries.

The load is a city's day with two consecutive hotspots and, for comparison, the day alone. A cluster
of 22 machines is emulated (:mod:`roost.bench.cluster`); two machines run on Spark, on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import data_dir, load_pickups
from roost.bench.cluster import BatchMetrics, compared, lines, run_strategies, warm_up
from roost.bench.common import CORES, Measured, Plot, Row
from roost.bench.moving import LOWER_LEFT, UPPER_RIGHT, Hotspot, MovingLoad
from roost.bench.streams import pipeline_config
from roost.engine.pipeline import Pipeline
from roost.model.choices import Strategy

MACHINES = 22
DEFAULT = Strategy.GLOBAL
HOTSPOTS = (
    Hotspot(0.1, 0.5, 0.4, LOWER_LEFT, normal=True),
    Hotspot(0.5, 0.9, 0.4, UPPER_RIGHT),
)
# Queries, rounds and points a round; the last size is the largest that fits into memory.
FULL = ((100_000, 15, 500_000), (1_000_000, 15, 300_000), (4_000_000, 10, 80_000))
DAY_ONLY_MAX = 1_000_000  # loading more queries takes most of the benchmark's time
QUICK = ((20_000, 12, 80_000), (100_000, 12, 80_000))
RATIOS = ("units_ratio_vs_history", "latency_ratio_vs_history")


def run(quick: bool) -> Measured:
    """Measure all strategies."""
    sizes = QUICK if quick else FULL
    pickups = load_pickups(data_dir())
    warm_up(pickups, MACHINES)
    rows: list[Row] = []
    panels: dict[str, Any] = {}
    for queries, rounds, points in sizes:
        for name, hotspots in {"moving": HOTSPOTS, "day only": ()}.items():
            if name == "day only" and queries > DAY_ONLY_MAX:
                continue
            load = MovingLoad(pickups, queries, rounds, points, hotspots)
            found = run_strategies(load, MACHINES)
            rows += _rows(name, queries, found)
            title = f"{queries:,} queries, {name}: batch, ms"
            panels[title] = lines(found, lambda m: 1e3 * m.batch_s)
    queries, rounds, points = sizes[0]
    rows += _on_spark(MovingLoad(pickups, queries, rounds, points, HOTSPOTS))
    summary = {
        "strategy": DEFAULT.value,
        **{key: _mean(rows, "moving", key) for key in RATIOS},
        **{f"{key}_day_only": _mean(rows, "day only", key) for key in RATIOS},
    }
    plot = Plot(f"{MACHINES} machines: time of a batch", panels, columns=2, log=True)
    setup = {"machines": MACHINES, "sizes": sizes, "data": pickups.source}
    return Measured(rows, summary, {"": plot}, more={"setup": setup})


def _mean(rows: list[Row], load: str, key: str) -> float:
    """Return the geometric mean of the default's ratios over the numbers of queries."""
    return geometric_mean(
        row[key] for row in rows if row["load"] == load and row["strategy"] == DEFAULT.value
    )


def _rows(load: str, queries: int, found: dict[Strategy, list[BatchMetrics]]) -> list[Row]:
    rows = []
    # The first round maps the index and is not counted for any strategy.
    history = found[Strategy.HISTORY][1:]
    for strategy, batches in found.items():
        metrics = compared(batches[1:], history)
        rate = mean(m.units_per_s for m in batches[1:])
        metrics["units_ratio_vs_history"] = rate / mean(m.units_per_s for m in history)
        latency_ms = metrics["latency_ms"]
        print(f"{load}, {queries:,} queries, {strategy.value}: {latency_ms:.1f} ms per batch")
        case = {"load": load, "machines": MACHINES, "queries": queries, "strategy": strategy.value}
        rows.append({**case, **metrics, "units_per_s_mean_of_rounds": rate})
    return rows


def _on_spark(load: MovingLoad) -> list[Row]:
    """Run two machines on Spark and measure wall-clock time."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        points = pa.concat_tables(load.step(number).points for number in range(load.rounds))
        pq.write_table(points, folder / "points.parquet", compression="none")
        pq.write_table(load.standing(), folder / "queries.parquet")
        for strategy in Strategy:
            settings = {
                "queries.path": str(folder / "queries.parquet"),
                "engine.strategy": strategy,
                "engine.machines": CORES,
                "engine.batch_rows": load.points,
                "balance.round": load.round_s / 2,
                "out.sink": "count",
            }
            config = pipeline_config(
                str(folder / "points.parquet"),
                load.pickups.bounds,
                folder / strategy.value,
                settings,
            )
            with Pipeline(config) as pipeline:
                report = pipeline.run()
            batches = report["per_batch"][2:]  # workers start in the first
            seconds = sum(batch["seconds"] for batch in batches)
            rate = sum(batch["points"] for batch in batches) / seconds
            print(f"{CORES} machines on Spark, {strategy.value}: {rate:,.0f} points/s")
            rows.append(
                {
                    "load": "moving, on Spark",
                    "machines": CORES,
                    "queries": load.queries,
                    "strategy": strategy.value,
                    "points_per_s": rate,
                    "units_per_s": rate * load.queries,
                    "latency_ms": 1e3 * seconds / len(batches),
                    "matches": report["matches"],
                    "plan_changes": report["balance"]["plan_changes"],
                }
            )
    assert len({row["matches"] for row in rows}) == 1, "strategies found different matches"
    return rows
