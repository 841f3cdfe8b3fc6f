"""Sinks of a dataflow beside Parquet: which rows they receive, and what stays on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import Dataflow, RunConfig
from roost.errors import ConfigError
from roost.testing import InProcessPipeline

ROWS = [{"k": number % 3, "t": number} for number in range(100)]


class Receiver:
    """Notes the rows of each batch."""

    def __init__(self, of: str) -> None:
        self.of = of
        self.batches: dict[int, list[dict[str, Any]]] = {}

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        assert batch_id not in self.batches
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        self.batches[batch_id] = rows


def run(folder: Path, sink: str, receivers: Sequence[Any]) -> dict[str, Any]:
    flow = Dataflow("two sinks")
    source = flow.source("s", {"k": "int64", "t": "int64"}, time="t")
    ones, rest = source.split("k = 1")
    ones.sink("ones")
    rest.sink("rest")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    config = RunConfig(
        dataflow={"sources": {"s": str(folder / "rows.parquet")}},
        engine={"batch_rows": 40, "machines": 2},
        out={"dir": folder / "out", "sink": sink},
    )
    with InProcessPipeline(config, flow=flow, sinks=receivers) as pipeline:
        report: dict[str, Any] = pipeline.run()
    return report


def stored(folder: Path, sink: str) -> list[int]:
    files = (folder / "out" / sink).rglob("*.parquet")
    return sorted(row["t"] for file in files for row in pq.read_table(file).to_pylist())


@pytest.mark.parametrize("sink", ["parquet", "count"])
def test_a_sink_receives_the_rows_of_its_name(sink: str, tmp_path: Path) -> None:
    receiver = Receiver("ones")
    report = run(tmp_path, sink, [receiver])
    expected = [row["t"] for row in ROWS if row["k"] == 1]
    assert len(receiver.batches) == 3
    received = [(batch, row) for batch, rows in receiver.batches.items() for row in rows]
    assert sorted(row["t"] for _, row in received) == expected
    assert all(row["batch_id"] == batch for batch, row in received)
    assert report["dataflow"]["sinks"] == {"ones": len(expected), "rest": 100 - len(expected)}
    assert stored(tmp_path, "ones") == (expected if sink == "parquet" else [])
    assert len(stored(tmp_path, "rest")) == (100 - len(expected) if sink == "parquet" else 0)


def test_a_sink_of_an_unknown_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a result of the run: ones, rest"):
        run(tmp_path, "parquet", [Receiver("matches")])
