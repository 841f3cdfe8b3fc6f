"""The moving load is the same for every strategy, with hotspots as specified."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from roost.bench.cases import load_pickups
from roost.bench.cluster import run_strategies, summed
from roost.bench.moving import HOTSPOT_SIDE, SCENARIOS, LoadHotspot, MovingLoad
from roost.bench.variants import rounds_to_recover
from roost.model.choices import Strategy

PICKUPS = load_pickups(None)
POINTS = 2_000


def in_square(load: MovingLoad, table: pa.Table, corner: tuple[float, float]) -> int:
    b = load.space.bounds
    x = (table["lon"].to_numpy() - b.x0) / b.width - corner[0]
    y = (table["lat"].to_numpy() - b.y0) / b.height - corner[1]
    inside = (x >= 0) & (x <= HOTSPOT_SIDE) & (y >= 0) & (y <= HOTSPOT_SIDE)
    return int(np.count_nonzero(inside))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_hotspot_has_its_share_of_the_points_and_its_queries(name: str) -> None:
    hotspots = SCENARIOS[name]
    load = MovingLoad(PICKUPS, 500, 20, POINTS, hotspots)
    plain = MovingLoad(PICKUPS, 500, 20, POINTS)
    live, most = {f"q{k}" for k in range(500)}, 0.0
    for number in range(20):
        step, usual = load.step(number), plain.step(number)
        assert step.points.num_rows == POINTS
        for hotspot in hotspots:
            share = hotspot.share_at(number / 20)
            most = max(most, share)
            extra = in_square(load, step.points, hotspot.corner)
            background = in_square(load, usual.points, hotspot.corner)
            assert extra >= int(share * POINTS)
            assert extra <= int(share * POINTS) + background
        if step.requests is not None:
            for row in step.requests.to_pylist():
                change = live.add if row["op"] == "register" else live.remove
                change(str(row["query_id"]))
        assert step.queries == len(live)
    assert most == pytest.approx(max(h.share for h in hotspots), rel=0.05)
    assert len(live) == 500, "all hotspots have ended"


def test_the_load_is_deterministic() -> None:
    first, second = (MovingLoad(PICKUPS, 10, 8, 100, SCENARIOS["step (6.8)"]) for _ in range(2))
    assert all(first.step(k).points.equals(second.step(k).points) for k in range(8))
    assert not first.step(0).points.equals(first.step(1).points)


def test_every_strategy_matches_the_same_on_the_emulated_cluster() -> None:
    hot = (LoadHotspot(0.3, 0.7, 0.5, (0.1, 0.1), step=True),)
    found = run_strategies(MovingLoad(PICKUPS, 300, 8, POINTS, hot), 5)
    assert set(found) == {strategy.value for strategy in Strategy}
    for batches in found.values():
        assert [m.points for m in batches] == [POINTS] * 8
        assert sum(m.matches for m in batches) > 0
        assert all(m.batch_s > 0 and m.imbalance >= 1.0 for m in batches)
        assert summed(batches)["units_per_s"] > 0
    assert all(m.epoch == 0 for m in found[Strategy.HISTORY])
    assert found[Strategy.GLOBAL][-1].epoch > 0, "the planner did not react to the hotspot"


def test_the_longest_sequence_out_of_balance_counts() -> None:
    hot = (LoadHotspot(0.3, 0.7, 0.5, (0.1, 0.1), step=True),)
    load = MovingLoad(PICKUPS, 50, 4, 200, hot)
    batches = run_strategies(load, 3)[Strategy.UNIFORM]
    series = [1.0, 1.5, 1.3, 1.1, 1.21, 1.2, 9.0, 9.0, 9.0]
    assert rounds_to_recover([replace(batches[0], imbalance=value) for value in series]) == 3
