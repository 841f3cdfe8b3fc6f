"""The project: scripts, lock files, import layers, and the bundled sample."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import shapely

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "roost"
DATA = SOURCE / "data"
LOCKS = ("requirements.lock", "requirements-bench.lock", "requirements-dev.lock")
SHELL_SCRIPTS = ("script/bootstrap", "script/run", "script/test", ".ci/run")
MADE_BY_TOOLS = re.compile(r"\.(?!ci$|gitignore$).*|__pycache__|build|dist|.*\.egg-info")

# Written in parts, so that this file does not match its own patterns.
MACHINE_PATH = re.compile(r"(?<![\w.~$}*-])/(?:work|tmp|root|home/\w+|Users/\w+)" + r"/\w")
REGISTRY = re.compile(
    "|".join(
        [
            r"py" + r"pi\.(?:org|python\.org)",
            r"python" + r"hosted\.org",
            r"registry\." + r"npmjs",
            r"arti" + r"factory",
            r"--(?:extra-)?index" + r"-url[ =]\s*\S*:",
            r"--find" + r"-links[ =]",
        ]
    )
)


def project_files() -> list[Path]:
    """Return every file that is or would be under version control."""
    if shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listing.returncode == 0 and listing.stdout:
            paths = [ROOT / name for name in listing.stdout.split("\0") if name]
            return [path for path in paths if path.is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not is_made_by_tools(path)]


def is_made_by_tools(path: Path) -> bool:
    return any(MADE_BY_TOOLS.fullmatch(part) for part in path.relative_to(ROOT).parts)


def text_files() -> list[tuple[str, str]]:
    found = []
    for path in project_files():
        content = path.read_bytes()
        if b"\0" not in content:
            found.append((str(path.relative_to(ROOT)), content.decode("utf-8")))
    assert len(found) > 10
    return found


@pytest.mark.parametrize("name", [*SHELL_SCRIPTS, "script/make-sample"])
def test_scripts_are_executable(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env ")


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_scripts_are_valid_shell_and_stop_at_errors(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / name], check=True)
    assert re.search(r"^set -e?uo pipefail$", (ROOT / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("pattern", "sample"),
    [
        pytest.param(MACHINE_PATH, "open('/ho" + "me/ann/x.csv')", id="machine paths"),
        pytest.param(REGISTRY, "--index" + "-url=https://mirror.example", id="registry hosts"),
    ],
)
def test_no_file_depends_on_one_machine(pattern: re.Pattern[str], sample: str) -> None:
    assert pattern.search(sample)
    hits = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert hits == []


@cache
def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_only_the_engine_imports_pyspark() -> None:
    users = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[0] in ("pyspark", "py4j") for name in imported_modules(path))
    }
    assert users <= {"engine"}


def test_only_the_storage_uses_sqlite() -> None:
    users = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if imported_modules(path) & {"sqlite3", "roost.storage.database"}
    }
    assert users == {"storage"}


def test_every_package_has_a_place_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers, forbidden = contracts["contracts"]
    present = {
        f"roost.{path.stem}"
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"roost.__init__", "roost.__main__"}
    assert present <= set(layers["layers"])
    assert set(forbidden["source_modules"]) == set(layers["layers"]) - {"roost.engine"}


def locked(name: str) -> dict[str, set[str]]:
    """Return versions by package; fail on a line that is neither a pin nor a hash."""
    versions: dict[str, set[str]] = {}
    text = (ROOT / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        pin = re.fullmatch(
            r"([a-z0-9-]+)==(\S+)( ; [^#@]+?)?((?: +--hash=sha256:[0-9a-f]{64})+) *", line
        )
        assert pin, f"{name}: {line[:100]}"
        versions.setdefault(pin[1], set()).add(pin[2])
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_have_only_pins_with_hashes(name: str) -> None:
    assert len(locked(name)) > 10
    assert "://" not in (ROOT / name).read_text()


def required(requirements: list[str]) -> set[str]:
    names = {re.split(r"[<>=!~ ;\[]", requirement)[0].lower() for requirement in requirements}
    assert all(names)
    return names


def test_lock_files_have_the_requirements_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    run, bench, dev = (locked(name) for name in LOCKS)
    needed = required(project["project"]["dependencies"] + groups["bootstrap"])
    assert needed <= run.keys()
    assert required(project["build-system"]["requires"]) <= run.keys()
    assert required(project["project"]["optional-dependencies"]["bench"]) <= bench.keys()
    assert required(groups["dev"]) <= dev.keys()
    # script/bootstrap counts on it: each lock holds all of the one before.
    assert run.items() <= bench.items() <= dev.items()


def test_python_versions_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (supported,) = re.findall(
        r'^supported="(.*)"$', (ROOT / "script" / "bootstrap").read_text(), re.MULTILINE
    )
    versions = sorted(supported.split())
    classified = [
        line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line
    ]
    assert versions == sorted(classified)
    minors = [int(version.removeprefix("3.")) for version in versions]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert project["requires-python"] == f">=3.{minors[0]},<3.{minors[-1] + 1}"


def bootstrap(folder: Path, version: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run script/bootstrap in an empty checkout on a host that has one Python."""
    for name in ("script", "bin", "home"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "script" / "bootstrap", folder / "script")
    for name in ("bash", "dirname", "cat", "basename"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or "")
    python = folder / "bin" / "python3"
    python.write_text(f"#!/bin/sh\nif [ $1 = -c ]; then echo {version}; else exit 9; fi\n")
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(folder / "script" / "bootstrap"), *words],
        capture_output=True,
        text=True,
        env={"PATH": str(folder / "bin"), "HOME": str(folder / "home")},
        check=False,
    )


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_bootstrap_refuses_other_python_versions_in_one_sentence(
    tmp_path: Path, version: str
) -> None:
    done = bootstrap(tmp_path, version)
    assert done.returncode == 3
    assert done.stderr == (
        "bootstrap: Roost needs Python 3.13 or 3.12 or 3.11, and none was found;"
        " please install one.\n"
    )


