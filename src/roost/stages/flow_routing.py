"""Names, ports and exchanges of a dataflow's stages: tuples go to the owners of their buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.blocks import BUCKET, times_of
from roost.dataflow.buckets import BucketMap, bucket_of, hash_rows
from roost.dataflow.local import Target, targets
from roost.dataflow.schema import FlowGraph, Node
from roost.errors import StateError
from roost.model.arrays import as_arrow, sort_small
from roost.storage.cache import WorkerCache
from roost.storage.store import Fact, View

FLOW = "flow"  # name of the stage of the progress, and table of the flow's facts
LAYOUT = "layout"  # key of the chosen layout among these facts
MAPS = "flow buckets"  # prefix of the tables of bucket maps


def stage_of(node: str) -> str:
    """Return the name of the stage that begins with an operator."""
    return f"{FLOW}:{node}"


def node_of(stage: str) -> str:
    """Invert :func:`stage_of`."""
    return stage.removeprefix(f"{FLOW}:")


def port_of(producer: str, target: Target) -> str:
    """Return the name of the port from a stage to an input of another one's first operator."""
    return f"{producer}>{target.node}.{target.input}"


def producers(graph: FlowGraph) -> list[Node]:
    """Return the nodes that are the beginning of a stage."""
    return [n for n in graph.nodes if n.name in graph.stages.starts]


def ports_of(graph: FlowGraph, node: str) -> dict[Target, str]:
    """Return the ports that a stage writes."""
    found = (t for t in targets(graph, node) if t.node in graph.stages.starts)
    return {target: port_of(node, target) for target in found}


def inputs_of(graph: FlowGraph, node: str) -> tuple[str, ...]:
    """Return the ports that a stage reads."""
    ports = (ports_of(graph, producer.name).items() for producer in producers(graph))
    return tuple(port for found in ports for target, port in found if target.node == node)


class PackedTuples(NamedTuple):
    """A block of tuples on its way through an exchange.

    The schema is apart from the record batches, so that a machine parses it once for all blocks
    that it receives: there is one from each machine that sends.
    """

    num_rows: int
    schema: bytes  # empty if the data is a whole Arrow stream
    data: bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.schema) + len(self.data)


class Packer:
    """Serializes parts of a block."""

    def __init__(self, block: pa.Table) -> None:
        self._block = block.combine_chunks()
        batches = self._block.to_batches()
        # Only a stream can have dictionaries, or several batches.
        whole = len(batches) != 1 or any(_has_dictionary(field.type) for field in block.schema)
        self._batch = None if whole else batches[0]
        self._schema = b"" if whole else block.schema.serialize().to_pybytes()

    def rows(self, start: int, stop: int) -> PackedTuples:
        """Serialize some rows."""
        count = stop - start
        if self._batch is not None:
            data = self._batch.slice(start, count).serialize()
        else:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self._block.schema) as writer:
                writer.write_table(self._block.slice(start, count))
            data = sink.getvalue()
        return PackedTuples(count, self._schema, data.to_pybytes())


def pieces(
    block: pa.Table, rows: NDArray[np.int64], borders: Sequence[int]
) -> Iterator[tuple[int, PackedTuples]]:
    """Serialize rows of a block for each machine, of which some get none.

    Machine ``m`` gets ``rows[borders[m]:borders[m + 1]]``.
    """
    packer = Packer(block.take(as_arrow(rows)))
    for machine, (start, stop) in enumerate(pairwise(borders)):
        if start < stop:
            yield machine, packer.rows(start, stop)


def _has_dictionary(kind: pa.DataType) -> bool:
    nested = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(map(_has_dictionary, nested))


def unpacked(blocks: Sequence[PackedTuples | pa.Table]) -> pa.Table | None:
    """Join blocks, of which those from an exchange are packed; None without any."""
    tables = []
    alike: dict[bytes, list[bytes]] = {}
    for block in blocks:
        if isinstance(block, pa.Table):
            tables.append(block)
        elif not block.schema:
            tables.append(pa.ipc.open_stream(pa.py_buffer(block.data)).read_all())
        else:
            alike.setdefault(block.schema, []).append(block.data)
    for text, parts in alike.items():
        schema = pa.ipc.read_schema(pa.py_buffer(text))
        read = [pa.ipc.read_record_batch(pa.py_buffer(data), schema) for data in parts]
        tables.append(pa.Table.from_batches(read, schema))
    return pa.concat_tables(tables) if tables else None


def with_buckets(block: pa.Table, keys: Sequence[str], buckets: int) -> pa.Table:
    """Add the bucket of each tuple."""
    found = bucket_of([block[key] for key in keys], block.num_rows, buckets)
    return block.append_column(BUCKET, as_arrow(found))


# --------------------------------------------------------------------------- routing


