"""Distances, with the formula of the kernel's circle test."""

from __future__ import annotations

import math

from numba import njit

from roost.kernel.shapes import half_arc
from roost.model.space import EARTH_RADIUS_M


@njit(cache=True, nogil=True)
def arc_m(arc: float) -> float:  # pragma: no cover - compiled
    """Return the distance in metres of a haversine."""
    return 2.0 * EARTH_RADIUS_M * math.asin(math.sqrt(min(max(arc, 0.0), 1.0)))


@njit(cache=True, nogil=True)
def apart(
    x0: float, y0: float, x1: float, y1: float, lonlat: bool
) -> float:  # pragma: no cover - compiled
    """Return the distance: metres on the sphere for lon/lat, coordinate units on a plane."""
    if lonlat:
        return arc_m(half_arc(x0, y0, x1, y1))
    dx = x1 - x0
    dy = y1 - y0
    return math.sqrt(dx * dx + dy * dy)
