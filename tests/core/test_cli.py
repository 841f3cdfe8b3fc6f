"""The ``roost`` command without Spark: help, exit codes, queries, inspection, bad settings."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from roost import __version__
from roost.balance import initial_plan
from roost.cli import RUN_FLAGS, build_parser, main, run_config
from roost.commands.queries import QueryService
from roost.commands.snapshot import write_result
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.model.schemas import DEAD_SCHEMA, TIMESTAMP
from roost.model.settings import KEYS
from roost.model.space import Coordinates, Outside, Rect, Space
from roost.queries.admission import Rules
from roost.queries.live import QuerySet
from roost.runtime import records
from roost.runtime.records import Commit, Intent
from roost.storage.agreement import agree
from roost.storage.store import Fact, Store

SPACE = Space(Rect(-74.0, 40.0, -73.0, 41.0), 20, 10, Coordinates.LONLAT)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "out" / "state"


def roost(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*words, name))


COMMANDS = dict(parsers(build_parser()))


# -- help and use


def test_the_documented_commands_exist() -> None:
    assert set(COMMANDS) == {
        (), ("run",), ("bench",), ("query",), ("query", "register"), ("query", "terminate"),
        ("query", "list"), ("snapshot",), ("synopsis",),
        ("guard",), ("guard", "list"), ("guard", "log"), ("guard", "block"),
        ("guard", "unblock"), ("compile",), ("inspect",),
        ("flow",), ("flow", "explain"),
    }  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "roost")
def test_every_command_has_help(capsys, words: tuple[str, ...]) -> None:
    code, out, err = roost(capsys, *words, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: roost")
    for action in COMMANDS[words]._actions:
        for flag in action.option_strings:
            assert flag in out


def test_the_help_of_run_explains_every_flag_and_its_default(capsys) -> None:
    _, out, _ = roost(capsys, "run", "--help")
    text = " ".join(out.split())
    assert "exactly once" in text
    assert text.count("(default") >= 10
    for action in COMMANDS["run",]._actions:
        assert action.help, action.dest
    documented = (
        "--points --queries --out --state --strategy --machines --bounds --grid --batch-rows"
        " --available-now --report"
    )
    assert all(flag in out for flag in documented.split())


def test_the_help_lists_the_exit_codes(capsys) -> None:
    _, out, _ = roost(capsys, "--help")
    assert "Exit codes: 0 success, 1 failure, 2 usage error, 3 request refused" in out


def test_every_flag_of_run_is_a_setting() -> None:
    assert {row[1] for row in RUN_FLAGS} <= set(KEYS)


def test_the_version(capsys) -> None:
    assert roost(capsys, "--version")[:2] == (0, f"roost {__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        (), ("fly",), ("query",), ("inspect",), ("run", "--speedy"), ("query", "list"),
        ("query", "register", "q", "--state", "s"), ("run", "--machines", "two"),
        ("query", "register", "q", "--state", "s", "--box", "0,0,1,1", "--circle", "0,0,1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_usage_error_exits_with_2_and_prints_the_usage(capsys, words: tuple[str, ...]) -> None:
    code, out, err = roost(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("usage: roost")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def module(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "roost", *words]
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    assert module("--version").stdout == f"roost {__version__}\n"
    failed = module("run", str(tmp_path / "missing.toml"))
    assert failed.returncode == 2
    assert "expected a readable file" in failed.stderr
    assert "Traceback" not in failed.stderr


# -- settings of a run


def settings(*words: str):
    return run_config(build_parser().parse_args(["run", *words]))[0]


def test_without_arguments_the_bundled_sample_is_replayed() -> None:
    config = settings()
    assert config.engine.available_now
    assert config.points.path is not None and Path(config.points.path).is_file()
    assert config.queries.path is not None and Path(config.queries.path).is_file()


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[points]\npath = "a.parquet"\n[engine]\nmachines = 2\nbatch_rows = 5\n')
    config = settings(str(path), "--machines", "4", "--outside", "dead", "--speed", "1.5")
    assert (config.points.path, config.engine.machines, config.engine.batch_rows) == (
        "a.parquet",
        4,
        5,
    )
    assert (config.space.outside, config.points.speed) == (Outside.DEAD, 1.5)
    assert not config.engine.available_now
    assert settings(str(path), "--available-now").engine.available_now


BAD_SETTINGS = [
    (("--machines", "0"), "engine.machines: got 0, expected a whole number from 1 up"),
    (("--batch-rows", "-5"), "engine.batch_rows: got -5, expected a whole number from 1 up"),
    (("--bounds", "1,2,3"), "space.bounds: got '1,2,3', expected four numbers x0,y0,x1,y1"),
    (
        ("--bounds", "5,0,1,1"),
        "space.bounds: got (5.0, 0.0, 1.0, 1.0), expected x0 < x1 and y0 < y1",
    ),
    (("--grid", "many"), "space.grid: got 'many', expected CxR, such as 1000x1000"),
    (
        ("--strategy", "best"),
        "engine.strategy: got 'best', expected replicated or uniform or history",
    ),
    (("--outside", "maybe"), "space.outside: got 'maybe', expected exact or dead"),
    (("--speed", "fast"), "points.speed: got 'fast', expected max"),
    (("--sink", "kafka"), "out.topic: got None, expected kafka://HOST:PORT/TOPIC"),
    (("no-such.toml",), "config: got 'no-such.toml', expected a readable file"),
]


@pytest.mark.parametrize(("words", "message"), BAD_SETTINGS, ids=[w[0] for w, _ in BAD_SETTINGS])
def test_an_invalid_setting_exits_with_2_and_is_named(
    capsys, tmp_path, words, message: str
) -> None:
    code, out, err = roost(capsys, "run", "--out", tmp_path / "out", *words)
    assert (code, out) == (2, "")
    assert f"roost: {message}" in err
    assert not (tmp_path / "out").exists(), "no output is created"


def test_bounds_may_begin_with_a_negative_number(capsys, tmp_path: Path) -> None:
    missing = tmp_path / "missing.parquet"
    words = ("--bounds", "-74.05,40.6,-73.7,40.9", "--out", tmp_path / "out", "--points", missing)
    code, _, err = roost(capsys, "run", *words)
    assert code == 1
    assert f"no points at {missing}" in err


def test_a_missing_request_file_exits_with_1_and_is_named(capsys, tmp_path: Path) -> None:
    missing = tmp_path / "missing.parquet"
    code, _, err = roost(capsys, "run", "--queries", missing, "--out", tmp_path / "out")
    assert code == 1
    assert str(missing) in err


def test_an_unknown_bench_is_named(capsys) -> None:
    code, _, err = roost(capsys, "bench", "speed")
    assert code == 2
    assert "got 'speed', expected" in err
    assert "peers" in err


# -- queries


def listed(capsys, state: Path, *words: str) -> list[list[str]]:
    code, out, _ = roost(capsys, "query", "list", "--state", state, *words)
    assert code == 0
    rows = [re.split(r"\s*│\s*", line.strip(" │")) for line in out.splitlines() if "│" in line]
    return rows


def test_queries_are_registered_listed_and_terminated(capsys, state: Path) -> None:
    def query(*words: object) -> tuple[int, str, str]:
        return roost(capsys, "query", *words, "--state", state)

    assert query("register", "a", "--box", "-74,40,-73,41", "--user", "ann")[0] == 0
    code, out, _ = query("register", "b", "--circle", "-73.5,40.5,500", "--where", "fare > 50")
    assert (code, out) == (0, "registered b at log position 2\n")
    polygon = "POLYGON ((0 0, 2 0, 2 2, 0 0))"
    times = ("--at", "2024-05-01T12:00:00", "--expires-at", "2024-05-02")
    assert query("register", "c", "--polygon", polygon, *times)[0] == 0
    aggregate = ("--aggregate", "count,AVG( fare )")
    assert query("register", "d", "--box", "0,0,1,1", *aggregate)[0] == 0
    assert query("register", "e", "--circle", "0,0,9", "--nearest", "3")[0] == 0
    assert listed(capsys, state) == [
        ["a", "ann", "box -74,40,-73,41", "", "matches", "-", "-"],
        ["b", "local", "circle -73.5,40.5 radius 500", "fare > 50", "matches", "-", "-"],
        [
            "c", "local", "polygon in 0,0,2,2", "", "matches",
            "2024-05-01T12:00:00+00:00", "2024-05-02T00:00:00+00:00",
        ],
        ["d", "local", "box 0,0,1,1", "", "aggregate count, avg(fare)", "-", "-"],
        ["e", "local", "circle 0,0 radius 9", "", "nearest 3", "-", "-"],
    ]  # fmt: skip
    assert query("terminate", "b")[1] == "terminated b at log position 6\n"
    assert query("terminate", "c", "--at", "2024-05-01T18:00:00Z")[0] == 0
    rows = {row[0]: row for row in listed(capsys, state)}
    assert set(rows) == {"a", "c", "d", "e"}
    assert rows["c"][6] == "2024-05-01T18:00:00+00:00"
    _, out, _ = query("list", "--limit", "1")
    assert "4 queries, 1 shown" in out


def test_names_are_printed_literally(capsys, state: Path) -> None:
    name = "[/x] :smile: [red]q[/red]"
    box = ("--box", "0,0,1,1", "--where", "base = '[b]'", "--user", "[u]", "--state", state)
    code, out, _ = roost(capsys, "query", "register", name, *box)
    assert (code, out) == (0, f"registered {name} at log position 1\n")
    assert listed(capsys, state) == [
        [name, "[u]", "box 0,0,1,1", "base = '[b]'", "matches", "-", "-"]
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(
            ("register", "a", "--box", "0,0,1,1"), "duplicate_query", id="already registered"
        ),
        pytest.param(("register", "b", "--box", "1,0,0,1"), "inverted_box", id="inverted"),
        pytest.param(("register", "b", "--box", "nan,0,0,1"), "not_finite", id="NaN"),
        pytest.param(("register", "b", "--circle", "0,0,-1"), "bad_radius", id="radius"),
        pytest.param(
            ("register", "b", "--polygon", "POLYGON ((0 0, 2 2, 2 0, 0 2, 0 0))"),
            "invalid_polygon",
            id="self-crossing",
        ),
        pytest.param(
            ("register", "b", "--box", "0,0,1,1", "--where", "fare >"), "bad_predicate", id="where"
        ),
        pytest.param(
            ("register", "b", "--box", "0,0,1,1", "--aggregate", "median(x)"),
            "bad_aggregate",
            id="aggregate",
        ),
        pytest.param(
            ("register", "b", "--box", "0,0,1,1", "--nearest", "3"), "bad_nearest", id="nearest"
        ),
        pytest.param(("terminate", "z"), "unknown_query", id="unknown"),
        pytest.param(("terminate", "a"), "not_owner", id="someone else's"),
    ],
)
def test_a_refused_request_exits_with_3_and_its_reason(capsys, state, words, reason) -> None:
    roost(capsys, "query", "register", "a", "--box", "0,0,1,1", "--user", "ann", "--state", state)
    code, out, err = roost(capsys, "query", *words, "--state", state)
    assert (code, out) == (3, "")
    assert f"roost: refused, {reason}: " in err
    with closing(QueryService(state)) as service:
        assert service.log.end() == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--box", "0,0,1"), "--box: got '0,0,1', expected x0,y0,x1,y1"),
        (("--box", "a,b,c,d"), "--box: got 'a,b,c,d', expected x0,y0,x1,y1"),
        (("--circle", "0,0"), "--circle: got '0,0', expected cx,cy,radius"),
        (("--box", "0,0,1,1", "--at", "soon"), "--at: got 'soon', expected an ISO time"),
        (("--box", "0,0,1,1", "--expires-at", "5"), "--expires-at: got '5', expected an ISO time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_unreadable_request_exits_with_2(capsys, state, words, message: str) -> None:
    code, _, err = roost(capsys, "query", "register", "a", *words, "--state", state)
    assert code == 2
    assert f"roost: {message}" in err


def test_identifiers_and_times_have_the_types_of_the_run(capsys, state: Path) -> None:
    store = Store(state)
    agree(store, meta("int64", "int64"))
    store.close()
    box = ("--box", "0,0,1,1", "--state", state)
    code, _, err = roost(capsys, "query", "register", "a", *box)
    assert (code, "QUERY_ID: got 'a', expected a whole number" in err) == (2, True)
    code, _, err = roost(capsys, "query", "register", "7", "--at", "noon", *box)
    assert (code, "--at: got 'noon', expected a whole number" in err) == (2, True)
    assert roost(capsys, "query", "register", "7", "--at", "-5", *box)[0] == 0
    assert listed(capsys, state)[0][5:] == ["-5", "-"]


@pytest.mark.parametrize("words", [("terminate", "a"), ("list",)], ids=" ".join)
def test_only_register_creates_a_state_directory(capsys, state: Path, words) -> None:
    code, _, err = roost(capsys, "query", *words, "--state", state)
    assert code == 1
    assert "is not a state directory" in err
    assert not state.exists()


# -- inspection


def meta(id_type: str, time_type: str) -> dict:
    return {
        "space": SPACE.to_json(),
        "query_id_type": id_type,
        "points": ["lon", "lat", "event_time", None],
        "types": ["int64", time_type],
        "attributes": [["fare", "double"]],
        "polygon_vertices_max": 100,
    }


def make_state(state: Path) -> None:
    store = Store(state)
    agree(store, meta("string", str(TIMESTAMP)))
    service = QueryService(state)
    box = {"op": "register", "user_id": "ann", "x0": -74.0, "y0": 40.0, "x1": -73.5, "y1": 41.0}
    rows = [{**box, "query_id": f"q{n}"} for n in range(1200)]
    service.log.append(pa.Table.from_pylist(rows))
    service.log.append(pa.table({"op": ["terminate"], "query_id": ["q7"], "user_id": ["ann"]}))
    queries = QuerySet(store, service.log, Rules(SPACE, pa.string(), TIMESTAMP))
    queries.advance(1)
    queries.advance(2)
    service.close()
    plan = initial_plan(Strategy.UNIFORM, SPACE.grid, 5)
    store.record(Fact(records.PLANS, 0, {**plan.to_json(), "strategy": "uniform"}))
    for batch_id in range(12):
        records.begin(store, Intent(batch_id, {"space": 0}, 2))
        metrics = {
            "points": 1000 + batch_id, "matches": 31337, "dead_points": 2, "dead_requests": 1,
            "seconds": 0.25,
        }  # fmt: skip
        store.record(records.commit_fact(Commit(batch_id, (), metrics)))
    records.begin(store, Intent(12, {"space": 0}, 2))
    store.close()
    dead = state.parent / "dead"
    dead.mkdir()
    dead_rows = [(0, "point", n, "null_id", "id is null", "{}") for n in range(3)]
    dead_rows.append((1, "request", 5, "inverted_box", "x0 is greater than x1", "{}"))
    columns = [list(column) for column in zip(*dead_rows, strict=True)]
    pq.write_table(pa.table(columns, schema=DEAD_SCHEMA), dead / "batch-0.parquet")


def test_inspect_shows_plan_batches_segments_and_dead_letters(capsys, state: Path) -> None:
    make_state(state)
    code, out, _ = roost(capsys, "inspect", state)
    assert code == 0
    text = " ".join(out.replace("│", " ").split())
    for words in (
        "-74,40,-73,41 (lonlat), grid 20x10, outside exact",
        "query log position 2",
        "epoch 0, uniform, 5 machines, 5 partitions",
        "0000000001.seg 1,200",
        "0000000001-2.seg",
        "batches (12, the last 10 shown)",
        "11 1,011 31,337 3 0.250",
        "batch 12 was begun and not committed: it runs, or the next run repeats it",
        "point null_id 3",
        "request inverted_box 1",
    ):
        assert words in text, words
    assert "1,001" not in text, "only the last ten"


def test_inspect_of_a_state_before_its_first_run(capsys, state: Path) -> None:
    roost(capsys, "query", "register", "a", "--box", "0,0,1,1", "--state", state)
    code, out, _ = roost(capsys, "inspect", state)
    assert code == 0
    assert "plan       none yet" in out
    assert "dead       none" in out


def test_inspect_of_another_folder_changes_nothing(capsys, tmp_path: Path) -> None:
    code, _, err = roost(capsys, "inspect", tmp_path)
    assert code == 1
    assert f"{tmp_path} is not a state directory" in err
    assert list(tmp_path.iterdir()) == []


# -- roost snapshot without Spark


RESULT = pa.table({"at_batch": [3, 3], "id": ["a", "b"], "fare": [1.5, None]})


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_result_is_written_in_the_format_of_its_suffix(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"result{suffix}"
    write_result(RESULT, path)
    if suffix == ".parquet":
        found = pq.read_table(path).to_pylist()
    elif suffix == ".csv":
        found = pyarrow.csv.read_csv(path).to_pylist()
    else:
        found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["at_batch"], row["id"], row.get("fare")) for row in found] == [
        (3, "a", 1.5),
        (3, "b", None),
    ]


@pytest.mark.parametrize(
    ("name", "table", "takes"),
    [
        ("result.xlsx", RESULT, "ends with .parquet, .csv, .jsonl"),
        ("nowhere/result.csv", RESULT, "a file that can be written"),
        ("result.csv", pa.table({"tags": [["a"], []]}), "another format than .csv"),
    ],
)
def test_a_result_that_cannot_be_written_names_the_reason(
    tmp_path: Path, name: str, table: pa.Table, takes: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        write_result(table, tmp_path / name)
    assert caught.value.key == "--out"
    assert takes in caught.value.expected


def test_the_output_format_is_checked_before_spark_starts(capsys, state: Path) -> None:
    code, _, err = roost(capsys, "snapshot", state, "--out", "result.xlsx")
    assert (code, "ends with .parquet" in err) == (2, True)
