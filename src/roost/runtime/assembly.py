"""Builds the batch loop of a run from its settings; the only place that does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan, initial_plan
from roost.balance.planner import GlobalPlanner
from roost.balance.rules import SwarmRules
from roost.balance.strategies import sampled_costs
from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import SourceKind
from roost.dataflow.schema import StreamSchema
from roost.errors import ConfigError
from roost.model.choices import Exchange, Strategy
from roost.model.records import TIME_MIN
from roost.model.schemas import id_type_of
from roost.model.settings import RunConfig
from roost.model.space import Space
from roost.queries.admission import Rules
from roost.queries.guard_state import GuardState
from roost.queries.live import QuerySet
from roost.queries.log import QueryLog
from roost.queries.versions import segment_files
from roost.runtime.balancing import (
    BalancePolicy,
    BuildPolicy,
    FittingPolicy,
    GlobalPolicy,
    ReplicatedPolicy,
    SwarmPolicy,
)
from roost.runtime.executor import Executor
from roost.runtime.flow import flow_rounds, flow_stages, sinks_of
from roost.runtime.flow_layout import Sample
from roost.runtime.flow_rounds import FlowPolicy
from roost.runtime.group_rounds import GroupRounds
from roost.runtime.guarding import GuardPolicy
from roost.runtime.loop import BatchLoop, ResultSink, kind_of, staging
from roost.runtime.records import last_epoch, last_intent, last_round, median_reached, plan_of
from roost.runtime.rounds import HiddenQueries, PlanRounds, Policy, Proposer, Resizing, Rounds
from roost.runtime.sampled import Sampled, sampled_positions
from roost.runtime.synopsis import (
    prefix_rounds,
    synopsis_queries,
    synopsis_spec,
    synopsis_stage,
)
from roost.stages.contract import Stage
from roost.stages.decode import PointSchema
from roost.stages.flow_source import own_schemas
from roost.stages.joins import JoinStage
from roost.stages.matching import MatchingStage
from roost.stages.reading import ReadingStage
from roost.stages.routing import PLANS, SpatialTable
from roost.stages.schema import aliases_of, time_unit, window_attributes
from roost.stages.standing import StandingStage
from roost.stages.statistics import CellStage, TrioStage
from roost.stages.synopsis_queries import SynopsisQueryStage
from roost.stages.window import WindowStage
from roost.storage.agreement import agree, agreed
from roost.storage.cache import WorkerCache
from roost.storage.copies import Copies
from roost.storage.files import Files
from roost.storage.store import Fact, Store
from roost.synopsis.catalogue import SPEC
from roost.window import WindowSpec
from roost.window.join import join_spec
from roost.window.spec import window_spec
from roost.window.view import WindowFiles, window_files

HISTORY_QUERIES = 200_000


@dataclass(frozen=True)
class Hooks:
    """What a caller may add, observe or replace."""

    sinks: Sequence[ResultSink] = ()  # beside the one that the configuration names
    more_stages: Sequence[Stage] = ()  # beside Roost's own
    # Called before each step of a batch, see :mod:`roost.runtime.loop`.
    on_step: Callable[[str, int], None] = lambda step, number: None
    clock: Callable[[], float] = time.perf_counter  # seconds, to time batches
    seed: int | None = None  # of the guard; drawn, and kept secret, if there is none
    wall_clock: Callable[[], float] = time.time  # seconds since 1970, of a dataflow's batches
    flow_policies: Sequence[FlowPolicy] = ()  # of a dataflow, in the order in which they propose
    # Proposes how many machines layouts should have, instead of the elastic manager: the first
    # policy of every round.
    resize: Proposer[Any] | None = None
    swarm: SwarmRules = SwarmRules()  # noqa: RUF009  (frozen)
    # Runs a sample of a dataflow, divided into stages.
    sample: Callable[[Division], Sample | None] = lambda division: None

    def receives(self, config: RunConfig, kind: str) -> bool:
        """Return whether anything receives results of a kind: else they are only counted."""
        return config.out.sink != "count" or kind in map(kind_of, self.sinks)


@dataclass(frozen=True)
class StreamShape:
    """The columns and the space of the points, and what costs are learned from, if anything.

    With a ``json_column``, each point is JSON text in that column.
    """

    points: PointSchema
    space: Space
    sample: Sampled | None = None
    json_column: str | None = None


def release_memory() -> None:
    """Return the memory that loading queries needed to the system, before workers need it."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it, or needs it
        ctypes.CDLL(None).malloc_trim(0)


