"""The public names, and what importing them loads."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import roost
from roost import errors

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name_is_there_and_there_are_fewer_than_ten() -> None:
    assert roost.__all__ == sorted(roost.__all__)
    assert len(set(roost.__all__)) == len(roost.__all__) < 10
    for name in roost.__all__:
        assert getattr(roost, name).__name__ == name
        assert getattr(roost, name).__doc__


def test_every_class_at_the_top_is_public() -> None:
    visible = {
        name
        for name, value in vars(roost).items()
        if isinstance(value, type) and value.__module__.startswith("roost")
    }
    assert visible | {"Dataflow", "Pipeline"} == set(roost.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        _ = roost.Pipelines


SPARK = {"pyspark", "py4j"}
HEAVY = SPARK | {"numba", "numpy", "pandas", "pyarrow", "rich", "scipy", "shapely", "sklearn"}
START_UP = {
    "import": "import roost",
    "settings": "import roost; roost.RunConfig(points={'path': 'p'}, space={'grid': '10x10'})",
    "records": "from roost import Box, Circle, Polygon, Query, RoostError, Terminate",
    "help": "import roost.cli as cli\ntry: cli.main(['--help'])\nexcept SystemExit: print()",
}


@pytest.mark.parametrize("code", START_UP.values(), ids=START_UP)
def test_start_up_is_fast_and_small_and_loads_no_heavy_package(code: str) -> None:
    """Processor time, because other processes do not add to it; numba alone takes longer."""
    measure = "import time, psutil; print(time.process_time(), psutil.Process().memory_info().rss)"
    found = f"sorted({HEAVY!r} & {{name.split('.')[0] for name in sys.modules}})"
    printed = run_python(f"import sys\n{code}\nprint({found})\n{measure}").splitlines()
    assert printed[-2] == "[]"
    seconds, nbytes = printed[-1].split()
    assert float(seconds) < 0.5
    assert int(nbytes) < 60e6


def test_commands_on_a_state_directory_and_decoding_load_no_spark() -> None:
    modules = "roost.commands.queries, roost.stages.point_files, roost.stages.decode"
    found = f"sorted({SPARK!r} & set(sys.modules))"
    assert run_python(f"import sys, {modules}\nprint({found})") == "[]"


def test_the_pipeline_brings_spark_and_starts_no_java() -> None:
    code = (
        "import sys, roost; roost.Pipeline; import pyspark;"
        "print('pyspark' in sys.modules, pyspark.SparkContext._active_spark_context,"
        " pyspark.SparkContext._gateway)"
    )
    assert run_python(code) == "True None None"


def test_a_dataflow_loads_neither_spark_nor_numba() -> None:
    found = f"sorted({SPARK | {'numba', 'scipy', 'pandas'}!r} & set(sys.modules))"
    assert run_python(f"import sys; from roost import Dataflow\nprint({found})") == "[]"


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert roost.__version__ == project["version"]


def test_every_error_is_a_roost_error_and_is_in_the_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 4
    for kind in kinds:
        assert issubclass(kind, roost.RoostError)
        assert kind.__name__ in (errors.__doc__ or "")
