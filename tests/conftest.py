"""Options, markers, seeds, and the Spark session that all Spark tests of a process share.

Without ``--full`` the long sweeps run a part: some seeds are fixed, some are fresh. Fresh seeds
come from the number that the header prints; ``--seed`` repeats them.

A test that is skipped, and not because it is marked ``full``, fails: a check that silently does not
run is lost. ``--allow-skips`` is for machines that cannot run all tests, such as those without
network access, where no Kafka broker can be fetched.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src"

sys.path.insert(0, str(TESTS))

# Without --full the examples of every run are the same. With it they are 25 times as many and new
# in every run; a failure prints the decorator that repeats it.
settings.register_profile(
    "part",
    derandomize=True,
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "full",
    settings.get_profile("part"),
    derandomize=False,
    max_examples=1_000,
)


class NoticedConnection(sqlite3.Connection):
    """Warn of a database that is never closed, as Python 3.13 does by itself."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._opened_by = os.environ.get("PYTEST_CURRENT_TEST")

    def __del__(self) -> None:
        try:
            self.total_changes  # noqa: B018
        except sqlite3.ProgrammingError:
            return  # closed
        text = f"unclosed database, opened by {self._opened_by}"
        warnings.warn(text, ResourceWarning, source=self, stacklevel=1)


if sys.version_info < (3, 13):
    sqlite3.connect = partial(sqlite3.connect, factory=NoticedConnection)  # type: ignore[assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long sweeps in full")
    parser.addoption("--seed", type=int, help="repeat the fresh seeds of an earlier run")
    parser.addoption(
        "--allow-skips",
        action="store_true",
        default=bool(os.environ.get("ROOST_ALLOW_SKIPS")),
        help="do not fail for skipped tests (or set ROOST_ALLOW_SKIPS)",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "part")
    if hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(1 << 31)
    use_memory()


DISK = "ROOST_TEST_DISK"
MEMORY = Path("/dev/shm")  # Linux has it; containers give it 64 MB by default
MEMORY_NEEDED = 4 << 30


def use_memory() -> None:
    """Put temporary files in memory, unless there is too little or TMPDIR says where to put them.

    Tests create hundreds of thousands of small files. Child processes do the same.
    """
    os.environ.setdefault(DISK, tempfile.gettempdir())
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    if usable and "TMPDIR" not in os.environ and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


def pytest_report_header(config: pytest.Config) -> str:
    return f"fresh seeds: --seed {config.option.seed}"


# --------------------------------------------------------------------------- sweeps


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked ``sweep(fixed, fresh, full)`` its seeds.

    It runs with the ``fixed`` seeds and with some fresh ones: ``fresh`` of them, ``full`` of them
    with ``--full``.
    """
    mark = metafunc.definition.get_closest_marker("sweep")
    if mark is None:
        return
    fixed, fresh, full = mark.args
    count = full if metafunc.config.getoption("--full") else fresh
    source = random.Random(f"{metafunc.config.option.seed} {metafunc.definition.nodeid}")
    # Small enough for every use: some seeds are multiplied or added to.
    drawn = [source.randrange(1_000, 1_000_000) for _ in range(count)]
    metafunc.parametrize("seed", [*fixed, *drawn])


# --------------------------------------------------------------------------- two processes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all processes of pytest-xdist draw the same fresh seeds."""
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute whole files among processes; each process that runs Spark tests has a session."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "kafka" if "test_kafka" in path else path  # one broker

    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="only with --full"))
        # Spark tests spend their time in other processes, and core tests measure the same packages.
        # Sweeps and properties repeat other tests with many inputs; measuring adds 40 % to them.
        repeats = item.get_closest_marker("sweep") or is_hypothesis_test(getattr(item, "obj", None))
        if item.get_closest_marker("spark") or repeats:
            item.add_marker(pytest.mark.no_cover)
    # The longest files start first, so that all processes end at about the same time.
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("spark"):
        return 0
    return 1 if item.path.parent.name == "simulation" else 2


