"""Pass matches to a Python function, in addition to the Parquet files.

A sink receives a batch before the batch is committed. If the driver fails in between, the batch
runs again, and the sink receives the same matches under the same batch id. This sink counts the
matches of a batch only after its commit, so it counts each match once.

Run it with ``python examples/callback_sink.py [FOLDER]``, with a new folder.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from roost import Circle, Pipeline, Query, RunConfig
from roost.engine.sinks import CallbackSink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

POINTS = "generate:rows=200000,rate=10000,seed=7"
CITIES = {
    "delhi": (77.21, 28.63),
    "lagos": (3.39, 6.45),
    "são paulo": (-46.63, -23.55),
    "tokyo": (139.69, 35.69),
}


class Alerts:
    """Counts large values by city, each batch once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._open: tuple[int, Counter[str]] | None = None

    def receive(self, batch_id: int, matches: pa.Table) -> None:
        """Receive matches of a batch; a large batch arrives in several tables."""
        if self._open is None or self._open[0] != batch_id:
            self._open = (batch_id, Counter())
        self._open[1].update(matches["query_id"].to_pylist())

    def finish(self, batch_id: int) -> None:
        """Add a committed batch, which will not be repeated."""
        if self._open is not None and self._open[0] == batch_id:
            self.counts += self._open[1]


def main(out: Path, spark: SparkSession | None = None) -> Counter[str]:
    """Return the number of alerts of each city."""
    alerts = Alerts()
    config = RunConfig(points={"path": POINTS}, out={"dir": out}, engine={"batch_rows": 50_000})
    with Pipeline(
        config,
        spark=spark,
        sinks=[CallbackSink(alerts.receive)],
        on_batch=lambda commit: alerts.finish(commit.batch_id),
    ) as pipeline:
        for name, (lon, lat) in CITIES.items():
            pipeline.request(Query(name, Circle(lon, lat, 50_000.0), predicate="value > 60"))
        pipeline.run()
    for name, count in alerts.counts.most_common():
        print(f"{count:6,}  {name}")
    return alerts.counts


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/callback_sink"))
