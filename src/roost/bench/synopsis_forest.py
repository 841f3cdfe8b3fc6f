"""The forest of ``roost bench synopsis``: rows of a synopsis instead of the original ones.

Random forests of Spark ML learn the temperature from place, time, pressure and wind, as in the
paper's table 3: from all training rows, and from 10 % and 20 % of them, sampled and synthetic. They
are tested on 30 % of the rows, which the sketch of the others has not seen. Synthetic rows come
from a sketch with the settings and the budget of the others, relative to the rows.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.common import CORES, Row
from roost.bench.synopsis_cases import HOUR_US
from roost.engine.baselines.forest import train_forest
from roost.engine.session import make_session
from roost.synopsis import Synopsis, SynopsisSpec, build, fit_memory, synthesize

PREDICTORS = ("lon", "lat", "day", "hour", "pressure_hpa", "wind_speed_ms")
TARGET = "temp_c"
DRIVER_MEMORY = "3g"
# Kind and share of the rows to learn from.
CASES = (
    ("all", 1.0),
    *((kind, share) for share in (0.1, 0.2) for kind in ("sample", "synthetic")),
)
DEPTHS = (5, 10)  # Spark's default, and the one of the summary
TEST_SHARE = 0.3
REPEATS, REPEATS_QUICK = 2, 1


@dataclass(frozen=True)
class _Source:
    """Training rows, and a sketch of them."""

    rows: pa.Table
    synopsis: Synopsis

    def draw(self, kind: str, share: float, seed: int) -> pa.Table:
        """Return rows of a kind."""
        if kind == "synthetic":
            return synthesize(self.synopsis, share, seed=seed)
        number = round(share * self.rows.num_rows)
        chosen = np.random.default_rng(seed).permutation(self.rows.num_rows)[:number]
        return self.rows.take(pa.array(np.sort(chosen)))


def measure_forests(
    table: pa.Table, spec: SynopsisSpec, bytes_per_row: float, seed: int, quick: bool
) -> tuple[Row, list[Row]]:
    """Train and test all forests; returns the summary and a row for each case and depth."""
    held = np.random.default_rng(seed).random(table.num_rows) < TEST_SHARE
    train, test = (table.filter(pa.array(part)) for part in (~held, held))
    fitted = fit_memory(build(train, spec), int(bytes_per_row * train.num_rows))
    source = _Source(train, fitted)
    spark = make_session(f"local[{CORES}]", {"spark.driver.memory": DRIVER_MEMORY})
    rows = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            tested = _write(test, Path(scratch, "test.parquet"))
            for depth in DEPTHS:
                for kind, share in CASES:
                    runs: list[Row] = []
                    for k in range(REPEATS_QUICK if quick else REPEATS):
                        part = source.draw(kind, share, seed + k)
                        path = _write(part, Path(scratch, "train.parquet"))
                        settings = {"depth": depth, "seed": seed + k}
                        run = train_forest(spark, path, tested, PREDICTORS, TARGET, **settings)
                        runs.append(asdict(run) | {"mb": Path(path).stat().st_size / 1e6})
                    means = {key: mean(run[key] for run in runs) for key in runs[0]}
                    rows.append({"kind": kind, "share": share, "depth": depth, **means})
    finally:
        spark.stop()
    rmse = {(row["kind"], row["share"]): row["rmse"] for row in rows if row["depth"] == DEPTHS[-1]}
    synthetic = rmse["synthetic", 0.1]
    summary = {
        "rmse_ratio_10pct": synthetic / rmse["all", 1.0],
        "rmse_ratio_vs_sample": synthetic / rmse["sample", 0.1],
    }
    return summary, rows


def _write(table: pa.Table, path: Path) -> str:
    """Write rows with the predictors of time to a file."""
    hours = np.asarray(table["event_time"].cast(pa.int64())) // HOUR_US
    columns = {name: table[name] for name in (*PREDICTORS, TARGET) if name in table.column_names}
    columns |= {"day": pa.array(hours / 24.0), "hour": pa.array((hours % 24).astype(np.float64))}
    pq.write_table(pa.table(columns), path, row_group_size=1 << 17)
    return str(path)
