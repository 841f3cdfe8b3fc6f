"""Which operators of a dataflow run together, as a value that its tasks carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Shared(NamedTuple):
    """A stateful operator that reads its input without an exchange.

    It runs in the tasks of another one, ``root``, and shares its bucket map: the columns ``keys``
    (by input) have the values by which the root's tuples were sent.
    """

    root: str
    keys: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Division:
    """The operators that begin a stage; all others run in the tasks of those before them."""

    starts: frozenset[str]
    shared: Mapping[str, Shared] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()  # Aggregates that receive partial results

    def root(self, name: str) -> str:
        """Return the operator whose bucket map a stateful operator uses."""
        return self.shared[name].root if name in self.shared else name

    def several(self, name: str) -> bool:
        """Return whether several stateful operators use the bucket map that this one uses."""
        return any(one.root == self.root(name) for one in self.shared.values())
