"""Explain a dataflow in a Python file, before it runs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roost.dataflow.explain import Explanation
from roost.dataflow.loading import load_flow
from roost.errors import ConfigError
from roost.model.settings import RunConfig
from roost.stages.flow_source import own_schemas
from roost.stages.point_files import find_files
from roost.stages.schema import point_schema
from roost.stages.sources import parse_generator

SAMPLE = Path(__file__).parents[1] / "data" / "sample_points.parquet"


def explain_flow(flow: str, machines: int | None = None, points: str | None = None) -> Explanation:
    """Explain the dataflow ``FILE.py:NAME``; one that reads points has the columns of a file.

    By default these are the points of the bundled sample.
    """
    loaded = load_flow(flow)
    if not loaded.reads_points:
        return loaded.explain(machines)
    schema = point_schema(
        _columns(str(SAMPLE) if points is None else points), RunConfig(), numbered=True
    )
    return loaded.explain(machines, own=own_schemas(schema, pa.string()))


def _columns(points: str) -> pa.Schema:
    if points.startswith("generate:"):
        return parse_generator(points, lambda: 0.0).schema
    files = find_files(points, "auto")
    if not files or files[0].suffix != ".parquet":
        raise ConfigError("--points", points, "a Parquet file or generate:…")
    return pq.read_schema(files[0]).remove_metadata()
