"""``roost bench dodo``: which operators share which executors, simulated and on a cluster.

Top-N topics as in the thesis (tables 7 to 9, figures 23, 24 and 27 to 31): operators extract,
count and rank, on groups of executors, while the input rises. Costs of an event are those that its
tables imply, so throughput can be compared with its figures; the same cases then run with the costs
of Roost's own operators, as a sample run of ``examples/top_topics.py`` measures them.

Throughput results from queues (:mod:`roost.sim.placement`), never from a constant. Two figures of
the thesis follow from no rule in it, and are shown as constants: 16 thousand events/s after the
peak of its extreme case, and 9,500 of an overrun static cluster, to which its gains refer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.bench.applications import application
from roost.bench.common import Line, Measured, Plot, Row
from roost.bench.dodo_cluster import real_row
from roost.bench.flow_cluster import slices_of
from roost.dataflow.schema import resolve
from roost.elastic.placement import Algorithm1, Algorithm2, Best, ExecutorGroup, PlacementPolicy
from roost.elastic.placement.snapshot import Place
from roost.model.arrays import Floats
from roost.runtime.flow_sample import sample_flow
from roost.sim.load_curves import ramp
from roost.sim.placement import (
    PlacementScenario,
    PlacementTrace,
    SimulatedOperator,
    simulate_placement,
)
from roost.stages.sources import parse_generator
from roost.storage.cache import WorkerCache

TARGETS = {
    "gain_balancing_vs_static": 0.515,
    "gain_autoscaling_vs_static": 0.75,
    "gain_balancing_vs_capacity": 0.17,
    "best_vs_algorithm_1": 1.0,
    "minutes_behind_input": 3.0,
}
NAMES = ("extract", "count", "rank")
Costs = tuple[float, float, float]  # microseconds of an event, by operator
# Fitted to the figures of chapters 6 and 7, whose clusters differ.
EXTREME_US: Costs = (157.0, 43.0, 10.0)
STATIC_US: Costs = (654.56, 208.33, 35.31)
# Events/s of an overrun static cluster in the thesis, which follow from no rule in it.
OVERRUN = 9_500.0
OVERRUN_EXTREME = 16_000.0
FIRST, SECOND, SHARED = "group 2", "group 3", "shared"
DEPLOYED = {"extract": FIRST, "count": SECOND, "rank": SECOND}  # printed in tables 7 and 9
OPTIMAL = {"extract": FIRST, "count": FIRST, "rank": SECOND}  # table 8
EXTREME_GROUPS = {FIRST: 6, SECOND: 1}
STATIC_GROUPS = {FIRST: 12, SECOND: 3}
TOTAL = 15
# Events/s at the beginning, and more in each second. The thesis has three and five generators.
EXTREME_INPUT = (20.0, 20.0)
STATIC_INPUT = (5 * 50.0, 5 * 5.0 / 3.0)
EXTREME_S, STATIC_S = 2_000.0, 2_400.0
ROUND_S, PROVISION_S = 30.0, 60.0
END_S = 120.0  # over which the throughput at the end is the mean
TICKS = 5  # over which a throughput is the mean elsewhere
# Tweets that the costs of Roost's operators are measured with.
TWEETS, TWEETS_QUICK = 600_000, 60_000
TWEETS_PER_S = 10_000
REAL_BATCHES = 30  # after a change of the mapping on a real cluster


@dataclass(frozen=True)
class PlacementCase:
    """A deployment, its input, and what the thesis measured or its costs imply."""

    name: str
    policy: str
    costs: Costs
    groups: Mapping[str, int]
    mapping: Mapping[str, str]
    input: tuple[float, float]
    seconds: float
    balancing: PlacementPolicy | None = None
    sizes: Algorithm2 | None = None
    reference: float | None = None

    def run(self) -> PlacementTrace:
        """Simulate the case."""
        first, more = self.input
        # The groups that are sized never have fewer executors than at the beginning.
        groups = (ExecutorGroup(name, count, min=count) for name, count in self.groups.items())
        return simulate_placement(
            PlacementScenario(
                operators_of(self.costs),
                tuple(groups),
                self.mapping,
                ramp([(0.0, first), (self.seconds, first + more * self.seconds)]),
                self.seconds,
                self.balancing,
                self.sizes,
                round_s=ROUND_S,
                provision_s=PROVISION_S,
            )
        )


def operators_of(costs: Costs) -> tuple[SimulatedOperator, ...]:
    """Return the three operators; each passes one event on for each that it receives."""
    return tuple(
        SimulatedOperator(name, cost * 1e-6, NAMES[max(k - 1, 0) : k])
        for k, (name, cost) in enumerate(zip(NAMES, costs, strict=True))
    )


def cases(extreme: Costs = EXTREME_US, static: Costs = STATIC_US) -> list[PlacementCase]:
    """Return all cases; the input rises as fast as in the thesis in proportion to the costs."""
    first = _input(EXTREME_INPUT, EXTREME_US, extreme)
    second = _input(STATIC_INPUT, STATIC_US, static)

    def small(name: str, policy: str, mapping: Mapping[str, str], **more: Any) -> PlacementCase:
        return PlacementCase(
            name, policy, extreme, EXTREME_GROUPS, mapping, first, EXTREME_S, **more
        )

    def large(name: str, policy: str, groups: Mapping[str, int], **more: Any) -> PlacementCase:
        mapping = DEPLOYED if len(groups) > 1 else dict.fromkeys(NAMES, SHARED)
        return PlacementCase(name, policy, static, groups, mapping, second, STATIC_S, **more)

    one, best, free = Algorithm1(), Best(), Algorithm1(capacity=False)
    sizes, ones = Algorithm2(TOTAL), {FIRST: 1, SECOND: 1}
    return [
        small("extreme", "static", DEPLOYED, reference=19_000.0),
        small("extreme", "algorithm_1", DEPLOYED, balancing=one, reference=30_000.0),
        small("extreme", "without capacity", DEPLOYED, balancing=free, reference=6_000.0),
        small("extreme", "best", DEPLOYED, balancing=best),
        small("optimal", "static", OPTIMAL, reference=30_000.0),
        small("optimal", "algorithm_1", OPTIMAL, balancing=one, reference=30_000.0),
        small("optimal", "without capacity", OPTIMAL, balancing=free, reference=7_000.0),
        small("optimal", "best", OPTIMAL, balancing=best),
        large("table 9", "static", STATIC_GROUPS, reference=12_313.0),
        large("table 9", "algorithm_1", STATIC_GROUPS, balancing=one, reference=14_400.0),
        large("table 9", "best", STATIC_GROUPS, balancing=best),
        large("table 9", "autoscaling, two groups", ones, balancing=one, sizes=sizes,
              reference=16_417.0),
        large("table 9", "autoscaling, one group", {SHARED: 2}, sizes=sizes, reference=16_700.0),
    ]  # fmt: skip


def _input(given: tuple[float, float], old: Costs, new: Costs) -> tuple[float, float]:
    factor = sum(old) / sum(new)
    return given[0] * factor, given[1] * factor


# --------------------------------------------------------------------------- metrics


def row_of(case: PlacementCase, trace: PlacementTrace, costs: str) -> Row:
    """Return the metrics of a case; ``costs`` says whose they are."""
    smooth = _smooth(trace.completed)
    peak = int(smooth.argmax())
    moves = [row for row in trace.rows if isinstance(row.decision, Place)]
    together = _together(trace)
    return {
        "case": case.name,
        "policy": case.policy,
        "costs": costs,
        "costs_us": list(case.costs),
        "throughput": trace.throughput(END_S),
        "peak": float(smooth[peak]),
        # What happens after the peak: the ablation moves operators back and forth.
        "lowest_after_peak": float(smooth[peak:].min()),
        "reference": case.reference,
        "rounds_with_moves": len(moves),
        "first_move_s": moves[0].clock if moves else None,
        "mapping": dict(trace.mappings[-1]),
        "executors": {name: int(counts[-1]) for name, counts in trace.executors.items()},
        "utilisation": float(together[-round(END_S) :].mean()),
        "executor_hours": float(sum(counts.sum() for counts in trace.executors.values())) / 3600.0,
    }


def _smooth(values: Floats) -> Floats:
    return np.convolve(values, np.full(TICKS, 1.0 / TICKS), "valid")


def _together(trace: PlacementTrace) -> Floats:
    """Return the mean utilisation of all executors, by tick."""
    busy = sum(trace.utilisation[name] * n for name, n in trace.executors.items())
    return np.asarray(busy / np.maximum(sum(trace.executors.values()), 1e-9))


def minutes_behind(trace: PlacementTrace, ceiling: float) -> float:
    """Return the minutes with less throughput than input, before the input passes a ceiling.

    A row passes one operator in a tick, so the input that counts is that of some ticks before.
    """
    late = len(trace.scenario.operators) - 1
    before, completed = trace.arrived[:-late], trace.completed[late:]
    behind = (completed < 0.99 * before) & (before < ceiling)
    return float(behind.sum()) * trace.scenario.tick_s / 60.0


@dataclass(frozen=True)
class Results:
    """The rows and traces of all cases with the costs of one system."""

    rows: list[Row]
    traces: dict[tuple[str, str], PlacementTrace]

    @classmethod
    def of(cls, given: Sequence[PlacementCase], costs: str) -> Results:
        """Simulate cases."""
        traces = {(case.name, case.policy): case.run() for case in given}
        rows = [row_of(case, traces[case.name, case.policy], costs) for case in given]
        return cls(rows, traces)

    def value(self, case: str, policy: str, key: str = "throughput") -> float:
        """Return a metric of a case."""
        found = (row for row in self.rows if (row["case"], row["policy"]) == (case, policy))
        return float(next(found)[key])

    def gains(self, overrun: float) -> Row:
        """Return throughput gains over the static cluster, overrun and at its capacity."""
        static = self.value("table 9", "static")
        found: Row = {}
        for key, policy in (
            ("balancing", "algorithm_1"),
            ("autoscaling", "autoscaling, one group"),
            ("autoscaling_two_groups", "autoscaling, two groups"),
        ):
            throughput = self.value("table 9", policy)
            found[f"gain_{key}_vs_static"] = throughput / overrun - 1.0
            found[f"gain_{key}_vs_capacity"] = throughput / static - 1.0
        return found


def summarise(thesis: Results, own: Results) -> Row:
    """Return the keys of the summary."""
    static = thesis.value("table 9", "static")
    own_overrun = OVERRUN / static * own.value("table 9", "static")
    rows = [*thesis.rows, *own.rows]
    ratios = [
        found.value(name, "best") / found.value(name, "algorithm_1")
        for found in (thesis, own)
        for name in ("extreme", "optimal", "table 9")
    ]
    before = thesis.value("extreme", "static", "utilisation")
    scaled = thesis.traces["table 9", "autoscaling, one group"]
    ceiling = TOTAL / (sum(STATIC_US) * 1e-6)
    summary: Row = {
        **thesis.gains(OVERRUN),
        "own_costs": own.gains(own_overrun),
        "best_vs_algorithm_1": min(ratios),
        "utilisation_vs_static": thesis.value("extreme", "algorithm_1", "utilisation") / before
        - 1.0,
        "minutes_behind_input": minutes_behind(scaled, ceiling),
        "overrun_constant": OVERRUN,
        "overrun_extreme_constant": OVERRUN_EXTREME,
    }
    assert all(row["throughput"] > 0.0 for row in rows)
    summary["missed"] = missed(summary)
    return summary


def missed(summary: Row) -> list[str]:
    """Return the keys whose targets were missed."""
    most = {"minutes_behind_input"}
    found = [
        key
        for key, target in TARGETS.items()
        if (summary[key] > target if key in most else summary[key] < target - 0.005)
    ]
    return found


# --------------------------------------------------------------------------- Roost's operators


def own_costs(tweets: int) -> Costs:
    """Measure the three operators of top-N topics; returns microseconds of a tweet."""
    text = f"generate:tweets,rows={tweets},rate={TWEETS_PER_S},seed=7"
    flow = application("top_topics", text)
    (item,) = parse_generator(text, lambda: 0.0).again(0, tweets)
    rows = item.read(["text", "at"], WorkerCache())
    sample = sample_flow(flow, slices_of(resolve(flow.name, flow.operators), rows))
    assert sample is not None
    # Extracting runs in the tasks of the source, whose rows are in memory. Ranking has two stages:
    # the Aggregate, and the Map that makes rows of its lists.
    stages = {"extract": ("tweets",), "count": ("count",), "rank": ("rank", "ranks")}
    extract, count, rank = (
        sum(sample.seconds[stage] for stage in stages[name]) / sample.rows * 1e6 for name in NAMES
    )
    return extract, count, rank


# --------------------------------------------------------------------------- the benchmark


def run(quick: bool) -> Measured:
    """Simulate all cases with the costs of the thesis, then with those of Roost's operators.

    At full size, a change of the mapping is also measured on a real cluster.
    """
    thesis = Results.of(cases(), "thesis")
    measured = own_costs(TWEETS_QUICK if quick else TWEETS)
    own = Results.of(cases(measured, measured), "Roost")
    table = {
        "costs": ("costs", ""),
        "case": ("case", ""),
        "policy": ("policy", ""),
        "events/s": ("throughput", ",.0f"),
        "peak": ("peak", ",.0f"),
        "lowest after it": ("lowest_after_peak", ",.0f"),
        "thesis": ("reference", ",.0f"),
        "moves": ("rounds_with_moves", ""),
        "utilisation": ("utilisation", ".2f"),
    }
    rows = [*thesis.rows, *(without_reference(row) for row in own.rows)]
    summary = summarise(thesis, own)
    if quick:
        summary["not_measured"] = ["real"]
    else:
        summary["real"] = real_row(REAL_BATCHES)
    return Measured(rows, summary, plots(thesis), table, more={"targets": TARGETS})


def without_reference(row: Row) -> Row:
    """Return a row without the thesis's figure, which other costs cannot be compared with."""
    return {**row, "reference": None}


