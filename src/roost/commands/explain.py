"""Explain a dataflow in a Python file, before it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter

import pyarrow as pa
import pyarrow.parquet as pq

from roost.dataflow.explain import Explanation
from roost.dataflow.flow import Dataflow
from roost.dataflow.loading import load_flow
from roost.dataflow.operators import Source
from roost.dataflow.schema import resolve
from roost.errors import ConfigError, SourceError
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.runtime.flow_layout import Sample
from roost.runtime.flow_sample import first_rows, sample_flow
from roost.stages.flow_costs import measure_exchange
from roost.stages.flow_routing import stage_of
from roost.stages.flow_source import own_schemas
from roost.stages.point_files import find_files
from roost.stages.schema import point_schema
from roost.stages.slices import Slice
from roost.stages.sources import open_source, parse_generator
from roost.storage.store import Store

SAMPLE = Path(__file__).parents[1] / "data" / "sample_points.parquet"
SAMPLE_S = 3.0  # of sample runs with as many machines
BATCH_ROWS = 1_000_000  # tuples of a batch for which layouts are compared


def explain_flow(
    flow: str,
    machines: int | None = None,
    points: str | None = None,
    layout: str | None = None,
    rows: int = BATCH_ROWS,
) -> Explanation:
    """Explain the dataflow ``FILE.py:NAME``; one that reads points has the columns of a file.

    By default these are the points of the bundled sample. Exchanges are measured on this host, and
    operators in a sample run if the sources can be read; ``rows`` is the size of a batch.
    """
    loaded = load_flow(flow)
    own = {}
    if loaded.reads_points:
        columns = _columns(str(SAMPLE) if points is None else points)
        own = own_schemas(point_schema(columns, RunConfig(), numbered=True), pa.string())
    sample = _sampled(loaded, rows)
    return loaded.explain(
        machines,
        costs=None if sample is None else sample.seconds,
        model=measure_exchange(resolve(loaded.name, loaded.operators, own), rows),
        own=own,
        layout=LayoutName(layout or LayoutName.AUTO),
    )


def _sampled(flow: Dataflow, rows: int) -> Sample | None:
    """Run a sample of the sources; None if one has no path that this process can read."""
    slices: dict[str, Sequence[Slice]] = {}
    with tempfile.TemporaryDirectory() as name, closing(Store(Path(name) / "state")) as store:
        for source in (o for o in flow.operators if isinstance(o, Source)):
            if source.path is None or source.path.startswith("kafka:"):
                return None
            try:
                time = source.time or ""
                opened = open_source(source.path, "auto", time, store, None, perf_counter)
            except SourceError:
                return None
            slices[stage_of(source.name)] = first_rows(opened, rows)
        return sample_flow(flow, slices, limit_s=SAMPLE_S)


def _columns(points: str) -> pa.Schema:
    if points.startswith("generate:"):
        return parse_generator(points, lambda: 0.0).schema
    files = find_files(points, "auto")
    if not files or files[0].suffix != ".parquet":
        raise ConfigError("--points", points, "a Parquet file or generate:…")
    return pq.read_schema(files[0]).remove_metadata()
