"""Sketches of many groups of rows: which values differ, and which value has which rank.

The sketches are those of :mod:`roost.window.accumulators`, one for each group that has values.
They are made and merged one at a time; a group costs some ten microseconds, not a few nanoseconds
a row like the other aggregates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasketches import hll_sketch, hll_union, kll_doubles_sketch

from roost.kernel.arrays import as_arrow
from roost.window.accumulators import HLL_LG_K, Distinct, Ranks
from roost.window.grouped import Groups, Part, Values


@dataclass(frozen=True, slots=True)
class Sketches(ABC):
    """Written sketches, None where there are no values."""

    data: list[bytes | None]

    kept: ClassVar[type[Distinct] | type[Ranks]]

    @staticmethod
    @abstractmethod
    def join(parts: list[bytes]) -> bytes:
        """Merge some sketches, at least one."""

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Sketches:
        """Sketch each group."""
        values = column.take(as_arrow(groups.rows))
        places = zip(groups.starts.tolist(), groups.sizes.tolist(), strict=False)
        return cls([cls.kept.of(values.slice(at, n)).data if n else None for at, n in places])

    @classmethod
    def merged(cls, parts: Sequence[Part], size: int) -> Sketches:
        """Merge."""
        found: list[list[bytes]] = [[] for _ in range(size)]
        for one, picks, slots in parts:
            for pick, slot in zip(picks.tolist(), slots.tolist(), strict=True):
                data = one.data[pick]
                if data is not None:
                    found[slot].append(data)
        return cls([cls.join(some) if some else None for some in found])

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored."""
        return {"sketch": pa.array(self.data, pa.binary())}

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored."""
        return {}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Sketches:
        """Take back what was stored."""
        return cls(columns["sketch"].to_pylist())


class DistinctSketches(Sketches):
    """How many values differ."""

    kept = Distinct

    @staticmethod
    def join(parts: list[bytes]) -> bytes:
        """Merge some sketches."""
        union = hll_union(HLL_LG_K)
        for part in parts:
            union.update(hll_sketch.deserialize(part))
        return bytes(union.get_result().serialize_compact())

    def answers(self, function: str, parameter: float | None) -> Values:
        """Return about how many values differ."""
        counts = [0.0 if data is None else float(Distinct(data).estimate()) for data in self.data]
        return Values(np.ones(len(counts), bool), np.array(counts, np.float64))


class RankSketches(Sketches):
    """Which value has which rank."""

    kept = Ranks

    @staticmethod
    def join(parts: list[bytes]) -> bytes:
        """Merge some sketches."""
        sketch = kll_doubles_sketch.deserialize(parts[0])
        for part in parts[1:]:
            sketch.merge(kll_doubles_sketch.deserialize(part))
        return bytes(sketch.serialize())

    def answers(self, function: str, parameter: float | None) -> Values:
        """Return about the values of a rank."""
        assert parameter is not None, "a quantile has a rank"
        values = [None if data is None else Ranks(data).quantile(parameter) for data in self.data]
        known = np.array([value is not None for value in values], bool)
        return Values(known, np.array([value or 0.0 for value in values], np.float64))
