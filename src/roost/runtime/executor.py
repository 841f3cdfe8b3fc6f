"""The contract of executors, and the executor that runs batches in this process."""

from __future__ import annotations

import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from roost.model.elastic import DEFAULT_GROUP
from roost.runtime.chain import Chain, Placement
from roost.runtime.part import SOURCE, Item, Parcel, run_part
from roost.stages.contract import MapExecutor, Report, Task
from roost.stages.reading import ReadingStage
from roost.stages.slices import Slice, cut
from roost.storage.cache import WorkerCache

Value = TypeVar("Value")


class Inputs(Protocol):
    """What the first level of a batch reads."""

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[Inputs, Mapping[str, Sequence[int]]]:
        """Divide the input of batch ``number``; returns it with the machines of each reading stage.

        ``machines`` is how many machines a routed stage has that runs inside the readers' tasks;
        None without such a stage.
        """


@dataclass(frozen=True)
class SliceInputs:
    """Rows that tasks read themselves, by reading stage: see :mod:`roost.stages.slices`."""

    slices: Mapping[str, Sequence[Slice]]
    groups: Mapping[tuple[str, int], Sequence[Slice]] = field(default_factory=dict)  # by part

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[SliceInputs, Mapping[str, Sequence[int]]]:
        """Use as many machines as there is work for, in turn under a replicated plan.

        Launching a task costs more than matching a few thousand points.
        """
        readers: dict[str, Sequence[int]] = {}
        groups: dict[tuple[str, int], Sequence[Slice]] = {}
        for stage, slices in self.slices.items():
            of_points = stage == ReadingStage.name
            limit = machines if machines is not None and of_points else executor.slots
            count = limit
            if machines is not None or not of_points:
                rows = sum(item.rows for item in slices)
                count = min(limit, max(1, rows // executor.rows_per_task))
            readers[stage] = [(number * count + k) % limit for k in range(count)]
            parts = ((stage, machine) for machine in readers[stage])
            groups |= dict(zip(parts, cut(slices, len(readers[stage])), strict=True))
        return SliceInputs(self.slices, groups), readers


class Allocator(Protocol):
    """Requests and releases executors; no call waits for the cluster."""

    # Return what each worker of a new executor does before it counts as warm.
    preparations: Callable[[], Sequence[Callable[[WorkerCache], None]]]

    @property
    def slots(self) -> int:
        """Number of tasks that one executor runs at the same time."""

    def executors(self) -> Mapping[str, bool]:
        """Return the executors that are present, and whether each is warm.

        Those that were decommissioned are not among them. An executor is warm if its first task
        would not be slower than later ones.
        """

    def request(self, total: int) -> None:
        """Request so many executors in all; also replaces those that die."""

    def decommission(self, names: Sequence[str]) -> None:
        """Release executors: each ends its tasks, or is killed after a while."""

    def of(self, group: str) -> Allocator:
        """Return the allocator of another executor group than the default one."""


class Executor(MapExecutor, Protocol):
    """Runs the tasks of a batch; the loop uses no other interface of a cluster."""

    allocator: Allocator | None  # None: the cluster has a fixed size

    @property
    def rows_per_task(self) -> int:
        """Rows below which another task of a replicated plan is not worth its launch."""

    def executors(self, group: str = DEFAULT_GROUP) -> Sequence[str]:
        """Return the names of a group's executors, as in homes and reports."""

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run a batch; returns one report per stage and machine, ordered by machine, or fails."""

    def submit(
        self, call: Callable[[Any, WorkerCache], Value], items: Sequence[Any]
    ) -> Future[list[Value]]:
        """Start :meth:`map` beside the batches."""


def collected(chain: Chain, reports: Sequence[Report]) -> dict[str, list[Report]]:
    """Group reports by stage, in the order of machines; a lost report is a lost file."""
    found = Counter((report.stage, report.machine) for report in reports)
    expected = Counter((node.name, machine) for node in chain.nodes for machine in node.machines)
    if found != expected:
        raise RuntimeError(
            f"the batch returned {found.total()} reports instead of {expected.total()}: missing "
            f"{sorted(expected - found)}, unexpected or repeated {sorted(found - expected)}"
        )
    by_machine = sorted(reports, key=lambda report: report.machine)
    return {node.name: [r for r in by_machine if r.stage == node.name] for node in chain.nodes}


class InProcessExecutor:
    """Runs tasks one after the other in this process; pickles what a cluster would.

    ``slots`` is the number of readers of a partitioned plan. ``measure`` replaces the measured
    times of a report, so that decisions repeat. ``names`` are those of its executors, each with a
    cache of its own and, below ``hosts``, a folder of its own; a caller may change them between two
    batches. ``room`` returns what the workers of an executor measure: bytes of files that fit into
    the memory of its host.
    ``pickling`` has the processor seconds that the parts of the last batch spent on
    pickling blocks, by stage and machine.
    """

    rows_per_task = 1
    allocator: Allocator | None = None

    def __init__(
        self,
        slots: int = 2,
        measure: Callable[[Report], Report] = lambda report: report,
        names: Sequence[str] = ("local",),
        hosts: Path | None = None,
        room: Callable[[str], int | None] = lambda name: None,
    ) -> None:
        self.slots = slots
        self.measure = measure
        self.names = names
        self._hosts = hosts
        self._room = room
        self._caches: dict[str, WorkerCache] = {}
        self._placement = Placement()
        self.pickling: dict[tuple[str, int], float] = defaultdict(float)

    def executors(self, group: str = DEFAULT_GROUP) -> Sequence[str]:
        """Return the names of a group's executors; those of other groups are the allocator's."""
        if group == DEFAULT_GROUP or self.allocator is None:
            return self.names
        return list(self.allocator.of(group).executors())

    def place(self, part: int, home: str | None, group: str = DEFAULT_GROUP) -> str:
        """Return the executor of a part: its home, or any of its group if that is not there."""
        names = self.executors(group)
        return home if home is not None and home in names else names[part % len(names)]

    def cache(self, name: str) -> WorkerCache:
        """Return the cache of an executor."""
        hosts = self._hosts
        if name not in self._caches:
            root = lambda: None if hosts is None else hosts / name  # noqa: E731
            self._caches[name] = WorkerCache(root, partial(self._room, name))
        return self._caches[name]

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run the levels one after the other."""
        self.pickling.clear()
        self._placement = placement
        chain, tasks = pickle.loads(pickle.dumps((chain, tasks)))
        items: list[list[Item]] = [
            [Parcel(stage, machine, SOURCE, inputs.groups[stage, machine])]
            for stage, machine in chain.parts[0]
        ]
        for level in range(chain.levels):
            items = self.run_level(chain, tasks, level, items)
        reports = [report for report in items[0] if isinstance(report, Report)]
        return collected(chain, [self.measure(report) for report in reports])

    def run_level(
        self, chain: Chain, tasks: Mapping[str, Task], level: int, items: Sequence[Sequence[Item]]
    ) -> list[list[Item]]:
        """Run one level; returns the items of each part of the next."""
        count = 1 if level + 1 == chain.levels else len(chain.parts[level + 1])
        following: list[list[Item]] = [[] for _ in range(count)]
        homes = self._placement.homes_of(chain, level)
        for part, mine in enumerate(items):
            name = self.place(part, homes[part], chain.group(level))
            cache = self.cache(name)
            for target, item in run_part(chain, tasks, level, part, mine, cache, name):
                started = time.process_time()
                data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
                sent = time.process_time()
                following[target].append(pickle.loads(data))
                if isinstance(item, Parcel):
                    self.pickling[chain.parts[level][part]] += sent - started
                    self.pickling[item.stage, item.machine] += time.process_time() - sent
        return following

    def map(
        self,
        call: Callable[[Any, WorkerCache], Value],
        items: Sequence[Any],
        places: Sequence[str | None] = (),
    ) -> list[Value]:
        """Run a function on every item."""
        call = pickle.loads(pickle.dumps(call))
        names = [self.place(0, place) for place in places or [None] * len(items)]
        return [
            pickle.loads(pickle.dumps(call(item, self.cache(name))))
            for item, name in zip(items, names, strict=True)
        ]

    def submit(
        self, call: Callable[[Any, WorkerCache], Value], items: Sequence[Any]
    ) -> Future[list[Value]]:
        """Run it at once."""
        done: Future[list[Value]] = Future()
        try:
            done.set_result(self.map(call, items))
        except Exception as error:
            done.set_exception(error)
        return done
