"""What a synopsis describes, and how rows are divided into groups.

The key of a group is a spatial prefix, a calendar bucket and an hour-of-day slot. The prefix is
the first bits of a geohash; with plane coordinates the bits divide the bounds of the space. Inside
a group, leaves also record the *place* (a longer prefix) and the *step* (a short interval of
time), so a query that cuts a group still finds most of its rows wholly inside or outside.

Prefix, bucket, slot and the rest of the place are packed into one integer, the run key, in this
order: sorted run keys are sorted by group, and then by place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit

from roost.errors import ConfigError
from roost.kernel.cells import Whole, spread
from roost.model.arrays import Floats, Ints, frozen
from roost.model.space import Coordinates, Rect, Space
from roost.predicate.ast import Kind
from roost.predicate.kinds import kind_of

DAY_S = 86_400
SECOND_US = 1_000_000
PLACE_BITS_MAX = 32
BINS_MAX = 250  # the code of a bin fits in a byte, with one for null
BUCKET_BITS = 24
SLOT_BITS = 5
# Bucket 0 is the one of 1970; buckets before it must not be negative in a key.
BUCKET_ZERO = 1 << (BUCKET_BITS - 1)
WORLD = Rect(-180.0, -90.0, 180.0, 90.0)


class BinRule(StrEnum):
    """How the edges of the bins follow the density of a feature."""

    EQUAL_DENSITY = "equal_density"  # every bin has the same share of the rows
    CUBE_ROOT = "cube_root"  # bins per unit of value follow the cube root of the density


@dataclass(frozen=True, slots=True)
class Feature:
    """A column that the synopsis describes; strings and booleans are categories."""

    name: str
    type: pa.DataType

    def __post_init__(self) -> None:
        accepted = pa.types.is_integer(self.type) or pa.types.is_floating(self.type)
        if not (accepted or self.categorical):
            expected = "a column of integers, floats, strings or booleans"
            raise ConfigError(f"synopsis.features: {self.name}", str(self.type), expected)

    @property
    def categorical(self) -> bool:
        """Whether values are categories, which have no mean."""
        return kind_of(self.type) in (Kind.STRING, Kind.BOOLEAN)


@dataclass(frozen=True, slots=True)
class SetSpec:
    """Set sketches of a column or of a combination of columns, one for each period.

    Columns need not be features. Those in ``binned``, which must be, count as the bin of their
    value. ``members`` distinct values fit in a Bloom filter with 1 % of false positives, ``lg_k``
    is the size of a HyperLogLog, and ``counters`` that of a count-min sketch, whose error is
    ``e / counters`` of the rows. A sketch of size 0 is not stored.
    """

    columns: tuple[Feature, ...]
    binned: tuple[str, ...] = ()
    period_days: int = 10
    members: int = 10_000
    lg_k: int = 12
    counters: int = 2_048

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ConfigError("synopsis.sets.columns", self.names, "distinct columns")
        _check_range("sets.period_days", self.period_days, 1, 10_000)
        _check_range("sets.members", self.members, 0, 1 << 30)
        _check_range("sets.lg_k", self.lg_k, 7 if self.lg_k else 0, 21)
        _check_range("sets.counters", self.counters, 0, 1 << 24)

    @classmethod
    def of(cls, schema: pa.Schema, columns: Sequence[str], **settings: Any) -> SetSpec:
        """Build the spec of a table's columns."""
        return cls(_typed(schema, columns, "sets.columns"), **settings)

    @classmethod
    def read(cls, schema: pa.Schema, data: Mapping[str, Any]) -> SetSpec:
        """Build the spec of a table's columns from settings; raises `ConfigError` for wrong ones.

        ``columns`` and ``binned`` are lists, or texts with commas.
        """
        known = {field.name: field for field in fields(cls)}
        given = {"columns": (), **data}
        for name, value in given.items():
            key = f"synopsis.sets.{name}"
            if name not in known:
                raise ConfigError(key, value, f"one of {', '.join(known)}")
            if name in ("columns", "binned"):
                parts = value.split(",") if isinstance(value, str) else value
                if not isinstance(parts, list | tuple) or not all(
                    isinstance(part, str) for part in parts
                ):
                    raise ConfigError(key, value, "a list of names")
                given[name] = tuple(part.strip() for part in parts)
            elif not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(key, value, "a whole number")
        return cls.of(schema, given.pop("columns"), **given)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(column.name for column in self.columns)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SetSpec:
        """Build from the JSON data of a file."""
        columns, binned = _features_from(data["columns"]), tuple(data["binned"])
        return cls(**data | {"columns": columns, "binned": binned})


