"""The contract between the batch loop and a stage.

A *stage* is one kind of work on the machines of a batch. It has three sides::

    Stage   on the driver: reads its state from the store, prepares a task, turns the reports of
            the machines into an outcome
    Task    pickled and sent to the machines: small, no store, no Spark
    Work    one machine's share of one batch: receives blocks, yields blocks, reports

Named *ports* connect stages. A stage that names a routing receives its inputs through an exchange,
which sends each row to the machine that the routing names. A stage without one runs inside the task
of the stage that produces its inputs and receives each block as it is made.

Everything here may run twice: a task, ``after``, ``committed``, ``cleanup``. A task therefore
writes files under names that no other attempt uses, and only the names in its report count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from roost.storage.cache import WorkerCache
from roost.storage.store import Fact, View

Value = TypeVar("Value")

Output = tuple[str, Any]  # a port and a block, which has ``num_rows`` and, to be sent, ``nbytes``


@dataclass(frozen=True, slots=True)
class Report:
    """What one stage did on one machine in one batch.

    ``Work.report`` sets the first three fields, the task code sets the others.
    """

    value: Any = None  # the stage's own result: file names, small arrays
    counts: Mapping[str, float] = field(default_factory=dict)  # added up over machines
    mark: Any = None  # for every machine of the later stages, such as a watermark
    stage: str = ""
    machine: int = 0
    executor: str = ""
    root: str = ""  # reports with the same root and machine shared a task
    rows_in: int = 0
    rows_out: int = 0
    bytes_out: int = 0  # sent through an exchange
    seconds: float = 0.0  # processor time, without that of other stages in the same task
    sending: float = 0.0  # part of it: dividing and packing blocks for an exchange


class Work(Protocol):
    """One machine's share of one batch."""

    def process(self, port: str, block: Any) -> Iterable[Output]:
        """Consume a block; called once per block or chunk, never once per row."""

    def finish(self, marks: Any) -> Iterable[Output]:
        """Consume the end of the input; ``marks`` is what ``Task.merge`` returned."""
        return ()

    def report(self) -> Report:
        """Return value, counts and mark; called once, after ``finish``."""


class Task(Protocol):
    """What every machine needs to know of a batch; pickled."""

    def build(self, machine: int, cache: WorkerCache) -> Work:
        """Build one machine's work."""

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> Any:
        """Merge the marks of the earlier stages that the stage reads, by stage."""
        return None


class Routing(Protocol):
    """Immutable: which machine processes a row. A row's machine depends on the row alone."""

    @property
    def epoch(self) -> int:
        """Number that an intent names."""

    @property
    def machines(self) -> int:
        """Number of machines."""

    @property
    def local(self) -> bool:
        """Whether any machine may process any row, so that no exchange is needed."""

    def split(self, port: str, block: Any, cache: WorkerCache) -> Iterator[tuple[int, Any]]:
        """Divide a block by machine."""


class RoutingTable(Protocol):
    """The epochs of a routing."""

    @property
    def name(self) -> str:
        """Name of the routing."""

    @property
    def epoch(self) -> int:
        """Epoch of the batches to come."""

    @property
    def records(self) -> str | None:
        """Table of the store that has a row for each epoch; None without one."""

    def at(self, epoch: int) -> Routing:
        """Return the routing of an epoch."""

    def size_of(self, machines: int) -> int | None:
        """Return the machines it has in a layout of so many; None if their number is fixed."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An output file, by name; published as the file of its machine, if it names one."""

    name: str
    machine: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a stage made of a batch, on the driver; ``observed`` and ``result`` are not stored."""

    files: Mapping[str, Sequence[Staged]] = field(default_factory=dict)  # by kind; published
    facts: Sequence[Fact] = ()  # recorded in the transaction that commits the batch
    metrics: Mapping[str, Any] = field(default_factory=dict)  # part of the commit
    observed: Any = None  # for policies, at the end of the round
    result: Any = None  # for later stages and ``committed``


@dataclass(frozen=True)
class Batch:
    """A batch as the stages see it: values only."""

    number: int
    routings: Mapping[str, Routing]
    before: Mapping[str, Routing]  # routings of the batch before
    queries: Any  # version of the live queries: roost.queries.versions.IndexVersion
    refused: Sequence[Any] = ()  # requests that log replay refused since the batch before
    reached: int | None = None  # newest event time of all earlier batches
    median: int | None = None  # newest median of the event times of an earlier batch
    closes_round: bool = False  # whether a round ended with the batch before
    attributes: tuple[str, ...] = ()  # attributes of the points that some stage reads
    ended: tuple[str, ...] = ()  # sources that bring no more rows
    choices: Mapping[str, Any] = field(default_factory=dict)  # what ``intend`` returned, by stage
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # of the stages that are done

    @property
    def prefix(self) -> str:
        """First part of the names of the batch's files; names sort by batch."""
        return f"batch-{self.number:010d}-"