def plots(found: Results) -> dict[str, Plot]:
    """Return throughput by case and policy, utilisation by group, and executors."""
    panels: dict[str, dict[str, Line]] = {}
    for (name, policy), trace in found.traces.items():
        panel = panels.setdefault(name, {})
        panel.setdefault("input", _line(trace.arrived, trace))
        panel[policy] = _line(trace.completed, trace)
    utilisation: dict[str, dict[str, Line]] = {}
    for name, policy in (
        ("extreme", "static"),
        ("extreme", "algorithm_1"),
        ("table 9", "static"),
        ("table 9", "algorithm_1"),
        ("table 9", "autoscaling, two groups"),
        ("table 9", "autoscaling, one group"),
    ):
        trace = found.traces[name, policy]
        lines = {group: _line(values, trace) for group, values in trace.utilisation.items()}
        utilisation[f"{name}: {policy}"] = {**lines, "all": _line(_together(trace), trace)}
    scaled = {
        f"{policy}, {group}": _line(values, trace)
        for (_, policy), trace in found.traces.items()
        if trace.scenario.sizes is not None
        for group, values in trace.executors.items()
    }
    return {
        "": Plot("Events/s, by minutes", panels),
        "-utilisation": Plot("Utilisation of executors, by minutes", utilisation, columns=2),
        "-executors": Plot("Executors, by minutes", {"autoscaling": scaled}),
    }


def _line(values: Floats, trace: PlacementTrace) -> Line:
    """Return a mean for each 15 seconds, by minutes."""
    ticks = max(round(15.0 / trace.scenario.tick_s), 1)
    means = values[: values.size // ticks * ticks].reshape(-1, ticks).mean(axis=1)
    minutes = (np.arange(means.size) + 0.5) * ticks * trace.scenario.tick_s / 60.0
    return list(zip(minutes.tolist(), means.tolist(), strict=True))
