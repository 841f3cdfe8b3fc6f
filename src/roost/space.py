"""Where things are: the bounded plane, its grid of cells, and how distance is meant.

The bounds only say where cells are fine. Cells on the edge of the grid reach outwards without
end, so every finite point has exactly one cell and every query finds it. A column is defined by
its edges, not by a division: column ``i`` holds the doubles ``edges[i] <= x < edges[i + 1]``.
That makes "which cell" a monotone, exact function of the coordinate, which the matching index
relies on when it decides from cells alone that a point cannot match.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.errors import ConfigError

EARTH_RADIUS_M = 6_371_008.8
GRID_SIDE_MAX = 1 << 15
CIRCLE_LON_LIMIT = 540.0


class Coordinates(StrEnum):
    """What x and y mean, and so what a circle's radius means."""

    LONLAT = "lonlat"  # degrees; radius in metres along the sphere
    PLANE = "plane"  # any unit; radius in the same unit


class Outside(StrEnum):
    """What becomes of points and queries beyond the bounds."""

    EXACT = "exact"  # edge cells reach outwards
    DEAD = "dead"  # refused, with a dead letter


@dataclass(frozen=True, slots=True)
class Rect:
    """A closed rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float

    def __post_init__(self) -> None:
        """Refuse what is no rectangle."""
        values = (self.x0, self.y0, self.x1, self.y1)
        if not all(math.isfinite(value) for value in values):
            raise ConfigError("space.bounds", values, "four finite numbers x0,y0,x1,y1")
        if not (self.x0 < self.x1 and self.y0 < self.y1):
            raise ConfigError("space.bounds", values, "x0 < x1 and y0 < y1")

    @property
    def width(self) -> float:
        """Extent along x."""
        return self.x1 - self.x0

    @property
    def height(self) -> float:
        """Extent along y."""
        return self.y1 - self.y0


def axis_edges(low: float, high: float, cells: int) -> NDArray[np.float64]:
    """Borders of equal cells between two numbers, strictly increasing.

    Examples
    --------
    >>> axis_edges(0.0, 1.0, 4).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    edges = low + (high - low) * (np.arange(cells + 1) / cells)
    edges[-1] = high
    if not bool(np.all(np.diff(edges) > 0)):
        raise ConfigError("space.bounds", (low, high), f"a range wide enough for {cells} cells")
    return edges


def locate_axis(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int32]:
    """Cell index of each value on one axis; values beyond the ends belong to the end cells."""
    cell = np.searchsorted(edges, values, side="right") - 1
    return np.clip(cell, 0, edges.size - 2).astype(np.int32)


@dataclass(frozen=True)
class Grid:
    """Columns by rows of equal cells over a rectangle.

    Examples
    --------
    >>> grid = Grid(Rect(0.0, 0.0, 10.0, 10.0), 10, 10)
    >>> grid.locate(np.array([2.5, 99.0]), np.array([0.0, -5.0])).tolist()
    [2, 9]
    """

    bounds: Rect
    columns: int
    rows: int

    def __post_init__(self) -> None:
        """Refuse grids that no plan could use."""
        for side in (self.columns, self.rows):
            if not 1 <= side <= GRID_SIDE_MAX:
                takes = f"CxR with both from 1 to {GRID_SIDE_MAX}"
                raise ConfigError("space.grid", f"{self.columns}x{self.rows}", takes)

    @cached_property
    def edges_x(self) -> NDArray[np.float64]:
        """Column borders."""
        return axis_edges(self.bounds.x0, self.bounds.x1, self.columns)

    @cached_property
    def edges_y(self) -> NDArray[np.float64]:
        """Row borders."""
        return axis_edges(self.bounds.y0, self.bounds.y1, self.rows)

    @property
    def cells(self) -> int:
        """How many cells there are."""
        return self.columns * self.rows

    def locate(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.int32]:
        """Row-major cell number of each point."""
        column = locate_axis(x, self.edges_x)
        row = locate_axis(y, self.edges_y)
        return row * np.int32(self.columns) + column


@dataclass(frozen=True)
class Space:
    """The bounded plane with its grid.

    Parameters
    ----------
    bounds
        The rectangle that the grid divides.
    columns, rows
        Cells along x and y.
    coordinates
        Degrees or plain units.
    outside
        Whether points and queries beyond the bounds are matched or refused.
    """

    bounds: Rect
    columns: int = 1000
    rows: int = 1000
    coordinates: Coordinates = Coordinates.LONLAT
    outside: Outside = Outside.EXACT

    @cached_property
    def grid(self) -> Grid:
        """The grid that plans divide among machines."""
        return Grid(self.bounds, self.columns, self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state directory."""
        b = self.bounds
        return {
            "bounds": [b.x0, b.y0, b.x1, b.y1],
            "columns": self.columns,
            "rows": self.rows,
            "coordinates": self.coordinates.value,
            "outside": self.outside.value,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Space:
        """Inverse of :meth:`to_json`."""
        return cls(
            Rect(*data["bounds"]),
            data["columns"],
            data["rows"],
            Coordinates(data["coordinates"]),
            Outside(data["outside"]),
        )


def haversine_m(
    lon0: NDArray[np.float64] | float,
    lat0: NDArray[np.float64] | float,
    lon1: NDArray[np.float64] | float,
    lat1: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Great-circle distance in metres on a sphere of the mean earth radius.

    Examples
    --------
    >>> round(float(haversine_m(0.0, 0.0, 1.0, 0.0)))
    111195
    """
    phi0, phi1 = np.radians(lat0), np.radians(lat1)
    half_lat = np.sin((phi1 - phi0) / 2.0)
    half_lon = np.sin((np.radians(lon1) - np.radians(lon0)) / 2.0)
    a = half_lat * half_lat + np.cos(phi0) * np.cos(phi1) * half_lon * half_lon
    result: NDArray[np.float64] = 2.0 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.minimum(a, 1.0)))
    return result
