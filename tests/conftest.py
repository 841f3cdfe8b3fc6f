"""Options, markers and the one Spark session that all Spark tests share.

Without ``--full`` the long sweeps run a part with fixed seeds; with it they run in full.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src"

sys.path.insert(0, str(TESTS))

# Examples of one run come from the same draws as those of the next: a failure stays a failure.
settings.register_profile(
    "part",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("part"), max_examples=1_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long sweeps in full")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="only with --full")
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def worker_path() -> None:
    """Let Python workers and child processes import Roost and the tests' helpers."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(SOURCES), str(TESTS), str(TESTS / "spark"), *filter(None, known)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long sweeps run in full."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def spark(worker_path: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Share one local session of two cores among all tests.

    The tests' batches are small; every machine of a plan still gets its part of them.
    """
    from roost.engine import jobs
    from roost.engine.session import make_session

    jobs.ROWS_PER_TASK_MIN = 1
    folder = tmp_path_factory.mktemp("spark")
    places = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder / 'derby'}",
    }
    session = make_session("local[2]", places)
    yield session
    session.stop()
