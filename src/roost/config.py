"""Settings of a run: one frozen value, from TOML, the command line and defaults.

A key that is unknown, of the wrong type or out of range is refused by name, with what it got and
what it takes, before anything is started.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import index
from pathlib import Path
from typing import Any

from roost.balance import Strategy
from roost.errors import ConfigError
from roost.space import Coordinates, Grid, Outside, Rect
from roost.window import JoinSpec, WindowKind, WindowSpec

SINKS = ("parquet", "count", "console", "kafka")


@dataclass(frozen=True)
class RunConfig:
    """Everything that ``roost run`` can be told.

    Attributes are documented with their keys in ``docs/configuration.md``.
    """

    points: str | None = None
    format: str = "auto"
    x: str | None = None
    y: str | None = None
    time: str = "event_time"
    point_id: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    speed: float | None = None

    queries: str | None = None
    query_log: str | None = None
    query_id_type: str | None = None
    polygon_vertices_max: int = 10_000

    bounds: Rect | None = None
    grid: tuple[int, int] = (1000, 1000)
    coordinates: Coordinates | None = None
    outside: Outside = Outside.EXACT

    strategy: Strategy | None = None
    machines: int | None = None
    batch_rows: int = 16_000_000
    available_now: bool = False
    master: str | None = None
    spark: Mapping[str, str] = field(default_factory=dict)
    encrypt: bool = False

    round_length: float = 15.0
    tolerance: float = 1.1

    window: WindowKind | None = None
    window_length: float | None = None
    window_tumbling: bool = False
    window_lateness: float | None = None
    window_attributes: tuple[str, ...] | None = None

    guard: bool = False
    guard_round: float = 60.0
    guard_evict: bool = False
    guard_quarantine: bool = False
    guard_users_max: int = 262_144

    join_left: str | None = None
    join_right: str | None = None
    join_distance: float | None = None
    join_within: float | None = None

    out: Path = Path("roost-out")
    state: Path | None = None
    sink: str = "parquet"
    sink_topic: str | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        """Take the name of a kind of window for the kind."""
        if self.window is not None:
            kind = _choice(WindowKind, "window.kind")(self.window)
            object.__setattr__(self, "window", kind)

    @property
    def state_folder(self) -> Path:
        """State directory; beside the output unless told otherwise."""
        return self.state if self.state is not None else self.out / "state"

    def window_spec(self, unit: int) -> WindowSpec | None:
        """Make the window, None where the run keeps none.

        Parameters
        ----------
        unit
            Event time of a second, or 1 where times are plain numbers.
        """
        if self.window is None or self.window_length is None:
            return None
        by_time = self.window is WindowKind.TIME
        scale = unit if by_time else 1
        length = max(1, round(self.window_length * scale))
        # What may still be in the window is not too late for it.
        late = length if self.window_lateness is None else round(self.window_lateness * scale)
        return WindowSpec(self.window, length, self.window_tumbling, late if by_time else 0)

    def join_spec(self, unit: int) -> JoinSpec | None:
        """Make the join, None where the run has none; ``unit`` is the event time of a second."""
        if self.join_distance is None or self.join_within is None:
            return None
        within = round(self.join_within * unit)
        return JoinSpec(self.join_left, self.join_right, self.join_distance, within)


def parse_bounds(value: Any) -> Rect:
    """Bounds from ``x0,y0,x1,y1`` text or a list of four numbers."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        numbers = [float(part) for part in parts]
        if len(numbers) != 4:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError("space.bounds", value, "four numbers x0,y0,x1,y1") from None
    return Rect(*numbers)


def parse_grid(value: Any) -> tuple[int, int]:
    """Grid from ``CxR`` text or a list of two numbers."""
    parts = value.lower().split("x") if isinstance(value, str) else value
    try:
        columns, rows = (int(part) if isinstance(part, str) else index(part) for part in parts)
    except (TypeError, ValueError):
        raise ConfigError("space.grid", value, "CxR, such as 1000x1000") from None
    Grid(Rect(0.0, 0.0, 1.0, 1.0), columns, rows)  # refuses sides that no grid has
    return columns, rows


