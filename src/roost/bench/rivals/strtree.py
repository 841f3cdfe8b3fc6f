"""Shapely's packed R-tree (STRtree): an in-memory index for Python, as a system to compare with.

Two forked workers inherit the tree. A worker reads one row group of the point file at a time and
queries the tree in slices, because all pairs of a row group at once would take gigabytes. It has
no streaming, no durable state and no predicates.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import shapely

from roost.bench.common import CORES
from roost.bench.rivals.protocol import MATCH_COLUMNS, RivalJob, job_of, measure, parser

SLICE_ROWS = 8_192

_tree: shapely.STRtree | None = None
_query_ids: npt.NDArray[np.int64] = np.empty(0, np.int64)


def load(job: RivalJob) -> None:
    """Build the tree of the job's queries, for this process and its forked workers."""
    global _tree, _query_ids
    table = pq.read_table(job.case.queries_path)
    _query_ids = table["query_id"].to_numpy()
    if job.case.kind == "boxes":
        shapes = shapely.box(*(table[name].to_numpy() for name in ("x0", "y0", "x1", "y1")))
    else:
        shapes = shapely.from_wkt(table["wkt"].to_numpy(zero_copy_only=False))
        shapely.prepare(shapes)
    _tree = shapely.STRtree(shapes)


def match_row_group(points_path: str, row_group: int, out: Path | None) -> int:
    """Match one row group of a point file; return the number of matches."""
    assert _tree is not None, "load() must be called first"
    columns = ["lon", "lat"] if out is None else ["id", "event_time", "lon", "lat"]
    table = pq.ParquetFile(points_path).read_row_group(row_group, columns=columns)
    points = shapely.points(table["lon"].to_numpy(), table["lat"].to_numpy())
    matches = 0
    parts: list[pa.Table] = []
    for start in range(0, len(points), SLICE_ROWS):
        at, queries = _tree.query(points[start : start + SLICE_ROWS], predicate="intersects")
        matches += len(at)
        if out is not None:
            rows = table.select(["id", "event_time"]).take(pa.array(at + start))
            columns_out = [_query_ids[queries], rows["id"], rows["event_time"]]
            parts.append(pa.table(columns_out, names=list(MATCH_COLUMNS)))
    if out is not None:
        pq.write_table(pa.concat_tables(parts), out / f"part-{row_group:05d}.parquet")
    return matches


def main() -> None:
    """Run one job from the command line."""
    job = job_of(parser("Match with shapely's STRtree.").parse_args())
    load(job)
    with multiprocessing.get_context("fork").Pool(CORES) as pool:

        def run(points_path: str, out: Path | None) -> int:
            if out is not None:
                out.mkdir()
            groups = pq.read_metadata(points_path).num_row_groups
            work = [(points_path, group, out) for group in range(groups)]
            return sum(pool.starmap(match_row_group, work, chunksize=1))

        measure(job, "strtree", f"shapely {shapely.__version__}", f"{CORES} processes", run)


if __name__ == "__main__":
    main()
