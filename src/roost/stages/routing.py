"""The spatial plan as a routing: points go to the machine that owns their cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from roost.balance import Plan, Router
from roost.balance.changes import Change, apply_changes, arrivals
from roost.errors import StateError
from roost.kernel.cells import locate_cells
from roost.kernel.ids import hash_ids
from roost.model.schemas import PointBlock
from roost.model.space import Space
from roost.stages.contract import Routing
from roost.stages.decode import pack_columns, pack_rows, take_rows
from roost.storage.cache import WorkerCache
from roost.storage.store import View

SPACE = "space"  # name of the routing
PLANS = "plans"  # table with its epochs


class Packed(NamedTuple):
    """Points of one machine with their cells, as bytes of an Arrow record batch."""

    num_rows: int
    data: pa.Buffer

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.data.size)


def router_of(plan: Plan, cache: WorkerCache) -> Router:
    """Return a plan unrolled into arrays; a worker retains it from task to task."""
    return cache.get("router", plan, lambda: Router(plan))


def spatial(routings: Mapping[str, Routing]) -> SpatialRouting:
    """Return the spatial routing among others."""
    routing = routings[SPACE]
    assert isinstance(routing, SpatialRouting)
    return routing


@dataclass(frozen=True)
class SpatialRouting:
    """Routes points by cell: cell to partition to machine."""

    plan: Plan
    space: Space

    @property
    def epoch(self) -> int:
        """Epoch of the plan."""
        return self.plan.epoch

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.plan.machines

    @property
    def local(self) -> bool:
        """Whether every machine has every partition."""
        return self.plan.fully_replicated

    def arrivals(self, before: SpatialRouting) -> dict[int, tuple[int, ...]]:
        """Return the partitions whose queries each machine must load after a change."""
        if self.local or before.epoch == self.epoch:
            return {}
        return arrivals(before.plan, self.plan)

    def departures(self, before: SpatialRouting) -> frozenset[int]:
        """Return the machines that own less of space after a change than before."""
        if self.local or before.epoch == self.epoch:
            return frozenset()
        return frozenset(arrivals(self.plan, before.plan))

    def apply(self, changes: Sequence[Change], machines: int | None = None) -> SpatialRouting:
        """Return the routing of the next epoch; ValueError if the plan does not allow a change."""
        plan = apply_changes(self.plan, changes, machines)
        plan.check_invariants()
        return replace(self, plan=plan)

    def split(
        self, port: str, block: PointBlock, cache: WorkerCache
    ) -> Iterator[tuple[int, Packed]]:
        """Pack the points of each machine into one block."""
        grid = self.space.grid
        router = router_of(self.plan, cache)
        cells = locate_cells(block.x, block.y, grid.edges_x, grid.edges_y)
        machine = router.machines_of(cells, hash_ids(block.ids) if router.shared else None)
        order = np.argsort(machine, kind="stable")
        packed = pack_columns(take_rows(block, order), cells[order])
        borders = np.searchsorted(machine[order], np.arange(self.machines + 1)).tolist()
        for number, (start, stop) in enumerate(pairwise(borders)):
            if start < stop:
                yield number, Packed(stop - start, pack_rows(packed, start, stop))


class SpatialTable:
    """The plans of a state directory, by epoch; ``epoch`` is that of the batches to come."""

    name = SPACE
    records = PLANS

    def __init__(self, view: View, space: Space, epoch: int) -> None:
        self._view = view
        self._space = space
        self.epoch = epoch
        self._known: dict[int, SpatialRouting] = {}

    def size_of(self, machines: int) -> int:
        """Return the machines of the plan in a layout of so many."""
        return machines

    def at(self, epoch: int) -> SpatialRouting:
        """Return the routing of an epoch."""
        if epoch not in self._known:
            body = self._view.get(PLANS, epoch)
            if body is None:
                raise StateError(f"the state has no plan of epoch {epoch}")
            # A batch uses its own plan and the one before.
            kept = {number: self._known[number] for number in sorted(self._known)[-1:]}
            self._known = {**kept, epoch: SpatialRouting(Plan.from_json(body), self._space)}
        return self._known[epoch]
