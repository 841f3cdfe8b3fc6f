"""Sketchlets of ``roost bench synopsis``: how a prefix tree divides the weather, and scaling.

The weather is divided among machines by trees and by prefixes of fixed length (figure 6). The
policy, which is the one of runs, changes the tree of simulated machines: by backlog alone, by
memory alone (figure 8), and under a rate that varies over the day and whose peak exceeds one
machine (figure 9).
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pyarrow as pa

from roost.bench.common import Bars, Line, Plot, Row
from roost.model.arrays import Ints
from roost.sim.load_curves import Curve, day, step
from roost.sim.sketchlets import SketchletScenario, SketchletTrace, simulate_sketchlets
from roost.synopsis import Bins, SynopsisSpec, build
from roost.synopsis.scaling import ScaleIn, ScaleOut, ScalingRules
from roost.synopsis.spec import locate
from roost.synopsis.tree import PrefixTree

MACHINES = (4, 16)
CELL_BITS = 4
CAPACITY = 1_000.0  # rows per second of a simulated machine
NO_LIMIT = 1e18
DAY_BATCHES = 400


def divide_weather(table: pa.Table, spec: SynopsisSpec, bins: Bins) -> tuple[list[Row], Plot]:
    """Return size and rate of each sketchlet under each division (figure 6)."""
    x, y = (np.asarray(table[name], np.float64) for name in (spec.x, spec.y))
    places = locate(x, y, spec)
    times = np.asarray(table[spec.time].cast(pa.int64()))
    hours = (int(times.max()) - int(times.min())) / 3.6e9 + 1.0
    divisions: dict[str, Ints] = {}
    for machines in MACHINES:
        tree = PrefixTree.even(machines, spec.place_bits, places)
        divisions[f"tree of {machines}"] = tree.owners_of(places, spec.place_bits)
    divisions["prefixes of 8 bits"] = places >> spec.place_bits - 8
    rows: list[Row] = []
    for name, owners in divisions.items():
        for owner in np.unique(owners).tolist():
            own = table.filter(pa.array(owners == owner))
            nbytes = build(own, spec, bins).nbytes
            found = {"division": name, "sketchlet": owner, "rows": own.num_rows}
            rows.append({**found, "mb": nbytes / 1e6, "rows_per_hour": own.num_rows / hours})
    panels = {}
    for key in ("mb", "rows_per_hour"):
        sizes = {name: sorted((r[key] for r in rows if r["division"] == name), reverse=True)
                 for name in divisions}  # fmt: skip
        panels[key] = {name: list(enumerate(own)) for name, own in sizes.items()}
    return rows, Plot("sketchlets, largest first", panels, columns=2)


def spread_of(rows: list[Row]) -> list[Row]:
    """Return how even the sketchlets of each division are."""
    found: list[Row] = []
    for name in dict.fromkeys(row["division"] for row in rows):
        own = [row for row in rows if row["division"] == name]
        spread: Row = {"division": name, "sketchlets": len(own)}
        for key in ("mb", "rows_per_hour"):
            values = [row[key] for row in own]
            spread |= {f"{key}_mean": fmean(values), f"{key}_max": max(values)}
        found.append(spread)
    return found


def measure_scaling() -> tuple[Row, list[Row], dict[str, Plot]]:
    """Simulate one rule at a time, and a varying rate."""
    backlog = _simulate(step(700.0, 1_400.0, 30.0), ScalingRules(memory=NO_LIMIT), 120, 4)
    memory = _simulate(
        step(500.0, 500.0, 0.0),
        ScalingRules(memory=1e5, backlog_upper=NO_LIMIT, backlog_lower=0.0),
        *(240, 4),
        row_bytes=1.0,
    )
    varying = _simulate(
        day(200.0, 2_400.0, DAY_BATCHES), ScalingRules(memory=NO_LIMIT), 2 * DAY_BATCHES, 6
    )
    rows: list[Row] = []
    for name, trace in (("backlog", backlog), ("memory", memory), ("varying rate", varying)):
        stable = trace.batches_to_stable
        rows.append(
            {
                "case": name,
                "scale_outs": len(trace.decisions(ScaleOut)),
                "scale_ins": len(trace.decisions(ScaleIn)),
                "machines_max": max(row.machines for row in trace.rows),
                "batches_to_stable": None if None in stable else max(n or 0 for n in stable),
            }
        )
    used = [(k, row.machines) for k, row in enumerate(varying.rows)]
    rates = [(k, sum(load.rate for load in row.seen.loads.values()) / CAPACITY)
             for k, row in enumerate(varying.rows)]  # fmt: skip
    lines: dict[str, dict[str, Line | Bars]] = {
        "backlog alone: batches behind": _by_machine(backlog, "backlog"),
        "memory alone: share of the budget": _by_machine(memory, "nbytes", 1e5),
        "varying rate": {"machines in use": used, "rate, in machines": rates},
    }
    single = [row["batches_to_stable"] for row in rows[:2]]
    summary: Row = {} if None in single else {"batches_to_stable": max(single)}
    plot = Plot("scaling of a prefix tree, by batch", lines, columns=3)
    return summary, rows, {"-scaling": plot}


def _simulate(
    curve: Curve, rules: ScalingRules, batches: int, machines: int, row_bytes: float = 0.0
) -> SketchletTrace:
    """Run the policy over a load that equal cells share; one machine has all in the beginning."""
    cells = [format(cell, f"0{CELL_BITS}b") for cell in range(1 << CELL_BITS)]
    tree = PrefixTree(machines, {"": 0})
    return simulate_sketchlets(
        SketchletScenario(
            tree=tree,
            rates={cell: lambda clock: curve(clock) / len(cells) for cell in cells},
            rules=rules,
            batches=batches,
            capacity=CAPACITY,
            row_bytes=row_bytes,
        )
    )


def _by_machine(trace: SketchletTrace, name: str, unit: float = 1.0) -> dict[str, Line | Bars]:
    machines = trace.scenario.tree.machines
    return {
        f"machine {m}": [
            (k, getattr(row.seen.machines[m], name) / unit) for k, row in enumerate(trace.rows)
        ]
        for m in range(machines)
    }