def _choice(kind: type[Any], key: str) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            names = " or ".join(member.value for member in kind)
            raise ConfigError(key, value, names) from None

    return parse


def _whole(key: str, low: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(key, value, f"a whole number from {low} up")
        return value

    return parse


def _finite(key: str, value: float) -> float:
    if math.isinf(value):
        raise ConfigError(key, value, "a finite number")
    return float(value)


def _above(key: str, low: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > low:
            raise ConfigError(key, value, f"a number above {low:g}")
        return _finite(key, value)

    return parse


def _speed(value: Any) -> float | None:
    if value == "max":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError("points.speed", value, "max, or event seconds per second above 0")
    return float(value)


def _text(key: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ConfigError(key, value, "text")
        return value

    return parse


def _one_of(key: str, *names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ConfigError(key, value, " or ".join(names))
        return str(value)

    return parse


def _at_least(key: str, low: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
            raise ConfigError(key, value, f"a number from {low:g} up")
        return _finite(key, value)

    return parse


def _names(key: str) -> Callable[[Any], tuple[str, ...]]:
    def parse(value: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(p, str) for p in parts):
            raise ConfigError(key, value, "a list of names")
        return tuple(part.strip() for part in parts if part.strip())

    return parse


def _flag(key: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(key, value, "true or false")
        return value

    return parse


def _texts(key: str) -> Callable[[Any], dict[str, str]]:
    def parse(value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise ConfigError(key, value, "a table of names and texts")
        return {str(name): str(item) for name, item in value.items()}

    return parse


def _path(key: str) -> Callable[[Any], Path]:
    return lambda value: Path(_text(key)(str(value) if isinstance(value, Path) else value))


# TOML key -> attribute and parser.
KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "points.path": ("points", _text("points.path")),
    "points.format": (
        "format",
        _one_of("points.format", "auto", "parquet", "csv", "jsonl"),
    ),
    "points.x": ("x", _text("points.x")),
    "points.y": ("y", _text("points.y")),
    "points.time": ("time", _text("points.time")),
    "points.id": ("point_id", _text("points.id")),
    "points.attributes": ("attributes", _texts("points.attributes")),
    "points.speed": ("speed", _speed),
    "queries.path": ("queries", _text("queries.path")),
    "queries.log": ("query_log", _text("queries.log")),
    "queries.id_type": ("query_id_type", _one_of("queries.id_type", "int", "text")),
    "queries.polygon_vertices_max": (
        "polygon_vertices_max",
        _whole("queries.polygon_vertices_max", 4),
    ),
    "space.bounds": ("bounds", parse_bounds),
    "space.grid": ("grid", parse_grid),
    "space.coordinates": ("coordinates", _choice(Coordinates, "space.coordinates")),
    "space.outside": ("outside", _choice(Outside, "space.outside")),
    "engine.strategy": ("strategy", _choice(Strategy, "engine.strategy")),
    "engine.machines": ("machines", _whole("engine.machines", 1)),
    "engine.batch_rows": ("batch_rows", _whole("engine.batch_rows", 1)),
    "engine.available_now": ("available_now", _flag("engine.available_now")),
    "engine.master": ("master", _text("engine.master")),
    "engine.spark": ("spark", _texts("engine.spark")),
    "engine.encrypt": ("encrypt", _flag("engine.encrypt")),
    "balance.round": ("round_length", _above("balance.round", 0.0)),
    "balance.tolerance": ("tolerance", _above("balance.tolerance", 1.0)),
    "window.kind": ("window", _choice(WindowKind, "window.kind")),
    "window.length": ("window_length", _above("window.length", 0.0)),
    "window.tumbling": ("window_tumbling", _flag("window.tumbling")),
    "window.lateness": ("window_lateness", _at_least("window.lateness", 0.0)),
    "window.attributes": ("window_attributes", _names("window.attributes")),
    "guard.enabled": ("guard", _flag("guard.enabled")),
    "guard.round": ("guard_round", _above("guard.round", 0.0)),
    "guard.evict": ("guard_evict", _flag("guard.evict")),
    "guard.quarantine": ("guard_quarantine", _flag("guard.quarantine")),
    "guard.users_max": ("guard_users_max", _whole("guard.users_max", 8)),
    "join.left": ("join_left", _text("join.left")),
    "join.right": ("join_right", _text("join.right")),
    "join.distance": ("join_distance", _at_least("join.distance", 0.0)),
    "join.within": ("join_within", _at_least("join.within", 0.0)),
    "out.dir": ("out", _path("out.dir")),
    "out.state": ("state", _path("out.state")),
    "out.sink": ("sink", _one_of("out.sink", *SINKS)),
    "out.topic": ("sink_topic", _text("out.topic")),
    "out.report": ("report", _path("out.report")),
}
_TABLES = ("points.attributes", "engine.spark")


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in _TABLES:
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def load_config(path: Path) -> RunConfig:
    """Read a TOML file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", str(path), f"a readable file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"valid TOML ({error})") from None
    return with_settings(RunConfig(), _flatten(data))


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Apply settings by their keys.

    Examples
    --------
    >>> with_settings(RunConfig(), {"engine.machines": 4}).machines
    4
    """
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            takes = f"a known key; did you mean {near[0]}?" if near else "a known key"
            raise ConfigError(key, value, takes)
        attribute, parse = KEYS[key]
        changes[attribute] = parse(value)
    changed = replace(config, **changes)
    assert {attribute for attribute, _ in KEYS.values()} == {f.name for f in fields(RunConfig)}
    return changed


def check_together(config: RunConfig) -> None:
    """Refuse settings that are each fine but do not go together."""
    if config.sink == "kafka" and config.sink_topic is None:
        raise ConfigError("out.topic", None, "kafka://HOST:PORT/TOPIC where out.sink is kafka")
    _check_window(config)
    _check_join(config)
    _check_guard(config)


def _check_guard(config: RunConfig) -> None:
    for name in ("evict", "quarantine"):
        if getattr(config, f"guard_{name}") and not config.guard:
            raise ConfigError(f"guard.{name}", True, "guard.enabled, too")
    if config.guard and config.strategy is not None and not config.strategy.adaptive:
        takes = "swarm or global where guard.enabled is true: others do not rebalance"
        raise ConfigError("engine.strategy", config.strategy.value, takes)


def _check_join(config: RunConfig) -> None:
    given = {
        name: getattr(config, f"join_{name}") for name in ("left", "right", "distance", "within")
    }
    if all(value is None for value in given.values()):
        return
    for name in ("distance", "within"):
        if given[name] is None:
            raise ConfigError(f"join.{name}", None, "a number where there is a join")
    if config.window is None:
        takes = "window.kind, too: a join is of points in a window"
        raise ConfigError("join.distance", config.join_distance, takes)


def _check_window(config: RunConfig) -> None:
    kind, length = config.window, config.window_length
    if kind is None:
        for name in ("length", "tumbling", "lateness", "attributes"):
            value = getattr(config, f"window_{name}")
            if value is not None and value is not False:
                raise ConfigError(f"window.{name}", value, "window.kind, too")
        return
    if length is None:
        raise ConfigError("window.length", None, f"a length where window.kind is {kind.value}")
    _above("window.length", 0.0)(length)
    if kind is WindowKind.TIME:
        return
    if config.window_lateness is not None:
        takes = "nothing unless window.kind is time"
        raise ConfigError("window.lateness", config.window_lateness, takes)
    if length != int(length):
        raise ConfigError("window.length", length, f"a whole number of {kind.value}")
