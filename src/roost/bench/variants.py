"""The balancing strategies and the variants of SWARM, compared over 240 rounds of a load.

Each runs on a cluster whose work is counted by cell (:mod:`roost.bench.counted`). Phases are
before, while and after hotspots last; a load without hotspots is one phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean, mean, stdev

from roost.balance.rules import SwarmRules, variants
from roost.bench.cluster import Variant, summed
from roost.bench.common import Row
from roost.bench.counted import CellDay, CountedCluster, CountedLoad, CountedMetrics
from roost.bench.moving import LoadHotspot
from roost.model.choices import Strategy

MACHINES = 22
ROUNDS = 240
POINTS = 500_000
RECOVERED = 1.2
COMPARED = ("replicated", "history", "swarm", "global", "paper")
PHASES = ("before", "while", "after", "without")
ADAPTIVE = ("swarm", "global")


def all_variants() -> dict[str, Variant]:
    """Return what is compared, by name: strategies, SWARM as published, and each change alone."""
    strategies = {name: Variant(Strategy(name)) for name in COMPARED if name != "paper"}
    rules: Mapping[str, SwarmRules] = variants()
    return strategies | {name: Variant(Strategy.SWARM, own) for name, own in rules.items()}


@dataclass(frozen=True)
class VariantCase:
    """One load with one seed, and what every variant measured."""

    scenario: str
    seed: int
    queries: int
    hotspots: tuple[LoadHotspot, ...]
    rounds: int
    found: Mapping[str, Sequence[CountedMetrics]]

    def phase(self, name: str, number: int) -> str:
        """Return the phase of a round."""
        if not self.hotspots:
            return "without"
        place = number / self.rounds
        if place < min(hotspot.begin for hotspot in self.hotspots):
            return "before"
        return "while" if place < max(hotspot.end for hotspot in self.hotspots) else "after"

    def batches(self, name: str, phase: str | None = None) -> list[CountedMetrics]:
        """Return the rounds of a phase, or all; the first, which maps the index, is left out."""
        chosen = self.found[name][1:]
        return [m for m in chosen if phase is None or self.phase(name, m.round) == phase]

    @property
    def phases(self) -> list[str]:
        """Return the phases of the load."""
        return [name for name in PHASES if self.batches("history", name)]


def run_case(
    day: CellDay,
    scenario: str,
    hotspots: tuple[LoadHotspot, ...],
    queries: int,
    seed: int,
    chosen: Mapping[str, Variant],
    *,
    machines: int = MACHINES,
    rounds: int = ROUNDS,
    points: int = POINTS,
) -> VariantCase:
    """Run a load with every variant."""
    load = CountedLoad(day, queries, rounds, points, hotspots, seed)
    found: dict[str, list[CountedMetrics]] = {}
    for name, variant in chosen.items():
        cluster = CountedCluster(load, variant, machines)
        found[name] = [cluster.run(step) for step in load.steps]
    case = VariantCase(scenario, seed, queries, hotspots, rounds, found)
    for name in chosen:
        ratios = {phase: ratio(case, name, "history", phase) for phase in case.phases}
        shown = ", ".join(f"{phase} {value:.2f}" for phase, value in ratios.items())
        print(f"{scenario}, {queries:,} queries, seed {seed}, {name}: {shown} of history")
    return case


def ratio(
    case: VariantCase, name: str, other: str, phase: str | None, key: str = "units_per_s"
) -> float:
    """Return a metric of one variant over that of another."""
    return summed(case.batches(name, phase))[key] / summed(case.batches(other, phase))[key]


def rounds_to_recover(batches: Sequence[CountedMetrics]) -> int:
    """Return the length of the longest sequence of rounds that were out of balance."""
    sequences = groupby(batches, lambda m: m.imbalance > RECOVERED)
    return max((len(list(batch)) for unbalanced, batch in sequences if unbalanced), default=0)


def rows_of(cases: Sequence[VariantCase]) -> list[Row]:
    """Return one row for each load, variant and phase: means over the seeds, with intervals."""
    rows: list[Row] = []
    for (scenario, queries), group in groupby(cases, lambda case: (case.scenario, case.queries)):
        seeds = list(group)
        for name in seeds[0].found:
            for phase in seeds[0].phases:
                metrics = [summed(case.batches(name, phase)) for case in seeds]
                ratios = [ratio(case, name, "history", phase) for case in seeds]
                rows.append(
                    {
                        "load": scenario,
                        "queries": queries,
                        "variant": name,
                        "phase": phase,
                        "seeds": len(seeds),
                        **{key: mean(m[key] for m in metrics) for key in metrics[0]},
                        "utilisation": _mean_of(seeds, name, phase, "utilisation"),
                        "network_bytes": _mean_of(seeds, name, phase, "network_bytes"),
                        "units_ratio_vs_history": mean(ratios),
                        "units_ratio_ci95": interval(ratios),
                        "rounds_to_recover": max(
                            rounds_to_recover(case.batches(name, phase)) for case in seeds
                        ),
                    }
                )
    return rows


def _mean_of(cases: Sequence[VariantCase], name: str, phase: str, key: str) -> float:
    return float(mean(getattr(m, key) for case in cases for m in case.batches(name, phase)))


def interval(values: Sequence[float]) -> float | None:
    """Return the half-width of the 95 % confidence interval of a mean; None for one value."""
    return None if len(values) < 2 else 1.96 * stdev(values) / len(values) ** 0.5


def summary_of(cases: Sequence[VariantCase]) -> Row:
    """Return the keys that both benchmarks have.

    Ratios are means over seeds and geometric means over loads, unless their name says otherwise.
    """
    hot = [case for case in cases if case.hotspots]

    def over_loads(
        chosen: Sequence[VariantCase], name: str, other: str, phase: str | None
    ) -> float:
        return geometric_mean(_by_load(chosen, name, other, phase).values())

    latency = _by_load(hot, "history", "swarm", "while", "latency_ms")
    best = _by_load(hot, "history", "replicated", "while", "latency_ms")
    worst = {
        f"{load} {phase} {name}": value
        for name in ADAPTIVE
        for phase in PHASES
        for load, value in _by_load(
            [case for case in cases if phase in case.phases], name, "history", phase
        ).items()
    }
    where = min(worst, key=lambda key: worst[key])
    recovered = [rounds_to_recover(case.batches("global")) for case in cases]
    return {
        "swarm_vs_history_hotspot": over_loads(hot, "swarm", "history", "while"),
        "global_vs_history_hotspot": over_loads(hot, "global", "history", "while"),
        "latency_ratio_vs_history": geometric_mean(latency.values()),
        "latency_ratio_replicated": geometric_mean(best.values()),
        "worst_phase_vs_history": worst[where],
        "worst_phase": where,
        "swarm_vs_paper": over_loads(cases, "swarm", "paper", None),
        "rounds_to_recover": max(recovered),
    }


def _by_load(
    cases: Sequence[VariantCase], name: str, other: str, phase: str | None, key: str = "units_per_s"
) -> dict[str, float]:
    """Return the mean ratio over the seeds, by load."""
    found: dict[str, list[float]] = {}
    for case in cases:
        load = f"{case.scenario} ({case.queries:,})"
        found.setdefault(load, []).append(ratio(case, name, other, phase, key))
    return {load: mean(ratios) for load, ratios in found.items()}
