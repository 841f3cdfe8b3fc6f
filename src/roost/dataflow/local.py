"""The stateless operators after the first one of a stage, inside its task.

Each task pushes its own tuples through all stateless operators up to the next stages and sinks. A
Union therefore needs no place of its own: every stream that it merges is pushed through the
operators behind it where that stream is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.blocks import Rejected
from roost.dataflow.mapping import apply_map
from roost.dataflow.operators import Filter, Map, Sink, Union
from roost.dataflow.schema import FlowGraph, Node
from roost.model.arrays import as_arrow
from roost.model.columns import one_array
from roost.model.records import Reason
from roost.predicate import PredicateSet

COMPILED = 256  # predicates that a worker retains


class Target(NamedTuple):
    """An input of the first operator of a stage, or a sink."""

    node: str
    input: int = 0


def targets(graph: FlowGraph, name: str) -> tuple[Target, ...]:
    """Return where the tuples of a node go, in the order of the graph."""
    found: dict[Target, None] = {}
    for output in range(graph.by_name[name].operator.outputs):
        for reader, k in graph.readers_of(name, output):
            if reader.name in graph.stages.starts or isinstance(reader.operator, Sink):
                if not (k and reader.mirrored):
                    found[Target(reader.name, k)] = None
            else:
                found |= dict.fromkeys(targets(graph, reader.name))
    return tuple(found)


@dataclass
class LocalOperators:
    """Pushes tuples through stateless operators; collects what these reject."""

    graph: FlowGraph
    rejected: list[Rejected]

    def push(
        self, name: str, table: pa.Table, output: int = 0
    ) -> Iterator[tuple[Target, pa.Table]]:
        """Yield the tuples that an output of a node leads to, with their targets."""
        starts = self.graph.stages.starts
        for reader, k in self.graph.readers_of(name, output):
            if reader.name in starts or isinstance(reader.operator, Sink):
                accepted = self._with_keys(reader, k, table)
                if accepted.num_rows and not (k and reader.mirrored):
                    yield Target(reader.name, k), accepted
            else:
                yield from self.apply(reader, table)

    def apply(self, node: Node, table: pa.Table) -> Iterator[tuple[Target, pa.Table]]:
        """Yield what a stateless operator makes of tuples, and the operators behind it."""
        match node.operator:
            case Map():
                made = apply_map(node, table, self.rejected)
                if made is not None:
                    yield from self.push(node.name, made)
            case Filter():
                for number, rows in enumerate(_divided(node, table)):
                    if rows.size and self.graph.readers_of(node.name, number):
                        kept = table if rows.size == table.num_rows else table.take(as_arrow(rows))
                        yield from self.push(node.name, kept, number)
            case Union():
                yield from self.push(node.name, table)

    def _with_keys(self, node: Node, side: int, table: pa.Table) -> pa.Table:
        """Reject the tuples whose key has a null."""
        keys = node.keys[side] if node.keys else ()
        nulls = [name for name in keys if table[name].null_count]
        if not nulls:
            return table
        valid = np.ones(table.num_rows, bool)
        for name in nulls:
            valid &= np.asarray(one_array(table[name]).is_valid())
        detail = f"a key column is null: {', '.join(nulls)}"
        without = table.filter(pa.array(~valid)).select(node.inputs[side].columns.names)
        self.rejected.append(Rejected(node.name, Reason.NULL_KEY, detail, without))
        return table.filter(pa.array(valid))


@lru_cache(maxsize=COMPILED)
def _compiled(text: str, schema: pa.Schema) -> PredicateSet:
    """Compile a predicate; workers retain it, because a small batch takes less time."""
    return PredicateSet([text], schema)


def _divided(node: Node, table: pa.Table) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each predicate of a Filter, and the rest."""
    assert isinstance(node.operator, Filter)
    columns = {name: table[name] for name in node.inputs[0].columns.names}
    rest = np.arange(table.num_rows)
    for text in node.operator.predicates:
        predicates = _compiled(text, node.inputs[0].columns)
        true = predicates.evaluate(np.zeros(rest.size, np.int64), rest, columns)
        yield rest[true]
        rest = rest[~true]
    yield rest
