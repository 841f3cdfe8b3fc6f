"""The comparison of strategies and variants of SWARM: phases, ratios, and a small run."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache, partial
from math import sqrt
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from roost.balance.rules import PAPER, SwarmRules
from roost.bench import hotspots, run_bench, swarm
from roost.bench.cases import load_pickups
from roost.bench.cluster import SECONDS_PER_BATCH, counted_work, run_strategies
from roost.bench.counted import CellDay, CountedCluster, CountedLoad, CountedMetrics
from roost.bench.moving import LoadHotspot, MovingLoad
from roost.bench.variants import VariantCase, all_variants, interval, rows_of, run_case, summary_of
from roost.stages.contract import Report
from roost.stages.matching import MatchingStage

HOT = (LoadHotspot(0.25, 0.5, 0.4, (0.1, 0.1), step=True),)
NAMES = ("replicated", "history", "swarm", "global", "paper")
BATCH = CountedMetrics(
    round=0,
    points=100,
    queries=10,
    batch_s=1.0,
    imbalance=1.0,
    epoch=0,
    partitions=4,
    loaded_queries=0,
    load_s=0.0,
    decision_s=0.0,
    bytes_sent=0,
    utilisation=1.0,
    network_bytes=0.0,
)


@cache
def sample_day() -> CellDay:
    """Return the day of the bundled sample."""
    return CellDay(load_pickups(None))


def case_of(
    seconds: dict[str, list[float]], hotspots: tuple[LoadHotspot, ...], seed: int = 0
) -> VariantCase:
    """Return a case with given times of batches; a batch has 1,000 units of work."""
    found = {
        name: [replace(BATCH, round=k, batch_s=s) for k, s in enumerate(times)]
        for name, times in seconds.items()
    }
    return VariantCase("load", seed, 10, hotspots, len(next(iter(seconds.values()))), found)


def test_every_change_alone_is_a_variant_and_swarm_has_all() -> None:
    found = all_variants()
    assert found["paper"].rules == PAPER and found["swarm"].rules == SwarmRules()
    for field in fields(SwarmRules):
        alone = found[f"paper+{field.name}"].rules
        changed = {
            f.name for f in fields(SwarmRules) if getattr(alone, f.name) != getattr(PAPER, f.name)
        }
        assert changed == {field.name}


def test_phases_and_ratios() -> None:
    """Rounds 1, 2 and 3 of 4 are before, while and after; the first round is left out."""
    seconds = {name: [9.0, 1.0, 1.0, 1.0] for name in NAMES}
    seconds["history"] = [1.0, 2.0, 8.0, 1.0]
    seconds["swarm"] = [1.0, 2.0, 2.0, 4.0]
    hot = (LoadHotspot(0.5, 0.75, 0.4, (0.1, 0.1)),)
    found = summary_of([case_of(seconds, hot)])
    assert found["swarm_vs_history_hotspot"] == pytest.approx(4.0)
    assert found["global_vs_history_hotspot"] == pytest.approx(8.0)
    assert found["latency_ratio_vs_history"] == pytest.approx(4.0)
    assert found["latency_ratio_replicated"] == pytest.approx(8.0)
    assert found["worst_phase_vs_history"] == pytest.approx(0.25)
    assert found["worst_phase"] == "load (10) after swarm"
    assert found["swarm_vs_paper"] == pytest.approx(3.0 / 8.0)
    assert found["rounds_to_recover"] == 0


def test_rows_are_means_over_seeds_with_intervals() -> None:
    cases = [
        case_of({"history": [1.0, 1.0], "swarm": [1.0, s]}, (), seed)
        for seed, s in enumerate((0.5, 1.0, 2.0))
    ]
    rows = {row["variant"]: row for row in rows_of(cases)}
    assert rows["swarm"]["units_ratio_vs_history"] == pytest.approx((2.0 + 1.0 + 0.5) / 3)
    assert rows["swarm"]["units_ratio_ci95"] == interval([2.0, 1.0, 0.5])
    assert rows["swarm"]["phase"] == "without" and rows["swarm"]["seeds"] == 3
    assert interval([1.0, 3.0]) == pytest.approx(1.96 * sqrt(2.0) / sqrt(2.0))
    assert interval([1.0]) is None


def test_a_small_run_has_all_keys_and_repeats() -> None:
    variants = {name: all_variants()[name] for name in NAMES}
    sizes = {"machines": 4, "rounds": 10, "points": 500}
    cases = [run_case(sample_day(), "step", HOT, 300, seed, variants, **sizes) for seed in (0, 1)]
    assert {row["phase"] for row in rows_of(cases)} == {"before", "while", "after"}
    found = summary_of(cases)
    assert all(isinstance(found[key], float) for key in found if key.endswith(("hotspot", "paper")))
    first, second = (case.found["history"][5] for case in cases)
    assert first.batch_s != second.batch_s, "seeds draw different loads"
    two = {name: variants[name] for name in ("history", "global")}
    again = run_case(sample_day(), "step", HOT, 300, 0, two, **sizes)
    times = [[m.batch_s for m in case.found["global"]] for case in (cases[0], again)]
    assert times[0] == times[1], "counted times repeat"


def test_utilisation_and_network_of_a_round() -> None:
    """All machines together have the same work, and a point is sent unless its reader owns it."""
    load = CountedLoad(sample_day(), 300, 3, 2_000, seed=1)
    rounds = {}
    for name in ("replicated", "history"):
        cluster = CountedCluster(load, all_variants()[name], 4)
        rounds[name] = [cluster.run(step) for step in load.steps]
    for shared, owned in zip(*rounds.values(), strict=True):
        assert shared.utilisation == pytest.approx(1.0, abs=0.01) and shared.network_bytes == 0.0
        assert 0.25 <= owned.utilisation < 1.0
        work_s = [m.utilisation * m.batch_s for m in (shared, owned)]
        assert work_s[0] == pytest.approx(work_s[1], rel=1e-9)
        assert owned.network_bytes * owned.batch_s == pytest.approx(32 * 2_000 * 3 / 4)


def test_counted_rounds_have_all_points_and_queries() -> None:
    load = CountedLoad(sample_day(), 200, 20, 3_000, HOT, seed=1)
    steps = load.steps
    assert {step.points.points for step in steps} == {3_000}
    assert [step.queries for step in steps] == [200] * 5 + [280] * 5 + [200] * 10
    assert [len(step.registered) for step in steps] == [0] * 5 + [80] + [0] * 14
    assert steps[10].terminated.tolist() == list(range(200, 280))
    # The square of the hotspot is cells 100 to 250 of 1,000; two fifths of the points are in it.
    rows, columns = np.divmod(steps[7].points.cells, 1_000)
    inside = (rows >= 100) & (rows < 250) & (columns >= 100) & (columns < 250)
    assert steps[7].points.counts[inside].sum() >= 0.4 * 3_000
    low, high = steps[5].registered[:, :2], steps[5].registered[:, 2:]
    assert low.min() >= 98 and high.max() <= 251


def test_a_normal_hotspot_is_concentrated_in_its_middle() -> None:
    spots = (replace(HOT[0], normal=True), HOT[0])
    near = []
    for spot in spots:
        step = CountedLoad(sample_day(), 10, 20, 20_000, (spot,), seed=1).steps[7]
        rows, columns = np.divmod(step.points.cells, 1_000)
        middle = (abs(rows - 175) < 30) & (abs(columns - 175) < 30)
        near.append(step.points.counts[middle].sum())
    assert near[0] > 2 * near[1]


def test_counted_work_agrees_with_the_engine() -> None:
    """Points are drawn by cell here and one by one there, so only means agree.

    The index has finer cells than the plan, so the engine checks fewer queries; with few queries
    most of the work is per point.
    """

    def without_batch(report: Report) -> Report:
        """Leave out a batch's own cost, as if it had many points."""
        own = SECONDS_PER_BATCH if report.stage == MatchingStage.name else 0.0
        counted = counted_work(report)
        return replace(counted, seconds=counted.seconds - own)

    chosen = {name: all_variants()[name] for name in ("history", "swarm", "global")}
    sizes = {"queries": 100, "rounds": 12, "points": 40_000, "hotspots": HOT, "seed": 3}
    engine = run_strategies(MovingLoad(load_pickups(None), **sizes), 6, chosen, without_batch)
    load = CountedLoad(sample_day(), **sizes)
    for name, variant in chosen.items():
        cluster = CountedCluster(load, variant, 6)
        mine = [cluster.run(step) for step in load.steps]
        assert [m.queries for m in mine] == [m.queries for m in engine[name]]
        assert [m.points for m in mine] == [m.points for m in engine[name]]
        own, other = (np.mean([m.imbalance for m in b[1:]]) for b in (mine, engine[name]))
        assert own == pytest.approx(other, rel=0.05), name


