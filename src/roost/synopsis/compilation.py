"""Compile the loops of the synopsis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from roost.model.records import Circle
from roost.synopsis.bins import DROPPED
from roost.synopsis.coarsening import Resolution, coarsen
from roost.synopsis.density import density
from roost.synopsis.part import select
from roost.synopsis.planes import fit_memory
from roost.synopsis.scope import Scope
from roost.synopsis.set_queries import contains
from roost.synopsis.spec import SetSpec, SynopsisSpec
from roost.synopsis.statistics import correlation, count, mean
from roost.synopsis.synopsis import Synopsis, build, merge


def compile_loops() -> None:
    """Build, merge and query the synopsis of a few rows."""
    rows = 2_000
    table = pa.table(
        {
            "lon": np.linspace(0.0, 1.0, rows),
            "lat": np.zeros(rows),
            "event_time": pa.array(np.arange(rows) * 60_000_000, pa.timestamp("us", "UTC")),
            "a": np.arange(rows) % 7.0,
            "b": np.arange(rows) % 11.0,
            "c": ["x", "y"] * (rows // 2),
        }
    )
    own = SetSpec.of(table.schema, ["a", "c"])
    spec = SynopsisSpec.of(table.schema, ["a", "b"], bins=8, sets=(own,))
    built = build(table, spec)
    joined = merge([built, build(table.slice(0, rows // 2), spec, built.bins)])
    small = fit_memory(built, built.nbytes - 64)
    coarse = coarsen(built, replace(Resolution.of(spec, built.bins), halvings=(DROPPED, 1)))
    scope = Scope(Circle(0.5, 0.0, 20_000.0), since=0, until=10**11, predicate="a > 2 or b < 3")
    # Small groups: their rows are judged one by one.
    count(build(table.slice(0, 4), spec, built.bins), scope)
    # Mapped arrays are read-only, which numba compiles separately.
    opened = Synopsis.of(small.arrays())
    for synopsis in (built, joined, small, opened, coarse):
        assert correlation(synopsis, "a", "b", scope).records
        assert mean(synopsis, "a", Scope(until=10**11)).records
        density(synopsis, "a", [1.0], scope)
        count(synopsis, scope)
        select(synopsis, scope)
        assert contains(synopsis, {"a": 1.0, "c": "y"}).records
