"""Bands: several synopses of one stream that queries add up, such as recent and older rows.

A sketch of an endless stream is a sequence of bands. The rows of each have a resolution of their
own, and after a requantisation their own bins. Bands may overlap in space and time: evidence is
summed. Parts with equal spec and bins give the results of their merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from roost.errors import ConfigError
from roost.synopsis.bins import Bins
from roost.synopsis.records import merge_bins, merge_groups
from roost.synopsis.scope import Scope
from roost.synopsis.sets import SetSketches
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import PlaceBounds, SmallRows, Synopsis, merge_places, promote


@dataclass(frozen=True, eq=False)
class Bands:
    """Synopses of the same features and space; all functions of queries accept them."""

    parts: tuple[Synopsis, ...]
    more_sets: tuple[SetSketches, ...] = ()  # beside those of the parts

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("bands", [], "at least one synopsis")
        first = self.parts[0]
        for part in self.parts[1:]:
            for name in ("features", "space", "x", "y", "time"):
                own, expected = getattr(part.spec, name), getattr(first.spec, name)
                if own != expected:
                    raise ConfigError(f"bands: {name}", own, f"those of the first: {expected}")
            if not np.array_equal(part.bins.shifts, first.bins.shifts):
                expected = f"those of the first: {first.bins.shifts.tolist()}"
                raise ConfigError("bands: shifts of sums", part.bins.shifts.tolist(), expected)

    @property
    def spec(self) -> SynopsisSpec:
        """Features and space, with the resolution of the first part."""
        return self.parts[0].spec

    @property
    def bins(self) -> Bins:
        """Bins of the first part; shifts are those of all."""
        return self.parts[0].bins

    @property
    def set_sketches(self) -> tuple[SetSketches, ...]:
        """The set sketches, for set queries."""
        return (*(own for part in self.parts for own in part.set_sketches), *self.more_sets)

    @property
    def count(self) -> int:
        """Number of rows described."""
        return sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, as it is stored."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def views(self) -> tuple[Synopsis, ...]:
        """The parts as queries read them: what is known of bins, groups and places is shared."""
        views: list[Synopsis] = []
        for equal in _partition(self.parts, lambda a, b: a.bins.same_values(b.bins)):
            own = [view for alike in _partition(equal, mergeable) for view in _align(alike)]
            # The mean of a bin does not depend on the bands between which its rows are divided.
            records = merge_bins([view.bin_records for view in own])
            views += [replace(view, bin_records=records) for view in own] if own[1:] else own
        return tuple(views)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return [_span(view) for view in self.views]

    def near(self, scope: Scope) -> tuple[Synopsis, ...]:
        """Return the views that may have rows in the time range of a scope, at least one."""
        since, until = scope.time_range
        near = [
            view
            for view, (first, last) in zip(self.views, self._spans, strict=True)
            if first < until and last >= since
        ]
        return tuple(near) or self.views[:1]


Sketch = Synopsis | Bands


def parts_of(sketch: Sketch, scope: Scope) -> tuple[Synopsis, ...]:
    """Return the synopses of which the evidence about a scope is summed."""
    return sketch.near(scope) if isinstance(sketch, Bands) else (sketch,)


def mergeable(a: Synopsis, b: Synopsis) -> bool:
    """Return whether synopses have one resolution; their bins may differ."""
    return a.spec == b.spec and a.bins.halvings == b.bins.halvings


def _partition(
    parts: Sequence[Synopsis], same: Callable[[Synopsis, Synopsis], bool]
) -> list[list[Synopsis]]:
    """Divide parts into classes of the same."""
    classes: list[list[Synopsis]] = []
    for part in parts:
        found = next((own for own in classes if same(own[0], part)), None)
        if found is None:
            classes.append([part])
        else:
            found.append(part)
    return classes


def _align(parts: Sequence[Synopsis]) -> list[Synopsis]:
    """Return parts of which queries judge groups, places and small groups as in their merge."""
    if len(parts) == 1:
        return list(parts)
    rows, grown = promote(parts)
    every = [*parts, *grown]
    places = merge_places([part.places for part in every])
    groups = merge_groups([part.groups for part in every])
    views = []
    for part in every:
        at = np.searchsorted(groups.keys, part.groups.keys)
        shared = {name: getattr(groups, name)[at] for name in ("bounds", "times", "exact")}
        bounds = places.bounds[np.searchsorted(places.cells, part.places.cells)]
        view = replace(
            part,
            groups=part.groups._replace(**shared),
            places=PlaceBounds(part.places.cells, bounds),
            rows=rows,
        )
        views.append(view)
        rows = SmallRows.empty(len(part.spec.features))
    return views


def _span(synopsis: Synopsis) -> tuple[int, int]:
    """Return the first and last time of the rows."""
    times = np.concatenate([synopsis.groups.times.ravel(), synopsis.rows.time])
    return (int(times.min()), int(times.max())) if times.size else (0, -1)