@pytest.mark.parametrize("module", [swarm, hotspots])
def test_the_benchmarks_write_the_same_summary_keys(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but Spark, with tiny sizes."""
    small = partial(run_case, machines=3, rounds=8, points=300)
    monkeypatch.setattr(module, "run_case", small)
    monkeypatch.setattr(module, "load_pickups", lambda folder: load_pickups(None))
    monkeypatch.setattr(module, "all_variants", lambda: {n: all_variants()[n] for n in NAMES})
    if module is swarm:
        monkeypatch.setattr(swarm, "QUERIES_QUICK", (200,))
        monkeypatch.setattr(swarm, "ON_CLUSTER_QUICK", (200, 12, 500))
        monkeypatch.setattr(swarm, "_on_cluster", lambda load: [])
    else:
        monkeypatch.setattr(hotspots, "QUERIES", 200)
        monkeypatch.setattr(hotspots, "SCENARIOS", {"step": HOT})
    path = tmp_path / "result.json"
    assert run_bench(module.__name__.rsplit(".", 1)[1], quick=True, json_path=path) == 0
    result = json.loads(path.read_text())
    assert set(result["summary"]) == {
        "swarm_vs_history_hotspot",
        "global_vs_history_hotspot",
        "latency_ratio_vs_history",
        "latency_ratio_replicated",
        "worst_phase_vs_history",
        "worst_phase",
        "swarm_vs_paper",
        "rounds_to_recover",
    }
    operations = [row for row in result["rows"] if row["load"] == "operations"]
    compared = [row for row in result["rows"] if row["load"] != "operations"]
    assert {row["variant"] for row in compared} == set(NAMES)
    assert len(operations) == (7 if module is swarm else 0)
    assert all(row["microseconds"] > 0.0 for row in operations)
    assert path.with_suffix(".png").stat().st_size > 10_000
