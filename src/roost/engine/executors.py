"""Requests and releases executors of a Spark cluster, by Spark's own allocation calls.

Roost decides how many there are, so Spark's dynamic allocation is on and passive: executors can be
requested by resource profile, and its own timeouts are out of reach. All calls that may wait for
the cluster run in a thread of their own, in their order. Another thread looks for executors that
have arrived, so that they get warm while a batch runs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event, RLock
from typing import Any

from roost.engine.executor import SparkExecutor
from roost.errors import ConfigError, RoostError
from roost.model.elastic import DEFAULT_GROUP, ElasticRules
from roost.storage.cache import WorkerCache

NEVER = "1000000s"
RENEW_S = 5.0  # after which a request is repeated, in case that the cluster lost it
KILL_S = 60.0  # until an executor that was decommissioned is killed
WARN_S = 60.0  # between two warnings of calls of the same kind
CANCELLED = "SPARK_JOB_CANCELLED"  # in the text of the error, where Roost cancels jobs
FIRST_S = 120.0  # to wait for the first executor, which shows how many cores each has
POLL_S = 0.1


def allocation_settings(rules: ElasticRules, *, groups: bool = False) -> dict[str, str]:
    """Return the Spark settings of a run that changes the number of executors.

    Spark requests as many executors as there are at first for each new profile, and would replace
    the totals of all others. So with several ``groups`` there are none before Roost's requests.
    """
    first = "0" if groups else str(rules.min + rules.spares_beside(rules.min))
    allocation = "spark.dynamicAllocation"
    timeouts = (
        "executorIdleTimeout",
        "cachedExecutorIdleTimeout",
        "shuffleTracking.timeout",
        "schedulerBacklogTimeout",
        "sustainedSchedulerBacklogTimeout",
    )
    return {
        f"{allocation}.enabled": "true",
        f"{allocation}.shuffleTracking.enabled": "true",
        f"{allocation}.minExecutors": first,
        f"{allocation}.initialExecutors": first,
        **{f"{allocation}.{name}": NEVER for name in timeouts},
        "spark.decommission.enabled": "true",
    }


class SparkAllocator:
    """The executors of a group, in a Spark context whose master can start some.

    Allocators of several groups share threads and the totals, which Spark accepts only together.
    """

    def __init__(
        self,
        executor: SparkExecutor,
        group: str = DEFAULT_GROUP,
        beside: SparkAllocator | None = None,
    ) -> None:
        self.preparations: Callable[[], Sequence[Callable[[WorkerCache], None]]] = lambda: ()
        self._executor, self._group = executor, group
        self._profile = executor.profile_id(group)
        self._first = beside or self
        self._others: dict[str, SparkAllocator] = {}
        self._context = executor.context
        self._spark: Any = self._context._jsc.sc()
        self._jvm: Any = self._context._jvm
        if beside is None:
            self._calls = ThreadPoolExecutor(1, "roost-allocation")
            self._warming = ThreadPoolExecutor(1, "roost-warm-up")
            self._watching = ThreadPoolExecutor(1, "roost-arrivals")
            self._watch: Future[None] | None = None
            self._prepared: Sequence[Callable[[WorkerCache], None]] = ()
            self._closed = Event()
            self._lock = RLock()
            self._totals: dict[int, int] = {}  # by profile
            self._silent: dict[str, float] = {}  # time until which failures are not shown, by kind
        else:
            self._calls, self._warming = beside._calls, beside._warming
            self._lock, self._totals = beside._lock, beside._totals
        self._jobs: dict[str, Future[bool]] = {}
        self._leaving: dict[str, float] = {}  # time from which each is killed
        self._requested = (0, 0.0)  # executors, and when
        self._slots: int | None = None

    def close(self) -> None:
        """End the threads; executors stay until the Spark session ends."""
        self._closed.set()
        for pool in (self._watching, self._calls, self._warming):
            pool.shutdown(wait=True, cancel_futures=True)

    def of(self, group: str) -> SparkAllocator:
        """Return the allocator of another group."""
        if group not in self._others:
            self._others[group] = SparkAllocator(self._executor, group, self)
        return self._others[group]

    @property
    def slots(self) -> int:
        """Number of tasks that one executor runs at the same time.

        Waits for the first one, and raises an error if the cluster cannot provide it.
        """
        if self._slots is None:
            deadline = time.monotonic() + FIRST_S
            while not (names := self._executor.registered(self._group)):
                if time.monotonic() > deadline:
                    if self._group != DEFAULT_GROUP:
                        expected = f"a group whose first executor arrives within {FIRST_S:g} s"
                        raise ConfigError("elastic.groups", self._group, expected)
                    raise RoostError(f"no executor arrived within {FIRST_S:g} s")
                time.sleep(POLL_S)
            cores = self._spark.statusStore().executorSummary(names[0]).totalCores()
            cpus = int(self._context.getConf().get("spark.task.cpus", "1") or 1)
            self._slots = max(int(cores) // cpus, 1)
        return self._slots

    def executors(self) -> Mapping[str, bool]:
        """Return the registered executors that stay, and whether each is warm.

        A new executor runs tasks first: its daemon loads the code, and its workers map segments.
        """
        with self._lock:
            registered = self._executor.registered(self._group)
            self._forget(registered)
            self._check_leaving()
            stay = [name for name in registered if name not in self._leaving]
            for name in stay:
                job = self._jobs.get(name)
                if job is None or (job.done() and not self._warm(job)):
                    calls = self._first._prepared
                    warm = partial(self._executor.warm, name, self.slots, calls, self._group)
                    self._jobs[name] = self._submit(self._warming, "preparing an executor", warm)
            return {name: self._warm(self._jobs[name]) for name in stay}

    def is_warm(self, name: str) -> bool:
        """Return whether an executor is known to be warm; threads may call it."""
        job = self._jobs.get(name)
        return job is not None and self._warm(job)

    def _submit(
        self, pool: ThreadPoolExecutor, what: str, call: Callable[..., Any], *arguments: Any
    ) -> Future[Any]:
        """Call in a thread; show why it failed, since executors would only seem to be late."""

        def reported() -> Any:
            try:
                return call(*arguments)
            except Exception as error:
                self._first._show(what, error)
                raise

        return pool.submit(reported)

    def _show(self, what: str, error: Exception) -> None:
        """Warn of a failed call. It will be repeated, so not of each."""
        now, text = time.monotonic(), str(error).partition("\n\tat")[0]  # without Java's stack
        if self._closed.is_set() or CANCELLED in text or now < self._silent.get(what, 0.0):
            return
        self._silent[what] = now + WARN_S
        warnings.warn(f"{what} failed: {text}", RuntimeWarning, stacklevel=2)

    @staticmethod
    def _warm(job: Future[bool]) -> bool:
        return job.done() and not job.cancelled() and job.exception() is None and job.result()

    def request(self, total: int) -> None:
        """Request so many executors in all, of the group's profile."""
        now = time.monotonic()
        if self._requested[0] == total and now - self._requested[1] < RENEW_S:
            return
        self._requested = total, now
        self._totals[self._profile] = total
        totals = dict(self._totals)
        self._submit(self._calls, "requesting executors", self._request, totals)
        first = self._first
        first._prepared = first.preparations()  # reads the store, which only this thread may do
        if first._watch is None or first._watch.done():
            first._watch = first._watching.submit(first._await_arrivals)

    def _await_arrivals(self) -> None:
        """Let executors get warm as soon as they are registered, until the next request."""
        until = time.monotonic() + RENEW_S
        while not self._closed.wait(POLL_S) and time.monotonic() < until:
            groups = [self, *self._others.values()]
            if all(sum(one.executors().values()) >= one._requested[0] for one in groups):
                return

    def _request(self, totals: Mapping[int, int]) -> None:
        counts, tasks, hosts = (self._jvm.java.util.HashMap() for _ in range(3))
        convert = self._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap
        for profile, total in totals.items():
            counts.put(profile, total)
            tasks.put(profile, 0)
            hosts.put(profile, convert(self._jvm.java.util.HashMap()))
        backend = self._spark.schedulerBackend()
        backend.requestTotalExecutors(convert(counts), convert(tasks), convert(hosts))

    def decommission(self, names: Sequence[str]) -> None:
        """Let executors end their tasks and leave."""
        with self._lock:
            for name in names:
                self._leaving[name] = time.monotonic() + KILL_S
                self._executor.leaving.add(name)
                self._submit(self._calls, "releasing an executor", self._decommission, name)

    def _decommission(self, name: str) -> None:
        # The total was lowered by the request before, so it stays as it is.
        none = self._jvm.scala.Option.empty()
        info = self._jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("released", none)
        self._spark.schedulerBackend().decommissionExecutor(name, info, False, False)

    def _forget(self, registered: Sequence[str]) -> None:
        """Forget executors that are gone; names are never used again."""
        self._jobs = {name: job for name, job in self._jobs.items() if name in registered}
        for name in self._leaving.keys() - set(registered):
            del self._leaving[name]
            self._executor.leaving.discard(name)

    def _check_leaving(self) -> None:
        """Kill what should have left."""
        now = time.monotonic()
        for name in [name for name, limit in self._leaving.items() if limit < now]:
            self._leaving[name] = now + KILL_S
            self._submit(self._calls, "killing an executor", self._kill, name)

    def _kill(self, name: str) -> None:
        convert = self._jvm.org.apache.spark.api.python.PythonUtils.toSeq
        # The context refuses this with dynamic allocation. The total stays as it is.
        self._spark.schedulerBackend().killExecutors(convert([name]), False, False, True)


def is_elastic(executor: SparkExecutor) -> bool:
    """Return whether the master of a context can start executors: one that is not local."""
    return not executor.context._jsc.isLocal()
