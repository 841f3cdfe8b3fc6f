"""Decisions about the size of an executor group, as values with a reason and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from roost.balance.changes import NoChange
from roost.dataflow.moves import MapChange


@dataclass(frozen=True, slots=True)
class Provision:
    """Give the layout more executors: ``executors`` in all, for a load of so many."""

    executors: int
    load: float
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give the layout fewer executors: ``executors`` in all, for a load of so many."""

    executors: int
    load: float
    reason: str


@dataclass(frozen=True, slots=True)
class Balance:
    """Keep the executors and divide the load anew: by some bucket maps, or by the spatial plan.

    Without ``changes`` it is only the plan, which has a policy of its own.
    """

    changes: tuple[MapChange, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Cannot:
    """Report what cannot be done; the layout has ``executors`` from now on."""

    executors: int
    reason: str


ElasticDecision = Provision | Release | Balance | NoChange | Cannot
