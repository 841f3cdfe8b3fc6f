"""``roost bench swarm``: strategies and variants of SWARM while a hotspot comes, moves and goes.

The load is a city's day of 240 rounds, with that hotspot and, for comparison, without. The work of
a cluster of 22 machines is counted (:mod:`roost.bench.variants`). A shorter day runs on Spark, on
the cluster of ``roost bench memory`` without its memory limits, beside the emulated time of as many
machines. Each change alone is measured with the smaller number of queries.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import data_dir, load_pickups
from roost.bench.cluster import BatchMetrics, lines, run_strategies, summed
from roost.bench.common import Measured, Plot, Row
from roost.bench.counted import CellDay
from roost.bench.memory import EXECUTOR, HOSTS
from roost.bench.moving import LOWER_LEFT, UPPER_RIGHT, LoadHotspot, MovingLoad, Step
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
from roost.engine.standalone import Host, StandaloneCluster
from roost.model.choices import Strategy
from roost.runtime.records import Commit

# The hotspot comes, moves to the opposite corner, and goes.
HOTSPOTS = (
    LoadHotspot(0.2, 0.45, 0.4, LOWER_LEFT, normal=True),
    LoadHotspot(0.45, 0.7, 0.4, UPPER_RIGHT),
)
QUERIES, QUERIES_QUICK = (100_000, 1_000_000), (20_000,)
SEEDS, SEEDS_QUICK = 10, 2
# On the cluster: queries, rounds and points a round.
ON_CLUSTER, ON_CLUSTER_QUICK = (100_000, 15, 500_000), (20_000, 12, 80_000)
WARM = 2  # rounds on the cluster that are not measured: workers start in the first


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
    queries, rounds, points = ON_CLUSTER_QUICK if quick else ON_CLUSTER
    load = MovingLoad(pickups, queries, rounds, points, HOTSPOTS)
    rows = rows_of(cases) + operation_rows(load, MACHINES) + _on_cluster(load)
    plot = Plot(f"{MACHINES} machines", panels, columns=3)
    setup = {"machines": MACHINES, "rounds": ROUNDS, "points": POINTS, "data": pickups.source}
    return Measured(rows, summary_of(cases), {"": plot}, more={"setup": setup})


def _on_cluster(load: MovingLoad) -> list[Row]:
    """Measure wall-clock time on three hosts of one core each, and emulated time."""
    emulated = run_strategies(load, HOSTS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = [load.step(number) for number in range(load.rounds)]
        points = pa.concat_tables(step.points for step in steps)
        pq.write_table(points, folder / "points.parquet", compression="none")
        pq.write_table(load.standing(), folder / "queries.parquet")
        with StandaloneCluster([Host(1, 512)] * HOSTS, folder / "cluster") as cluster:
            for strategy in Strategy:
                report = _run(load, steps, folder, cluster.url, strategy)
                rows.append(_cluster_row(load, strategy, report, emulated[strategy.value]))
    assert len({row["matches"] for row in rows}) == 1, "strategies found different matches"
    return rows


def _run(
    load: MovingLoad, steps: Sequence[Step], folder: Path, master: str, strategy: Strategy
) -> Row:
    """Run one strategy; returns the report."""
    settings = {
        "queries.path": str(folder / "queries.parquet"),
        "queries.id_type": "int",
        "engine.strategy": strategy,
        "engine.master": master,
        "engine.machines": HOSTS,
        "engine.spark": EXECUTOR,
        "engine.batch_rows": load.points,
        "balance.round": load.round_s / 2,
        "balance.exchange": "always",
        "out.sink": "count",
    }
    points, bounds = str(folder / "points.parquet"), load.pickups.bounds

    def on_batch(commit: Commit) -> None:
        following = commit.batch_id + 1
        if following < len(steps) and steps[following].requests is not None:
            pipeline.log.append(steps[following].requests)

    config = pipeline_config(points, bounds, folder / strategy.value, settings)
    with Pipeline(config, on_batch=on_batch) as pipeline:
        return pipeline.run()


def _cluster_row(
    load: MovingLoad, strategy: Strategy, report: Row, emulated: Sequence[BatchMetrics]
) -> Row:
    batches = report["per_batch"][WARM:]
    seconds = sum(batch["seconds"] for batch in batches)
    rate = sum(batch["points"] for batch in batches) / seconds
    print(f"{HOSTS} hosts, {strategy.value}: {rate:,.0f} points/s")
    return {
        "load": "moving, on a cluster",
        "machines": HOSTS,
        "queries": load.queries,
        "strategy": strategy.value,
        "points_per_s": rate,
        "units_per_s": rate * load.queries,
        "latency_ms": 1e3 * seconds / len(batches),
        "emulated_latency_ms": summed(emulated[WARM:])["latency_ms"],
        "matches": report["matches"],
        "plan_changes": report["balance"]["plan_changes"],
    }
