"""Bins: how the values of each feature are divided.

Edges come from quantile sketches (KLL), which any number of machines can feed and merge. A value
that alone exceeds the share of a bin has a bin of its own. Two rules place the other edges: *equal
density*, and edges spaced by the cube root of the density, which minimises the squared error of a
value that is replaced by the mean of its bin.

Code 0 is null; bin ``k`` has code ``k + 1`` and the values ``edges[k - 1] <= v < edges[k]``. A
category is the number of its value, and the last bin collects the values without a bin. NaN and
infinite values count as null.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasketches import kll_doubles_sketch
from numpy.typing import NDArray

from roost.errors import SourceError
from roost.model.arrays import Floats, as_numpy
from roost.model.columns import one_array
from roost.synopsis.spec import BinRule, Feature, SynopsisSpec

KLL_K = 2048  # a rank error of 0.15 %, a seventh of the share of one of 96 bins
SAMPLE_ROWS = 1 << 18
GRID = 4096
CELLS = 4096
MARGIN = 1e-14  # of a value by which its cell may begin too late, above all rounding
EXACT_MAX = 2**53 - 1
DROPPED = 8  # halvings of a plane that leaves do not have: no feature has 2**8 bins


class Coding(NamedTuple):
    """Tables to find the code of a value: from the first edge of its cell on, edges are compared.

    Cells divide the values between the first and the last edge evenly.
    """

    edges: Floats  # by feature, NaN at the end: no value reaches it
    starts: NDArray[np.uint8]  # by feature and cell
    lows: Floats
    scales: Floats
    shifts: Floats
    planes: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Bins:
    """Edges and categories of every feature, and how far the leaves merge adjacent bins.

    Leaves store bin ``k`` as ``k >> halvings[feature]``, and with ``DROPPED`` halvings nothing:
    code 0 then stands for every value. ``shifts`` is subtracted from values before they are summed:
    the same everywhere, so that records merge by addition.
    """

    edges: tuple[Floats, ...]
    categories: tuple[tuple[Any, ...] | None, ...]
    shifts: Floats
    halvings: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """Number of bins of each feature."""
        return [edges.size + 1 for edges in self.edges]

    @property
    def plane_counts(self) -> list[int]:
        """Number of bins of each plane, after merging."""
        pairs = zip(self.counts, self.halvings, strict=True)
        return [((count - 1) >> halving) + 1 for count, halving in pairs]

    @property
    def plane_order(self) -> list[int]:
        """Features by ascending fan-out: the plane with the most bins is at the bottom."""
        counts = self.plane_counts
        return sorted(range(len(counts)), key=lambda feature: (counts[feature], feature))

    @property
    def codes_max(self) -> int:
        """Number of codes of the feature with the most bins, null included."""
        return max(self.counts) + 1

    @cached_property
    def coding(self) -> Coding:
        """Tables by which compiled loops find codes."""
        features, most = len(self.edges), max(edges.size for edges in self.edges)
        edges = np.full((features, most + 1), np.nan)
        starts = np.zeros((features, CELLS), np.uint8)
        lows, scales = np.zeros(features), np.zeros(features)
        for k, own in enumerate(self.edges):
            edges[k, : own.size] = own
            if own.size > 1:
                lows[k], scales[k] = own[0], CELLS / (own[-1] - own[0])
                begins = own[0] + np.arange(CELLS) / scales[k]
                # The computed cell of a value may be rounded up.
                margin = MARGIN * np.abs(own).max()
                starts[k] = np.searchsorted(own, begins - margin)
        return Coding(edges, starts, lows, scales, self.shifts, self.planes)

    @cached_property
    def planes(self) -> NDArray[np.uint8]:
        """Code in the leaves, by feature and code."""
        codes = np.arange(self.codes_max)
        rows = [
            np.where((codes > 0) & (h < DROPPED), ((codes - 1) >> h) + 1, 0) for h in self.halvings
        ]
        return np.array(rows, np.uint8)

    @property
    def dropped(self) -> tuple[bool, ...]:
        """Whether leaves do not tell a feature; group records do."""
        return tuple(halvings >= DROPPED for halvings in self.halvings)

    def halved(self, feature: int) -> Bins:
        """Return the bins with one plane at half its resolution."""
        halvings = list(self.halvings)
        halvings[feature] += 1
        return replace(self, halvings=tuple(halvings))

    def difference(self, other: Bins, features: Sequence[Feature]) -> str | None:
        """Return the name of the first feature whose bins differ."""
        for k, feature in enumerate(features):
            if not (self._same_values(k, other) and self.halvings[k] == other.halvings[k]):
                return feature.name
        return None

    def same_values(self, other: Bins) -> bool:
        """Return whether all values have the same bins; planes may differ."""
        return all(self._same_values(k, other) for k in range(len(self.edges)))

    def _same_values(self, k: int, other: Bins) -> bool:
        same = np.array_equal(self.edges[k], other.edges[k])
        same = same and self.categories[k] == other.categories[k]
        return same and bool(self.shifts[k] == other.shifts[k])

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; floats survive exactly."""
        return {
            "edges": [edges.tolist() for edges in self.edges],
            "categories": [None if names is None else list(names) for names in self.categories],
            "shifts": self.shifts.tolist(),
            "halvings": list(self.halvings),
        }

    @cached_property
    def text(self) -> str:
        """The JSON data as text."""
        return json.dumps(self.to_json())

    def prepared(self) -> Bins:
        """Return the bins with all that building computes of them, which copies then have."""
        _ = self.coding, self.text
        return self

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Bins:
        """Invert :meth:`to_json`."""
        return cls(
            tuple(np.array(edges, np.float64) for edges in data["edges"]),
            tuple(None if names is None else tuple(names) for names in data["categories"]),
            np.array(data["shifts"], np.float64),
            tuple(data["halvings"]),
        )


