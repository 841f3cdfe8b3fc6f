"""Generator of requests of normal users, attackers and crowds, tick by tick, from a seed.

A world consists of parties (``parties.py``). It generates the requests of each tick as columns for
the simulator or as blocks for the query log. It does not react to the guard: blocked users continue
to send requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.model.space import Rect
from roost.sim.parties import (
    Attack,
    Crowd,
    Floats,
    Ids,
    Leaver,
    Mover,
    Newcomer,
    Normal,
    Party,
    Random,
    Step,
    rank_weights,
)

__all__ = [
    "Attack",
    "Crowd",
    "Leaver",
    "Mover",
    "Newcomer",
    "Normal",
    "Party",
    "Requests",
    "World",
    "rank_weights",
]


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in order.

    Parameters
    ----------
    codes
        User of each, as an index into the world's names.
    registers
        Whether it registers a query; otherwise it terminates one.
    queries
        Number of the query.
    boxes
        ``x0, y0, x1, y1`` in the unit square; NaN for terminations.
    """

    codes: NDArray[np.int32]
    registers: NDArray[np.bool_]
    queries: Ids
    boxes: Floats

    def __len__(self) -> int:
        return len(self.codes)

    def table(self, names: Sequence[str], bounds: Rect, *, numbered: bool = False) -> pa.Table:
        """Return a block for the query log, scaled to the given bounds.

        Query identifiers are texts, or integers if ``numbered``.
        """
        low = np.array([bounds.x0, bounds.y0] * 2)
        size = np.array([bounds.x1 - bounds.x0, bounds.y1 - bounds.y0] * 2)
        boxes = low + self.boxes * size
        gone = ~self.registers
        ids = pa.array(self.queries)
        if not numbered:
            ids = pc.binary_join_element_wise("q", ids.cast(pa.string()), "")
        return pa.table(
            {
                "op": pa.array(np.where(self.registers, "register", "terminate")),
                "query_id": ids,
                "user_id": pa.array(names).take(pa.array(self.codes)),
                **{
                    name: pa.array(np.ascontiguousarray(boxes[:, k]), mask=gone)
                    for k, name in enumerate(("x0", "y0", "x1", "y1"))
                },
            }
        )


class World:
    """Parties together, tick by tick.

    Parameters
    ----------
    parties
        Groups of users.
    data
        A sample of the data in the unit square, ``(n, 2)``.
    seed
        Seed of all random numbers.
    tick_s
        Seconds of stream time in a tick.
    query_side
        Side of a query's box.
    """

    def __init__(
        self,
        parties: Sequence[Party],
        data: Floats,
        seed: int,
        tick_s: float = 15.0,
        query_side: float = 0.0016,
    ) -> None:
        self._parties = parties
        self._data = data
        self._random = np.random.default_rng([seed, 77])
        self._tick_s = tick_s
        self._query_side = query_side
        self._next = 0
        self.tick = 0
        sizes = [party.users for party in parties]
        self._first = np.concatenate([[0], np.cumsum(sizes)])
        self.names = tuple(f"{party.name}-{k}" for party in parties for k in range(party.users))
        self.malicious = np.repeat([party.malicious for party in parties], sizes)
        # Numbers and users of each party's live queries, the oldest first.
        self._held: list[tuple[Ids, NDArray[np.int32]]] = []

    @property
    def targets(self) -> list[Floats]:
        """Targets of all attacks so far, in order."""
        found = [t for party in self._parties if isinstance(party, Attack) for t in party.targets]
        return [place for _, place in sorted(found, key=lambda target: target[0])]

    def begin(self) -> Requests:
        """Return the requests before the first tick."""
        blocks = []
        for k, party in enumerate(self._parties):
            self._held.append((np.empty(0, np.int64), np.empty(0, np.int32)))
            blocks.append(self._registered(k, party.begin(self._random, self._data)))
        return _joined(blocks)

    def next(self) -> Requests:
        """Return the requests of the next tick, shuffled over the parties."""
        blocks = []
        for k, party in enumerate(self._parties):
            held = len(self._held[k][0])
            step = party.step(self.tick, self._tick_s, held, self._random, self._data)
            blocks.append(self._ended(k, step))
            blocks.append(self._registered(k, step))
        self.tick += 1
        return _shuffled(_joined(blocks), self._random)

    def _registered(self, k: int, step: Step) -> Requests:
        count = len(step.owners)
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        codes = (step.owners + self._first[k]).astype(np.int32)
        old_numbers, old_codes = self._held[k]
        self._held[k] = (np.append(old_numbers, numbers), np.append(old_codes, codes))
        half = self._query_side / 2
        low, high = np.clip(step.places - half, 0, 1), np.clip(step.places + half, 0, 1)
        return Requests(codes, np.ones(count, np.bool_), numbers, np.hstack([low, high]))

    def _ended(self, k: int, step: Step) -> Requests:
        numbers, codes = self._held[k]
        own = np.arange(len(numbers))
        if step.enders is not None:
            own = np.flatnonzero(codes < self._first[k] + step.enders)
        count = min(step.ended, len(own))
        if self._parties[k].mixed:
            own = self._random.choice(own, count, replace=False)
        gone = np.zeros(len(numbers), np.bool_)
        gone[own[:count]] = True
        self._held[k] = (numbers[~gone], codes[~gone])
        boxes = np.full((count, 4), np.nan)
        return Requests(codes[gone], np.zeros(count, np.bool_), numbers[gone], boxes)


def _joined(blocks: Sequence[Requests]) -> Requests:
    return Requests(
        np.concatenate([block.codes for block in blocks]),
        np.concatenate([block.registers for block in blocks]),
        np.concatenate([block.queries for block in blocks]),
        np.concatenate([block.boxes for block in blocks]),
    )


def _shuffled(block: Requests, random: Random) -> Requests:
    """Shuffle requests; safe because a terminated query was registered in an earlier tick."""
    order = random.permutation(len(block))
    return Requests(
        block.codes[order], block.registers[order], block.queries[order], block.boxes[order]
    )