def assemble(
    config: RunConfig,
    store: Store,
    log: QueryLog,
    executor: Executor,
    shape: StreamShape | None,
    hooks: Hooks = Hooks(),  # noqa: B008  (frozen)
    default_strategy: Strategy = Strategy.REPLICATED,
    flow: Dataflow | None = None,
) -> BatchLoop:
    """Build the batch loop of a run; the caller holds the run lock.

    A run has points to match (``shape``), a dataflow, or both.
    """
    group = _group_rounds(config, store, executor, hooks)
    if group is not None:
        hooks = replace(hooks, resize=Resizing(lambda: group.machines))
    if shape is not None:
        assembly = _Assembly(config, store, log, executor, shape, hooks, flow, group)
        return assembly.loop(default_strategy)
    assert flow is not None
    stages = _flow_stages(config, store, executor, flow, {}, hooks, group, sample=hooks.sample)
    return _batch_loop(config, store, executor, [*stages, *hooks.more_stages], hooks, flow, group)


def _flow_stages(
    config: RunConfig,
    store: Store,
    executor: Executor,
    flow: Dataflow | None,
    own: Mapping[SourceKind, StreamSchema],
    hooks: Hooks,
    group: GroupRounds | None,
    sample: Callable[[Division], Sample | None] = lambda division: None,
) -> list[Stage]:
    """Build the stages of the dataflow, if the run has one."""
    if flow is None:
        return []
    return flow_stages(
        config,
        store,
        executor,
        flow,
        own,
        hooks.wall_clock,
        sample,
        resizable=hooks.resize is not None,
        machines=None if group is None else group.machines,
        received=partial(hooks.receives, config),
    )


def _batch_loop(
    config: RunConfig,
    store: Store,
    executor: Executor,
    stages: Sequence[Stage],
    hooks: Hooks,
    flow: Dataflow | None,
    group: GroupRounds | None,
    plan: Sequence[PlanRounds] = (),
    *,
    log: QueryLog | None = None,
    queries: QuerySet | None = None,
    guard: GuardState | None = None,
) -> BatchLoop:
    """Build the loop of stages, with the rounds of all that adapts."""
    flows = flow_rounds(config, store, stages, hooks.flow_policies, hooks.resize, _wanted(group))
    prefixes = prefix_rounds(
        store,
        stages,
        config.synopsis,
        hooks.clock,
        hooks.resize,
        lambda: 0 if group is None else group.machines_max,
    )
    rounds: list[Rounds] = [*flows, *prefixes, *plan]
    if group is not None:
        group.loads = lambda: [load for found in flows for load in found.loads]
        group.plan = lambda: next((found.load for found in plan), None)
        group.needed = lambda: max((found.needed for found in prefixes), default=0)
        group.placement.begin(stages)
        # Executors come first, so that the next batch uses those that have arrived.
        rounds.insert(0, group)
    stays = config.out.sink == "parquet"
    return BatchLoop(
        store,
        log,
        queries,
        stages,
        executor,
        config.out.dir.absolute(),
        sinks=hooks.sinks,
        only_delivered=frozenset() if stays else frozenset(["matches", *sinks_of(flow)]),
        rounds=rounds,
        operators=None if group is None else group.placement,
        guard=guard,
        history=config.out.history,
        on_step=hooks.on_step,
        clock=hooks.clock,
    )


def _group_rounds(
    config: RunConfig, store: Store, executor: Executor, hooks: Hooks
) -> GroupRounds | None:
    """Build the rounds of the executors; None if their number is fixed."""
    if config.elastic.max is None or hooks.resize is not None:
        return None
    if executor.allocator is None:
        for group in config.elastic.other_groups:
            expected = "no group: the cluster has a fixed number of executors"
            raise ConfigError("elastic.groups", group.name, expected)
        warnings.warn(
            "the cluster has a fixed number of executors: elastic.max has no effect", stacklevel=3
        )
        return None
    return GroupRounds(store, executor.allocator, config.elastic, hooks.wall_clock)


