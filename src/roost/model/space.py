"""The bounded plane, its grid of cells, and distance.

Cells on the edge of the grid extend outwards without limit, so every finite point has exactly one
cell and every query finds it. A column is defined by its edges, not by a division: column ``i``
holds the doubles ``edges[i] <= x < edges[i + 1]``. The cell is therefore a monotone, exact function
of the coordinate; the matching index relies on this when it excludes a point by its cell alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roost.errors import ConfigError

# Settings import this module, and `import roost` imports settings: functions import numpy.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Degrees = NDArray[np.float64] | float

EARTH_RADIUS_M = 6_371_008.8
GRID_SIDE_MAX = 1 << 15
CIRCLE_LON_LIMIT = 540.0  # longitudes may wrap around once on each side


class Coordinates(StrEnum):
    """Meaning of x and y, and the unit of a circle's radius."""

    LONLAT = "lonlat"  # degrees; radius in metres along the sphere
    PLANE = "plane"  # any unit; radius in that unit


class Outside(StrEnum):
    """How points and queries beyond the bounds are treated."""

    EXACT = "exact"  # matched: edge cells extend outwards
    DEAD = "dead"  # rejected, with a dead letter


@dataclass(frozen=True, slots=True)
class Rect:
    """A closed rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float

    def __post_init__(self) -> None:
        values = astuple(self)
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
    """Return the strictly increasing borders of equal cells between two numbers.

    Examples
    --------
    >>> axis_edges(0.0, 1.0, 4).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    import numpy as np

    edges = low + (high - low) * (np.arange(cells + 1) / cells)
    edges[-1] = high
    if not bool(np.all(np.diff(edges) > 0)):
        raise ConfigError("space.bounds", (low, high), f"a range wide enough for {cells} cells")
    return edges


def locate_axis(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the cell of each value on one axis; values beyond the ends are in the end cells."""
    import numpy as np

    cell = np.searchsorted(edges, values, side="right") - 1
    return np.clip(cell, 0, edges.size - 2).astype(np.int32)


@dataclass(frozen=True)
class Grid:
    """Columns by rows of equal cells over a rectangle.

    Examples
    --------
    >>> import numpy as np
    >>> grid = Grid(Rect(0.0, 0.0, 10.0, 10.0), 10, 10)
    >>> grid.locate(np.array([2.5, 99.0]), np.array([0.0, -5.0])).tolist()
    [2, 9]
    """

    bounds: Rect
    columns: int
    rows: int

    def __post_init__(self) -> None:
        for side in (self.columns, self.rows):
            if not 1 <= side <= GRID_SIDE_MAX:
                expected = f"CxR with both from 1 to {GRID_SIDE_MAX}"
                raise ConfigError("space.grid", f"{self.columns}x{self.rows}", expected)

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
        """Number of cells."""
        return self.columns * self.rows

    def locate(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the row-major cell number of each point."""
        import numpy as np

        column = locate_axis(x, self.edges_x)
        row = locate_axis(y, self.edges_y)
        return row * np.int32(self.columns) + column


@dataclass(frozen=True)
class Space:
    """The bounded plane with its grid."""

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
        """Return JSON data for the state directory."""
        return {**asdict(self), "bounds": list(astuple(self.bounds))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Space:
        """Inverse of :meth:`to_json`."""
        kinds = Coordinates(data["coordinates"]), Outside(data["outside"])
        return cls(Rect(*data["bounds"]), data["columns"], data["rows"], *kinds)


def haversine_m(lon0: Degrees, lat0: Degrees, lon1: Degrees, lat1: Degrees) -> NDArray[np.float64]:
    """Return the great-circle distance in metres on a sphere of the mean earth radius.

    Examples
    --------
    >>> round(float(haversine_m(0.0, 0.0, 1.0, 0.0)))
    111195
    """
    import numpy as np

    phi0, phi1 = np.radians(lat0), np.radians(lat1)
    half_lat = np.sin((phi1 - phi0) / 2.0)
    half_lon = np.sin((np.radians(lon1) - np.radians(lon0)) / 2.0)
    a = half_lat * half_lat + np.cos(phi0) * np.cos(phi1) * half_lon * half_lon
    result: NDArray[np.float64] = 2.0 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.minimum(a, 1.0)))
    return result
