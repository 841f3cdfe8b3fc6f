"""``roost bench swarm``: every strategy on a load that moves, and more and more queries.

The load is a city's day, with one hotspot after another, and for comparison the day alone. A
cluster of 22 machines is measured machine by machine (:mod:`roost.bench.cluster`); two machines
run on Spark itself, on two real cores.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import Pickups, box_requests, data_dir, load_pickups
from roost.bench.cluster import BatchFigures, run_strategies, summed, warm_up
from roost.bench.common import environment, save_panels_plot, write_json
from roost.bench.moving import LOWER_LEFT, SLOT_S, UPPER_RIGHT, Hotspot, MovingLoad
from roost.engine.pipeline import Pipeline
from roost.model.choices import Strategy
from roost.model.settings import RunConfig

MACHINES = 22
CORES = 2
DEFAULT = Strategy.GLOBAL
HOTSPOTS = (
    Hotspot(0.1, 0.5, 0.4, LOWER_LEFT, normal=True),
    Hotspot(0.5, 0.9, 0.4, UPPER_RIGHT),
)
# Queries, rounds and points a round; the last is the largest that fits beside what measures it.
FULL = ((100_000, 15, 500_000), (1_000_000, 15, 300_000), (4_000_000, 10, 80_000))
DAY_ONLY_MAX = 1_000_000  # with more queries, loading them takes most of the bench's time
QUICK = ((20_000, 12, 80_000), (100_000, 12, 80_000))


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    sizes = QUICK if quick else FULL
    pickups = load_pickups(data_dir())
    warm_up(pickups, MACHINES)
    rows: list[dict[str, Any]] = []
    panels: dict[str, Any] = {}
    for queries, rounds, points in sizes:
        loads = {"moving": HOTSPOTS, "day only": ()}
        if queries > DAY_ONLY_MAX:
            del loads["day only"]
        for name, hotspots in loads.items():
            load = MovingLoad(pickups, queries, rounds, points, hotspots)
            found = run_strategies(load, MACHINES)
            rows += _rows(name, queries, found)
            panels[f"{queries:,} queries, {name}: batch, ms"] = {
                strategy.value: [(f.round, 1e3 * f.batch_s) for f in figures]
                for strategy, figures in found.items()
            }
    queries, rounds, points = sizes[0]
    rows += _real(pickups, MovingLoad(pickups, queries, rounds, points, HOTSPOTS))
    result = {
        "bench": "swarm",
        "quick": quick,
        "setup": {"machines": MACHINES, "sizes": sizes, "data": pickups.source},
        "environment": environment(),
        "rows": rows,
        "summary": {
            "strategy": DEFAULT.value,
            **{key: _mean(rows, "moving", key) for key in RATIOS},
            **{f"{key}_day_only": _mean(rows, "day only", key) for key in RATIOS},
        },
    }
    write_json(json_path, result)
    title = f"{MACHINES} machines: time of a batch"
    save_panels_plot(json_path.with_suffix(".png"), title, panels, columns=2, log=True)
    return result


RATIOS = ("units_ratio_vs_history", "latency_ratio_vs_history")


def _mean(rows: list[dict[str, Any]], load: str, key: str) -> float:
    """Geometric mean of the default's ratios over the numbers of queries."""
    values = [row[key] for row in rows if row["load"] == load and row["strategy"] == DEFAULT.value]
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _rows(
    load: str, queries: int, found: dict[Strategy, list[BatchFigures]]
) -> list[dict[str, Any]]:
    # The first round maps the index and is not counted for anybody.
    history = summed(found[Strategy.HISTORY][1:])
    history_rates = [f.units / f.batch_s for f in found[Strategy.HISTORY][1:]]
    rows = []
    for strategy, figures in found.items():
        own = summed(figures[1:])
        rates = [f.units / f.batch_s for f in figures[1:]]
        print(f"{load}, {queries:,} queries, {strategy.value}: {own['latency_ms']:.1f} ms a batch")
        rows.append(
            {
                "load": load,
                "machines": MACHINES,
                "queries": queries,
                "strategy": strategy.value,
                "units_ratio_vs_history": sum(rates) / sum(history_rates),
                "latency_ratio_vs_history": history["latency_ms"] / own["latency_ms"],
                **own,
                "units_per_s_mean_of_rounds": sum(rates) / len(rates),
            }
        )
    return rows


def _real(pickups: Pickups, load: MovingLoad) -> list[dict[str, Any]]:
    """Run two machines on Spark, by the clock on the wall."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = [load.step(number) for number in range(load.rounds)]
        points = pa.concat_tables(step.points for step in steps)
        pq.write_table(points, folder / "points.parquet", compression="none")
        pq.write_table(box_requests(load.boxes), folder / "queries.parquet")
        for strategy in Strategy:
            config = RunConfig(
                points={"path": str(folder / "points.parquet"), "id": "id"},
                queries={"path": str(folder / "queries.parquet")},
                space={"bounds": load.space.bounds},
                engine={
                    "strategy": strategy,
                    "machines": CORES,
                    "batch_rows": load.points,
                    "master": f"local[{CORES}]",
                    "available_now": True,
                },
                balance={"round": SLOT_S / 2},
                out={"sink": "count", "dir": folder / strategy.value},
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
    assert len({row["matches"] for row in rows}) == 1, "strategies that do not match the same"
    return rows
