"""The contract between the batch loop and a kind of work.

A *stage* is one kind of work on the machines of a batch. It has three sides::

    Stage   on the driver: reads its state from the store, prepares a task, turns the reports of
            the machines into an outcome
    Task    pickled and sent to the machines: small, no store, no Spark
    Work    one machine's share of one batch: receives blocks, yields blocks, reports

Stages are connected by named *ports*. A stage that names a routing receives its inputs through an
exchange, which sends each row to the machine that the routing names. A stage without one runs
inside the task of the stage that produces its inputs and receives each block as it is made.

Everything here may run twice: a task, ``after``, ``committed``, ``cleanup``. A task therefore
writes files under names that no other attempt uses, and only the names in its report count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from roost.storage.cache import WorkerCache
from roost.storage.store import Fact, View

Value = TypeVar("Value")


Output = tuple[str, Any]  # a port and a block, which has ``num_rows`` and, to be sent, ``nbytes``


@dataclass(frozen=True, slots=True)
class Report:
    """What one stage did on one machine in one batch.

    ``Work.report`` fills in the first three fields, the task code the others.

    Parameters
    ----------
    value
        The stage's own result: file names, small arrays.
    counts
        Numbers to add up over machines.
    mark
        A small value for every machine of the later stages, such as a watermark.
    stage, machine, executor
        What ran, and where.
    root
        Stage that the task was named for: reports with the same root and machine shared a task.
    rows_in, rows_out, bytes_out
        Rows received and emitted; bytes sent through an exchange.
    seconds
        Processor time, without that of other stages in the same task.
    """

    value: Any = None
    counts: Mapping[str, float] = field(default_factory=dict)
    mark: Any = None
    stage: str = ""
    machine: int = 0
    executor: str = ""
    root: str = ""
    rows_in: int = 0
    rows_out: int = 0
    bytes_out: int = 0
    seconds: float = 0.0


class Work(Protocol):
    """One machine's share of one batch."""

    def process(self, port: str, block: Any) -> Iterable[Output]:
        """Consume a block; called once per block or chunk, never once per row."""

    def finish(self, marks: Any) -> Iterable[Output]:
        """Consume the end of the input; ``marks`` is what ``Task.merge`` returned."""

    def report(self) -> Report:
        """Return value, counts and mark; called once, after ``finish``."""


class Task(Protocol):
    """What every machine needs to know of a batch; pickled."""

    def build(self, machine: int, cache: WorkerCache) -> Work:
        """Build one machine's work."""

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> Any:
        """Merge the marks of the earlier stages that the stage reads, by stage."""


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

    def at(self, epoch: int) -> Routing:
        """Return the routing of an epoch."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An output file of a task, by name; published as the file of its machine, if it names one."""

    name: str
    machine: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a stage made of a batch, on the driver.

    Parameters
    ----------
    files
        Staged output files by kind; the commit publishes them.
    facts
        Rows to record in the transaction that commits the batch.
    metrics
        Figures of the batch, part of its commit.
    observed
        What policies may see at the end of the round; kept in memory only.
    result
        What later stages and ``committed`` use; kept in memory only.
    """

    files: Mapping[str, Sequence[Staged]] = field(default_factory=dict)
    facts: Sequence[Fact] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    observed: Any = None
    result: Any = None


@dataclass(frozen=True)
class Batch:
    """A batch as the stages see it: values only.

    Parameters
    ----------
    number
        Number of the batch.
    routings, before
        Routings of this batch and of the batch before it, by name.
    queries
        The version of the live queries (:class:`roost.queries.versions.IndexVersion`).
    refused
        Requests that log replay refused since the batch before.
    reached
        Newest event time of all earlier batches.
    closes_round
        Whether a round ended with the batch before.
    attributes
        Attributes of the points that some stage reads.
    choices
        What each stage decided when the intent was written; a replay repeats it.
    outcomes
        Outcomes of the stages that are done.
    """

    number: int
    routings: Mapping[str, Routing]
    before: Mapping[str, Routing]
    queries: Any
    refused: Sequence[Any] = ()
    reached: int | None = None
    closes_round: bool = False
    attributes: tuple[str, ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """How the names of the batch's files begin."""
        return batch_prefix(self.number)


def batch_prefix(number: int) -> str:
    """Return how the names of a batch's files begin; names sort by batch."""
    return f"batch-{number:010d}-"


@dataclass(frozen=True)
class Job:
    """Background work of a stage, beside the batches; may be abandoned at any time.

    Parameters
    ----------
    call
        Runs on an executor for each item, with the item, the job's file prefix and the cache.
    items
        Inputs: names of immutable files, and the like.
    after
        Turns the results into an outcome, whose facts are recorded between two batches.
    """

    call: Callable[[Any, str, WorkerCache], Any]
    items: Sequence[Any]
    after: Callable[[Sequence[Any]], Outcome]


class MapExecutor(Protocol):
    """The part of an executor that a stage may use on the driver."""

    @property
    def slots(self) -> int:
        """Number of tasks that run at the same time."""

    def map(self, call: Callable[[Any, WorkerCache], Value], items: Sequence[Any]) -> list[Value]:
        """Run a function on every item, each in a task of its own; results in their order."""


Reports = Mapping[str, Sequence[Report]]


def task_seconds(reports: Reports, stage: str) -> dict[int, float]:
    """Return the processor time of the tasks that a stage ran in, by machine."""
    mine = {(report.root, report.machine): 0.0 for report in reports[stage]}
    for report in (report for others in reports.values() for report in others):
        if (report.root, report.machine) in mine:
            mine[report.root, report.machine] += report.seconds
    return {machine: seconds for (_, machine), seconds in mine.items()}


class Stage:
    """One kind of work, on the driver. Subclasses override what they need.

    Its state is a function of the store: ``open`` computes it, and ``committed`` brings it to the
    value that ``open`` would compute after the commit.

    Attributes
    ----------
    name
        Name of the stage.
    inputs, outputs
        Ports that it reads and writes. A stage with neither runs on the driver only.
    routing
        Routing that brings its inputs; None runs the stage where its inputs are made.
    marks
        Stages whose marks it reads.
    kinds
        Kinds of output files, each a folder of the output.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    routing: ClassVar[str | None] = None
    marks: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = ()

    def open(self, view: View) -> None:
        """Compute the stage's state from the store."""

    def intend(self) -> Any:
        """Return what a replay of the batch must repeat, as JSON; None if nothing."""
        return None

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
