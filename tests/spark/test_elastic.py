"""Executors of a standalone cluster follow the measured load; no test calls the allocation API.

The workers offer more cores than the host has: allocation and results are real, speed is not.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import elastic_driver
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import read_folder
from elastic_driver import QUERIES, SIDE, size_changes

from balance_checks import plans_of
from roost import Dataflow
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.schema import resolve
from roost.engine.console import executor_counts, round_lines
from roost.engine.executors import SparkAllocator, allocation_settings
from roost.engine.local_cluster import spark_home
from roost.engine.standalone import Host, StandaloneCluster
from roost.model.elastic import ElasticRules
from roost.runtime.group_rounds import GROUP_ROUNDS
from roost.storage.store import Store
from roost.testing import brute_force

pytestmark = pytest.mark.spark

LOW, HIGH = 30, 360  # points per second: 0.06 and 0.72 executors, and what a batch costs
LAST_S = 150  # of the last phase, which ends when its executors have left
HOSTS = 4
DEADLINE_S = 300
GONE_S = 30.0  # until the executors of a driver have left


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, child_environment: None
) -> Iterator[StandaloneCluster]:
    with StandaloneCluster([Host(1, 600)] * HOSTS, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def write_points(folder: Path, seconds: Sequence[int]) -> pa.Table:
    """Write a stream whose rate is low and high in turn, for so many seconds each."""
    rates = [(LOW, HIGH)[k % 2] for k, length in enumerate(seconds) for _ in range(length)]
    times = np.repeat(np.arange(len(rates)), rates)
    xy = np.random.default_rng(4).uniform(0, SIDE, (times.size, 2))
    table = pa.table(
        {"id": np.arange(times.size), "x": xy[:, 0], "y": xy[:, 1], "event_time": times}
    )
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "points.parquet")
    return table


def drive(
    folder: Path, master: str, changes: int, *faults: str
) -> subprocess.CompletedProcess[str]:
    driver = Path(__file__).with_name("elastic_driver.py")
    command = [sys.executable, str(driver), str(folder), master, str(changes), *faults]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)


def check(folder: Path, table: pa.Table) -> None:
    """Compare matches with brute force and sums with the interpreter, each once.

    ``table`` has the rows that were read. No source has ended.
    """
    rows = [{**row, "time": row["event_time"]} for row in table.to_pylist()]
    found = [(row["query_id"], row["point_id"]) for row in read_folder(folder / "out" / "matches")]
    assert sorted(found) == brute_force(rows, QUERIES, lonlat=False)
    flow = Dataflow("work")
    elastic_driver.totals(flow.source("points", table.schema, time="event_time", path="-"))
    oracle = Interpreter(resolve(flow.name, flow.operators))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_driver, "WORK_S", 0.0)
        oracle.batch({"points": table.to_pylist()}, 0.0)
    sums, expected = read_folder(folder / "out" / "sums"), oracle.results["sums"]
    assert len(expected) > 100
    assert Counter(map(values_of, sums)) == Counter(map(values_of, expected))


def values_of(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in ("event_time", "k", "n", "s"))


def decisions(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rounds, and the kinds of their decisions without repetitions."""
    with closing(Store(folder / "out" / "state")) as store:
        return [row for _, row in store.items(GROUP_ROUNDS)], size_changes(store)


