"""Roost's own sources: which rows come next, and where to go on after a restart.

A source is asked for the next slices after an offset and never remembers anything that matters:
the offset of a batch is part of its intent. Offsets count rows of the source in replay order.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.errors import ConfigError, SourceError
from roost.stages.generators import Hotspot, PointGenerator, load_places
from roost.stages.point_files import PointFile, arrange, find_files, stored_times
from roost.stages.slices import GeneratedSlice, ParquetSlice
from roost.storage.cache import WorkerCache
from roost.storage.inputs import add_inputs, point_files, seen_inputs
from roost.storage.store import Store

AnySlice = ParquetSlice | GeneratedSlice
Clock = Callable[[], float]
SAMPLE_ROWS = 400_000


class Source(Protocol):
    """Where points come from."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of the source."""

    @property
    def grows(self) -> bool:
        """Whether more rows may come after the end."""

    def take(self, offset: int, limit: int) -> list[AnySlice]:
        """Rows after an offset that are there by now, at most ``limit``."""

    def again(self, start: int, stop: int) -> list[AnySlice]:
        """Rows that were taken before, for a batch that runs again."""

    def sample(self, columns: list[str]) -> pa.Table:
        """First rows, to learn bounds and costs from."""

    def poll(self) -> bool:
        """Look for more input; whether there was any."""

    def ended(self, offset: int) -> bool:
        """Whether no row will ever come after an offset, for what is known so far."""

    def total(self) -> int | None:
        """Rows known to come, for the progress bar."""


@dataclass
class _Pace:
    """Event time against the clock: how far a replay may have come."""

    speed: float
    clock: Clock
    started: tuple[float, int] | None = None

    def horizon(self, next_time: int, units_per_s: float) -> float:
        if self.started is None:
            self.started = (self.clock(), next_time)
        wall, event = self.started
        return event + (self.clock() - wall) * self.speed * units_per_s


class FileSource:
    """Files replayed in event order.

    Parameters
    ----------
    path
        A file, or a folder that may grow.
    form
        Format, or ``auto``.
    time
        Name of the time column.
    store
        Remembers the order of the files.
    speed
        Event seconds per second; None is as fast as possible.
    clock
        Seconds, for the speed.
    """

    def __init__(
        self,
        path: str,
        form: str,
        time: str,
        store: Store,
        speed: float | None,
        clock: Clock,
    ) -> None:
        self._path, self._form, self._time = path, form, time
        self.grows = Path(path).is_dir()
        self._store = store
        self._pace = None if speed is None else _Pace(speed, clock)
        self._times: tuple[str, NDArray[np.int64]] | None = None
        self._files = [PointFile(*row) for row in point_files(store)]
        self.poll()
        if not self._files:
            raise SourceError(f"no points at {path}: the folder has no file that could be read")
        self._schema = pq.read_schema(self._files[0].path).remove_metadata()

    @property
    def schema(self) -> pa.Schema:
        """Columns of the source."""
        return self._schema

    def poll(self) -> bool:
        """Look for files that were not there before."""
        seen = seen_inputs(self._store)
        new = [path for path in find_files(self._path, self._form) if str(path) not in seen]
        if not new:
            return False
        first = sum(file.rows for file in self._files)
        staged = self._store.folder / "staged" / f"points-{len(self._files):06d}.parquet"
        files = arrange(new, self._form, self._time, first, staged)
        rows = [(file.path, file.rows, file.first) for file in files]
        add_inputs(self._store, rows, [str(path) for path in new])
        self._files += files
        return True

    def total(self) -> int:
        """Rows known to come."""
        return sum(file.rows for file in self._files)

    def ended(self, offset: int) -> bool:
        """Whether all known files are read."""
        return offset >= self.total()

    def take(self, offset: int, limit: int) -> list[AnySlice]:
        """Rows after an offset that are due by now."""
        slices: list[AnySlice] = []
        at = 0
        for file in self._files:
            start = max(offset - at, 0)
            at += file.rows
            if start >= file.rows:
                continue
            stop = self._due(file, start, min(file.rows, start + limit))
            if stop > start:
                slices.append(ParquetSlice(file.path, start, stop, file.first))
                limit -= stop - start
            if limit <= 0 or stop < file.rows:
                break
        return slices

    def _due(self, file: PointFile, start: int, stop: int) -> int:
        if self._pace is None:
            return stop
        if self._times is None or self._times[0] != file.path:
            self._times = (file.path, _due_times(file.path, self._time))
        times = self._times[1]
        if not times.size:
            return stop
        is_timestamp = not pa.types.is_integer(self._schema.field(self._time).type)
        horizon = self._pace.horizon(int(times[start]), 1e6 if is_timestamp else 1.0)
        due = int(np.searchsorted(times, horizon, side="right"))
        return max(min(stop, due), start)

    def sample(self, columns: list[str]) -> pa.Table:
        """First rows, to learn bounds and costs from."""
        cache = WorkerCache()
        tables = [item.read(columns, cache) for item in self.again(0, SAMPLE_ROWS)]
        return pa.concat_tables(tables)

    def again(self, start: int, stop: int) -> list[AnySlice]:
        """Rows that were taken before, whatever the speed."""
        pace, self._pace = self._pace, None
        try:
            return self.take(start, stop - start)
        finally:
            self._pace = pace


