"""The operators of a dataflow as values: a directed acyclic graph that names its edges.

An operator lists the streams that it reads as ports: the name of another operator and, where that
has several outputs, which of them. Nothing here computes; :mod:`roost.dataflow.schema` validates a
graph, :mod:`roost.dataflow.interpreter` defines what it means, and the stages run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc


class Port(NamedTuple):
    """One output of an operator."""

    node: str
    output: int = 0


class WindowBy(StrEnum):
    """What bounds a window."""

    TIME = "time"
    TUPLES = "tuples"
    FOREVER = "forever"


@dataclass(frozen=True)
class Window:
    """Tuples that are aggregated or joined together.

    Sizes and advances of time are seconds where event times are timestamps, else the unit of the
    time column. Windows of an Aggregate begin at multiples of the advance.
    """

    by: WindowBy
    size: float | None = None  # None only without end
    advance: float | None = None  # None for Join and Product


@dataclass(frozen=True)
class Operator:
    """Base of all operators."""

    name: str
    inputs: tuple[Port, ...] = ()

    stateful: ClassVar[bool] = False

    @property
    def outputs(self) -> int:
        """Number of output streams."""
        return 1


class SourceKind(StrEnum):
    """Where the tuples of a source come from."""

    RECORDS = "records"  # files, a generator, Kafka, a streaming DataFrame
    POINTS = "points"  # of the same run
    MATCHES = "matches"  # of the same run


@dataclass(frozen=True)
class Source(Operator):
    """Tuples from outside; without a time column they are stamped with the batch's clock."""

    kind: SourceKind = SourceKind.RECORDS
    schema: pa.Schema | None = None  # None for points and matches: the run knows it
    time: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Map(Operator):
    """Zero, one or several tuples for each input tuple, with its event time.

    ``columns`` are pyarrow expressions by name. A ``function`` receives a record batch and returns
    one with as many rows, or a pair of one with any number of rows and, for each of them, the
    number of its input row in ascending order.
    """

    columns: Mapping[str, pc.Expression] = field(default_factory=dict)
    function: Callable[[pa.RecordBatch], Any] | None = None
    schema: pa.Schema | None = None  # of what the function returns


@dataclass(frozen=True)
class Filter(Operator):
    """Divides a stream by the first predicate that is true; the last output has the rest."""

    predicates: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """Number of output streams."""
        return len(self.predicates) + 1


@dataclass(frozen=True)
class Union(Operator):
    """Merges streams of the same schema."""


@dataclass(frozen=True)
class Aggregate(Operator):
    """One tuple for each window and group that has tuples."""

    stateful: ClassVar[bool] = True

    functions: Mapping[str, Any] = field(default_factory=dict)  # text or the user's, by column
    by: tuple[str, ...] = ()
    window: Window = Window(WindowBy.FOREVER)


@dataclass(frozen=True)
class Join(Operator):
    """Pairs of a left and a right tuple with equal keys for which the condition is true."""

    stateful: ClassVar[bool] = True

    condition: str = ""
    window: Window = Window(WindowBy.FOREVER)
    per: str | None = None  # "key": a window of tuples counts those of one key


@dataclass(frozen=True)
class Product(Operator):
    """Pairs of a left and a right tuple for which the condition is true."""

    stateful: ClassVar[bool] = True

    condition: str = ""
    window: Window = Window(WindowBy.FOREVER)


@dataclass(frozen=True)
class Sink(Operator):
    """Writes a stream to the folder of its name."""

    @property
    def outputs(self) -> int:
        """Number of output streams."""
        return 0