def _wanted(group: GroupRounds | None) -> Callable[[], int] | None:
    """Return what says how many machines layouts should have at once; None if that is fixed."""
    return None if group is None else lambda: group.machines


@dataclass
class _Assembly:
    """The steps of :func:`assemble`, which share many values."""

    config: RunConfig
    store: Store
    log: QueryLog
    executor: Executor
    shape: StreamShape
    hooks: Hooks
    flow: Dataflow | None
    group: GroupRounds | None = None

    def __post_init__(self) -> None:
        self.points, self.space = self.shape.points, self.shape.space
        self.out = self.config.out.dir.absolute()
        self.unit = time_unit(self.points)
        self.id_type = self._query_id_type()
        self.spec = window_spec(self.config.window, self.unit)
        self.join = join_spec(self.config.join, self.unit)
        self.synopsis = synopsis_spec(self.config, self.points, self.space)
        self._agree()
        self.cache = WorkerCache()
        self.guard = GuardState.load(self.store)
        self.window = None if self.spec is None else self._window(self.spec)
        self.queries = self._queries()
        release_memory()

    def _query_id_type(self) -> pa.DataType:
        """Return the type of query identifiers: as recorded, configured, or first seen."""
        known, configured = agreed(self.store), self.config.queries.id_type
        if known is not None:
            return pa.int64() if known["query_id_type"] == "int64" else pa.string()
        if configured is not None:
            return pa.int64() if configured == "int" else pa.string()
        first = next(iter(self.log.read(0, min(1, self.log.end()))), None)
        if first is None or "query_id" not in first.column_names:
            return pa.string()
        try:
            return id_type_of(first.schema.field("query_id").type, "query_id")
        except ConfigError:
            return pa.string()  # any client may have sent it: the request is refused, not the run

    def _agree(self) -> None:
        """Check that the state directory was made with the same settings."""
        points = self.points
        window: dict[str, Any] = {}
        if self.spec is not None:
            window = {
                "join": None if self.join is None else self.join.to_json(),
                "window": self.spec.to_json(),
                "window_attributes": window_attributes(self.config, points).names,
            }
        agree(
            self.store,
            {
                "space": self.space.to_json(),
                "query_id_type": str(self.id_type),
                "points": [points.x, points.y, points.time, points.point_id],
                "types": [str(points.id_type), str(points.time_type)],
                "attributes": [[f.name, str(f.type)] for f in points.attributes],
                "polygon_vertices_max": self.config.queries.polygon_vertices_max,
                **window,
                **({} if self.synopsis is None else {SPEC: self.synopsis.to_json()}),
            },
        )

    def _window(self, spec: WindowSpec) -> WindowStage:
        schema = window_attributes(self.config, self.points)
        aliases = aliases_of(self.points, schema)
        files, leases = window_files(self.store), self.store.leases
        return WindowStage(spec, schema, aliases, self.space, files, leases, self.cache)

    def _queries(self) -> QuerySet:
        """Apply the log, in the order that the guard requires."""
        config, store, points = self.config, self.store, self.points
        rules = Rules(
            self.space,
            self.id_type,
            points.time_type,
            points.attributes,
            config.queries.polygon_vertices_max,
            self.window is not None,
            None if self.window is None else self.window.schema,
            points.id_type,
            config.guard.enabled
            or self.guard is not None
            or config.engine.strategy is Strategy.SWARM,
        )
        queries = QuerySet(store, self.log, rules, guard=self.guard)
        pending = last_intent(store)
        if pending is not None:
            # A batch that was begun and never applied needs the version of its own position.
            queries.advance(max(pending.position, queries.version.position))
        if self.guard is not None:
            self.guard.apply_commands(self.log)
        queries.advance(max(self.log.end(), queries.version.position))
        if self.guard is None and config.guard.enabled:
            # Requests from before the stream were not sent to make a hotspot in it.
            seed = secrets.randbits(63) if self.hooks.seed is None else self.hooks.seed
            self.guard = GuardState.begin(store, seed, config.guard.users_max)
            queries.guard = self.guard
        if self.guard is not None:
            self.guard.now = self._reached()
        return queries

    def _reached(self) -> int:
        now = median_reached(self.store)
        return TIME_MIN if now is None else now

    def loop(self, default: Strategy) -> BatchLoop:
        """Build the stages, the policies and the loop."""
        config, hooks = self.config, self.hooks
        strategy = config.engine.strategy or default
        if hooks.resize is not None and strategy in (Strategy.UNIFORM, Strategy.HISTORY):
            expected = "global, swarm or replicated where the number of machines may change"
            raise ConfigError("engine.strategy", strategy, expected)
        machines = config.engine.machines or self.executor.slots
        if self.group is not None:
            machines = self.group.machines
        table = SpatialTable(self.store, self.space, self._plan(strategy, machines))
        statistics = self._statistics(strategy)
        given = config, self.store, self.executor
        own = own_schemas(self.points, self.id_type)
        stages: list[Stage] = [
            ReadingStage(
                self.points,
                self.space,
                staging(self.out, "dead"),
                (lambda reached: None) if self.spec is None else self.spec.watermark,
                self.shape.json_column,
            ),
            MatchingStage(
                self.queries,
                self.points,
                self.space,
                self.id_type,
                self._segments(),
                staging(self.out, "matches") if hooks.receives(config, "matches") else None,
                table,
                self._replicates(strategy),
            ),
            *(stage for stage in (self.window, statistics) if stage is not None),
            *self._window_results(),
            *self._synopsis_stages(machines),
            *_flow_stages(*given, self.flow, own, hooks, self.group),
            *hooks.more_stages,
        ]
        plan = self._plan_rounds(strategy, statistics, table)
        return _batch_loop(
            *given,
            stages,
            hooks,
            self.flow,
            self.group,
            plan,
            log=self.log,
            queries=self.queries,
            guard=self.guard,
        )

    def _synopsis_stages(self, machines: int) -> list[Stage]:
        if self.synopsis is None:
            return []
        store, spec, settings = self.store, self.synopsis, self.config.synopsis
        given = (store, spec, self.points, machines, self.shape.sample, settings)
        stage = synopsis_stage(*given, resizable=self.hooks.resize is not None)
        results = staging(self.out, SynopsisQueryStage.kinds[0])
        return [stage, *synopsis_queries(store, spec, settings, results)]

    def _plan(self, strategy: Strategy, machines: int) -> int:
        """Return the epoch of the plan to use: the last one, or a new one if it does not fit."""
        store = self.store
        last = last_epoch(store)
        known = {} if last is None else plan_of(store, last)
        keep = self.hooks.resize is not None
        same = keep or known.get("machines") == machines
        if strategy.adaptive and not self._replicates(strategy):
            same &= not (known and Plan.from_json(known).undivided)
        if last is not None and known["strategy"] == strategy and same:
            return last
        first = self._first_plan(strategy, machines)
        epoch = 0 if last is None else last + 1
        plan = first.renumbered(epoch, int(known.get("next_id", 0)))
        plan.check_invariants()
        store.record(Fact(PLANS, epoch, {**plan.to_json(), "strategy": strategy.value}))
        return epoch

    def _first_plan(self, strategy: Strategy, machines: int) -> Plan:
        """Return the plan of a strategy before it has seen any load but a sample's."""
        sample = self.shape.sample
        if strategy is Strategy.HISTORY and sample is None:
            accepted = "another strategy for a stream without a sample of points"
            raise ConfigError("engine.strategy", strategy, accepted)
        history = None
        sampled = strategy in (Strategy.HISTORY, Strategy.GLOBAL)
        sampled |= strategy is Strategy.SWARM and self.hooks.swarm.sampled_plan
        if sampled and sample is not None:
            history = self._history(sample)
        return initial_plan(strategy, self.space.grid, machines, history)

    def _replicates(self, strategy: Strategy) -> bool:
        """Return whether the plan is replicated while the queries fit into memory.

        The guard finds attacks by what the balancer does, so it needs a plan that divides space.
        """
        auto = self.config.balance.exchange is Exchange.AUTO and not self.config.guard.enabled
        return strategy.adaptive and auto

    def _history(self, source: Sampled) -> NDArray[np.float64]:
        x, y = sampled_positions(source, self.points.x, self.points.y)
        return sampled_costs(self.space.grid, x, y, self.queries.bounds(HISTORY_QUERIES))

    def _segments(self) -> Files:
        """Return the files of the queries, as the machines read them."""
        engine = self.config.engine
        copies = (
            None
            if engine.cache is None
            else Copies(str(engine.cache.absolute()), engine.cache_bytes)
        )
        return replace(segment_files(self.store), copies=copies)

    def _statistics(self, strategy: Strategy) -> CellStage | TrioStage | None:
        if strategy is Strategy.SWARM:
            folder, files = self._segments(), self.store.files("trio")
            return TrioStage(self.space, folder, files, self.window, self.hooks.swarm)
        return CellStage(self.queries, self.space) if strategy is Strategy.GLOBAL else None

    def _window_results(self) -> list[Stage]:
        """Build the stages of standing queries and of the join."""
        if self.window is None or self.config.out.sink == "count":
            return []
        files = WindowFiles(self.window.files, self.cache)
        types = self.points.id_type, self.points.time_type
        kinds = {kind: staging(self.out, kind) for kind in StandingStage.kinds}
        folder = segment_files(self.store)
        found: list[Stage] = [StandingStage(folder, files, kinds, self.id_type, *types)]
        if self.join is not None:
            self.join.check(self.window.schema)
            found.append(JoinStage(self.join, files, staging(self.out, "pairs"), *types))
        return found

    def _plan_rounds(
        self, strategy: Strategy, stage: CellStage | TrioStage | None, table: SpatialTable
    ) -> list[PlanRounds]:
        """Build the policies of the plan; they continue from the last round.

        A balancer finds the hotspots, so a guard without one only refuses blocked users.
        """
        config = self.config
        if stage is None and config.guard.enabled:
            text = f"strategy {strategy.value} does not rebalance: the guard detects no attack"
            warnings.warn(text, stacklevel=4)
        resize = self.hooks.resize
        if stage is None and resize is None:
            return []
        saved = last_round(self.store) or {}
        number = int(saved.get("round", -1)) + 1
        if saved.get("strategy") != strategy.value:
            saved = {}
        balance: BalancePolicy | None = None
        if isinstance(stage, TrioStage):
            build: BuildPolicy = partial(SwarmPolicy, stage)
        elif stage is not None:
            planner = GlobalPlanner(tolerance=config.balance.tolerance)
            build = partial(GlobalPolicy, stage, planner)
        if stage is not None:
            balance = build(saved)
            if self._replicates(strategy):
                balance = FittingPolicy(build, partial(self._first_plan, strategy), saved)
        policies: list[Policy] = [] if resize is None else [resize]
        policies.append(balance or ReplicatedPolicy())
        guard = None
        if balance is not None and config.guard.enabled and self.guard is not None:
            guard = GuardPolicy(
                self.guard,
                self.queries,
                self.space,
                max(int(config.guard.round * self.unit), 1),
                balance.hottest,
                evict=config.guard.evict,
                quarantine=config.guard.quarantine,
            )
            policies.append(guard)
        rounds = PlanRounds(
            self.store,
            table,
            strategy.value,
            policies,
            int(config.balance.round * self.unit),
            self._reached(),
            number,
            (lambda now: HiddenQueries()) if guard is None else guard.hidden,
            self.hooks.clock,
            _wanted(self.group),
            None if balance is None else balance.hottest,
            self._index_bytes,
        )
        return [rounds]

    def _index_bytes(self) -> int:
        """Return the size of the live queries' files."""
        files = segment_files(self.store)
        return sum(files.path(ref.file).stat().st_size for ref in self.queries.version.segments)
