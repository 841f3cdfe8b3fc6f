"""Spark SQL reads and merges the HyperLogLogs of a synopsis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from roost.synopsis import SetSpec, SynopsisSpec, build, cardinality
from roost.synopsis.sets import HLL

pytestmark = pytest.mark.spark
ROWS = 20_000


@pytest.mark.parametrize("type_", [pa.int32(), pa.string()], ids=str)
@pytest.mark.parametrize("distinct", [50, 8_000])
def test_spark_reads_and_merges_the_cardinality(spark: Any, type_: Any, distinct: int) -> None:
    keys = np.random.default_rng(distinct).integers(0, distinct, ROWS)
    table = pa.table(
        {
            "lon": np.zeros(ROWS),
            "lat": np.zeros(ROWS),
            "event_time": np.zeros(ROWS, np.int64),
            "size": np.ones(ROWS),
            "key": pa.array(keys).cast(type_),
        }
    )
    spec = SynopsisSpec.of(table.schema, ["size"], sets=(SetSpec.of(table.schema, ["key"]),))
    built = build(table, spec)
    sketch = bytes(built.sets.blob(0, HLL))
    estimate = "hll_sketch_estimate"
    frame = spark.createDataFrame([(sketch,)], "sketch binary")
    (mine,) = frame.selectExpr(f"{estimate}(sketch)").collect()
    result = cardinality(built, ["key"])
    assert mine[0] == pytest.approx(result.value, abs=0.5)
    truth = len(set(keys.tolist()))
    assert result.low <= truth <= result.high

    # A union with the sketch that Spark builds of the same column has no further values.
    frame = spark.createDataFrame([(key,) for key in table["key"].to_pylist()], ["key"])
    theirs = frame.selectExpr("hll_sketch_agg(key) as theirs").collect()[0][0]
    both = spark.createDataFrame([(sketch, bytes(theirs))], "mine binary, theirs binary")
    (united,) = both.selectExpr(f"{estimate}(hll_union(mine, theirs))").collect()
    assert united[0] == pytest.approx(result.value, abs=0.5)