@dataclass(frozen=True)
class KeyRouting:
    """Sends tuples to the owners of their buckets.

    A Product has a grid of left by right buckets; a tuple goes to every machine that owns a cell of
    its row or column, once.
    """

    map: BucketMap
    keys: Mapping[str, tuple[int, tuple[str, ...]]]  # by port: input, and its key columns
    grid: tuple[int, int] | None = None  # of a Product

    local = False

    @property
    def epoch(self) -> int:
        """Epoch of the bucket map."""
        return self.map.epoch

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.map.machines

    def split(
        self, port: str, block: pa.Table, cache: WorkerCache
    ) -> Iterator[tuple[int, PackedTuples]]:
        """Divide tuples by machine; each gets its bucket."""
        side, keys = self.keys[port]
        columns = [block[key] for key in keys]
        if self.grid is not None:
            yield from self._split_grid(side, block, columns)
            return
        buckets = bucket_of(columns, block.num_rows, self.map.buckets)
        rows, machines = self._receivers(block, buckets)
        order = sort_small(machines, self.machines)
        borders = np.searchsorted(machines[order], np.arange(self.machines + 1)).tolist()
        block = block.append_column(BUCKET, as_arrow(buckets))
        yield from pieces(block, rows[order], borders)

    def _receivers(
        self, block: pa.Table, buckets: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows and their machines; a tuple of a moving bucket may go to both owners."""
        rows = np.arange(block.num_rows)
        if not self.map.under_way:
            return rows, self.map.owner_array[buckets]
        times = times_of(block)
        also, old = self.map.also_received(buckets, times)
        machines = self.map.owners_of(buckets, times)
        return np.concatenate([rows, also]), np.concatenate([machines, old])

    def _split_grid(
        self, side: int, block: pa.Table, columns: list[pa.ChunkedArray]
    ) -> Iterator[tuple[int, PackedTuples]]:
        assert self.grid is not None
        hashes = hash_rows(columns, block.num_rows)
        buckets = (hashes % np.uint64(self.grid[side])).astype(np.int32)
        times = times_of(block)
        block = block.append_column(BUCKET, as_arrow(buckets))
        if self.map.under_way:
            received = (
                received_by_side(self.map, self.grid, m, side) for m in range(self.machines)
            )
            kept = [(times >= a[buckets]) | (times < b[buckets]) for a, b in received]
        else:
            owns = np.zeros((self.machines, self.grid[side]), bool)
            owns[self.map.owner_array.reshape(self.grid), np.indices(self.grid)[side]] = True
            kept = [mine[buckets] for mine in owns]
        rows = [np.flatnonzero(mine) for mine in kept]
        borders = np.cumsum([0, *(mine.size for mine in rows)]).tolist()
        yield from pieces(block, np.concatenate(rows), borders)


def received_by_side(
    buckets: BucketMap, grid: tuple[int, int], machine: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which left or right tuples a machine gets for its cells of a Product's grid.

    For each bucket of the side: those from a time on, and those before another.
    """
    since, until = (times.reshape(grid) for times in buckets.received(machine))
    return since.min(axis=1 - side), until.max(axis=1 - side)


def key_columns(node: Node, side: int) -> tuple[str, ...]:
    """Return the columns that decide the bucket of a tuple; all for a Product, which has no key."""
    if node.keys:
        return node.keys[side]
    fields = node.inputs[side].columns
    usable = (pa.types.is_primitive, pa.types.is_string, pa.types.is_large_string)
    return tuple(field.name for field in fields if any(test(field.type) for test in usable))


def routing_of(graph: FlowGraph, node: Node, buckets: BucketMap, grid: Any) -> KeyRouting:
    """Return the routing of a stateful operator, and of those that are sent by its bucket map."""
    keys = {}
    shared = graph.stages.shared
    sent = {name: one.keys for name, one in shared.items() if one.sent and one.root == node.name}
    for producer in producers(graph):
        for (name, side), port in ports_of(graph, producer.name).items():
            if name == node.name:
                keys[port] = side, key_columns(node, side)
            elif name in sent:
                keys[port] = side, sent[name][side]
    return KeyRouting(buckets, keys, grid)


@dataclass
class BucketTable:
    """The bucket maps of an operator, by epoch."""

    name: str
    graph: FlowGraph
    node: Node
    view: View
    epoch: int
    grid: tuple[int, int] | None
    size_of: Callable[[int], int] = lambda machines: machines

    @property
    def records(self) -> str:
        """Table of the maps."""
        return maps_of(self.node.name)

    def map_at(self, epoch: int) -> BucketMap:
        """Return the bucket map of an epoch."""
        body = self.view.get(self.records, epoch)
        if body is None:
            raise StateError(f"the state has no bucket map of {self.node.name!r}, epoch {epoch}")
        return BucketMap.from_json(epoch, body)

    def at(self, epoch: int) -> KeyRouting:
        """Return the routing of an epoch."""
        return routing_of(self.graph, self.node, self.map_at(epoch), self.grid)

    @property
    def current(self) -> BucketMap:
        """The map of the batches to come."""
        return self.map_at(self.epoch)

    def fact(self, new: BucketMap) -> Fact:
        """Return the row of a new map."""
        new.check_invariants()
        return Fact(self.records, new.epoch, new.to_json())


def maps_of(node: str) -> str:
    """Return the table of an operator's bucket maps."""
    return f"{MAPS} {node}"