def pytest_collection_finish() -> None:
    """Have the garbage collector skip modules and thousands of test items from now on."""
    gc.collect()
    gc.freeze()


# --------------------------------------------------------------------------- skips

SKIPPED = "Skipped, but not marked full: {reason}\n--allow-skips accepts this."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("full"):
        _refuse_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _refuse_skip(collector.config, report)
    return report


def _refuse_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if config.getoption("--allow-skips"):
        return
    # A skip is a tuple: file, line and reason.
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = SKIPPED.format(reason=reason)


# --------------------------------------------------------------------------- fixtures


# For a JVM that ends after seconds, half of its time went into the better compiler, and a sixth of
# the rest into the verification of Spark's classes.
QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)


@pytest.fixture(scope="session", autouse=True)
def child_environment() -> None:
    """Let child processes import Roost and the tests' helpers, and start Java quickly."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", QUICK_JAVA)
    archive = Path(sys.prefix) / "spark.jsa"  # from script/bootstrap --dev
    if archive.exists():
        # A JVM with other classes says that it cannot use the archive, and goes on without it.
        quiet = "-Xlog:cds=off -Xlog:class+path=off"
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"'-XX:SharedArchiveFile={archive}' {quiet}")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(SOURCES), str(TESTS), str(TESTS / "spark"), *filter(None, known)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@pytest.fixture(scope="session", autouse=True)
def no_waiting() -> Iterator[None]:
    """Skip what only matters when the host fails or its memory runs out: half of a small batch.

    Tests kill drivers, not the host. Drivers in processes of their own do wait for the disk.
    """
    from roost.storage.database import Database

    synchronous = Database.synchronous
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(Database, "synchronous", lambda self, level: synchronous(self, "off"))
        patch.setattr("roost.runtime.assembly.release_memory", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """Measure with less effort what decides how fast a run is, and changes none of its results.

    Tests of measurements set the effort that they need.
    """
    from threadpoolctl import ThreadpoolController

    @cache
    def threads() -> ThreadpoolController:
        """Find the libraries with threads once: that takes longer than to analyse a few users."""
        import sklearn.cluster  # noqa: F401 - loads what is to be found

        return ThreadpoolController()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.storage.speed.PROBE_BYTES", 1 << 16)
        patch.setattr("roost.runtime.flow_sample.RUNS", 1)
        patch.setattr("roost.runtime.flow_sample.MACHINES", (2, 4))
        patch.setattr("roost.guard.detector.threadpool_limits", lambda n: threads().limit(limits=n))
        yield


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """Return a folder on a disk, whose pages leave memory; temporary files are in memory."""
    with tempfile.TemporaryDirectory(dir=os.environ[DISK]) as name:
        yield Path(name)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """Close at the end of a test what it has opened."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long sweeps run in full."""
    return bool(request.config.getoption("--full"))


SESSION = pytest.StashKey["SparkSession"]()


def stop_session(config: pytest.Config) -> None:
    """Stop the session that Spark tests share, if it runs."""
    if SESSION in config.stash:
        config.stash[SESSION].stop()
        del config.stash[SESSION]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop the session when the other tests begin: Spark tests are the first of a process."""
    if item.get_closest_marker("spark") is None:
        stop_session(item.config)


@pytest.fixture(scope="session")
def spark(
    request: pytest.FixtureRequest,
    child_environment: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SparkSession]:
    """Share one local session of two cores among all tests.

    The tests' batches are small; every machine of a plan still gets its part of them.
    """
    from roost.engine.executor import SparkExecutor
    from roost.engine.session import make_session

    SparkExecutor.rows_per_task = 1
    folder = tmp_path_factory.mktemp("spark")
    chosen = {
        # Spark's default is 200 tasks for every exchange of a query.
        "spark.sql.shuffle.partitions": "4",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder / 'derby'}",
    }
    session = make_session("local[2]", chosen)
    request.config.stash[SESSION] = session
    yield session
    stop_session(request.config)
