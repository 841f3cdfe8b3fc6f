"""``roost bench hotspots``: five scenarios of hotspots on 22 machines whose work is counted.

The scenarios are those of figures 6.6 to 6.10 of the dissertation, on a city's day of 240 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping

from roost.bench.cases import data_dir, load_pickups
from roost.bench.cluster import Variant, lines
from roost.bench.common import Measured, Plot
from roost.bench.counted import CellDay
from roost.bench.moving import SCENARIOS
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

QUERIES = 50_000
SEEDS, SEEDS_QUICK = 10, 2


def run(quick: bool) -> Measured:
    """Measure all variants on all scenarios; a quick run only those that the summary compares."""
    pickups = load_pickups(data_dir())
    day = CellDay(pickups)
    chosen: Mapping[str, Variant] = all_variants()
    if quick:
        chosen = {name: chosen[name] for name in COMPARED}
    cases = [
        run_case(day, scenario, hotspots, QUERIES, seed, chosen)
        for scenario, hotspots in SCENARIOS.items()
        for seed in range(SEEDS_QUICK if quick else SEEDS)
    ]
    panels = {}
    for case in cases:
        if case.seed == 0:
            found = {name: case.found[name] for name in COMPARED}
            panels[f"{case.scenario}: units of work per second"] = lines(
                found, lambda m: m.units_per_s
            )
            panels[f"{case.scenario}: busiest machine over the mean"] = lines(
                found, lambda m: m.imbalance
            )
    setup = {
        "machines": MACHINES,
        "queries": QUERIES,
        "rounds": ROUNDS,
        "points_per_round": POINTS,
        "data": pickups.source,
    }
    title = f"{MACHINES} machines, {QUERIES:,} queries, rounds of {POINTS:,} points"
    plot = Plot(title, panels, columns=2)
    return Measured(rows_of(cases), summary_of(cases), {"": plot}, more={"setup": setup})
