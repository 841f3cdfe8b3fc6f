"""``roost bench swarm``: strategies and variants of SWARM while a hotspot comes, moves and goes.

The load is a city's day of 240 rounds, with that hotspot and, for comparison, without. The work of
a cluster of 22 machines is counted (:mod:`roost.bench.variants`); two machines run on Spark, on two
cores. Each change alone is measured with the smaller number of queries.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import data_dir, load_pickups
from roost.bench.cluster import lines
from roost.bench.common import CORES, Measured, Plot, Row
from roost.bench.counted import CellDay
from roost.bench.moving import LOWER_LEFT, UPPER_RIGHT, LoadHotspot, MovingLoad
from roost.bench.operations import operation_rows
from roost.bench.streams import pipeline_config
from roost.bench.variants import (
    COMPARED,
    MACHINES,
    POINTS,
    ROUNDS,
    all_variants,
    rows_of,
    run_case,
    summary_of,
)
from roost.engine.pipeline import Pipeline
from roost.model.choices import Strategy

# The hotspot comes, moves to the opposite corner, and goes.
HOTSPOTS = (
    LoadHotspot(0.2, 0.45, 0.4, LOWER_LEFT, normal=True),
    LoadHotspot(0.45, 0.7, 0.4, UPPER_RIGHT),
)
QUERIES, QUERIES_QUICK = (100_000, 1_000_000), (20_000,)
SEEDS, SEEDS_QUICK = 10, 2
# On Spark: queries, rounds and points a round.
ON_SPARK, ON_SPARK_QUICK = (100_000, 15, 500_000), (20_000, 12, 80_000)


def run(quick: bool) -> Measured:
    """Measure all strategies and variants."""
    pickups = load_pickups(data_dir())
    day = CellDay(pickups)
    chosen = all_variants()
    sizes = QUERIES_QUICK if quick else QUERIES
    least = min(sizes)
    compared = {name: chosen[name] for name in COMPARED}
    cases = [
        run_case(day, name, hotspots, queries, seed, chosen if queries == least else compared)
        for queries in sizes
        for name, hotspots in {"moving": HOTSPOTS, "day only": ()}.items()
        for seed in range(SEEDS_QUICK if quick else SEEDS)
        if hotspots or not quick
    ]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case in cases:
        if case.seed == 0:
            found = {name: case.found[name] for name in COMPARED}
            title = f"{case.queries:,} queries, {case.scenario}"
            panels[f"{title}: units of work per second"] = lines(found, lambda m: m.units_per_s)
            panels[f"{title}: CPU utilisation"] = lines(found, lambda m: m.utilisation)
            sent = lines(found, lambda m: m.network_bytes / 1e9)
            panels[f"{title}: network, gigabytes per second"] = sent
    queries, rounds, points = ON_SPARK_QUICK if quick else ON_SPARK
    load = MovingLoad(pickups, queries, rounds, points, HOTSPOTS)
    rows = rows_of(cases) + operation_rows(load, MACHINES) + _on_spark(load)
    plot = Plot(f"{MACHINES} machines", panels, columns=3)
    setup = {"machines": MACHINES, "rounds": ROUNDS, "points": POINTS, "data": pickups.source}
    return Measured(rows, summary_of(cases), {"": plot}, more={"setup": setup})


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
