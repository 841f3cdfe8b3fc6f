"""Admission rules of a state directory, from the settings it was made with."""

from __future__ import annotations

import pyarrow as pa

from roost.model.schemas import TIMESTAMP
from roost.model.space import Coordinates, Rect, Space
from roost.queries.admission import POLYGON_VERTICES_MAX, Rules
from roost.storage.agreement import agreed
from roost.storage.store import View

WORLD = Rect(-180.0, -90.0, 180.0, 90.0)


def _attribute_schema(pairs: list[list[str]]) -> pa.Schema | None:
    """Rebuild the schema of the points' attributes from the recorded settings."""
    fields = []
    for name, text in pairs:
        try:
            fields.append((name, pa.type_for_alias(text)))
        except ValueError:
            if not text.startswith("timestamp"):
                return None  # another type: the run itself checks it
            fields.append((name, TIMESTAMP))
    return pa.schema(fields)


def rules_of(view: View) -> Rules:
    """Return the rules of a state directory; before its first run, the most permissive ones."""
    meta = agreed(view)
    if meta is None:
        space = Space(WORLD, coordinates=Coordinates.PLANE)
        return Rules(space, pa.string(), TIMESTAMP)
    id_type = pa.int64() if meta["query_id_type"] == "int64" else pa.string()
    time_type = pa.int64() if meta["types"][1] == "int64" else TIMESTAMP
    attributes = _attribute_schema(meta["attributes"])
    stored = None
    if "window" in meta and attributes is not None:
        stored = pa.schema([attributes.field(name) for name in meta["window_attributes"]])
    return Rules(
        Space.from_json(meta["space"]),
        id_type,
        time_type,
        attributes,
        meta.get("polygon_vertices_max", POLYGON_VERTICES_MAX),
        "window" in meta,
        stored,
        pa.int64() if meta["types"][0] == "int64" else pa.string(),
    )
