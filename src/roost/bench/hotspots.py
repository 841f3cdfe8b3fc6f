"""``roost bench hotspots``: five scenarios of hotspots on an emulated cluster of 22 machines.

The scenarios are those of figures 6.6 to 6.10 of the dissertation, on a city's day. Measured for
each strategy: units of work per second while the hotspots are active, and the longest sequence of
rounds in which the busiest machine was more than 1.2 times as busy as the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from roost.bench.cases import data_dir, load_pickups
from roost.bench.cluster import BatchMetrics, compared, lines, run_strategies, warm_up
from roost.bench.common import Measured, Plot, Row
from roost.bench.moving import SCENARIOS, MovingLoad
from roost.model.choices import Strategy

MACHINES = 22
DEFAULT = Strategy.GLOBAL
RECOVERED = 1.2
# Queries, rounds and points a round.
FULL = (500_000, 15, 400_000)
QUICK = (50_000, 15, 60_000)


def rounds_to_recover(batches: Sequence[BatchMetrics]) -> int:
    """Return the length of the longest sequence of rounds that were out of balance."""
    sequences = groupby(batches, lambda m: m.imbalance > RECOVERED)
    return max((len(list(batch)) for unbalanced, batch in sequences if unbalanced), default=0)


def run(quick: bool) -> Measured:
    """Measure all strategies on all scenarios."""
    queries, rounds, points = QUICK if quick else FULL
    pickups = load_pickups(data_dir())
    warm_up(pickups, MACHINES)
    rows: list[Row] = []
    panels = {}
    for scenario, hotspots in SCENARIOS.items():
        load = MovingLoad(pickups, queries, rounds, points, hotspots)
        begin = min(hotspot.begin for hotspot in hotspots)
        end = max(hotspot.end for hotspot in hotspots)
        found = run_strategies(load, MACHINES)
        hot = {
            strategy: [m for m in batches if begin <= m.round / rounds < end]
            for strategy, batches in found.items()
        }
        for strategy, batches in hot.items():
            metrics = compared(batches, hot[Strategy.HISTORY])
            print(f"{scenario} {strategy.value}: {metrics['latency_ms']:.1f} ms per batch")
            rows.append(
                {
                    "scenario": scenario,
                    "strategy": strategy.value,
                    "rounds_to_recover": rounds_to_recover(batches),
                    **metrics,
                    "timeline": [[m.round, m.units_per_s, m.imbalance] for m in found[strategy]],
                }
            )
        panels[f"{scenario}: units of work per second"] = lines(found, lambda m: m.units_per_s)
        panels[f"{scenario}: busiest machine over the mean"] = lines(found, lambda m: m.imbalance)
    own = [row for row in rows if row["strategy"] == DEFAULT.value]
    summary = {
        "strategy": DEFAULT.value,
        "rounds_to_recover": max(row["rounds_to_recover"] for row in own),
        "units_ratio_vs_history": min(row["units_ratio_vs_history"] for row in own),
        "latency_ratio_vs_history": min(row["latency_ratio_vs_history"] for row in own),
    }
    setup = {
        "machines": MACHINES,
        "queries": queries,
        "rounds": rounds,
        "points_per_round": points,
        "data": pickups.source,
    }
    title = f"{MACHINES} machines, {queries:,} queries, rounds of {points:,} points"
    return Measured(rows, summary, {"": Plot(title, panels, columns=2)}, more={"setup": setup})
