"""The prefix tree: which machine owns which part of a synopsis.

A machine owns prefixes of the places (see :mod:`roost.synopsis.spec`). The owner of a row is the
longest prefix of its place that the tree lists, so a parent keeps what its children did not take
over. Changing an owner moves no file: rows that were stored before stay with the old owner.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.model.arrays import Ints

PARTS = 8  # prefixes of each machine among which rows are divided evenly


@dataclass(frozen=True)
class PrefixTree:
    """Owners by prefix, which is a text of bits; the empty one is the root. Immutable."""

    machines: int
    owners: Mapping[str, int]

    def __post_init__(self) -> None:
        if "" not in self.owners:
            raise ValueError("a prefix tree needs an owner of the root")
        for prefix, owner in self.owners.items():
            if set(prefix) - {"0", "1"} or not 0 <= owner < self.machines:
                raise ValueError(f"prefix {prefix!r} of machine {owner} is not possible")

    def ranges(self, place_bits: int) -> tuple[Ints, Ints]:
        """Return the first place of each range of places with one owner, and the owners."""
        spans = [span(prefix, place_bits) for prefix in self.owners]
        firsts = np.unique([place for span in spans for place in span])[:-1]
        owners = np.empty(firsts.size, np.int64)
        # Longer prefixes replace what shorter ones set.
        for prefix in sorted(self.owners, key=len):
            first, last = np.searchsorted(firsts, span(prefix, place_bits))
            owners[first:last] = self.owners[prefix]
        return firsts, owners

    def owners_of(self, places: Ints, place_bits: int) -> Ints:
        """Return the owner of each place."""
        firsts, owners = self.ranges(place_bits)
        return owners[np.searchsorted(firsts, places, side="right") - 1]

    @classmethod
    def even(cls, machines: int, place_bits: int, places: Ints | None = None) -> PrefixTree:
        """Divide the space into prefixes with as many rows of a sample for each machine.

        Without a sample, every machine has the same share of the space. Each machine's prefixes
        follow each other, so that most of them share a parent.
        """
        known = np.empty(0, np.int64) if places is None else np.sort(places)
        leaves = _divide(known, place_bits, machines * PARTS) if machines > 1 else {"": 1.0}
        total, before = sum(leaves.values()), 0.0
        owners = {}
        for prefix, rows in sorted(leaves.items()):
            middle = before + rows / 2.0
            owners[prefix] = min(int(middle * machines / total), machines - 1)
            before += rows
        return cls(machines, _joined(owners))

    def listed(self, prefix: str) -> str:
        """Return the longest prefix of a prefix that the tree lists."""
        ends = range(len(prefix), -1, -1)
        return next(prefix[:end] for end in ends if prefix[:end] in self.owners)

    def owner(self, prefix: str) -> int:
        """Return the owner of what longer prefixes did not take over."""
        return self.owners[self.listed(prefix)]

    def whole_owner(self, prefix: str) -> int | None:
        """Return the only owner of a prefix; None if there are several."""
        inside = {owner for listed, owner in self.owners.items() if listed.startswith(prefix)}
        owner = self.owner(prefix)
        return owner if inside <= {owner} else None

    def moved(self, prefix: str, target: int) -> PrefixTree:
        """Return the tree in which the part of a prefix that its owner has goes to another."""
        source = self.owner(prefix)
        owners = {
            listed: target if listed.startswith(prefix) and owner == source else owner
            for listed, owner in self.owners.items()
        }
        return PrefixTree(self.machines, owners | {prefix: target})._reduced()

    def taken_back(self, subtree: str) -> PrefixTree:
        """Return the tree in which a prefix with all below it belongs to the owner around it."""
        kept = {p: owner for p, owner in self.owners.items() if not p.startswith(subtree)}
        return PrefixTree(self.machines, kept)._reduced()

    def resized(self, machines: int, weights: Mapping[str, float]) -> PrefixTree:
        """Return the tree on another number of machines.

        ``weights`` are those of prefixes with one owner. New machines take from those with most,
        down to a fair share; what machines that leave had goes to those with least. Neighbours
        stay together. Everything else stays where it is.
        """
        loads = [0.0] * max(machines, self.machines)
        held: list[list[str]] = [[] for _ in loads]
        for prefix in sorted(weights):
            loads[self.owner(prefix)] += weights[prefix]
            held[self.owner(prefix)].append(prefix)
        fair = sum(loads) / machines
        given = [prefix for machine in range(machines, self.machines) for prefix in held[machine]]
        for machine in range(self.machines) if machines > self.machines else ():
            for prefix in reversed(held[machine]):
                if loads[machine] - weights[prefix] / 2.0 <= fair:
                    break
                loads[machine] -= weights[prefix]
                given.append(prefix)
        targets = range(self.machines, machines) or range(machines)
        target = min(targets, key=loads.__getitem__)
        tree = PrefixTree(len(loads), self.owners)
        for prefix in given:
            if loads[target] + weights[prefix] / 2.0 > fair:
                target = min(targets, key=loads.__getitem__)
            loads[target] += weights[prefix]
            tree = tree.moved(prefix, target)
        target = min(targets, key=loads.__getitem__)
        owners = {p: target if owner >= machines else owner for p, owner in tree.owners.items()}
        _join_siblings(owners)
        return PrefixTree(machines, owners)._reduced()

    def _reduced(self) -> PrefixTree:
        """Omit prefixes that have the owner of the prefix around them."""
        kept = {
            prefix: owner
            for prefix, owner in self.owners.items()
            if not prefix or self.owner(prefix[:-1]) != owner
        }
        return PrefixTree(self.machines, kept)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for a fact."""
        return {"machines": self.machines, "owners": dict(self.owners)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrefixTree:
        """Invert :meth:`to_json`."""
        return cls(data["machines"], data["owners"])


def span(prefix: str, place_bits: int) -> tuple[int, int]:
    """Return the first place of a prefix, and the first one after it."""
    first = int(prefix or "0", 2)
    rest = place_bits - len(prefix)
    return first << rest, (first + 1) << rest


def _divide(places: Ints, place_bits: int, parts: int) -> dict[str, float]:
    """Halve the prefix with most rows until there are enough; returns the rows of each.

    Places without rows count as much as one row together, so that any prefix can be halved.
    """

    def weigh(prefix: str) -> tuple[float, int, str]:
        first, last = np.searchsorted(places, span(prefix, place_bits))
        return -float(last - first) - 0.5 ** len(prefix), len(prefix), prefix

    heap = [weigh("")]
    while len(heap) < parts and heap[0][1] < place_bits:
        prefix = heapq.heappop(heap)[2]
        for bit in "01":
            heapq.heappush(heap, weigh(prefix + bit))
    return {prefix: -weight for weight, _, prefix in heap}


def _joined(owners: dict[str, int]) -> dict[str, int]:
    """Replace siblings with the same owner by their parent, and name an owner of the root."""
    _join_siblings(owners)
    root = owners.get("", next(iter(owners.values())))
    return {"": root} | {prefix: owner for prefix, owner in owners.items() if owner != root}


def _join_siblings(owners: dict[str, int]) -> None:
    """Replace siblings with the same owner by their parent."""
    for length in range(max(map(len, owners)), 0, -1):
        for prefix in [prefix for prefix in owners if len(prefix) == length]:
            sibling = prefix[:-1] + "01"[prefix[-1] == "0"]
            if prefix in owners and owners.get(sibling) == owners[prefix]:
                owners[prefix[:-1]] = owners.pop(prefix)
                del owners[sibling]
