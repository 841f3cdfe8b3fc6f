"""Roost's own sources: which rows come next, and where to continue after a restart.

A source returns the slices after an offset and has no state that a restart would lose: the offset
of a batch is part of its intent. Offsets count rows of the source in replay order.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.errors import ConfigError, SourceError
from roost.model.schemas import TIMESTAMP
from roost.stages.generators import (
    CallGenerator,
    Generator,
    Hotspot,
    PointGenerator,
    RatingGenerator,
    Skew,
    TweetGenerator,
    load_places,
)
from roost.stages.point_files import PointFile, arrange, find_files, stored_times
from roost.stages.slices import GeneratedSlice, ParquetSlice, Slice
from roost.storage.cache import WorkerCache
from roost.storage.inputs import add_inputs, point_files, seen_inputs
from roost.storage.store import Store

Clock = Callable[[], float]
SAMPLE_ROWS = 400_000


class RowSource(Protocol):
    """Where points come from."""

    schema: pa.Schema
    grows: bool = False  # whether more rows may come after the end

    def take(self, offset: int, limit: int) -> Sequence[Slice]:
        """Return the rows after an offset that are due by now, at most ``limit``."""

    def again(self, start: int, stop: int) -> Sequence[Slice]:
        """Return rows that were read before, for a batch that runs again."""

    def sample(self, columns: list[str]) -> pa.Table:
        """Return the first rows, to learn bounds and costs from."""

    def poll(self) -> bool:
        """Look for more input; returns whether there was any."""
        return False

    def total(self) -> int | None:
        """Return the number of rows known; None if there is no end."""

    def due(self, offset: int) -> int | None:
        """Return the offset after the last row that has arrived by now; None without a pace.

        ``offset`` is that of the next row to read.
        """
        return None

    def ended(self, offset: int) -> bool:
        """Return whether no row follows an offset, as far as is known."""
        total = self.total()
        return total is not None and offset >= total


@dataclass
class _Pace:
    """How far a paced source may have come: an event time or a row that moves with the clock."""

    per_s: float
    clock: Clock
    started: tuple[float, int] | None = None

    def horizon(self, following: int) -> float:
        if self.started is None:
            self.started = (self.clock(), following)
        wall, first = self.started
        return first + (self.clock() - wall) * self.per_s


class FileSource(RowSource):
    """A file, or the files of a folder that may grow, replayed in event order.

    The store has the order of the files. ``speed`` is in event seconds per second of the clock;
    None is as fast as possible.
    """

    def __init__(
        self,
        path: str,
        form: str,
        time: str,
        store: Store,
        speed: float | None,
        clock: Clock,
        name: str = "",
    ) -> None:
        self._path, self._form, self._time, self._name = path, form, time, name
        self.grows = Path(path).is_dir()
        self._store = store
        self._times: tuple[str, NDArray[np.int64]] | None = None
        self._files = [PointFile(*row) for row in point_files(store, name)]
        self.poll()
        if not self._files:
            raise SourceError(f"no points at {path}: the folder has no file of a known format")
        self.schema = pq.read_schema(self._files[0].path).remove_metadata()
        times = self.schema.field(time).type if time in self.schema.names else TIMESTAMP
        unit = 1.0 if pa.types.is_integer(times) else 1e6
        self._pace = None if speed is None else _Pace(speed * unit, clock)

    def poll(self) -> bool:
        """Look for files that were not there before."""
        seen = seen_inputs(self._store, self._name)
        new = [path for path in find_files(self._path, self._form) if str(path) not in seen]
        if not new:
            return False
        name = f"{self._name or 'points'}-{len(self._files):06d}.parquet"
        staged = self._store.folder / "staged" / name
        files = arrange(new, self._form, self._time, self.total(), staged)
        add_inputs(self._store, list(files), [str(path) for path in new], self._name)
        self._files += files
        return True

    def total(self) -> int:
        """Return the number of rows of all known files."""
        return sum(file.rows for file in self._files)

    def take(self, offset: int, limit: int) -> list[ParquetSlice]:
        """Return the rows after an offset that are due by now, at most ``limit``."""
        return self._slices(offset, limit, self._pace)

    def again(self, start: int, stop: int) -> list[ParquetSlice]:
        """Return rows that were read before, due or not."""
        return self._slices(start, stop - start, None)

    def due(self, offset: int) -> int | None:
        """Return the offset after the last row whose event time is due; None without a pace."""
        if self._pace is None:
            return None
        first = 0
        for file in self._files:
            if offset < first + file.rows:
                found = self._due(file, max(offset - first, 0), file.rows, self._pace)
                if found < file.rows:
                    return first + found
            first += file.rows
        return first

    def _slices(self, offset: int, limit: int, pace: _Pace | None) -> list[ParquetSlice]:
        slices: list[ParquetSlice] = []
        at = 0
        for file in self._files:
            start = max(offset - at, 0)
            at += file.rows
            if start >= file.rows:
                continue
            stop = min(file.rows, start + limit)
            if pace is not None:
                stop = self._due(file, start, stop, pace)
            if stop > start:
                slices.append(ParquetSlice(start, stop, file.path, file.first))
                limit -= stop - start
            if limit <= 0 or stop < file.rows:
                break
        return slices

    def _due(self, file: PointFile, start: int, stop: int, pace: _Pace) -> int:
        if self._times is None or self._times[0] != file.path:
            self._times = (file.path, _due_times(file.path, self._time))
        times = self._times[1]
        if not times.size:
            return stop
        due = int(np.searchsorted(times, pace.horizon(int(times[start])), side="right"))
        return max(min(stop, due), start)

    def sample(self, columns: list[str]) -> pa.Table:
        """Return the first rows, to learn bounds and costs from."""
        cache = WorkerCache()
        return pa.concat_tables([item.read(columns, cache) for item in self.again(0, SAMPLE_ROWS)])


def _due_times(path: str, name: str) -> NDArray[np.int64]:
    """Return the event time at which each row is due; empty if no row has a time."""
    values, there = stored_times(path, name)
    known = values[there]
    if not known.size:
        return known
    # A row without a time is due with the row before it, the first ones with the first time.
    return np.maximum.accumulate(np.where(there, values, known[0]))


class GeneratorSource(RowSource):
    """A seeded generator of ``rows`` rows, or without an end."""

    def __init__(self, generator: Generator, rows: int | None, pace: _Pace | None) -> None:
        self._generator = generator
        self._rows = rows
        self._pace = pace
        self.schema = generator.block(0, 1).schema

    def total(self) -> int | None:
        """Return the number of rows; None if there is no end."""
        return self._rows

    def take(self, offset: int, limit: int) -> list[GeneratedSlice]:
        """Return the rows after an offset that are due by now, at most ``limit``."""
        stop = offset + limit if self._rows is None else min(offset + limit, self._rows)
        if self._pace is not None:
            stop = min(stop, int(self._pace.horizon(offset)))
        return self.again(offset, stop) if stop > offset else []

    def due(self, offset: int) -> int | None:
        """Return the number of rows that are due by now; None without a pace."""
        if self._pace is None:
            return None
        found = int(self._pace.horizon(offset))
        return found if self._rows is None else min(found, self._rows)

    def again(self, start: int, stop: int) -> list[GeneratedSlice]:
        """Return rows that were read before."""
        return [GeneratedSlice(start, stop, self._generator)]

    def sample(self, columns: list[str]) -> pa.Table:
        """Return the first rows, to learn bounds and costs from."""
        rows = SAMPLE_ROWS if self._rows is None else min(SAMPLE_ROWS, self._rows)
        return self._generator.block(0, rows).select(columns)


GENERATOR_START_US = int(dt.datetime(2024, 1, 1, tzinfo=dt.UTC).timestamp() * 1e6)
HOTSPOT_FORMAT = "LON:LAT:SIDE:SHARE:START_S:STOP_S[:uniform|normal[:step|normal[:DX:DY]]]"


def parse_hotspot(text: str) -> Hotspot:
    """Build a hotspot from its fields; times in seconds of the stream, drift in degrees a second.

    Examples
    --------
    >>> parse_hotspot("-74:40.7:0.5:0.4:10:60:normal:step:0.01:0").drift_deg_per_s
    (0.01, 0.0)
    """
    parts = text.split(":")
    kinds = parts[6:8]
    spread, intensity = [*kinds, *["uniform", "step"][len(kinds) :]]
    try:
        lon, lat, side, share, start_s, stop_s = map(float, parts[:6])
        drift_x, drift_y = map(float, parts[8:] or (0.0, 0.0))
    except ValueError:
        raise ConfigError("points.path", text, f"hotspot={HOTSPOT_FORMAT}") from None
    start_us, stop_us = (GENERATOR_START_US + int(time_s * 1e6) for time_s in (start_s, stop_s))
    drift = (drift_x, drift_y)
    return Hotspot((lon, lat), side, share, start_us, stop_us, spread, intensity, drift)


SKEW_FORMAT = "uniform, zipf:EXPONENT or normal:MEAN:DEVIATION"


def parse_skew(text: str) -> Skew:
    """Build a skew from its kind and numbers.

    Examples
    --------
    >>> parse_skew("zipf:1.1").exponent
    1.1
    >>> parse_skew("normal:2000:100").deviation
    100.0
    """
    kind, *numbers = text.split(":")
    with contextlib.suppress(ValueError):
        match kind, list(map(float, numbers)):
            case "uniform", []:
                return Skew()
            case "zipf", [exponent]:
                return Skew("zipf", exponent)
            case "normal", [mean, deviation]:
                return Skew("normal", mean=mean, deviation=deviation)
    raise ConfigError("generator.skew", text, SKEW_FORMAT)


@dataclass(frozen=True)
class _GeneratorKind:
    """A generator that a path can name, with its options: parameter and parser of each."""

    build: Callable[..., Generator]
    options: Mapping[str, tuple[str, Callable[[str], Any]]]


_STREAM: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "rate": ("rate_per_s", float),
    "seed": ("seed", int),
}
_PLACES = {**_STREAM, "spread": ("spread_deg", float)}
_GENERATORS = {
    "points": _GeneratorKind(
        lambda **given: PointGenerator(load_places(), **given),
        {**_PLACES, "hotspot": ("hotspots", parse_hotspot)},
    ),
    "calls": _GeneratorKind(
        lambda **given: CallGenerator(load_places(), **given),
        {
            **_PLACES,
            "callers": ("callers", int),
            "districts": ("districts", int),
            "skew": ("skew", parse_skew),
            "duration": ("duration_s", float),
            "longest": ("longest_s", float),
            "disorder": ("disorder_s", float),
        },
    ),
    "tweets": _GeneratorKind(
        TweetGenerator,
        {
            **_STREAM,
            "topics": ("topics", int),
            "skew": ("skew", parse_skew),
            "most": ("most", int),
            "users": ("users", int),
        },
    ),
    "ratings": _GeneratorKind(
        RatingGenerator,
        {
            **_STREAM,
            "users": ("users", int),
            "items": ("items", int),
            "skew": ("skew", parse_skew),
            "activity": ("activity", parse_skew),
        },
    ),
}


def parse_generator(text: str, clock: Clock, key: str = "points.path") -> GeneratorSource:
    """Build a generator from text such as ``generate:calls,rows=1000000,rate=10000,pace=live``.

    Without a kind it generates points. Raises :class:`ConfigError` with the ``key``.
    """
    parts = [part for part in text.removeprefix("generate:").split(",") if part]
    kind = parts.pop(0) if parts and "=" not in parts[0] else "points"
    if kind not in _GENERATORS:
        raise ConfigError(key, text, "generate: with " + " or ".join(_GENERATORS))
    chosen = _GENERATORS[kind]
    arguments: dict[str, Any] = {"rate_per_s": 10_000.0, "seed": 1}
    given = {"pace": "max"}
    try:
        for part in parts:
            name, _, value = part.partition("=")
            if name not in ("rows", "pace", *chosen.options) or not value:
                accepted = ", ".join(["rows", "pace", *chosen.options])
                raise ConfigError(key, text, f"generate:{kind} with {accepted}")
            if name not in chosen.options:
                given[name] = value
                continue
            argument, parse = chosen.options[name]
            parsed = parse(value)
            several = argument == "hotspots"
            arguments[argument] = (*arguments.get(argument, ()), parsed) if several else parsed
        rows = int(given["rows"]) if "rows" in given else None
    except ValueError as error:
        raise ConfigError(key, text, f"numbers ({error})") from None
    if given["pace"] not in ("max", "live"):
        raise ConfigError(key, text, "pace=max or pace=live")
    if rows is not None and rows < 0:
        raise ConfigError(key, text, "rows=0 or more")
    generator = chosen.build(start_us=GENERATOR_START_US, **arguments)
    pace = _Pace(generator.rate_per_s, clock) if given["pace"] == "live" else None
    return GeneratorSource(generator, rows, pace)


def open_source(
    path: str,
    form: str,
    time: str,
    store: Store,
    speed: float | None,
    clock: Clock,
    name: str = "",
) -> RowSource:
    """Open the source of a path, or of the text of a generator.

    The files of a source of a dataflow are registered under its ``name``.
    """
    if path.startswith("generate:"):
        return parse_generator(path, clock, f"{name}.path" if name else "points.path")
    return FileSource(str(Path(path)), form, time, store, speed, clock, name)
