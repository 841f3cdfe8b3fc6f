"""Dataflows from files: loading, settings, runs in process, report, inspection, explanation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import Dataflow, RunConfig
from roost.cli import build_parser, main, run_config
from roost.commands.explain import explain_flow
from roost.commands.inspect import inspect_state
from roost.dataflow.loading import load_flow
from roost.dataflow.operators import Map
from roost.errors import ConfigError, DataflowError
from roost.testing import InProcessPipeline

CALLS = """
from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from roost import Dataflow
from helper_of_calls import SCALE, doubled


@dataclass
class Limits:  # finds its module in sys.modules while the file runs
    low: int = 0


def scaled(rows: pa.RecordBatch) -> pa.RecordBatch:
    values = doubled(rows.column("v").to_pylist())
    return pa.RecordBatch.from_pydict({"k": rows.column("k"), "v": values}, schema=SCHEMA)


SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
flow = Dataflow("calls")
calls = flow.source("calls", {"k": "int64", "v": "int64", "t": "int64"}, time="t", path="no-such")
sums = calls.map(scaled, schema=SCHEMA, name="scale").aggregate(
    {"total": "sum(v)"}, by="k", size=10, name="sums"
)
sums.sink("written")
number = 5
"""
HELPER = "SCALE = 2\n\n\ndef doubled(values):\n    return [value * SCALE for value in values]\n"


@pytest.fixture
def calls(tmp_path: Path) -> str:
    """Return a file with a dataflow that imports a module of its folder."""
    (tmp_path / "helper_of_calls.py").write_text(HELPER)
    (tmp_path / "calls.py").write_text(CALLS)
    return f"{tmp_path / 'calls.py'}:flow"


@pytest.fixture(autouse=True)
def no_helper() -> Any:
    """Forget the module that a flow file imports: each test has its own folder."""
    yield
    module = sys.modules.pop("helper_of_calls", None)
    if module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)


def roost(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def written(tmp_path: Path, rows: int = 40) -> Path:
    """Write a file of calls: key k has every fourth row, row 0 has no key, row 1 no time."""
    table = pa.table(
        {
            "k": pa.array([None, *(n % 4 for n in range(1, rows))], pa.int64()),
            "v": pa.array(range(rows), pa.int64()),
            "t": pa.array([0, None, *range(2, rows)], pa.int64()),
        }
    )
    path = tmp_path / "calls.parquet"
    pq.write_table(table, path)
    return path


# -- loading


def test_a_file_is_loaded_as_a_module_that_cannot_be_imported(calls: str, tmp_path: Path) -> None:
    before, path = set(sys.modules), list(sys.path)
    flow = load_flow(calls)
    assert flow.name == "calls"
    assert set(sys.modules) - before == {"helper_of_calls"}
    assert sys.path == path
    (function,) = [o.function for o in flow.operators if isinstance(o, Map)]
    pickled = cloudpickle.dumps(function)
    (tmp_path / "helper_of_calls.py").unlink()
    del sys.modules["helper_of_calls"]
    rows = pa.RecordBatch.from_pydict({"k": [1], "v": [21], "t": [0]})
    assert cloudpickle.loads(pickled)(rows).column("v").to_pylist() == [42]


BAD_FILES = {
    "no file": (None, "flow", "a readable file (No such file or directory)"),
    "no name": ("from roost import Dataflow\nflow = Dataflow()\n", "flo", "did you mean flow?"),
    "no flow": ("x = 1\n", "flow", "the name of a Dataflow (the file has none)"),
    "another type": ("flow = 5\n", "flow", "flow is of type int; the file has none"),
    "syntax": ("a = 1\nb = = 2\n", "flow", "valid Python (line 2: invalid syntax)"),
    "null byte": ("a = 1\0\n", "flow", "valid Python ("),
    "exception": ("a = 1\nb = a / 0\n", "flow", "(line 2: ZeroDivisionError: division by zero)"),
    "in a function": (
        "from roost import Dataflow\nflow = Dataflow()\nflow.source('s', {'a': 'number'})\n",
        "flow",
        "(line 3: roost.errors.DataflowError: operator 's', column 'a': unknown type 'number'",
    ),
}


@pytest.mark.parametrize(("text", "name", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_without_the_dataflow_is_refused(tmp_path: Path, text, name, expected) -> None:
    path = tmp_path / "bad.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_flow(f"{path}:{name}")
    assert caught.value.key == "dataflow.flow"
    assert expected in str(caught.value)
    assert "roost_flow_bad" not in sys.modules


@pytest.mark.parametrize("text", ["flow.py", "flow.py:", ":flow", "flow.py:a b", 7])
def test_the_setting_names_a_file_and_a_name(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataflow\.flow.*expected FILE\.py:NAME"):
        RunConfig(dataflow={"flow": text})
    with pytest.raises(ConfigError, match=r"dataflow\.flow.*expected FILE\.py:NAME"):
        load_flow(text)


# -- settings of a run


def settings(*words: str) -> tuple[RunConfig, Dataflow | None]:
    return run_config(build_parser().parse_args(["run", *words]))


def test_a_dataflow_of_records_runs_without_matching(calls: str) -> None:
    config, flow = settings("--flow", calls, "--source", "calls=a=b.parquet")
    assert flow is not None and not flow.reads_points
    assert (config.points.path, config.queries.path) == (None, None)
    assert config.dataflow.sources == {"calls": "a=b.parquet"}
    both, _ = settings("--flow", calls, "--points", "p.parquet")
    assert both.points.path == "p.parquet"


def test_a_dataflow_that_reads_points_replays_the_sample_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from roost import Dataflow\nflow = Dataflow()\nflow.matches().sink('m')\n")
    config, flow = settings("--flow", f"{path}:flow")
    assert flow is not None and flow.reads_points
    assert config.points.path is not None and Path(config.points.path).is_file()
    assert not config.engine.available_now, "or the end of the sample would close no window"


def test_flags_and_file_have_the_settings_of_a_dataflow(calls: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    sources = '{ calls = "x", b = "y" }'
    path.write_text(f'[dataflow]\nflow = "{calls}"\nlateness = 5\nidle = 7\nsources = {sources}\n')
    config, _ = settings(str(path), "--source", "calls=z", "--flow-machines", "3")
    assert config.dataflow.sources == {"calls": "z", "b": "y"}
    assert (config.dataflow.lateness, config.dataflow.idle, config.dataflow.machines) == (5, 7, 3)
    config, _ = settings(str(path), "--flow-lateness", "2", "--flow-idle", "1")
    assert (config.dataflow.lateness, config.dataflow.idle) == (2, 1)


def test_a_source_flag_needs_name_and_path(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--source", "calls"])
    assert "got 'calls', expected NAME=PATH" in capsys.readouterr().err


def test_an_unknown_flow_file_exits_with_2(capsys, tmp_path: Path) -> None:
    code, _, err = roost(capsys, "run", "--flow", "no.py:flow", "--out", tmp_path / "out")
    assert (code, "dataflow.flow: got 'no.py:flow', expected a readable file" in err) == (2, True)
    assert not (tmp_path / "out").exists()


# -- runs


def config_of(tmp_path: Path, calls: str, **dataflow: Any) -> RunConfig:
    return RunConfig(
        out={"dir": tmp_path / "out"},
        engine={"batch_rows": 10},
        dataflow={"flow": calls, "machines": 2, **dataflow},
    )


def test_a_configured_dataflow_runs_and_is_reported(calls: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, calls, sources={"calls": str(written(tmp_path))})
    with InProcessPipeline(config) as pipeline:
        report = pipeline.run()
    files = sorted((tmp_path / "out" / "written").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    found = {(row["t"], row["k"]): row["total"] for row in rows}
    expected: dict[tuple[int, int], int] = {}
    for n in range(2, 40):
        window = (n // 10 * 10, n % 4)
        expected[window] = expected.get(window, 0) + 2 * n
    assert found == expected
    flow = report["dataflow"]
    assert flow["sources"] == {"calls": 40}
    assert flow["sinks"] == {"written": len(expected)}
    assert flow["dead"] == {"calls": {"null_time": 1}, "sums": {"null_key": 1}}
    assert flow["watermarks"]["sums"] == flow["watermarks"]["calls"] == "end"
    assert flow["state"]["sums"] == {"files": 0, "rows": 0, "bytes": 0}
    assert (report["points"], report["batches"] >= 4) == (0, True)


def test_records_that_are_no_tuples_become_dead_letters(tmp_path: Path) -> None:
    """A missing key is null, which only an operator with this key rejects."""
    at = "2024-01-01T00:00:0{}Z".format
    records: list[dict[str, Any]] = [
        {"k": 1, "at": at(1)}, {"k": 1.5, "at": at(2)}, {"k": 7}, {"at": at(3)},
        {"k": 8, "at": "soon"}, {"k": 1 << 70, "at": at(4)},
    ]  # fmt: skip
    lines = ["no record", *map(json.dumps, records)]
    (tmp_path / "calls.jsonl").write_text("\n".join(lines))
    flow = Dataflow("records")
    columns = {"k": "int64", "at": "timestamp[us, tz=UTC]"}
    calls = flow.source("calls", columns, time="at", path=str(tmp_path / "calls.jsonl"))
    calls.sink("all")
    calls.aggregate({"n": "count"}, by="k", size=10, name="by_key").sink("sums")
    with InProcessPipeline(RunConfig(out={"dir": tmp_path / "out"}), flow=flow) as pipeline:
        report = pipeline.run()
    assert report["dataflow"]["dead"] == {
        "calls": {"malformed": 1, "wrong_type": 3, "null_time": 1}, "by_key": {"null_key": 1}
    }  # fmt: skip
    assert report["dataflow"]["sinks"] == {"all": 2, "sums": 1}


def test_a_run_without_a_dataflow_reports_none(tmp_path: Path) -> None:
    config = RunConfig(points={"path": "generate:rows=10"}, out={"dir": tmp_path / "out"})
    with InProcessPipeline(config) as pipeline:
        assert pipeline.run()["dataflow"] is None
        assert inspect_state(config.out.state_dir).dataflow is None


def test_an_unknown_source_and_a_source_without_a_path_are_refused(
    calls: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"dataflow\.sources\.call: .*of the dataflow: calls"):
        InProcessPipeline(config_of(tmp_path, calls, sources={"call": "x"}))
    flow = Dataflow()
    flow.source("s", {"a": "int64"}).sink("out")
    with (
        InProcessPipeline(RunConfig(out={"dir": tmp_path / "out"}), flow=flow) as pipeline,
        pytest.raises(DataflowError, match="'s': no path"),
    ):
        pipeline.run()


def test_requests_without_points_are_refused(calls: str, tmp_path: Path) -> None:
    config = RunConfig(
        out={"dir": tmp_path / "out"}, dataflow={"flow": calls}, queries={"path": "q.parquet"}
    )
    with (
        InProcessPipeline(config) as pipeline,
        pytest.raises(ConfigError, match=r"queries\.path.*expected points\.path, too"),
    ):
        pipeline.run()
    assert not (tmp_path / "out").exists()


# -- inspection and explanation


def test_inspect_shows_the_dataflow(calls: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # in a file, tables are as wide as they need
    config = config_of(tmp_path, calls, sources={"calls": str(written(tmp_path))})
    config = RunConfig(out=config.out, dataflow=config.dataflow, engine={"available_now": True})
    with InProcessPipeline(config) as pipeline:
        pipeline.run()
    summary = inspect_state(config.out.state_dir).dataflow
    assert summary is not None
    (source,), (sums,) = summary.sources, summary.subqueries
    assert (source.name, source.kind, source.rows, source.newest) == ("calls", "records", 40, 39)
    assert (source.watermark, source.ended) == (39, False), "more rows may come in another run"
    assert (sums.operator, sums.kind, sums.window) == ("sums", "Aggregate", "time 10")
    assert (sums.keys, sums.epoch, sums.buckets) == ("k", 0, (128, 128))
    assert (sums.files, sums.rows, sums.watermark) == (2, 4, 30)
    assert sums.nbytes > 0
    code, out, _ = roost(capsys, "inspect", config.out.state_dir)
    text = " ".join(out.replace("│", " ").split())
    assert code == 0
    assert "sums Aggregate time 10 k epoch 0 2 x 128 2 4" in text
    assert "calls records 40 39 39" in text
    assert "batch points matches tuples results dead seconds" in text.replace("┃ ", "")
    results = sum(pq.read_metadata(path).num_rows for path in (config.out.dir / "written").iterdir()
                  if path.suffix == ".parquet")  # fmt: skip
    assert f"0 0 0 40 {results} 2" in text and results, "two of the calls are rejected"


def test_inspect_shows_timestamps(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    flow = Dataflow("calls")
    schema = {"k": "int64", "at": "timestamp[us, tz=UTC]"}
    path = tmp_path / "calls.parquet"
    times = pa.array([0, 61_500_000, 130_000_000], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"k": [1, 1, 1], "at": times}), path)
    calls = flow.source("calls", schema, time="at", path=str(path))
    calls.aggregate({"n": "count"}, by="k", size=60, name="sums").sink("written")
    config = RunConfig(out={"dir": tmp_path / "out"}, engine={"available_now": True})
    with InProcessPipeline(config, flow=flow) as pipeline:
        pipeline.run()
    _, out, _ = roost(capsys, "inspect", config.out.state_dir)
    text = " ".join(out.replace("│", " ").split())
    assert "calls records 3 1970-01-01T00:02:10 1970-01-01T00:02:10" in text
    assert "1 x 256" not in text and "1970-01-01T00:02:00" in text, "the open window"


def test_a_dataflow_is_explained(calls: str, capsys) -> None:
    code, out, _ = roost(capsys, "flow", "explain", calls, "--machines", "4")
    assert code == 0
    text = " ".join(out.split())
    assert "sums sums, written (prefix) k 256 time 10 panes 2" in text
    assert re.search(r"operator_set 1 2 4 [\d.e-]+ auto 1 2 4 [\d.e-]+ runs", text), text
    assert "aggregated before the exchange: sums" in text
    code, out, _ = roost(capsys, "flow", "explain", calls, "--layout", "query_cloud")
    assert code == 0 and re.search(r"query_cloud .* runs operator_cloud", " ".join(out.split()))
    assert explain_flow(calls, 4).runs.channels == 4


def test_a_dataflow_of_matches_is_explained_with_the_columns_of_points(
    tmp_path: Path, capsys
) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from roost import Dataflow\n"
        "flow = Dataflow()\n"
        "counts = flow.matches().aggregate({'n': 'count'}, by='query_id', size=60)\n"
        "counts.sink('counts')\n"
    )
    for points in ([], ["--points", "generate:rows=5"]):
        code, out, _ = roost(capsys, "flow", "explain", f"{path}:flow", *points)
        assert (code, "query_id" in out) == (0, True)
    code, _, err = roost(capsys, "flow", "explain", f"{path}:flow", "--points", tmp_path / "own.py")
    assert (code, "expected a Parquet file or generate:" in err) == (2, True)
    for flag in ("--machines", "--rows"):
        code, _, err = roost(capsys, "flow", "explain", f"{path}:flow", flag, "0")
        assert (code, f"{flag}: got 0" in err) == (2, True)
    with pytest.raises(SystemExit):
        roost(capsys, "flow", "explain", f"{path}:flow", "--layout", "operator-set")
    names = "'query_cloud', 'operator_cloud', 'operator_set', 'auto'"
    assert re.search(rf"choose from {names}|choose from {names.replace(chr(39), '')}",
                     capsys.readouterr().err)  # fmt: skip
