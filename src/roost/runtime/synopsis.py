"""Builds the stage of the synopsis from the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from roost.errors import ConfigError
from roost.model.schemas import TIMESTAMP
from roost.model.settings import RunConfig, SynopsisSettings
from roost.model.space import Space
from roost.runtime.prefix_rounds import PrefixRound, PrefixRounds
from roost.runtime.rounds import Proposer
from roost.runtime.sampled import Sampled, sampled_positions
from roost.stages.contract import Stage
from roost.stages.decode import PointSchema
from roost.stages.synopsis import TREES, PrefixTable, SynopsisStage
from roost.stages.synopsis_queries import SynopsisQueryStage
from roost.storage.files import Files
from roost.storage.store import Fact, Store
from roost.synopsis.budget import Budget
from roost.synopsis.catalogue import read_rows, sketch_files
from roost.synopsis.reader import Loader
from roost.synopsis.scaling import ScalingRules
from roost.synopsis.spec import DAY_S, BinRule, SetSpec, SynopsisSpec, locate
from roost.synopsis.standing import standing_queries
from roost.synopsis.tree import PrefixTree


def synopsis_spec(config: RunConfig, points: PointSchema, space: Space) -> SynopsisSpec | None:
    """Return what the synopsis of a run describes; None if no features are configured."""
    settings = config.synopsis
    if settings.features is None:
        return None
    if points.time_type != TIMESTAMP:
        expected = "a timestamp column where there is a synopsis"
        raise ConfigError("points.time", str(points.time_type), expected)
    shared = {item.name for item in fields(settings)} & {item.name for item in fields(SynopsisSpec)}
    given = {name: getattr(settings, name) for name in shared - {"features", "sets"}}
    given["sets"] = tuple(SetSpec.read(points.attributes, own) for own in settings.sets)
    given |= {"rule": BinRule(settings.rule), "space": space}
    own = {"x": points.x, "y": points.y, "time": points.time}
    return SynopsisSpec.of(points.attributes, settings.features, **given, **own)


def synopsis_stage(
    store: Store,
    spec: SynopsisSpec,
    points: PointSchema,
    machines: int,
    sample: Sampled | None,
    settings: SynopsisSettings,
    *,
    resizable: bool = False,
) -> SynopsisStage:
    """Build the stage; its prefix tree continues from the last one if it fits.

    It always does if the number of machines may change.
    """
    last = store.last(TREES)
    epoch = 0 if last is None else last[0]
    if last is None or (last[1]["machines"] != machines and not resizable):
        epoch += last is not None
        places = None
        if sample is not None:
            places = locate(*sampled_positions(sample, spec.x, spec.y), spec)
        tree = PrefixTree.even(machines, spec.place_bits, places)
        store.record(Fact(TREES, epoch, tree.to_json()))
    table = PrefixTable(store, spec, epoch)
    retention = None if settings.retention is None else settings.retention * DAY_S
    budget = Budget(settings.memory, settings.study * DAY_S, retention)
    how = (settings.exchange, settings.learn_rows, settings.fold_files, budget)
    changes = settings.scaling or resizable
    return SynopsisStage(spec, points, table, sketch_files(store), store.leases, *how, changes)


def synopsis_queries(
    store: Store, spec: SynopsisSpec, settings: SynopsisSettings, results: Files
) -> list[Stage]:
    """Build the stage of standing queries, which writes to ``results``, if there are any."""
    files = sketch_files(store)
    queries = standing_queries(settings.queries, spec, read_rows(files, [], spec))
    return [SynopsisQueryStage(queries, Loader(files, spec), results)] if queries else []


def prefix_rounds(
    store: Store,
    stages: Sequence[Stage],
    settings: SynopsisSettings,
    clock: Callable[[], float],
    resize: Proposer[PrefixRound] | None = None,
    machines_max: Callable[[], int] = lambda: 0,
) -> list[PrefixRounds]:
    """Build the rounds of the prefix tree; none if it stays as it is."""
    stage = next((stage for stage in stages if isinstance(stage, SynopsisStage)), None)
    if stage is None or not (settings.scaling or resize is not None):
        return []
    names = (item.name for item in fields(ScalingRules))
    given = {name: getattr(settings, f"scaling_{name}") for name in names if name != "memory"}
    rules = ScalingRules(memory=settings.memory, **given) if settings.scaling else None
    return [PrefixRounds(store, stage, rules, clock, resize, machines_max)]
