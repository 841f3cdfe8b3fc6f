"""Requirements of a benchmark are checked before it starts; failures set its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import shapely

from roost import bench
from roost.bench import cases, load, peers
from roost.bench.cases import CaseSpec
from roost.bench.rivals import environment
from roost.bench.rivals.environment import Unavailable
from roost.cli import main
from roost.errors import RoostError

SPEC = CaseSpec("tiny", "boxes", 20, points=200, write_points=0, warm_points=10)
# A fake system: writes a constant result.
FAKE = """
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
result = {"points": 200, "matches": 7, "points_per_s": 5.0, "notes": ""}
open(words["--json"], "w").write(json.dumps(result))
"""


def python(code: str) -> peers.Maker:
    return lambda: [sys.executable, "-c", code]


def missing() -> list[str]:
    raise Unavailable("no such jar")


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[peers.System]:
    """Replace all systems by one that works, and all cases by a tiny one."""
    made = [peers.System(s.name, python(FAKE), modes=("count",)) for s in peers.SYSTEMS]
    monkeypatch.setattr(peers, "SYSTEMS", made)
    monkeypatch.setattr(cases, "QUICK", (SPEC,))
    monkeypatch.delenv("ROOST_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def replace_system(systems: list[peers.System], system: peers.System) -> None:
    (at,) = [k for k, old in enumerate(systems) if old.name == system.name]
    systems[at] = system


@pytest.mark.parametrize("name", bench.NAMES)
def test_a_missing_package_is_named_before_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda package: None)
    monkeypatch.setattr(bench, "import_module", None)  # nothing is run
    assert main(["bench", name, "--json", str(tmp_path / "new" / "result.json")]) == 1
    printed = capsys.readouterr().err
    assert "matplotlib" in printed and "script/bootstrap --bench" in printed
    assert ("duckdb" in printed) == (name in ("peers", "snapshot", "synopsis"))
    assert not (tmp_path / "new").exists()


def test_all_packages_of_all_benchmarks_are_installed_with_the_extra() -> None:
    for name in bench.NAMES:
        bench.check_packages(name)


def test_a_folder_that_cannot_be_written_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench, "import_module", None)
    assert main(["bench", "scale", "--json", str(tmp_path / "file" / "result.json")]) == 1
    assert "results cannot be written to" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_named_before_the_start(
    systems: list[peers.System], tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(RoostError, match=r"environments of rivals .* XDG_CACHE_HOME"):
        peers.run(True)


def test_memory_that_may_not_be_read_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    with pytest.raises(RoostError, match="may not read the memory maps"):
        load.run(True)


def test_systems_that_all_work_are_exit_code_0(systems: list[peers.System], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert bench.run_bench("peers", quick=True, json_path=path) == 0
    result = json.loads(path.read_text())
    assert result["summary"]["failed"] == []
    assert result["summary"]["ratio_vs_duckdb"] == 1.0


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(missing, "no such jar", id="unavailable"),
        pytest.param(python("import no_such_module"), "No module named", id="fails"),
    ],
)
def test_a_rival_that_fails_is_in_its_row_the_summary_and_the_exit_code(
    systems: list[peers.System],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: peers.Maker,
    reason: str,
) -> None:
    replace_system(systems, peers.System("duckdb", command, modes=("count",)))
    path = tmp_path / "result.json"
    assert bench.run_bench("peers", quick=True, json_path=path) == 1
    result = json.loads(path.read_text())
    assert [row["system"] for row in result["rows"]] == [system.name for system in systems]
    reasons = {row["system"]: row["skipped"] for row in result["rows"]}
    assert reason in reasons.pop("duckdb")
    assert set(reasons.values()) == {None}
    (failed,) = result["summary"]["failed"]
    assert failed.startswith("duckdb, tiny, count: ") and reason in failed
    assert f"roost bench peers: failed: {failed}" in capsys.readouterr().err


def test_what_is_unavailable_is_named_before_the_first_case(
    systems: list[peers.System],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cases, "make_cases", stop)
    replace_system(systems, peers.System("sedona", missing))
    with pytest.raises(KeyboardInterrupt):
        peers.run(True)
    assert "unavailable: sedona, boxes: no such jar" in capsys.readouterr().err


def test_an_environment_that_cannot_be_created_is_tried_once() -> None:
    tried = []

    def fail() -> list[str]:
        tried.append(1)
        raise Unavailable("no network")

    made = peers.prepare([peers.System("sedona", fail)], ["boxes", "polygons"])
    assert list(made) == [fail] and str(made[fail]) == "no network"
    assert len(tried) == 1


def test_duckdb_has_another_command_for_polygons() -> None:
    (duckdb,) = [system for system in peers.SYSTEMS if system.name == "duckdb"]
    assert duckdb.maker("boxes")() == [sys.executable, "-m", "roost.bench.rivals.duckdb_rival"]
    assert duckdb.maker("polygons") is environment.duckdb_spatial_command


def test_an_environment_that_inherits_sees_our_packages_after_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "environment"
    create = venv.create
    installed = []
    monkeypatch.setattr(venv, "create", lambda place, with_pip: create(place))
    monkeypatch.setattr(environment, "run", lambda command, *_: installed.append(command[-1]))
    interpreter = environment.make(folder, ("duckdb==0",), inherit=True)
    own = environment.own_packages(folder)
    (own / "duckdb.py").write_text("__version__ = 'its own'")
    code = "import duckdb, numba, roost.bench.rivals.protocol; print(duckdb.__version__)"
    sources = str(Path(bench.__file__).parents[2])
    done = subprocess.run(
        [interpreter, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": sources},
    )
    assert done.stdout == "its own\n"
    environment.make(folder, ("duckdb==0",), inherit=True)
    assert installed == ["duckdb==0"], "it is reused"
    environment.make(folder, ("duckdb==0",))
    assert len(installed) == 2, "an environment that does not inherit is another one"


@pytest.mark.full
def test_duckdb_matches_polygons_in_its_own_environment(tmp_path: Path) -> None:
    """Installs DuckDB's spatial extension, so it needs network access the first time."""
    spec = CaseSpec("zones", "polygons", 0, points=2_000, write_points=100, warm_points=10)
    (case,) = cases.make_cases((spec,), tmp_path / "case", None)
    (duckdb,) = [system for system in peers.SYSTEMS if system.name == "duckdb"]
    command = peers.prepare([duckdb], ["polygons"])[environment.duckdb_spatial_command]
    row = peers.run_one(case, "count", duckdb, command, tmp_path)
    points = pq.read_table(case.points_path)
    shapes = shapely.from_wkt(pq.read_table(case.queries_path)["wkt"].to_pylist())
    lon, lat = points["lon"].to_numpy(), points["lat"].to_numpy()
    expected = sum(int(np.sum(shapely.intersects_xy(shape, lon, lat))) for shape in shapes)
    assert row["skipped"] is None
    assert row["matches"] == expected > 500
