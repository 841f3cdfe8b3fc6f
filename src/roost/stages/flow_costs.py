"""Measures what an exchange costs on this host: per channel, and per tuple that is sent.

The exchange's own code is timed: dividing a block by machine, packing, pickling and unpacking it.
One task that sends ``rows`` tuples to ``machines`` takes ``alpha * machines + beta * rows``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from roost.dataflow.blocks import TIME
from roost.dataflow.buckets import BucketMap
from roost.dataflow.compiler import LayoutCosts
from roost.dataflow.operators import Source
from roost.dataflow.schema import FlowGraph
from roost.model.arrays import as_arrow
from roost.stages.flow_routing import KeyRouting, unpacked
from roost.storage.cache import WorkerCache

FEW, MANY = 4_096, 65_536  # tuples
MACHINES = 64
PASSES = 5


def measure_exchange(
    graph: FlowGraph, rate: float, clock: Callable[[], float] = time.process_time
) -> LayoutCosts:
    """Measure the weights of a layout's cost with tuples of a dataflow's first source.

    ``rate`` is the number of tuples in a batch, so that costs are processor seconds per batch.
    """
    (schema, *_) = (n.output for n in graph.nodes if isinstance(n.operator, Source))
    assert schema is not None
    blocks = [_block(schema.columns, rows) for rows in (FEW, MANY)]

    def least(block: pa.Table, machines: int) -> float:
        routing = KeyRouting(BucketMap.even(machines), {"p": (0, (TIME,))})
        return min(_seconds(routing, block, clock) for _ in range(PASSES))

    one, many, wide = least(blocks[0], 1), least(blocks[1], 1), least(blocks[0], MACHINES)
    return LayoutCosts(
        alpha=max(wide - one, 0.0) / (MACHINES - 1),
        beta=max(many - one, 0.0) / (MANY - FEW),
        rate=rate,
    )


def _seconds(routing: KeyRouting, block: pa.Table, clock: Callable[[], float]) -> float:
    started = clock()
    for _, piece in routing.split("p", block, WorkerCache()):
        unpacked([pickle.loads(pickle.dumps(piece))])
    return clock() - started


def _block(schema: pa.Schema, rows: int) -> pa.Table:
    """Make tuples with different values, of the types of a schema."""
    numbers = as_arrow(np.arange(rows))
    columns = {}
    for field in schema:
        try:
            columns[field.name] = numbers.cast(field.type)
        except pa.ArrowException:
            columns[field.name] = pa.nulls(rows, field.type)
    return pa.table({**columns, TIME: numbers})