class KeyLayout(NamedTuple):
    """The numbers by which compiled loops compute keys and times."""

    x0: float
    y0: float
    cells_per_x: float
    cells_per_y: float
    axis_cells: int
    rest_bits: int
    bucket_us: int
    slot_us: int
    step_us: int
    steps_per_slot: int
    interval_days: int
    intervals: int  # of a bucket


@dataclass(frozen=True)
class SynopsisSpec:
    """Features and resolution of a synopsis; only synopses with equal specs can be merged."""

    features: tuple[Feature, ...]
    space: Space = Space(WORLD)  # noqa: RUF009 - immutable
    prefix_bits: int = 4
    place_bits: int = 24
    bucket_days: int = 10
    slots: int = 8
    step_s: int = 3600
    bins: int = 96
    rule: BinRule = BinRule.CUBE_ROOT
    x: str = "lon"
    y: str = "lat"
    time: str = "event_time"
    sets: tuple[SetSpec, ...] = ()
    interval_days: int | None = None  # of the totals; None, or that of a bucket: there are none

    def __post_init__(self) -> None:
        names = [feature.name for feature in self.features]
        if not names or len(set(names)) != len(names) or len(names) > 64:
            raise ConfigError("synopsis.features", names, "1 to 64 distinct columns")
        _check_range("place_bits", self.place_bits, 2, PLACE_BITS_MAX)
        if self.place_bits % 2:
            raise ConfigError("synopsis.place_bits", self.place_bits, "an even number")
        _check_range("prefix_bits", self.prefix_bits, 0, self.place_bits)
        _check_range("bucket_days", self.bucket_days, 1, 10_000)
        interval = self.bucket_days if self.interval_days is None else self.interval_days
        if interval == self.bucket_days:  # equal specs are those that can be merged
            object.__setattr__(self, "interval_days", None)
        elif interval < 1 or self.bucket_days % interval:
            expected = f"a number of days that divides a bucket of {self.bucket_days}"
            raise ConfigError("synopsis.interval_days", interval, expected)
        _check_range("bins", self.bins, 2, BINS_MAX)
        if self.slots < 1 or 24 % self.slots:
            raise ConfigError("synopsis.slots", self.slots, "a divisor of 24")
        if self.step_s < 1 or self.slot_s % self.step_s:
            expected = f"a number of seconds that divides a slot of {self.slot_s}"
            raise ConfigError("synopsis.step_s", self.step_s, expected)
        combinations = [frozenset(own.names) for own in self.sets]
        for own in self.sets:
            if combinations.count(frozenset(own.names)) > 1:
                raise ConfigError("synopsis.sets", own.names, "one set for the same columns")
            for name in own.binned:
                if name not in names or name not in own.names:
                    expected = f"columns of the set that are features: {', '.join(names)}"
                    raise ConfigError("synopsis.sets.binned", name, expected)

    @classmethod
    def of(cls, schema: pa.Schema, features: Sequence[str], **settings: Any) -> SynopsisSpec:
        """Build the spec of a table's columns."""
        return cls(_typed(schema, features, "features"), **settings)

    @property
    def slot_s(self) -> int:
        """Length of an hour-of-day slot."""
        return DAY_S // self.slots

    @property
    def rest_bits(self) -> int:
        """Bits of a place after the prefix."""
        return self.place_bits - self.prefix_bits

    @property
    def lonlat(self) -> bool:
        """Whether positions are degrees."""
        return self.space.coordinates is Coordinates.LONLAT

    @cached_property
    def layout(self) -> KeyLayout:
        """The numbers for compiled loops."""
        bounds = WORLD if self.lonlat else self.space.bounds
        side = 1 << (self.place_bits // 2)
        interval = self.interval_days or self.bucket_days
        return KeyLayout(
            *(bounds.x0, bounds.y0, side / bounds.width, side / bounds.height, side),
            self.rest_bits,
            self.bucket_days * DAY_S * SECOND_US,
            self.slot_s * SECOND_US,
            self.step_s * SECOND_US,
            self.slot_s // self.step_s,
            interval,
            self.bucket_days // interval,
        )

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the features, for predicates."""
        return pa.schema([(feature.name, feature.type) for feature in self.features])

    @property
    def columns(self) -> tuple[Feature, ...]:
        """The columns of features and of sets, each once."""
        every = (*self.features, *(column for own in self.sets for column in own.columns))
        return tuple({column.name: column for column in every}.values())

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {feature.name: k for k, feature in enumerate(self.features)}

    @cached_property
    def _numbers(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.features if not feature.categorical)

    def index(self, name: str, *, numeric: bool = False) -> int:
        """Return the position of a feature; raises `ConfigError` if there is none."""
        position = self._positions.get(name)
        if position is None:
            raise ConfigError("feature", name, f"one of {', '.join(self._positions)}")
        if numeric and name not in self._numbers:
            raise ConfigError("feature", name, f"a number: one of {', '.join(self._numbers)}")
        return position

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for a file."""
        sets = [_values_of(own) | {"columns": _names_and_types(own.columns)} for own in self.sets]
        values = {"features": _names_and_types(self.features), "sets": sets}
        return _values_of(self) | values | {"space": self.space.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SynopsisSpec:
        """Invert :meth:`to_json`."""
        features, space = _features_from(data["features"]), Space.from_json(data["space"])
        sets = tuple(map(SetSpec.from_json, data["sets"]))
        changed = {"features": features, "space": space, "rule": BinRule(data["rule"])}
        return cls(**data | changed | {"sets": sets})


def _typed(schema: pa.Schema, names: Sequence[str], setting: str) -> tuple[Feature, ...]:
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ConfigError(f"synopsis.{setting}", missing[0], f"one of {', '.join(schema.names)}")
    return tuple(Feature(name, _value_type(schema.field(name).type)) for name in names)


def _values_of(spec: SynopsisSpec | SetSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


def _names_and_types(columns: Sequence[Feature]) -> list[list[str]]:
    return [[column.name, str(column.type)] for column in columns]


def _features_from(columns: Sequence[Sequence[str]]) -> tuple[Feature, ...]:
    return tuple(Feature(name, pa.type_for_alias(alias)) for name, alias in columns)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"synopsis.{name}", value, f"a number from {low} to {high}")


def _value_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(type_):
        return _value_type(type_.value_type)
    return pa.string() if kind_of(type_) is Kind.STRING else type_


@njit(cache=True, nogil=True)
def _place_at(x: float, y: float, layout: KeyLayout) -> Whole:  # pragma: no cover - compiled
    last = float(layout.axis_cells - 1)
    column = int(min(max((x - layout.x0) * layout.cells_per_x, 0.0), last))
    row = int(min(max((y - layout.y0) * layout.cells_per_y, 0.0), last))
    return (spread(column) << 1) | spread(row)


@njit(cache=True, nogil=True)
def _fill_places(
    x: Floats, y: Floats, layout: KeyLayout, out: Ints
) -> None:  # pragma: no cover - compiled
    for i in range(x.size):
        out[i] = _place_at(x[i], y[i], layout)


def locate(x: Floats, y: Floats, spec: SynopsisSpec) -> Ints:
    """Return the place of each position."""
    places = np.empty(x.size, np.int64)
    _fill_places(frozen(x), frozen(y), spec.layout, places)
    return places


@njit(cache=True, nogil=True)
def run_keys(
    x: Floats, y: Floats, time: Ints, layout: KeyLayout, keys: Ints, steps: Ints
) -> None:  # pragma: no cover - compiled
    """Fill the run key and the step of each row."""
    rest_bits = layout.rest_bits
    day = 86_400_000_000
    begin = end = step = head = np.int64(0)
    for i in range(x.size):
        place = _place_at(x[i], y[i], layout)
        # Rows follow each other in time: most have the step of the row before.
        if not begin <= time[i] < end:
            bucket = time[i] // layout.bucket_us
            in_bucket = time[i] - bucket * layout.bucket_us
            day_of_bucket = in_bucket // day
            of_day = in_bucket - day_of_bucket * day
            slot = of_day // layout.slot_us
            in_slot = (of_day - slot * layout.slot_us) // layout.step_us
            step = day_of_bucket * layout.steps_per_slot + in_slot
            begin = time[i] - (of_day - slot * layout.slot_us) % layout.step_us
            end = begin + layout.step_us
            head = (bucket + BUCKET_ZERO) << SLOT_BITS | slot
        prefix = (place >> rest_bits) << (BUCKET_BITS + SLOT_BITS)
        keys[i] = (prefix | head) << rest_bits | (place & ((1 << rest_bits) - 1))
        steps[i] = step


def split_group_keys(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Return prefix, bucket and slot of group keys."""
    slots = keys & ((1 << SLOT_BITS) - 1)
    buckets = (keys >> SLOT_BITS & ((1 << BUCKET_BITS) - 1)) - BUCKET_ZERO
    return keys >> (SLOT_BITS + BUCKET_BITS), buckets, slots


def join_group_keys(prefixes: Ints, buckets: Ints, slots: Ints) -> Ints:
    """Return the group keys of prefixes, buckets and slots."""
    heads = prefixes << BUCKET_BITS | (buckets + BUCKET_ZERO)
    return np.asarray(heads << SLOT_BITS | slots)


def places_of(run_keys: Ints, spec: SynopsisSpec) -> Ints:
    """Return the place of each run key: the prefix and the rest."""
    rest = spec.rest_bits
    prefix = run_keys >> (rest + SLOT_BITS + BUCKET_BITS)
    return np.asarray(prefix << rest | run_keys & ((1 << rest) - 1))