class BinLearner:
    """Collects what the choice of bins needs; learners of several machines can be merged."""

    def __init__(self, spec: SynopsisSpec) -> None:
        self._spec = spec
        self._sketches = [kll_doubles_sketch(KLL_K) for _ in spec.features]
        self._categories: list[Counter[Any]] = [Counter() for _ in spec.features]

    def update(self, table: pa.Table) -> None:
        """Add a sample of a table's rows."""
        stride = max(1, table.num_rows // SAMPLE_ROWS)
        for k, feature in enumerate(self._spec.features):
            column = one_array(table[feature.name])
            if feature.categorical:
                for pair in column.value_counts().to_pylist():
                    self._categories[k][pair["values"]] += pair["counts"]
                continue
            values = feature_values(column, feature, None)[::stride]
            self._sketches[k].update(values[np.isfinite(values)])

    def sampled(self, k: int) -> int:
        """Return from how many values the bins of a feature would be decided."""
        if self._spec.features[k].categorical:
            return self.counts_of(k).total()
        return int(self._sketches[k].n)

    def merge(self, other: BinLearner) -> None:
        """Add what another learner has collected."""
        for k, sketch in enumerate(other._sketches):
            self._sketches[k].merge(sketch)
            self._categories[k] += other._categories[k]

    @property
    def spec(self) -> SynopsisSpec:
        """Features and number of bins."""
        return self._spec

    def bins(self) -> Bins:
        """Decide the bins."""
        edges, categories, shifts = [], [], []
        for k, feature in enumerate(self._spec.features):
            names = self._names(k) if feature.categorical else None
            grid = np.zeros(1) if feature.categorical else self.grid(k)
            if names is None:
                edges.append(place_edges(grid, self._spec.bins, self._spec.rule, feature.type))
            else:
                edges.append(np.arange(1.0, len(names) + 1.0))
            categories.append(names)
            shifts.append(float(grid[grid.size // 2]))
        halvings = (0,) * len(edges)
        return Bins(tuple(edges), tuple(categories), np.array(shifts), halvings)

    def counts_of(self, k: int) -> Counter[Any]:
        """Return how often each category of a feature occurred."""
        counts = self._categories[k].copy()
        counts.pop(None, None)
        return counts

    def _names(self, k: int) -> tuple[Any, ...]:
        counts = self.counts_of(k)
        ranked = sorted(counts, key=lambda name: (-counts[name], name))
        return tuple(ranked[: self._spec.bins - 1])

    def grid(self, k: int) -> Floats:
        """Return equally spaced quantiles of a feature."""
        sketch = self._sketches[k]
        if sketch.is_empty():
            return np.zeros(1)
        return np.array(sketch.get_quantiles(np.linspace(0.0, 1.0, GRID + 1)), np.float64)


def learn_bins(table: pa.Table, spec: SynopsisSpec) -> Bins:
    """Decide the bins from one table."""
    learner = BinLearner(spec)
    learner.update(table)
    return learner.bins()


def place_edges(grid: Floats, bins: int, rule: BinRule, type_: pa.DataType) -> Floats:
    """Return the inner edges of bins for a feature, from equally spaced quantiles.

    Edges are values that the column can store. There are fewer if the values do not need more.

    Examples
    --------
    >>> grid = np.array([0.0, 0.0, 0.0, 1.0, 2.0, 3.0])
    >>> place_edges(grid, 4, BinRule.EQUAL_DENSITY, pa.int32()).tolist()
    [1.0, 2.0, 3.0]
    """
    values, counts = np.unique(grid, return_counts=True)
    heavy = counts * bins > grid.size
    own = _edges_of_heavy(values, heavy, type_)
    while own.size > bins - 1:
        heavy[np.flatnonzero(heavy)[np.argmin(counts[heavy])]] = False
        own = _edges_of_heavy(values, heavy, type_)
    light = np.where(heavy, 0.0, counts)[1:]
    gaps = np.diff(values)
    weights = light if rule is BinRule.EQUAL_DENSITY else np.cbrt(light * gaps * gaps)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    left = bins - 1 - own.size
    if left > 0 and total[-1] > 0:
        targets = total[-1] * np.arange(1, left + 1) / (left + 1)
        own = np.concatenate([own, _recordable(np.interp(targets, total, values), type_)])
    edges: Floats = np.unique(own)
    return edges


def _edges_of_heavy(values: Floats, heavy: NDArray[np.bool_], type_: pa.DataType) -> Floats:
    """Return the edges that give each heavy value a bin; neighbours share an edge."""
    alone = heavy & ~np.append(heavy[1:], False)
    edges = np.concatenate([values[heavy], _after(values[alone], type_)])
    return np.unique(edges[(edges > values[0]) & (edges <= values[-1])])


def _after(values: Floats, type_: pa.DataType) -> Floats:
    """Return the next greater values that the column can store."""
    if pa.types.is_integer(type_):
        return values + 1.0
    narrow = _float_type(type_)
    following: Floats = np.nextafter(values.astype(narrow), narrow(np.inf)).astype(np.float64)
    return following


def _recordable(values: Floats, type_: pa.DataType) -> Floats:
    if pa.types.is_integer(type_):
        return np.ceil(values)
    return values.astype(_float_type(type_)).astype(np.float64)


def _float_type(type_: pa.DataType) -> Any:
    if pa.types.is_float16(type_):
        return np.float16
    return np.float32 if pa.types.is_float32(type_) else np.float64


def feature_values(column: pa.Array, feature: Feature, names: tuple[Any, ...] | None) -> Floats:
    """Return a column as float64, NaN for null; categories as their numbers."""
    if feature.categorical:
        assert names is not None, "categories are counted, not measured"
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        found = pc.index_in(plain.cast(feature.type), pa.array(names, feature.type))
        numbers = np.asarray(found.fill_null(len(names))).astype(np.float64)
        numbers[np.asarray(plain.is_null())] = np.nan
        return numbers
    if pa.types.is_integer(column.type):
        extremes = pc.min_max(column).as_py()
        if any(abs(extreme or 0) > EXACT_MAX for extreme in extremes.values()):
            raise SourceError(f"feature {feature.name}: integers from 2**53 up are not supported")
        column = column.cast(pa.float64())
    if column.null_count and column.type in (pa.float32(), pa.float64()):
        column = pc.fill_null(column, float("nan"))  # in half of the time of to_numpy
    values: Floats = np.asarray(as_numpy(column), np.float64)
    return values
