"""Train a random forest on synthetic rows of a synopsis instead of the rows themselves.

Stations measure temperature, pressure and wind. A synopsis of the training rows replaces them: a
tenth of their number is drawn from it, written as Parquet, and a forest of Spark ML learns the
temperature from it. Its error on rows that the synopsis has not seen is compared with that of a
forest that learned from all training rows.

Run it with ``python examples/synthetic_forest.py [FOLDER]``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roost.engine.session import make_session
from roost.synopsis import SynopsisSpec, build, synthesize

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEATURES = ("temp_c", "pressure_hpa", "wind_ms")
PREDICTORS = ("lon", "lat", "hour", "pressure_hpa", "wind_ms")
STATIONS, HOURS = 60, 24 * 60
NOISE_C = 1.5
SHARE = 0.1


def measure(seed: int = 1) -> pa.Table:
    """Simulate hourly rows of all stations."""
    rng = np.random.default_rng(seed)
    lon, lat = rng.uniform(-55.0, -40.0, STATIONS), rng.uniform(-30.0, -5.0, STATIONS)
    hour, station = (part.ravel() for part in np.indices((HOURS, STATIONS)))
    pressure = 1010.0 + rng.normal(0.0, 4.0, hour.size)
    wind = rng.gamma(2.0, 1.5, hour.size)
    temp = 26.0 + 0.25 * lat[station] + 5.0 * np.sin((hour % 24 - 9) / 24 * 2 * np.pi)
    temp += 0.2 * (1010.0 - pressure) - 0.5 * wind + rng.normal(0.0, NOISE_C, hour.size)
    return pa.table(
        {
            "event_time": pa.array(
                (1_704_067_200 + hour * 3600) * 1_000_000, pa.timestamp("us", "UTC")
            ),
            "lon": lon[station],
            "lat": lat[station],
            "temp_c": pa.array(temp, pa.float32()),
            "pressure_hpa": pa.array(pressure, pa.float32()),
            "wind_ms": pa.array(wind, pa.float32(), mask=rng.random(hour.size) < 0.05),
        }
    )


def main(out: Path, spark: SparkSession | None = None) -> dict[str, float]:
    """Return the error of the forest by the rows it has learned from."""
    session = spark or make_session()
    rows = measure()
    held = np.random.default_rng(2).random(rows.num_rows) < 0.3
    train, test = rows.filter(pa.array(~held)), rows.filter(pa.array(held))
    synopsis = build(train, SynopsisSpec.of(train.schema, FEATURES, bins=48))
    synthetic = synthesize(synopsis, SHARE, seed=3)
    out.mkdir(parents=True, exist_ok=True)
    tables = {"all": train, "synthetic": synthetic, "test": test}
    for name, table in tables.items():
        hours = pc.cast(pc.hour(table["event_time"]), pa.float64())
        pq.write_table(table.append_column("hour", hours), out / f"{name}.parquet")
    errors = {name: error_of(session, out, name) for name in ("all", "synthetic")}
    print(f"{train.num_rows} rows of {train.nbytes / 1e6:.1f} MB")
    print(f"synopsis of {synopsis.nbytes / 1e6:.1f} MB, {synthetic.num_rows} synthetic rows")
    for name, error in errors.items():
        print(f"trained on {name} rows: {error:.2f} degrees")
    if spark is None:
        session.stop()
    return errors


def error_of(spark: SparkSession, folder: Path, name: str) -> float:
    """Train a forest on a file of the folder, and return its error on the test rows."""
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.regression import RandomForestRegressor

    vectors = VectorAssembler(inputCols=list(PREDICTORS), outputCol="features")
    train, test = (
        vectors.transform(spark.read.parquet(str(folder / f"{part}.parquet")).dropna())
        for part in (name, "test")
    )
    forest = RandomForestRegressor(labelCol="temp_c", maxDepth=8, seed=1)
    evaluator = RegressionEvaluator(labelCol="temp_c", metricName="rmse")
    return float(evaluator.evaluate(forest.fit(train).transform(test)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/synthetic_forest"))
