"""Slices: what a task reads. A few words that say which rows, turned into columns by the worker.

A batch of Roost's own sources travels to the executors as slices, not as rows: the rows go from
the file straight into the worker's columns and never pass through the JVM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.errors import SourceError
from roost.model.arrays import as_arrow
from roost.stages.decode import ROW
from roost.stages.generators import PointGenerator
from roost.storage.cache import WorkerCache


class Slice(Protocol):
    """Rows that any process can read, as often as needed, always the same."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Read the rows; columns that do not exist are left out."""


def _open(path: str, cache: WorkerCache) -> tuple[pq.ParquetFile, tuple[int, ...]]:
    """Open a file; returns it with the numbers of the first rows of its row groups."""

    def build() -> tuple[pq.ParquetFile, tuple[int, ...]]:
        file = pq.ParquetFile(path, memory_map=True)
        meta = file.metadata
        sizes = [meta.row_group(k).num_rows for k in range(meta.num_row_groups)]
        return file, tuple(np.concatenate([[0], np.cumsum(sizes)]).tolist())

    return cache.get("parquet", path, build)


@dataclass(frozen=True, slots=True)
class ParquetSlice:
    """Rows ``start:stop`` of a Parquet file whose first row is ``first`` of the whole source."""

    path: str
    start: int
    stop: int
    first: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Read the rows, with their numbers in the source if requested."""
        file, starts = _open(self.path, cache)
        if self.stop > starts[-1]:
            raise SourceError(
                f"{self.path} has only {starts[-1]} rows instead of at least {self.stop}: "
                "was it replaced?"
            )
        begin = int(np.searchsorted(starts, self.start, side="right")) - 1
        end = int(np.searchsorted(starts, self.stop, side="left"))
        names = file.schema_arrow.names
        there = tuple(name for name in columns if name in names)
        groups = tuple(range(begin, end))
        # Small batches read the same row group many times.
        table = cache.get(
            "row groups",
            (self.path, groups, there),
            lambda: file.read_row_groups(list(groups), columns=list(there), use_threads=False),
        )
        table = table.slice(self.start - starts[begin], self.rows)
        if ROW in columns and ROW not in names:
            rows = as_arrow(np.arange(self.first + self.start, self.first + self.stop))
            table = table.append_column(ROW, rows)
        return table


@dataclass(frozen=True)
class GeneratedSlice:
    """Rows ``start:stop`` of a generator."""

    generator: PointGenerator
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.stop - self.start

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Generate the rows."""
        table = self.generator.block(self.start, self.stop)
        return table.select([name for name in table.column_names if name in columns])


def pieces(item: Slice, rows: int) -> Iterator[ParquetSlice | GeneratedSlice]:
    """Divide a slice into parts of at most so many rows, to be read one after the other."""
    assert isinstance(item, ParquetSlice | GeneratedSlice)
    for start in range(item.start, item.stop, rows):
        yield replace(item, start=start, stop=min(start + rows, item.stop))


def cut(slices: Sequence[Slice], parts: int) -> list[list[ParquetSlice | GeneratedSlice]]:
    """Divide slices into groups of nearly equal numbers of rows, in order."""
    total = sum(item.rows for item in slices)
    borders = [total * k // parts for k in range(parts + 1)]
    groups: list[list[ParquetSlice | GeneratedSlice]] = [[] for _ in range(parts)]
    at = 0
    for item in slices:
        assert isinstance(item, ParquetSlice | GeneratedSlice)
        for k in range(parts):
            low, high = max(borders[k], at), min(borders[k + 1], at + item.rows)
            if low < high:
                start, stop = item.start + low - at, item.start + high - at
                groups[k].append(replace(item, start=start, stop=stop))
        at += item.rows
    return groups
