"""Slices: descriptions of rows that a worker turns into columns.

A batch of Roost's own sources travels to the executors as slices, not as rows: the rows go from
the file straight into the worker's columns and never pass through the JVM.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.errors import SourceError
from roost.model.arrays import as_arrow
from roost.stages.decode import ROW
from roost.stages.generators import Generator
from roost.storage.cache import WorkerCache


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``start:stop`` that any process can read, as often as needed, always the same."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @abstractmethod
    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Read the rows; columns that do not exist are left out."""


def _open(path: str) -> tuple[pq.ParquetFile, tuple[int, ...]]:
    """Open a file; returns it with the borders of its row groups."""
    file = pq.ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)]
    return file, (0, *accumulate(sizes))


@dataclass(frozen=True, slots=True)
class ParquetSlice(Slice):
    """Rows of a Parquet file whose first row is number ``first`` of the source."""

    path: str
    first: int

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Read the rows, with their numbers in the source if requested."""
        file, starts = cache.get("parquet", self.path, lambda: _open(self.path))
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


@dataclass(frozen=True, slots=True)
class GeneratedSlice(Slice):
    """Rows of a generator."""

    generator: Generator

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Generate the rows, with their numbers if requested."""
        table = self.generator.block(self.start, self.stop)
        if ROW in columns:
            table = table.append_column(ROW, as_arrow(np.arange(self.start, self.stop)))
        return table.select([name for name in table.column_names if name in columns])


def pieces(item: Slice, rows: int) -> Iterator[Slice]:
    """Divide a slice into slices of at most ``rows`` rows."""
    for start in range(item.start, item.stop, rows):
        yield replace(item, start=start, stop=min(start + rows, item.stop))


def cut(slices: Sequence[Slice], parts: int) -> list[list[Slice]]:
    """Divide slices into groups of nearly equal numbers of rows, in order."""
    total = sum(item.rows for item in slices)
    borders = [total * k // parts for k in range(parts + 1)]
    groups: list[list[Slice]] = [[] for _ in range(parts)]
    at = 0
    for item in slices:
        for k in range(parts):
            low, high = max(borders[k], at), min(borders[k + 1], at + item.rows)
            if low < high:
                start, stop = item.start + low - at, item.start + high - at
                groups[k].append(replace(item, start=start, stop=stop))
        at += item.rows
    return groups