@dataclass(frozen=True)
class Job:
    """Background work of a stage, beside the batches; may be abandoned at any time."""

    # Runs on an executor for each item: the item, the cache, and the file prefix as ``prefix``.
    call: Callable[..., Any]
    items: Sequence[Any]  # names of immutable files, and the like
    # Turns the results into an outcome, whose facts are recorded between two batches.
    after: Callable[[Sequence[Any]], Outcome]


class MapExecutor(Protocol):
    """The part of an executor that a stage may use on the driver."""

    @property
    def slots(self) -> int:
        """Number of tasks that run at the same time."""

    def map(
        self,
        call: Callable[[Any, WorkerCache], Value],
        items: Sequence[Any],
        places: Sequence[str | None] = (),
    ) -> list[Value]:
        """Run a function on every item, each in a task of its own; results in their order.

        ``places`` are the executors on which the tasks prefer to run.
        """


Reports = Mapping[str, Sequence[Report]]


def task_seconds(reports: Reports, stage: str) -> dict[int, float]:
    """Return the processor time of the tasks that a stage ran in, by machine."""
    tasks = {(report.root, report.machine): 0.0 for report in reports[stage]}
    for report in (report for others in reports.values() for report in others):
        if (report.root, report.machine) in tasks:
            tasks[report.root, report.machine] += report.seconds
    return {machine: seconds for (_, machine), seconds in tasks.items()}


class Stage:
    """One kind of work, on the driver. Subclasses override what they need.

    Its state is a function of the store: ``open`` computes it, and ``committed`` brings it to the
    value that ``open`` would compute after the commit.
    """

    name: str
    # Ports that it reads and writes. A stage with neither runs on the driver only.
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    routing: str | None = None  # brings its inputs; None runs it where they are made
    within: str | None = None  # stage with the same routing, in whose tasks it runs
    marks: tuple[str, ...] = ()  # stages whose marks it reads
    kinds: tuple[str, ...] = ()  # of output files, each a folder of the output

    def open(self, view: View) -> None:
        """Compute the stage's state from the store."""

    def intend(self) -> Any:
        """Return what a replay of the batch must repeat, as JSON; None if nothing."""
        return None

    def preparation(self) -> Callable[[WorkerCache], None] | None:
        """Return what makes the first task of a new worker as fast as later ones; pickled."""
        return None

    def due(self) -> bool:
        """Return whether a batch has work to do even if no source has rows."""
        return False

    def attributes(self, queries: Any) -> Iterable[str]:
        """Return the attributes of points that the stage reads."""
        return ()

    def prepare(self, batch: Batch) -> Task | None:
        """Return the task of a batch; None for a stage that runs on the driver only."""
        return None

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Turn the machines' reports into an outcome; ``batch.outcomes`` has the earlier ones."""
        return Outcome()

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Update the stage's state after the commit."""

    def cleanup(self) -> None:
        """Delete files that nothing can request; no batch is running."""

    def job(self) -> Job | None:
        """Return background work, if there is any to do."""
        return None

    def discard(self, prefix: str) -> None:
        """Delete the files of a job that was abandoned."""

    def routing_table(self) -> RoutingTable | None:
        """Return the routing that the stage brings along, if any."""
        return None

    def state(self) -> Any:
        """Return the stage's state as a value that can be compared."""
        return None
