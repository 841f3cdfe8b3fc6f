"""``roost bench hotspots``: five hotspots that come and go, on a cluster of 22 machines.

The scenarios are those of figures 6.6 to 6.10 of the dissertation, over a city's own day. For each
strategy: units of work a second over the hotspot's life, and how many rounds in a row the busiest
machine was more than 1.2 times as busy as the mean, at the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roost.bench.cases import data_dir, load_pickups
from roost.bench.cluster import BatchFigures, run_strategies, summed, warm_up
from roost.bench.common import environment, save_panels_plot, write_json
from roost.bench.moving import SCENARIOS, MovingLoad
from roost.model.choices import Strategy

MACHINES = 22
DEFAULT = Strategy.GLOBAL
RECOVERED = 1.2
# Queries, rounds and points a round.
FULL = (500_000, 15, 400_000)
QUICK = (50_000, 15, 60_000)


def rounds_to_recover(figures: Sequence[BatchFigures]) -> int:
    """Longest run of rounds that were out of balance."""
    longest = run = 0
    for batch in figures:
        run = run + 1 if batch.imbalance > RECOVERED else 0
        longest = max(longest, run)
    return longest


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    queries, rounds, points = QUICK if quick else FULL
    pickups = load_pickups(data_dir())
    warm_up(pickups, MACHINES)
    rows: list[dict[str, Any]] = []
    panels = {}
    for scenario, hotspots in SCENARIOS.items():
        load = MovingLoad(pickups, queries, rounds, points, hotspots)
        begin = min(hotspot.begin for hotspot in hotspots)
        end = max(hotspot.end for hotspot in hotspots)
        found = run_strategies(load, MACHINES)
        hot = {
            strategy: [f for f in figures if begin <= f.round / rounds < end]
            for strategy, figures in found.items()
        }
        history = summed(hot[Strategy.HISTORY])
        for strategy, figures in hot.items():
            own = summed(figures)
            print(f"{scenario} {strategy.value}: {own['latency_ms']:.1f} ms a batch")
            rows.append(
                {
                    "scenario": scenario,
                    "strategy": strategy.value,
                    "rounds_to_recover": rounds_to_recover(figures),
                    "units_ratio_vs_history": own["units_per_s"] / history["units_per_s"],
                    "latency_ratio_vs_history": history["latency_ms"] / own["latency_ms"],
                    **own,
                    "timeline": [
                        [f.round, f.units / f.batch_s, f.imbalance] for f in found[strategy]
                    ],
                }
            )
        panels[f"{scenario}: units of work per second"] = {
            strategy.value: [(f.round, f.units / f.batch_s) for f in figures]
            for strategy, figures in found.items()
        }
        panels[f"{scenario}: busiest machine over the mean"] = {
            strategy.value: [(f.round, f.imbalance) for f in figures]
            for strategy, figures in found.items()
        }
    own_rows = [row for row in rows if row["strategy"] == DEFAULT.value]
    result = {
        "bench": "hotspots",
        "quick": quick,
        "setup": {
            "machines": MACHINES,
            "queries": queries,
            "rounds": rounds,
            "points_per_round": points,
            "data": pickups.source,
        },
        "environment": environment(),
        "rows": rows,
        "summary": {
            "strategy": DEFAULT.value,
            "rounds_to_recover": max(row["rounds_to_recover"] for row in own_rows),
            "units_ratio_vs_history": min(row["units_ratio_vs_history"] for row in own_rows),
            "latency_ratio_vs_history": min(row["latency_ratio_vs_history"] for row in own_rows),
        },
    }
    write_json(json_path, result)
    title = f"{MACHINES} machines, {queries:,} queries, rounds of {points:,} points"
    save_panels_plot(json_path.with_suffix(".png"), title, panels, columns=2)
    return result