def check_no_executor_is_left(cluster: StandaloneCluster) -> None:
    """The cluster ends the executors of a driver that is gone."""
    deadline = time.monotonic() + GONE_S
    while left := list(executors_of(cluster)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def executors_of(cluster: StandaloneCluster) -> Iterator[psutil.Process]:
    """Return the executors of all drivers; they run in the folders of their workers."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            inside = process.cwd().startswith(str(cluster.folder))
            if inside and "--executor-id" in process.cmdline():
                yield process


def test_executors_follow_the_load(tmp_path: Path, cluster: StandaloneCluster) -> None:
    """One executor dies while others arrive, and one while others leave; no result changes."""
    folder = tmp_path / "run"
    table = write_points(folder, (5, 20, LAST_S))
    done = drive(folder, cluster.url, 2, "arriving", "leaving")
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout)
    check(folder, table[: last["points"]])
    rounds, kinds = decisions(folder)
    assert kinds == ["Provision", "Release"], [(row["decision"], row["reason"]) for row in rounds]
    assert max(row["observed"] for row in rounds) >= 2
    assert max(row["layout"] for row in rounds) >= 2, "the layout counted no executor"
    assert rounds[-1]["planned"] == 1
    assert last["killed"] == ["arriving", "leaving"] and last["left"] <= 1
    plans = plans_of(folder / "out" / "state")
    assert {plan.undivided for plan in plans} == {True, False}, "one executor divides space"
    check_no_executor_is_left(cluster)


@pytest.mark.full
def test_executors_of_a_local_cluster_follow_the_load(
    tmp_path: Path, child_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path / "home")))
    folder = tmp_path / "run"
    table = write_points(folder, (5, 20, LAST_S))
    done = drive(folder, "local-cluster[3,1,600]", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout)
    check(folder, table[: last["points"]])
    rounds, kinds = decisions(folder)
    assert kinds == ["Provision", "Release"], [(row["decision"], row["reason"]) for row in rounds]
    assert max(row["layout"] for row in rounds) >= 2
    assert last["left"] == 1


@pytest.mark.full
def test_drivers_die_around_decisions(tmp_path: Path, cluster: StandaloneCluster) -> None:
    """A decision is recorded and not carried out, or carried out and that is not recorded."""
    folder = tmp_path / "run"
    table = write_points(folder, (5, 34, 20, 24, LAST_S))
    for fault in ("recorded-Provision", "done-Provision", "recorded-Release", "done-Release"):
        killed = drive(folder, cluster.url, 9, fault)
        assert killed.returncode == -signal.SIGKILL, (fault, killed.stderr[-3000:])
        rounds, _ = decisions(folder)
        if fault.startswith("recorded"):
            assert fault.endswith(rounds[-1]["decision"])
            assert rounds[-1]["layout"] != rounds[-1]["planned"]
        check_no_executor_is_left(cluster)
    done = drive(folder, cluster.url, 4)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout)
    check(folder, table[: last["points"]])
    rounds, kinds = decisions(folder)
    assert kinds == ["Provision", "Release"] * 2, [(r["decision"], r["reason"]) for r in rounds]
    assert rounds[-1]["planned"] == 1 == last["left"]
    check_no_executor_is_left(cluster)


def test_progress_shows_executors_and_decisions() -> None:
    size = {"decision": "NoChange", "planned": 2, "observed": 1, "reason": "1 of 2 are present"}
    assert executor_counts(size) == "1 of 2 executors" and list(round_lines(size)) == []
    other = {"decision": "Provision", "planned": 3, "observed": 0, "reason": "load of 1.5"}
    assert list(round_lines(other)) == ["executors: Provision 3, load of 1.5"]
    moves = [
        {"operator": "rank", "before": "default", "after": "other"},
        {"operator": "count", "before": None, "after": "default"},
    ]
    placed = {"moves": moves, "reason": "the loads differ"}
    both = {**size, "groups": {"other": other}, "placement": placed}
    assert executor_counts(both) == "executors: default 1 of 2, other 0 of 3"
    assert list(round_lines(both)) == [
        "executors of group other: Provision 3, load of 1.5",
        "operator rank from default to other: the loads differ",
        "operator count to default: the loads differ",
    ]


class Anything:
    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *arguments: Any) -> Any:
        return Anything()


def test_an_executor_gets_warm_while_a_batch_runs() -> None:
    present, warmed = ["0"], threading.Event()

    class Executor(Anything):
        leaving: set[str] = set()  # noqa: RUF012

        def registered(self, group: str) -> list[str]:
            return list(present)

        def warm(self, name: str, slots: int, calls: Any, group: str) -> bool:
            if name == "1":
                assert calls == [len]
                warmed.set()
            return True

    allocator = SparkAllocator(Executor())  # type: ignore[arg-type]
    allocator._slots = 1
    with closing(allocator):
        allocator.executors()
        allocator.preparations = lambda: [len]  # type: ignore[list-item]
        allocator.request(2)
        present.append("1")
        assert warmed.wait(5.0)


def test_totals_of_all_groups_are_requested_together_and_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request replaces the totals of all profiles, and a cluster may lose it."""

    class Executor(Anything):
        def profile_id(self, group: str) -> int:
            return {"default": 0, "other": 3}[group]

        def registered(self, group: str) -> list[str]:
            return []

    totals: list[dict[int, int]] = []
    allocator = SparkAllocator(Executor())  # type: ignore[arg-type]
    allocator._slots = allocator.of("other")._slots = 1
    for one in (allocator, allocator.of("other")):
        one._request = totals.append  # type: ignore[method-assign, assignment]
    allocator.request(2)
    allocator.of("other").request(1)
    allocator.request(2)
    monkeypatch.setattr("roost.engine.executors.RENEW_S", 0.0)
    allocator.request(2)
    allocator.close()
    assert totals == [{0: 2}, {0: 2, 3: 1}, {0: 2, 3: 1}]


def test_spark_requests_no_executors_of_its_own_for_new_profiles() -> None:
    rules = ElasticRules(min=2, max=4, spares=1)
    first = "spark.dynamicAllocation.initialExecutors"
    assert allocation_settings(rules)[first] == "3"
    assert allocation_settings(rules, groups=True)[first] == "0"


def test_an_executor_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was decommissioned; it is killed after a while, and again if that was lost."""
    calls: list[str] = []

    class Backend:
        def decommissionExecutor(self, name: str, *more: Any) -> None:
            calls.append(f"decommission {name}")

        def killExecutors(self, *more: Any) -> None:
            calls.append("kill")

    class Spark(Anything):
        def schedulerBackend(self) -> Backend:
            return Backend()

    class Executor(Anything):
        leaving: set[str] = set()  # noqa: RUF012

        def registered(self, group: str) -> list[str]:
            return ["0", "1"]

    monkeypatch.setattr("roost.engine.executors.KILL_S", 0.2)
    allocator = SparkAllocator(Executor())  # type: ignore[arg-type]
    allocator._spark, allocator._slots = Spark(), 1
    allocator.decommission(["1"])
    assert list(allocator.executors()) == ["0"]
    for _ in range(2):
        time.sleep(0.25)
        assert list(allocator.executors()) == ["0"]
    allocator.close()
    assert calls == ["decommission 1", "kill", "kill"]


def test_calls_that_fail_are_shown_once_with_the_reason() -> None:
    """Otherwise it only looks as if executors did not arrive."""
    text = (
        "An error occurred while calling o1.f.\n: java.lang.Error: gone\n\tat org.apache.A\n\tat B"
    )
    calls = []

    class Backend:
        def requestTotalExecutors(self, *arguments: Any) -> None:
            calls.append("request")
            raise RuntimeError(text)

    class Spark(Anything):
        def schedulerBackend(self) -> Backend:
            return Backend()

    class Executor(Anything):
        leaving: set[str] = set()  # noqa: RUF012

        def registered(self, group: str) -> list[str]:
            return ["0"]

        def warm(self, *arguments: Any) -> bool:
            calls.append("warm")
            if calls.count("warm") == 1:
                raise RuntimeError("[SPARK_JOB_CANCELLED] Job 3 cancelled")  # by the pipeline
            raise ModuleNotFoundError("No module named 'flow'")

    allocator = SparkAllocator(Executor())  # type: ignore[arg-type]
    allocator._spark, allocator._slots = Spark(), 1
    with pytest.warns(RuntimeWarning) as shown, closing(allocator):
        for total in (2, 3):
            allocator.request(total)
        until = time.monotonic() + 5.0
        while (calls.count("request") < 2 or calls.count("warm") < 4) and time.monotonic() < until:
            allocator.executors()
            time.sleep(0.01)
    assert calls.count("request") == 2 and calls.count("warm") >= 4
    assert sorted(str(one.message) for one in shown) == [
        "preparing an executor failed: No module named 'flow'",
        "requesting executors failed: An error occurred while calling o1.f.\n"
        ": java.lang.Error: gone",
    ]


def test_executors_that_are_gone_are_forgotten() -> None:
    present = ["0", "1", "2"]

    class Executor(Anything):
        leaving: set[str] = {"9"}  # noqa: RUF012  (of another group)

        def registered(self, group: str) -> list[str]:
            return list(present)

        def warm(self, *arguments: Any) -> bool:
            return True

    allocator = SparkAllocator(Executor())  # type: ignore[arg-type]
    allocator._slots = 1
    with closing(allocator):
        allocator.executors()
        allocator.decommission(["1"])
        assert list(allocator.executors()) == ["0", "2"]
        assert allocator._executor.leaving == {"1", "9"}
        present[:] = ["0"]  # one left, and one died
        assert list(allocator.executors()) == ["0"]
        assert allocator._executor.leaving == {"9"}
        assert not allocator._leaving
        assert list(allocator._jobs) == ["0"]


def test_requests_do_not_wait_for_the_cluster() -> None:
    """A cluster that does not respond delays no batch."""
    blocked = threading.Event()

    class Backend:
        def requestTotalExecutors(self, *arguments: Any) -> None:
            blocked.wait()

        decommissionExecutor = requestTotalExecutors

    class Spark(Anything):
        def schedulerBackend(self) -> Backend:
            return Backend()

    class Executor(Anything):
        leaving: set[str] = set()  # noqa: RUF012

    allocator = SparkAllocator(Executor())  # type: ignore[arg-type]
    allocator._spark = Spark()
    started = time.monotonic()
    for total in range(1, 4):
        allocator.request(total)
    allocator.decommission(["7"])
    assert time.monotonic() - started < 1.0
    assert allocator._executor.leaving == {"7"}
    blocked.set()
    allocator.close()
