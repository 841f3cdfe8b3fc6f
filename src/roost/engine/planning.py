"""Which plan a run begins with, and what changes it while the stream runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from roost.balance import Strategy, initial_plan
from roost.balance.planner import GlobalPlanner
from roost.balance.strategies import History
from roost.config import RunConfig
from roost.engine.balancer import Balancer, GlobalBalancer, RoundSetup, SwarmBalancer
from roost.engine.decode import PointSchema
from roost.engine.guarding import GuardRounds
from roost.engine.kafka import Topic
from roost.engine.schema import time_unit
from roost.engine.sources import Source
from roost.errors import ConfigError
from roost.model import TIME_MIN
from roost.space import Space
from roost.state.columns import convert
from roost.state.guard_keeper import GuardKeeper
from roost.state.queries import QuerySet
from roost.state.store import Store
from roost.state.windows import WindowKeeper

HISTORY_QUERIES = 200_000

Sampled = Source | Topic


def ensure_plan(
    store: Store,
    strategy: Strategy,
    machines: int,
    space: Space,
    queries: QuerySet,
    points: PointSchema,
    source: Sampled | None,
) -> int:
    """Epoch of the plan to use: the last one, or a new one where it was asked for."""
    last = store.last_epoch()
    kept = None if last is None else store.plan(last)
    if kept is not None and (kept["strategy"], kept["machines"]) == (strategy.value, machines):
        assert last is not None
        return last
    history = None
    if strategy is Strategy.HISTORY and source is None:
        takes = "another strategy for a stream without a sample of points"
        raise ConfigError("engine.strategy", strategy.value, takes)
    if strategy in (Strategy.HISTORY, Strategy.GLOBAL) and source is not None:
        history = _history(space, queries, points, source)
    made = initial_plan(strategy, space.grid, machines, history)
    epoch = 0 if last is None else last + 1
    plan = made.renumbered(epoch, 0 if kept is None else int(kept["next_id"]))
    plan.check_invariants()
    store.put_plan(epoch, {**plan.to_json(), "strategy": strategy.value})
    return epoch


def _history(space: Space, queries: QuerySet, points: PointSchema, source: Sampled) -> History:
    sample = source.sample([points.x, points.y])
    x, y = (
        convert(sample[name], pa.float64())[0].to_numpy(zero_copy_only=False)
        for name in (points.x, points.y)
    )
    known = np.isfinite(x) & np.isfinite(y)
    boxes = queries.bounds(HISTORY_QUERIES)
    return History.of(space.grid, x[known], y[known], boxes)


def make_balancer(
    config: RunConfig,
    store: Store,
    strategy: Strategy,
    space: Space,
    queries: QuerySet,
    points: PointSchema,
    windows: WindowKeeper | None,
    keeper: GuardKeeper | None,
    clock: Callable[[], float],
) -> Balancer | None:
    """Make what changes plans while the stream runs; it goes on from the last round.

    Hotspots are found by a balancer, so that a guard without one only refuses who is blocked.
    """
    if not strategy.adaptive:
        if config.guard:
            finds = f"strategy {strategy.value} does not rebalance, so that the guard finds nobody"
            warnings.warn(finds, stacklevel=2)
        return None
    unit = time_unit(points)
    saved = store.last_round()
    if saved is not None and saved["strategy"] != strategy.value:
        saved = {"round": saved["round"]}
    reached = store.reached()
    guard = None
    if config.guard and keeper is not None:
        length = max(int(config.guard_round * unit), 1)
        guard = GuardRounds(
            keeper,
            queries,
            space,
            length,
            evict=config.guard_evict,
            quarantine=config.guard_quarantine,
        )
    setup = RoundSetup(
        store,
        queries,
        int(config.round_length * unit),
        saved,
        TIME_MIN if reached is None else reached,
        windows,
        guard,
        clock,
    )
    if strategy is Strategy.SWARM:
        return SwarmBalancer(setup)
    return GlobalBalancer(setup, space, GlobalPlanner(tolerance=config.tolerance))