def _due_times(path: str, name: str) -> NDArray[np.int64]:
    """Event time at which each row is due; empty where no row has a time."""
    values, there = stored_times(path, name)
    known = values[there]
    if not known.size:
        return known
    # Rows without a time ride along with the row before them, the first ones with the first time.
    return np.maximum.accumulate(np.where(there, values, known[0]))


class GeneratorSource:
    """A seeded generator, paced by its own rate or as fast as possible.

    Parameters
    ----------
    generator
        Makes the points.
    rows
        How many in all; None goes on without end.
    paced
        Whether rows come at the generator's rate by the clock.
    clock
        Seconds.
    """

    grows = False

    def __init__(
        self, generator: PointGenerator, rows: int | None, paced: bool, clock: Clock
    ) -> None:
        self.generator = generator
        self._rows = rows
        self._paced = paced
        self._clock = clock
        self._started: tuple[float, int] | None = None
        self._schema = generator.block(0, 1).schema

    @property
    def schema(self) -> pa.Schema:
        """Columns of the source."""
        return self._schema

    def poll(self) -> bool:
        """Nothing new ever comes."""
        return False

    def total(self) -> int | None:
        """Rows known to come."""
        return self._rows

    def ended(self, offset: int) -> bool:
        """Whether all rows are made."""
        return self._rows is not None and offset >= self._rows

    def take(self, offset: int, limit: int) -> list[AnySlice]:
        """Rows after an offset that are due by now."""
        stop = offset + limit
        if self._rows is not None:
            stop = min(stop, self._rows)
        if self._paced:
            if self._started is None:
                self._started = (self._clock(), offset)
            wall, row = self._started
            stop = min(stop, row + int((self._clock() - wall) * self.generator.rate_per_s))
        return [GeneratedSlice(self.generator, offset, stop)] if stop > offset else []

    def again(self, start: int, stop: int) -> list[AnySlice]:
        """Rows that were taken before."""
        return [GeneratedSlice(self.generator, start, stop)]

    def sample(self, columns: list[str]) -> pa.Table:
        """First rows, to learn bounds and costs from."""
        rows = SAMPLE_ROWS if self._rows is None else min(SAMPLE_ROWS, self._rows)
        return self.generator.block(0, rows).select(columns)


GENERATOR_START_US = int(dt.datetime(2024, 1, 1, tzinfo=dt.UTC).timestamp() * 1e6)
HOTSPOT_TAKES = "LON:LAT:SIDE:SHARE:START_S:STOP_S[:uniform|normal[:step|normal[:DX:DY]]]"


def parse_hotspot(text: str) -> Hotspot:
    """Build a hotspot from its fields; times in seconds of the stream, drift in degrees a second.

    Examples
    --------
    >>> parse_hotspot("-74:40.7:0.5:0.4:10:60:normal:step:0.01:0").drift_deg_per_s
    (0.01, 0.0)
    """
    parts = text.split(":")
    if len(parts) not in (6, 7, 8, 10):
        raise ConfigError("points.path", text, f"hotspot={HOTSPOT_TAKES}")
    try:
        lon, lat, side, share, start_s, stop_s = (float(part) for part in parts[:6])
        drift = (float(parts[8]), float(parts[9])) if len(parts) == 10 else (0.0, 0.0)
    except ValueError:
        raise ConfigError("points.path", text, f"hotspot={HOTSPOT_TAKES}") from None
    spread = parts[6] if len(parts) > 6 else "uniform"
    intensity = parts[7] if len(parts) > 7 else "step"
    if spread not in ("uniform", "normal") or intensity not in ("step", "normal"):
        raise ConfigError("points.path", text, f"hotspot={HOTSPOT_TAKES}")
    return Hotspot(
        (lon, lat),
        side,
        share,
        GENERATOR_START_US + int(start_s * 1e6),
        GENERATOR_START_US + int(stop_s * 1e6),
        spread="normal" if spread == "normal" else "uniform",
        intensity="normal" if intensity == "normal" else "step",
        drift_deg_per_s=drift,
    )


def parse_generator(text: str, clock: Clock) -> GeneratorSource:
    """Build a generator from text such as ``generate:rows=1000000,rate=10000,seed=7,pace=live``."""
    takes = ("rows", "rate", "seed", "spread", "pace", "hotspot")
    given: dict[str, str] = {}
    hotspots = []
    for part in filter(None, text.removeprefix("generate:").split(",")):
        name, _, value = part.partition("=")
        if name not in takes or not value:
            raise ConfigError("points.path", text, "generate: with " + ", ".join(takes))
        if name == "hotspot":
            hotspots.append(parse_hotspot(value))
        given[name] = value
    try:
        rows = int(given["rows"]) if "rows" in given else None
        generator = PointGenerator(
            load_places(),
            float(given.get("rate", 10_000.0)),
            GENERATOR_START_US,
            int(given.get("seed", 1)),
            hotspots=tuple(hotspots),
            spread_deg=float(given.get("spread", 0.1)),
        )
    except ValueError as error:
        raise ConfigError("points.path", text, f"numbers ({error})") from None
    pace = given.get("pace", "max")
    if pace not in ("max", "live"):
        raise ConfigError("points.path", text, "pace=max or pace=live")
    return GeneratorSource(generator, rows, pace == "live", clock)


def open_source(
    path: str, form: str, time: str, store: Store, speed: float | None, clock: Clock
) -> FileSource | GeneratorSource:
    """Source for a path or generator text."""
    if path.startswith("generate:"):
        return parse_generator(path, clock)
    return FileSource(str(Path(path)), form, time, store, speed, clock)
