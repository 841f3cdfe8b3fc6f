"""Settings of a run: frozen sections that validate on construction.

A setting is one field of one section. The field carries the default and the parser, and its key is
``section.name`` in TOML, on the command line and in error messages. A value that is unknown, of the
wrong type or out of range raises :class:`ConfigError` with the key, the value received and the
values accepted, whether it comes from a file, a flag or Python.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Self

from roost.errors import ConfigError
from roost.model.choices import (
    BucketPolicy,
    ElasticPolicyName,
    Exchange,
    LayoutName,
    PlacementName,
    Strategy,
    WindowKind,
)
from roost.model.elastic import DEFAULT_GROUP, ElasticRules, GroupRules
from roost.model.space import Coordinates, Grid, Outside, Rect

SECTIONS: dict[str, type[Section]] = {}


def _setting(
    parse: Callable[[Any], Any], accepts: str, default: Any = None, flag_type: type = str
) -> Any:
    """Declare a setting that accepts what ``parse`` converts without an exception.

    ``parse`` must accept the values that it returns. ``accepts`` names the accepted values. None is
    accepted if it is the default; a default that is a class is called. ``flag_type`` converts the
    text of a command-line flag before ``parse``.
    """
    metadata = {"parse": parse, "accepts": accepts, "flag_type": flag_type}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _only(accepted: bool, value: Any) -> Any:
    if not accepted:
        raise ValueError
    return value


def _string(value: Any) -> str:
    return str(_only(isinstance(value, str) and value != "", value))


def _text(default: str | None = None) -> Any:
    return _setting(_string, "text", default)


def _path(default: Path | None = None, kind: type = Path) -> Any:
    return _setting(lambda value: kind(_string(os.fspath(value))), "text", default)


def _choice(choices: Iterable[str], default: str | None = None) -> Any:
    by_name = {str(choice): choice for choice in choices}
    return _setting(by_name.__getitem__, " or ".join(by_name), default)


def _number(
    kind: type[int] | type[float],
    low: float,
    default: float | None = None,
    *,
    inclusive: bool = True,
    below: float = math.inf,
) -> Any:
    def parse(value: Any) -> float:
        fits = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        above = fits and (value > low or (inclusive and value == low))
        return kind(_only(above and value < below, value))

    noun = "a whole number" if kind is int else "a finite number"
    limit = f"from {low:g} up" if inclusive else f"above {low:g}"
    limit += "" if below == math.inf else f", below {below:g}"
    return _setting(parse, f"{noun} {limit}", default, kind)


def _flag(default: bool = False) -> Any:
    return _setting(
        lambda value: _only(isinstance(value, bool), value), "true or false", default, bool
    )


def _table() -> Any:
    def parse(value: Mapping[Any, Any]) -> dict[str, str]:
        return {str(name): str(item) for name, item in value.items()}

    return _setting(parse, "a table of names and texts", dict, dict)


def _tables() -> Any:
    def parse(value: Any) -> tuple[dict[str, Any], ...]:
        tables = _only(isinstance(value, list | tuple), value)
        return tuple(dict(_only(isinstance(table, Mapping), table)) for table in tables)

    return _setting(parse, "a list of tables", ())


def _flow(value: Any) -> str:
    file, _, name = _string(value).rpartition(":")
    return str(_only(file != "" and name.isidentifier(), value))


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    stripped = map(str.strip, _only(isinstance(parts, list | tuple), parts))
    return tuple(name for name in stripped if name)


def _speed(value: Any) -> float | None:
    if value == "max":
        return None
    number = float(_only(not isinstance(value, bool), value))
    return float(_only(number > 0, number))


def _bounds(value: Any) -> Rect:
    if isinstance(value, Rect):
        return value
    x0, y0, x1, y1 = map(float, value.split(",") if isinstance(value, str) else value)
    return Rect(x0, y0, x1, y1)


def _grid(value: Any) -> tuple[int, int]:
    parts = value.lower().split("x") if isinstance(value, str) else value
    columns, rows = (int(part) if isinstance(part, str) else index(part) for part in parts)
    Grid(Rect(0.0, 0.0, 1.0, 1.0), columns, rows)  # checks the limits of both sides
    return columns, rows


@dataclass(frozen=True)
class Section:
    """A group of settings that is valid once it exists."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str) -> None:
        """Register the section under its name."""
        cls.section = section
        SECTIONS[section] = cls

    def __post_init__(self) -> None:
        """Parse every value, then check the section as a whole."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            try:
                object.__setattr__(self, item.name, item.metadata["parse"](value))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                key, accepts = f"{self.section}.{item.name}", item.metadata["accepts"]
                raise ConfigError(key, value, accepts) from None
        self._check()

    def _check(self) -> None:
        """Raise :class:`ConfigError` if settings of this section contradict each other."""

    def _changed(self) -> dict[str, Any]:
        values = ((item, getattr(self, item.name)) for item in fields(self))
        return {item.name: value for item, value in values if value != item.default}

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return a section, from a mapping of its settings if it is not one already."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            example = {fields(cls)[0].name: given}
            raise ConfigError(cls.section, given, f"settings by name, such as {example}")
        for name, value in given.items():
            _check_known(f"{cls.section}.{name}", value)
        return cls(**given)


@dataclass(frozen=True)
class PointSettings(Section, section="points"):
    """Where the points come from and what their columns mean."""

    path: str | None = _path(kind=str)
    format: str = _choice(("auto", "parquet", "csv", "jsonl"), "auto")
    x: str | None = _text()
    y: str | None = _text()
    time: str = _text("event_time")
    id: str | None = _text()
    attributes: Mapping[str, str] = _table()
    speed: float | None = _setting(_speed, "max, or event seconds per second above 0")


@dataclass(frozen=True)
class QuerySettings(Section, section="queries"):
    """Where requests come from and what they may contain."""

    path: str | None = _path(kind=str)
    log: str | None = _text()
    id_type: str | None = _choice(("int", "text"))
    polygon_vertices_max: int = _number(int, 4, 10_000)


@dataclass(frozen=True)
class SpaceSettings(Section, section="space"):
    """The plane and its grid."""

    bounds: Rect | None = _setting(_bounds, "four numbers x0,y0,x1,y1")
    grid: tuple[int, int] = _setting(_grid, "CxR, such as 1000x1000", (1000, 1000))
    coordinates: Coordinates | None = _choice(Coordinates)
    outside: Outside = _choice(Outside, Outside.EXACT)


@dataclass(frozen=True)
class EngineSettings(Section, section="engine"):
    """How batches run on Spark."""

    strategy: Strategy | None = _choice(Strategy)
    machines: int | None = _number(int, 1)
    batch_rows: int = _number(int, 1, 16_000_000)
    available_now: bool = _flag()
    master: str | None = _text()
    spark: Mapping[str, str] = _table()
    encrypt: bool = _flag()
    cache: Path | None = _path()
    cache_bytes: int = _number(int, 1, 16_000_000_000)


@dataclass(frozen=True)
class BalanceSettings(Section, section="balance"):
    """When adaptive strategies change the plan."""

    round: float = _number(float, 0, 15.0, inclusive=False)
    tolerance: float = _number(float, 1, 1.1, inclusive=False)
    exchange: Exchange = _choice(Exchange, Exchange.AUTO)


@dataclass(frozen=True)
class WindowSettings(Section, section="window"):
    """Which points the window holds; without a kind there is no window."""

    kind: WindowKind | None = _choice(WindowKind)
    length: float | None = _number(float, 0, inclusive=False)
    tumbling: bool = _flag()
    lateness: float | None = _number(float, 0)
    attributes: tuple[str, ...] | None = _setting(_names, "a list of names")

    def _check(self) -> None:
        if self.kind is None:
            for name, value in self._changed().items():
                raise ConfigError(f"window.{name}", value, "window.kind, too")
            return
        if self.length is None:
            raise ConfigError("window.length", None, f"a length where window.kind is {self.kind}")
        if self.kind is WindowKind.TIME:
            return
        if self.lateness is not None:
            expected = "nothing unless window.kind is time"
            raise ConfigError("window.lateness", self.lateness, expected)
        if self.length != int(self.length):
            raise ConfigError("window.length", self.length, f"a whole number of {self.kind}")


@dataclass(frozen=True)
class GuardSettings(Section, section="guard"):
    """How the guard finds and treats users who attack the balancer."""

    enabled: bool = _flag()
    round: float = _number(float, 0, 60.0, inclusive=False)
    evict: bool = _flag()
    quarantine: bool = _flag()
    users_max: int = _number(int, 8, 262_144)

    def _check(self) -> None:
        for name in ("evict", "quarantine"):
            if getattr(self, name) and not self.enabled:
                raise ConfigError(f"guard.{name}", True, "guard.enabled, too")


@dataclass(frozen=True)
class JoinSettings(Section, section="join"):
    """Which pairs of points in the window are joined; without a distance there is no join."""

    left: str | None = _text()
    right: str | None = _text()
    distance: float | None = _number(float, 0)
    within: float | None = _number(float, 0)

    def _check(self) -> None:
        for name in ("distance", "within"):
            if self._changed() and getattr(self, name) is None:
                raise ConfigError(f"join.{name}", None, "a number where there is a join")


@dataclass(frozen=True)
class DataflowSettings(Section, section="dataflow"):
    """Which dataflow runs, and how."""

    flow: str | None = _setting(_flow, "FILE.py:NAME")
    sources: Mapping[str, str] = _table()
    lateness: float = _number(float, 0, 0.0)
    idle: float | None = _number(float, 0, inclusive=False)
    machines: int | None = _number(int, 1)
    buckets: int = _number(int, 1, 256)
    layout: LayoutName = _choice(LayoutName, LayoutName.AUTO)
    round: float = _number(float, 0, 10.0)
    balance: BucketPolicy = _choice(BucketPolicy, BucketPolicy.PLANNER)
    imbalance: float = _number(float, 0, 0.1)
    improvement: float = _number(float, 0, 0.05, below=1)


@dataclass(frozen=True)
class SynopsisSettings(Section, section="synopsis"):
    """What the synopsis describes, and how finely; without features there is none."""

    features: tuple[str, ...] | None = _setting(_names, "a list of names")
    prefix_bits: int = _number(int, 0, 4)
    place_bits: int = _number(int, 2, 24)
    bucket_days: int = _number(int, 1, 10)
    interval_days: int | None = _number(int, 1)
    slots: int = _number(int, 1, 8)
    step_s: int = _number(int, 1, 3600)
    bins: int = _number(int, 2, 96)
    rule: str = _choice(("cube_root", "equal_density"), "cube_root")
    exchange: bool = _flag()
    learn_rows: int = _number(int, 1, 50_000)
    fold_files: int = _number(int, 2, 16)
    memory: int = _number(int, 1 << 16, 1 << 28)
    study: float = _number(float, 0, 30.0)
    retention: float | None = _number(float, 0, inclusive=False)
    sets: tuple[Mapping[str, Any], ...] = _tables()
    queries: tuple[Mapping[str, Any], ...] = _tables()
    scaling: bool = _flag()
    scaling_observations: int = _number(int, 1, 4)
    scaling_stabilisation: int = _number(int, 0, 4)
    scaling_memory_upper: float = _number(float, 0, 0.45, inclusive=False, below=1)
    scaling_memory_lower: float = _number(float, 0, 0.25, below=1)
    scaling_backlog_upper: float = _number(float, 0, 2.0)
    scaling_backlog_lower: float = _number(float, 0, 0.5)
    scaling_utilisation: float = _number(float, 0, 0.8, inclusive=False, below=1)

    def _check(self) -> None:
        if self.features is None:
            for name, value in self._changed().items():
                raise ConfigError(f"synopsis.{name}", value, "synopsis.features, too")
        if self.scaling and not self.exchange:
            raise ConfigError("synopsis.scaling", True, "synopsis.exchange, too")
        for name in ("scaling_memory", "scaling_backlog"):
            low, high = getattr(self, f"{name}_lower"), getattr(self, f"{name}_upper")
            if low > high:
                raise ConfigError(
                    f"synopsis.{name}_lower", low, f"at most synopsis.{name}_upper, {high:g}"
                )
        if self.retention is not None and self.retention <= self.study:
            expected = f"more days than synopsis.study, {self.study:g}"
            raise ConfigError("synopsis.retention", self.retention, expected)
        given = [query.get("name") for query in self.queries]
        for own in given:
            if not isinstance(own, str) or not own or given.count(own) > 1:
                raise ConfigError("synopsis.queries.name", own, "a name for each query, as text")


@dataclass(frozen=True)
class ElasticSettings(Section, section="elastic"):
    """How many executors the run has; without a maximum their number is fixed."""

    min: int = _number(int, 1, 1)
    max: int | None = _number(int, 1)
    lower: float = _number(float, 0, 0.5, inclusive=False)
    upper: float = _number(float, 0, 0.9, inclusive=False)
    target: float = _number(float, 0, 0.6, inclusive=False)
    batch_seconds: float | None = _number(float, 0, inclusive=False)
    spares: int = _number(int, 0, 0)
    by_started_hour: bool = _flag()
    forecast: bool = _flag(True)
    policy: ElasticPolicyName = _choice(ElasticPolicyName, ElasticPolicyName.LOAD_AWARE)
    round: float = _number(float, 0, 10.0, inclusive=False)
    total: int | None = _number(int, 1)
    placement: PlacementName = _choice(PlacementName, PlacementName.OFF)
    groups: tuple[Mapping[str, Any], ...] = _tables()

    def _check(self) -> None:
        if self.max is not None:
            self._check_groups()
            return
        for name, value in self._changed().items():
            raise ConfigError(f"elastic.{name}", value, "elastic.max, too")

    def _check_groups(self) -> None:
        """Check limits, and that groups and operators are named once."""
        groups = [GroupRules.of(group) for group in self.groups]
        for key, names in (
            ("name", [group.name for group in groups]),
            ("operators", [name for group in groups for name in group.operators]),
        ):
            for name in names:
                if names.count(name) > 1:
                    raise ConfigError(f"elastic.groups.{key}", name, "each name once")
        least = self.rules.min + sum(group.min for group in self.other_groups)
        if self.total is not None and self.total < least:
            raise ConfigError("elastic.total", self.total, f"at least {least}, the sum of all min")
        if self.placement is not PlacementName.OFF and not self.other_groups:
            raise ConfigError("elastic.placement", self.placement, "elastic.groups, too")

    @property
    def other_groups(self) -> tuple[GroupRules, ...]:
        """The executor groups beside the default one."""
        found = map(GroupRules.of, self.groups)
        return tuple(group for group in found if group.name != DEFAULT_GROUP)

    @property
    def operators(self) -> dict[str, str]:
        """The executor groups of operators that are named, by operator."""
        found = map(GroupRules.of, self.groups)
        return {name: group.name for group in found for name in group.operators}

    @property
    def rules(self) -> ElasticRules:
        """The rules of the manager, where there is a maximum."""
        assert self.max is not None
        names = {item.name for item in fields(ElasticRules)}
        given: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        return ElasticRules(**{name: given[name] for name in names & set(given)})


@dataclass(frozen=True)
class OutputSettings(Section, section="out"):
    """Where results and state go."""

    dir: Path = _path(Path("roost-out"))
    state: Path | None = _path()
    sink: str = _choice(("parquet", "count", "console", "kafka"), "parquet")
    topic: str | None = _text()
    report: Path | None = _path()
    history: int = _number(int, 2, 10_000)

    def _check(self) -> None:
        if self.sink == "kafka" and self.topic is None:
            raise ConfigError("out.topic", None, "kafka://HOST:PORT/TOPIC where out.sink is kafka")

    @property
    def state_dir(self) -> Path:
        """State directory; beside the output by default."""
        return self.state if self.state is not None else self.dir / "state"


@dataclass(frozen=True, init=False)
class RunConfig:
    """All settings of a run; ``docs/configuration.md`` describes them by key.

    Each keyword is a section or a mapping of its settings. Strings and tuples are accepted as they
    are in TOML: the name of a strategy, ``"1000x1000"``, four numbers for the bounds. A wrong or
    unknown setting, or settings that contradict each other, raise :class:`ConfigError`.

    Examples
    --------
    >>> config = RunConfig(points={"path": "points.parquet"}, engine={"strategy": "swarm"})
    >>> config.points.path, config.engine.strategy.adaptive, config.out.sink
    ('points.parquet', True, 'parquet')
    """

    points: PointSettings
    queries: QuerySettings
    space: SpaceSettings
    engine: EngineSettings
    balance: BalanceSettings
    window: WindowSettings
    guard: GuardSettings
    join: JoinSettings
    dataflow: DataflowSettings
    synopsis: SynopsisSettings
    elastic: ElasticSettings
    out: OutputSettings

    def __init__(self, **sections: Section | Mapping[str, Any]) -> None:
        for name, value in sections.items():
            if name not in SECTIONS:
                raise _unknown_keyword(name, value)
        for name, section in SECTIONS.items():
            object.__setattr__(self, name, section.of(sections.get(name, {})))
        if self.join.distance is not None and self.window.kind is None:
            expected = "window.kind, too: a join is of points in a window"
            raise ConfigError("join.distance", self.join.distance, expected)
        strategy = self.engine.strategy
        if self.elastic.max is not None:
            for name, given in (("engine", self.engine), ("dataflow", self.dataflow)):
                if given.machines is not None:
                    expected = "nothing where elastic.max is set: one for each slot of an executor"
                    raise ConfigError(f"{name}.machines", given.machines, expected)
            if strategy in (Strategy.UNIFORM, Strategy.HISTORY):
                expected = "global, swarm or replicated where elastic.max is set"
                raise ConfigError("engine.strategy", strategy, expected)
        if self.guard.enabled and strategy is not None and not strategy.adaptive:
            expected = "swarm or global where guard.enabled is true: others do not rebalance"
            raise ConfigError("engine.strategy", strategy, expected)


KEYS = {f"{name}.{item.name}": item for name, kind in SECTIONS.items() for item in fields(kind)}
# Keywords of version 0.1 whose names differ from their keys.
RENAMED = {
    "point_id": "points.id",
    "query_log": "queries.log",
    "query_id_type": "queries.id_type",
    "round_length": "balance.round",
    "sink_topic": "out.topic",
}


def _check_known(key: str, value: Any) -> None:
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, 1)
        expected = f"a known key; did you mean {near[0]}?" if near else "a known key"
        raise ConfigError(key, value, expected)


def _unknown_keyword(name: str, value: Any) -> ConfigError:
    """Return the error for a keyword that is no section, with the spelling that is accepted."""
    spelled = {key.partition(".")[2]: key for key in reversed(KEYS)}
    spelled |= {key.replace(".", "_"): key for key in KEYS} | RENAMED
    spelled |= {section: section for section in SECTIONS}
    expected = "a section: " + ", ".join(SECTIONS)
    for near in difflib.get_close_matches(name, spelled, 1):
        section, _, setting = spelled[near].partition(".")
        expected = f"a section; did you mean {section}={ {setting: value} if setting else value }?"
    return ConfigError(name, value, expected)


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in KEYS:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def load_config(path: Path | str, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a TOML file; ``settings`` override the file by key, tables by name."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", str(path), f"a readable file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"valid TOML ({error})") from None
    merged = dict(_flatten(data))
    for key, value in (settings or {}).items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            value = {**known, **value}
        merged[key] = value
    return with_settings(RunConfig(), merged)


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Change settings by key; only the result is checked for contradictions.

    Examples
    --------
    >>> with_settings(RunConfig(), {"engine.machines": 4}).engine.machines
    4
    """
    changes: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        _check_known(key, value)
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = value
    sections = {name: replace(getattr(config, name), **given) for name, given in changes.items()}
    return replace(config, **sections)
