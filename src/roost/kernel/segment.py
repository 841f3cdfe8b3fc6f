"""Segment: an immutable set of queries with its index, as named arrays.

All data of a segment is in flat arrays, so it can be written to a file once and memory-mapped by
any number of processes. Columns that no query of the segment uses (times, predicates, shapes) are
absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import shapely
from numpy.typing import NDArray

from roost.kernel.boxes import BoxPostings, build_boxes
from roost.kernel.cells import IndexGrid, sort_points
from roost.kernel.ids import hash_ids, text_buffers
from roost.kernel.shapes import ShapePostings, Shapes, build_shapes
from roost.model.arrays import Floats, Ints, as_arrow, as_numpy, frozen
from roost.model.records import BOX, CIRCLE, POLYGON, TIME_MAX, TIME_MIN
from roost.model.space import EARTH_RADIUS_M, Coordinates, Space

Arrays = dict[str, NDArray[Any]]

# Arrays of a segment file, and the attributes of a segment that hold them; from "radius" on, an
# array may be absent.
_ARRAYS = {
    "kinds": "kinds",
    "boxes": "boxes",
    "keys": "keys",
    "key_slots": "key_slots",
    "radius": "radius",
    "live_from": "live_from",
    "live_until": "live_until",
    "timed": "timed",
    "predicate": "predicate",
    "wants": "outputs",
    "born": "created_position",
}


def query_schema(id_type: pa.DataType) -> pa.Schema:
    """Return the schema of admitted queries, before they are indexed."""
    return pa.schema(
        [
            ("query_id", id_type),
            ("user_id", pa.string()),
            ("kind", pa.int8()),
            ("x0", pa.float64()),
            ("y0", pa.float64()),
            ("x1", pa.float64()),
            ("y1", pa.float64()),
            ("radius", pa.float64()),  # the centre of a circle is x0, y0
            ("wkb", pa.binary()),
            ("predicate", pa.string()),
            ("live_from", pa.int64()),
            ("live_until", pa.int64()),
            ("output", pa.string()),  # requested instead of single matches; null for matches
            ("created_position", pa.int64()),  # log position, for queries with another output
        ]
    )


def circle_images(cx: float, cy: float, radius: float, space: Space) -> list[list[float]]:
    """Return boxes that together contain every point of a circle.

    In lon/lat coordinates a circle near the antimeridian also covers longitudes 360 degrees away.
    """
    if space.coordinates is Coordinates.PLANE:
        reach = radius * (1.0 + 1e-12)
        return [[cx - reach, cy - reach, cx + reach, cy + reach]]
    angle = radius / EARTH_RADIUS_M * (1.0 + 1e-9) + 1e-12
    reach_lat = float(np.degrees(angle))
    low, high = cy - reach_lat, cy + reach_lat
    left, right = longitude_range(space)
    if high >= 90.0 or low <= -90.0:
        return [[left, low, right, high]]
    reach = float(np.degrees(np.arcsin(min(1.0, np.sin(angle) / np.cos(np.radians(cy))))))
    reach = reach * (1.0 + 1e-9) + 1e-9
    images = [[cx - reach + turn, low, cx + reach + turn, high] for turn in (-360.0, 0.0, 360.0)]
    return [image for image in images if image[2] >= left and image[0] <= right]


def longitude_range(space: Space) -> tuple[float, float]:
    """Return the longitudes that a point may have: 360 degrees, or more if the bounds allow."""
    return min(-180.0, space.bounds.x0), max(180.0, space.bounds.x1)


def _polygon_edges(geometry: shapely.Geometry) -> Floats:
    """Return every edge of every ring as ``ax, ay, bx, by``."""
    rings = shapely.get_rings(shapely.get_parts(geometry))
    coordinates, ring = shapely.get_coordinates(rings, return_index=True)
    same = ring[1:] == ring[:-1]
    edges: Floats = np.hstack([coordinates[:-1], coordinates[1:]])[same]
    return edges


def _collect_shapes(columns: dict[str, NDArray[Any]], wkb: pa.Array, space: Space) -> Shapes:
    rows: list[tuple[int, int, Any, tuple[float, float, float], Floats]] = []
    for slot in np.flatnonzero(columns["kind"] != BOX).tolist():
        kind = int(columns["kind"][slot])
        if kind == CIRCLE:
            circle = (columns["x0"][slot], columns["y0"][slot], columns["radius"][slot])
            images: list[Any] = circle_images(*circle, space)
            edges = np.empty((0, 4))
        else:
            geometry = shapely.from_wkb(wkb[slot].as_py())
            circle, images = (0.0, 0.0, 0.0), [geometry.bounds]
            edges = _polygon_edges(geometry)
        rows += [(slot, kind, image, circle, edges) for image in images]
    return Shapes(
        np.array([row[0] for row in rows], np.int32),
        np.array([row[1] for row in rows], np.int8),
        np.array([row[2] for row in rows], np.float64).reshape(-1, 4),
        np.array([row[3] for row in rows], np.float64).reshape(-1, 3),
        np.cumsum([0, *(len(row[4]) for row in rows)]).astype(np.int64),
        np.concatenate([*(row[4] for row in rows), np.empty((0, 4))]),
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries with their index; ``ids[slot]`` is the identifier of the query in a slot.

    Text of a mapped segment is not validated or copied, so opening one reads little of its file.
    """

    size: int
    longest_list: int  # number of queries in the longest posting list
    ids: pa.Array
    users: pa.Array
    kinds: NDArray[np.int8]
    boxes: Floats
    keys: NDArray[np.uint64]
    key_slots: NDArray[np.int32]
    box_postings: BoxPostings | None
    shape_postings: ShapePostings | None
    radius: Floats | None
    live_from: Ints | None
    live_until: Ints | None
    timed: NDArray[np.bool_] | None  # whether either limits the query
    predicate: NDArray[np.int32] | None
    predicate_texts: tuple[str, ...]
    outputs: NDArray[np.int32] | None
    output_texts: tuple[str, ...]
    created_position: Ints | None
    wkb: pa.Array | None

    @property
    def postings(self) -> list[BoxPostings | ShapePostings]:
        """The posting lists that the segment has."""
        both = (self.box_postings, self.shape_postings)
        return [postings for postings in both if postings is not None]

    @property
    def id_type(self) -> pa.DataType:
        """Type of the identifiers."""
        return self.ids.type if pa.types.is_integer(self.ids.type) else pa.string()

    def ids_at(self, slots: NDArray[Any]) -> pa.Array:
        """Return the identifiers of some slots; numpy is faster for numbers."""
        if pa.types.is_integer(self.ids.type):
            return as_arrow(as_numpy(self.ids)[slots])
        return self.ids.take(as_arrow(slots)).cast(pa.string())

    def find(self, ids: pa.Array) -> tuple[Ints, NDArray[np.int32]]:
        """Find queries by identifier; return indices into ``ids`` and the slots found.

        An identifier may occur more than once; its slots come in ascending order.
        """
        keys = hash_ids(ids)
        first = np.searchsorted(self.keys, keys, side="left")
        counts = np.searchsorted(self.keys, keys, side="right") - first
        places = np.repeat(np.arange(len(ids)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        slots = self.key_slots[first[places] + np.arange(places.size) - before]
        if not pa.types.is_integer(self.ids.type):
            # Two texts may share a key, so the texts are compared.
            same = pc.equal(ids.take(pa.array(places)), self.ids_at(slots))
            mine = np.asarray(same.to_numpy(zero_copy_only=False), bool)
            places, slots = places[mine], slots[mine]
        return places, slots

    def bounds(self, space: Space, slots: Ints | None = None) -> tuple[Ints, Floats]:
        """Return slots and bounding boxes, of some queries or of all.

        A circle across the antimeridian has several boxes.
        """
        chosen = np.arange(self.size) if slots is None else slots
        circle = self.kinds[chosen] == CIRCLE
        owners = [chosen[~circle]]
        found = [np.asarray(self.boxes[owners[0]])]
        for slot in chosen[circle].tolist():
            assert self.radius is not None
            cx, cy = self.boxes[slot, :2].tolist()
            images = circle_images(cx, cy, float(self.radius[slot]), space)
            owners.append(np.full(len(images), slot))
            found.append(np.asarray(images, np.float64).reshape(-1, 4))
        return np.concatenate(owners), np.concatenate(found)

    def queries(self) -> pa.Table:
        """Return the queries as they were admitted (see :func:`query_schema`)."""
        nothing, created = pa.nulls(self.size), self.created_position
        circle, polygon = self.kinds == CIRCLE, self.kinds == POLYGON
        columns: dict[str, Any] = {
            "query_id": self.ids,
            "user_id": self.users,
            "kind": self.kinds,
            "x0": self.boxes[:, 0],
            "y0": self.boxes[:, 1],
            "x1": pa.array(self.boxes[:, 2], mask=circle),
            "y1": pa.array(self.boxes[:, 3], mask=circle),
            "radius": nothing if self.radius is None else pa.array(self.radius, mask=~circle),
            "wkb": nothing if self.wkb is None else pc.if_else(polygon, self.wkb, None),
            "predicate": _decode_texts(self.predicate, self.predicate_texts, self.size),
            "output": _decode_texts(self.outputs, self.output_texts, self.size),
            "created_position": nothing if created is None else pa.array(created, mask=created < 0),
            "live_from": or_full(self.live_from, self.size, TIME_MIN),
            "live_until": or_full(self.live_until, self.size, TIME_MAX),
        }
        schema = query_schema(self.id_type)
        return pa.table(
            [pa.array(columns[field.name]).cast(field.type) for field in schema], schema=schema
        )


def _decode_texts(codes: NDArray[np.int32] | None, texts: tuple[str, ...], size: int) -> pa.Array:
    if codes is None:
        return pa.nulls(size)
    return pa.array(texts, pa.string()).take(pa.array(codes, mask=codes < 0))


def or_full(values: Ints | None, size: int, default: int) -> Ints:
    """Return the values, or an array of the default if there are none."""
    return np.full(size, default, np.int64) if values is None else values


def _numpy(queries: pa.Table, name: str, default: int | None = None) -> NDArray[Any]:
    column = queries[name] if default is None else queries[name].fill_null(default)
    return np.asarray(_one_chunk(column).to_numpy(zero_copy_only=False))


def _unless_all(values: NDArray[Any], default: int) -> NDArray[Any] | None:
    return None if np.all(values == default) else values


def order_by_place(queries: pa.Table, space: Space) -> pa.Table:
    """Return queries in the Z-order of their centres (columns of :func:`query_schema`).

    Posting lists have this order in any case. With slots in it, too, all that a file has of the
    queries of a rectangle is in few of its pages.
    """
    columns = {name: _numpy(queries, name) for name in ("kind", "x0", "y0", "x1", "y1")}
    circle = columns["kind"] == CIRCLE
    x, y = (
        np.where(circle, columns[low], (columns[low] + columns[high]) / 2)
        for low, high in (("x0", "x1"), ("y0", "y1"))
    )
    return queries.take(as_arrow(sort_points(x, y, IndexGrid.over(space.bounds)).order))


def build_segment(queries: pa.Table, space: Space) -> Segment:
    """Index admitted queries (columns of :func:`query_schema`)."""
    queries = queries.combine_chunks()
    columns = {name: _numpy(queries, name) for name in ("kind", "x0", "y0", "x1", "y1", "radius")}
    kinds = columns["kind"].astype(np.int8)
    boxes = frozen(np.stack([columns[name] for name in ("x0", "y0", "x1", "y1")], axis=1))
    grid = IndexGrid.over(space.bounds)
    ids = _one_chunk(queries["query_id"])
    wkb = _one_chunk(queries["wkb"])

    box_slots = np.flatnonzero(kinds == BOX).astype(np.int32)
    box_postings = shape_postings = None
    if box_slots.size:
        own = boxes if box_slots.size == kinds.size else frozen(boxes[box_slots])
        box_postings = build_boxes(own, box_slots, grid)
    if box_slots.size < kinds.size:
        lonlat = space.coordinates is Coordinates.LONLAT
        shape_postings = build_shapes(_collect_shapes(columns, wkb, space), grid, lonlat=lonlat)

    predicate, texts = _encode_texts(queries["predicate"])
    outputs, output_texts = _encode_texts(queries["output"])
    keys = hash_ids(ids)
    order = np.argsort(keys, kind="stable")
    live_from = _unless_all(_numpy(queries, "live_from"), TIME_MIN)
    live_until = _unless_all(_numpy(queries, "live_until"), TIME_MAX)
    return Segment(
        size=int(kinds.size),
        longest_list=_longest(box_postings, shape_postings),
        ids=ids,
        users=_one_chunk(queries["user_id"]),
        kinds=kinds,
        boxes=boxes,
        keys=keys[order],
        key_slots=order.astype(np.int32),
        box_postings=box_postings,
        shape_postings=shape_postings,
        radius=columns["radius"] if CIRCLE in kinds else None,
        live_from=live_from,
        live_until=live_until,
        timed=_timed(live_from, live_until, int(kinds.size)),
        predicate=predicate,
        predicate_texts=texts,
        outputs=outputs,
        output_texts=output_texts,
        created_position=_unless_all(_numpy(queries, "created_position", -1), -1),
        wkb=wkb if POLYGON in kinds else None,
    )


def _longest(*lists: BoxPostings | ShapePostings | None) -> int:
    found = (int(np.diff(each.starts).max(initial=0)) for each in lists if each is not None)
    return max(found, default=0)


def _timed(live_from: Ints | None, live_until: Ints | None, size: int) -> NDArray[np.bool_] | None:
    if live_from is None and live_until is None:
        return None
    since, until = or_full(live_from, size, TIME_MIN), or_full(live_until, size, TIME_MAX)
    return np.asarray((since != TIME_MIN) | (until != TIME_MAX))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    chunk = column.combine_chunks()
    return chunk.chunk(0) if isinstance(chunk, pa.ChunkedArray) else chunk


def _encode_texts(column: pa.ChunkedArray) -> tuple[NDArray[np.int32] | None, tuple[str, ...]]:
    if column.null_count == len(column):
        return None, ()
    encoded = _one_chunk(pc.dictionary_encode(column))
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    return codes, tuple(encoded.dictionary.to_pylist())


def _pack_text(prefix: str, values: pa.Array, arrays: Arrays) -> None:
    arrays[f"{prefix}.offsets"], arrays[f"{prefix}.data"] = text_buffers(values)


def _unpack_text(prefix: str, arrays: Mapping[str, NDArray[Any]], to: pa.DataType) -> pa.Array:
    offsets, data = arrays[f"{prefix}.offsets"], arrays[f"{prefix}.data"]
    size = offsets.size - 1
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    if pa.types.is_large_string(to) or pa.types.is_large_binary(to):
        return pa.Array.from_buffers(to, size, buffers)
    return pa.Array.from_buffers(pa.large_binary(), size, buffers).cast(to)


def _unpack_texts(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    return tuple(_unpack_text(prefix, arrays, pa.string()).to_pylist())


def pack(segment: Segment) -> Arrays:
    """Return all arrays of a segment by the names that its file uses."""
    held = {name: getattr(segment, attribute) for name, attribute in _ARRAYS.items()}
    arrays: Arrays = {name: values for name, values in held.items() if values is not None}
    arrays["longest_list"] = np.array([segment.longest_list])
    if pa.types.is_integer(segment.ids.type):
        arrays["ids"] = segment.ids.to_numpy(zero_copy_only=False)
    else:
        _pack_text("ids", segment.ids, arrays)
    users = pc.dictionary_encode(segment.users)
    arrays["user_codes"] = users.indices.to_numpy(zero_copy_only=False)
    _pack_text("users", users.dictionary, arrays)
    _pack_text("predicates", pa.array(segment.predicate_texts, pa.string()), arrays)
    if segment.outputs is not None:
        _pack_text("wants_texts", pa.array(segment.output_texts, pa.string()), arrays)
    if segment.wkb is not None:
        _pack_text("wkb", segment.wkb, arrays)
    for prefix, postings in (("box", segment.box_postings), ("shape", segment.shape_postings)):
        if postings is not None:
            arrays |= {f"{prefix}.{name}": array for name, array in postings._asdict().items()}
    return arrays


def _group(prefix: str, kind: type[Any], arrays: Mapping[str, NDArray[Any]]) -> Any:
    if f"{prefix}.cells" not in arrays:
        return None
    return kind(**{name: arrays[f"{prefix}.{name}"] for name in kind._fields})


def unpack(arrays: Mapping[str, NDArray[Any]]) -> Segment:
    """Invert :func:`pack`, without copying the arrays, which may be memory-mapped."""
    plain = arrays.get("ids")
    ids = _unpack_text("ids", arrays, pa.large_string()) if plain is None else as_arrow(plain)
    users = _unpack_text("users", arrays, pa.string())
    held: dict[str, Any] = {name: arrays.get(stored) for stored, name in _ARRAYS.items()}
    size = int(arrays["kinds"].size)
    boxes, shapes = _group("box", BoxPostings, arrays), _group("shape", ShapePostings, arrays)
    if "longest_list" in arrays:
        longest = int(arrays["longest_list"][0])
    else:  # a file of version 0.1
        longest = _longest(boxes, shapes)
        held["timed"] = _timed(held["live_from"], held["live_until"], size)
    return Segment(
        size=size,
        longest_list=longest,
        ids=ids,
        # Checking the codes would read them all.
        users=pa.DictionaryArray.from_arrays(as_arrow(arrays["user_codes"]), users, safe=False),
        box_postings=boxes,
        shape_postings=shapes,
        predicate_texts=_unpack_texts("predicates", arrays),
        output_texts=_unpack_texts("wants_texts", arrays) if "wants" in arrays else (),
        wkb=_unpack_text("wkb", arrays, pa.large_binary()) if "wkb.offsets" in arrays else None,
        **held,
    )
