"""Brute force over points and queries: the oracle that results are compared with.

Written from the definitions (closed shapes, haversine, GEOS for polygons, half-open lifetimes),
independent of the engine, and slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import shapely

EARTH_RADIUS_M = 6_371_008.8


def haversine(lon0: float, lat0: float, lon1: float, lat1: float) -> float:
    """Return the distance of two places on the sphere, in metres."""
    phi0, phi1 = math.radians(lat0), math.radians(lat1)
    a = math.sin((phi1 - phi0) / 2) ** 2
    a += math.cos(phi0) * math.cos(phi1) * math.sin(math.radians(lon1 - lon0) / 2) ** 2
    return 2 * EARTH_RADIUS_M * math.asin(math.sqrt(min(1.0, a)))


def covers(query: Mapping[str, Any], x: float, y: float, lonlat: bool) -> bool:
    """Return whether a query's shape has a point."""
    if query.get("wkt") is not None:
        return bool(shapely.from_wkt(query["wkt"]).intersects(shapely.Point(x, y)))
    if query.get("radius") is not None:
        if lonlat:
            return bool(haversine(query["cx"], query["cy"], x, y) <= query["radius"])
        return bool((x - query["cx"]) ** 2 + (y - query["cy"]) ** 2 <= query["radius"] ** 2)
    return bool(query["x0"] <= x <= query["x1"] and query["y0"] <= y <= query["y1"])


def brute_force(
    points: Iterable[Mapping[str, Any]],
    queries: Iterable[Mapping[str, Any]],
    *,
    lonlat: bool,
    predicate: Callable[[str, Mapping[str, Any]], bool] = lambda text, point: True,
) -> list[tuple[Any, Any]]:
    """Return sorted (query id, point id) pairs.

    Points have ``id``, ``x``, ``y`` and ``time``; queries have ``query_id``, the fields of a shape,
    and optionally ``live_from``, ``live_until`` and a ``predicate``, which the function evaluates.
    """
    pairs = []
    queries = list(queries)
    for point in points:
        for query in queries:
            if query.get("live_from") is not None and point["time"] < query["live_from"]:
                continue
            if query.get("live_until") is not None and point["time"] >= query["live_until"]:
                continue
            if not covers(query, point["x"], point["y"], lonlat):
                continue
            if query.get("predicate") and not predicate(query["predicate"], point):
                continue
            pairs.append((query["query_id"], point["id"]))
    return sorted(pairs)
