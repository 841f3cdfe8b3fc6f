"""The only task code: one part of one level of a batch, on any executor.

Executors move items between levels and call :func:`run_part`. An item is a block for a stage and
machine (:class:`Parcel`), a mark (:class:`Mark`) or a report. Blocks and marks that are for a later
level are passed on. Reports travel with the blocks, so only the last level is collected.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from roost.runtime.chain import Chain, StageNode
from roost.stages.contract import Output, Report, Task, Work
from roost.storage.cache import WorkerCache

Value = TypeVar("Value")


class Parcel(NamedTuple):
    """A block for a stage on a machine."""

    stage: str
    machine: int
    port: str
    block: Any


class Mark(NamedTuple):
    """A mark for a stage on a machine, from one machine of an earlier stage."""

    stage: str
    machine: int
    source: str
    sender: int
    value: Any


Item = Parcel | Mark | Report
SOURCE = "source"
"""Port through which the first level receives what it reads."""


END = object()


class _Running:
    """A stage in this part: its work, where its outputs go, and its measurements."""

    def __init__(self, node: StageNode, clock: Callable[[], float]) -> None:
        self.node = node
        self.work: Work
        self.rows_in = self.rows_out = self.bytes_out = 0
        self.seconds = self.sending = 0.0
        self.local: dict[str, list[_Running]] = {}
        self.remote: dict[str, list[StageNode]] = {}
        self._clock = clock

    def timed(self, call: Callable[[], Value]) -> Value:
        """Count the time of a call as this stage's."""
        started = self._clock()
        try:
            return call()
        finally:
            self.seconds += self._clock() - started

    def each(self, call: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Iterate over the result of a call; count the time of both as this stage's."""
        steps = iter(self.timed(call))
        while (item := self.timed(partial(next, steps, END))) is not END:
            yield item

    def sent(self, call: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Iterate over what an exchange makes of a block; count the time as that of sending."""
        before = self.seconds
        for item in self.each(call):
            self.sending += self.seconds - before
            yield item
            before = self.seconds
        self.sending += self.seconds - before

    def report(self, executor: str, machine: int) -> Report:
        own = self.timed(self.work.report)
        return replace(
            own,
            stage=self.node.name,
            machine=machine,
            executor=executor,
            root=self.node.root,
            rows_in=self.rows_in,
            rows_out=self.rows_out,
            bytes_out=self.bytes_out,
            seconds=self.seconds,
            sending=self.sending,
        )


def run_part(
    chain: Chain,
    tasks: Mapping[str, Task],
    level: int,
    part: int,
    items: Iterable[Item],
    cache: WorkerCache,
    executor: str = "",
    clock: Callable[[], float] = time.process_time,
) -> Iterator[tuple[int, Item]]:
    """Run one part on the items that the level before sent to it.

    Yields items with the number of the part of the next level that they go to. ``executor`` is the
    name for the reports; ``clock`` returns processor seconds.
    """
    root, machine = chain.parts[level][part]
    # The root is the first.
    group = [_Running(node, clock) for node in chain.nodes if node.root == root]
    for run in group:
        run.work = run.timed(partial(tasks[run.node.name].build, machine, cache))
        for port in run.node.outputs:
            consumers = [node for node in chain.nodes if port in node.inputs]
            run.local[port] = [r for r in group if r.node in consumers and r.node.name != root]
            run.remote[port] = [node for node in consumers if node.root != root]
    running = {run.node.name: run for run in group}
    targets = 1 if level + 1 == chain.levels else len(chain.parts[level + 1])

    def hop(stage: str, machine: int) -> int:
        """Return where an item goes next; the same in every attempt."""
        return chain.numbers[chain.by_name[stage].root, machine] % targets

    def emitted(run: _Running, call: Callable[[], Iterable[Output]]) -> Iterator[tuple[int, Item]]:
        for port, block in run.each(call):
            run.rows_out += getattr(block, "num_rows", 0)
            for reader in run.local.get(port, ()):
                yield from received(reader, port, block)
            for node in run.remote.get(port, ()):
                assert node.routing is not None
                split = partial(chain.routings[node.routing].split, port, block, cache)
                for target, piece in run.sent(split):
                    run.bytes_out += piece.nbytes
                    yield hop(node.name, target), Parcel(node.name, target, port, piece)

    def received(run: _Running, port: str, block: Any) -> Iterator[tuple[int, Item]]:
        run.rows_in += getattr(block, "num_rows", 0)
        yield from emitted(run, partial(run.work.process, port, block))

    marks: dict[str, list[Mark]] = defaultdict(list)
    for item in group[0].each(lambda: items):
        if isinstance(item, Report):
            yield part % targets, item
        elif item.stage not in running:
            yield hop(item.stage, item.machine), item
        elif isinstance(item, Mark):
            marks[item.stage].append(item)
        else:
            yield from received(running[item.stage], item.port, item.block)
    for run in group:
        values = _mark_values(chain, run.node, marks[run.node.name])
        yield from emitted(run, partial(_finish, run.work, tasks[run.node.name], values))
    for run in group:
        report = run.report(executor, machine)
        if report.mark is not None:
            source = run.node.name
            for node in (node for node in chain.nodes if source in node.marks):
                for target in node.machines:
                    mark = Mark(node.name, target, source, machine, report.mark)
                    yield hop(node.name, target), mark
        yield part % targets, report


def _finish(work: Work, task: Task, marks: Mapping[str, Sequence[Any]]) -> Iterable[Output]:
    return work.finish(task.merge(marks))


def _mark_values(chain: Chain, node: StageNode, marks: Sequence[Mark]) -> dict[str, list[Any]]:
    """Return the marks by stage, in the order of machines; each machine must have sent one."""
    values: dict[str, list[Any]] = {}
    for source in node.marks:
        found = sorted((m for m in marks if m.source == source), key=lambda mark: mark.sender)
        senders, expected = [mark.sender for mark in found], sorted(chain.by_name[source].machines)
        if senders != expected:
            raise RuntimeError(
                f"{node.name} received marks of {source} from machines {senders} "
                f"instead of {expected}"
            )
        values[source] = [mark.value for mark in found]
    return values