def test_bootstrap_uses_a_supported_version_and_only_the_requested_one(tmp_path: Path) -> None:
    done = bootstrap(tmp_path / "any", "3.12")
    assert done.returncode not in (0, 3)  # the stand-in cannot make an environment
    assert "making .venv with" in done.stderr
    done = bootstrap(tmp_path / "other", "3.12", "--python", "3.13")
    assert (done.returncode, "needs Python 3.13, and none" in done.stderr) == (3, True)
    done = bootstrap(tmp_path / "wrong", "3.12", "--python", "3.9")
    assert (done.returncode, "--python takes one of" in done.stderr) == (1, True)


def test_the_sample_is_at_most_two_megabytes() -> None:
    names = {path.name for path in DATA.iterdir() if path.is_file()}
    assert names == {
        "ATTRIBUTION.md",
        "cities.csv",
        "sample_points.parquet",
        "sample_requests.parquet",
    }
    assert sum((DATA / name).stat().st_size for name in names) <= 2_000_000


def test_every_bundled_file_is_attributed() -> None:
    attribution = (DATA / "ATTRIBUTION.md").read_text()
    for path in DATA.iterdir():
        assert path.name == "ATTRIBUTION.md" or f"`{path.name}`" in attribution
    assert "CC BY 4.0" in attribution


def test_sample_points_are_complete_and_in_order() -> None:
    points = pq.read_table(DATA / "sample_points.parquet")
    assert points.column_names == ["event_time", "lon", "lat", "base"]
    assert 300_000 <= points.num_rows <= 400_000
    assert all(column.null_count == 0 for column in points.columns)
    assert (np.diff(points["event_time"].to_numpy().view(np.int64)) >= 0).all()
    assert np.isfinite(points["lon"].to_numpy()).all()
    assert np.isfinite(points["lat"].to_numpy()).all()


def shapes_of(row: dict[str, object]) -> list[str]:
    given = {
        "box": ("x0", "y0", "x1", "y1"),
        "circle": ("cx", "cy", "radius"),
        "polygon": ("wkt",),
    }
    used = {name for names in given.values() for name in names if row[name] is not None}
    shapes = [shape for shape, names in given.items() if set(names) <= used]
    assert used == {name for shape in shapes for name in given[shape]}
    return shapes


def check_registration(row: dict) -> str:
    (shape,) = shapes_of(row)
    if shape == "box":
        assert row["x0"] < row["x1"] and row["y0"] < row["y1"]
    elif shape == "circle":
        assert row["radius"] > 0
    else:
        polygon = shapely.from_wkt(row["wkt"])
        assert polygon.geom_type == "Polygon" and polygon.is_valid and not polygon.is_empty
    if row["expires_at"] and row["at"]:
        assert row["at"] < row["expires_at"]
    return shape


def test_sample_requests_are_valid_and_of_every_kind() -> None:
    rows = pq.read_table(DATA / "sample_requests.parquet").to_pylist()
    live: dict[str, tuple[str, datetime | None]] = {}
    kinds: dict[str, int] = {}
    assert [row["seq"] for row in rows] == list(range(len(rows)))
    for row in rows:
        if row["op"] == "register":
            assert row["query_id"] not in live
            live[row["query_id"]] = row["user_id"], row["at"]
            kind = check_registration(row)
        else:
            assert row["op"] == "terminate" and shapes_of(row) == []
            user_id, since = live.pop(row["query_id"])
            assert user_id == row["user_id"]
            assert since is None or since < row["at"]
            kind = "terminate"
        kinds[kind] = kinds.get(kind, 0) + 1
    assert min(kinds[kind] for kind in ("box", "circle", "polygon", "terminate")) > 100
    for name in ("predicate", "at", "expires_at"):
        assert sum(row[name] is not None for row in rows) > 100
