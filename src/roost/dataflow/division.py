"""Which operators of a dataflow run together, as a value that its tasks carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Shared(NamedTuple):
    """A stateful operator that shares the tasks and the bucket map of another one, ``root``.

    The columns ``keys`` (by input) have the values by which the root's tuples are sent. Its tuples
    are made in these tasks, or ``sent`` to them by its own exchange.
    """

    root: str
    keys: tuple[tuple[str, ...], ...]
    sent: bool = False


@dataclass(frozen=True)
class Division:
    """The operators that begin a stage; all others run in the tasks of those before them."""

    starts: frozenset[str]
    shared: Mapping[str, Shared] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()  # Aggregates that receive partial results

    def root(self, name: str) -> str:
        """Return the operator whose bucket map a stateful operator uses."""
        return self.shared[name].root if name in self.shared else name

    def receives(self, name: str) -> bool:
        """Return whether an exchange brings the tuples of a stateful operator."""
        return name not in self.shared or self.shared[name].sent

    def several(self, name: str) -> bool:
        """Return whether several stateful operators use the bucket map that this one uses."""
        return any(one.root == self.root(name) for one in self.shared.values())
