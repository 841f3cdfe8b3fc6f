"""Which prefixes a machine passes on, and to whom: the fewest that remove its excess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STEPS = 20_000  # of the search; more moves than it reaches are chosen greedily
_ROUNDING = 1e-9


class PrefixLoad(NamedTuple):
    """Rows per second and bytes of a prefix."""

    rate: float = 0.0
    nbytes: float = 0.0

    def plus(self, other: PrefixLoad) -> PrefixLoad:
        """Return the sum of two loads."""
        return PrefixLoad(self.rate + other.rate, self.nbytes + other.nbytes)

    def minus(self, other: PrefixLoad) -> PrefixLoad:
        """Return what is left of a load, or of room for it."""
        return PrefixLoad(self.rate - other.rate, self.nbytes - other.nbytes)

    def fits(self, room: PrefixLoad) -> bool:
        """Return whether there is room for both."""
        return all(
            own <= free + _ROUNDING * abs(free) for own, free in zip(self, room, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PrefixMove:
    """A prefix and its new owner, with the load of what moves."""

    prefix: str
    target: int
    load: PrefixLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefix that may move."""

    prefix: str
    load: PrefixLoad
    amount: float  # of what is in excess
    ranks: Mapping[int, int]  # how much each target is preferred, the lowest first

    def overlaps(self, prefix: str) -> bool:
        """Return whether one prefix contains the other."""
        return self.prefix.startswith(prefix) or prefix.startswith(self.prefix)


Moves = tuple[PrefixMove, ...]
Rooms = Mapping[int, PrefixLoad]


def choose_moves(candidates: Sequence[Candidate], excess: float, rooms: Rooms) -> Moves | None:
    """Return the fewest moves that remove the excess; None if none were found.

    Of as many moves, those to preferred targets are better, then those that move less. Moves do not
    contain each other.
    """
    return _Search(candidates, excess, rooms).run()


class _Search:
    """Tries combinations of candidates, the largest first, of one move, of two, and so on."""

    def __init__(self, candidates: Sequence[Candidate], excess: float, rooms: Rooms) -> None:
        found = (one for one in candidates if one.amount > 0.0)
        self._candidates = sorted(found, key=lambda one: (-one.amount, one.prefix))
        self._excess = excess * (1.0 - _ROUNDING)
        self._rooms = dict(sorted(rooms.items()))
        self._steps = 0
        self._best: tuple[tuple[int, float], Moves] | None = None

    def run(self) -> Moves | None:
        for moves in range(1, len(self._candidates) + 1):
            self._extend(0, (), self._excess, 0, self._rooms, moves)
            if self._best is not None:
                return self._best[1]
            if self._steps > STEPS:
                return self._greedy()
        return None

    def _extend(
        self, first: int, moves: Moves, missing: float, rank: int, rooms: Rooms, left: int
    ) -> None:
        """Add each possible move, until as many as wanted remove the excess."""
        if not left:
            if missing <= 0.0:
                key = rank, -missing
                if self._best is None or key < self._best[0]:
                    self._best = key, moves
            return
        for number in range(first, len(self._candidates)):
            one = self._candidates[number]
            # Those that follow are smaller.
            if one.amount * left < missing or self._steps > STEPS:
                return
            if any(one.overlaps(move.prefix) for move in moves):
                continue
            for target, room in rooms.items():
                self._steps += 1
                if one.load.fits(room):
                    self._extend(
                        number + 1,
                        (*moves, PrefixMove(one.prefix, target, one.load)),
                        missing - one.amount,
                        rank + one.ranks[target],
                        {**rooms, target: room.minus(one.load)},
                        left - 1,
                    )

    def _greedy(self) -> Moves | None:
        """Move the smallest candidate that suffices, else the largest one, until it does."""
        rooms, missing, moves = dict(self._rooms), self._excess, list[PrefixMove]()
        while missing > 0.0:
            possible = [
                one
                for one in self._candidates
                if not any(one.overlaps(move.prefix) for move in moves)
                and any(one.load.fits(room) for room in rooms.values())
            ]
            if not possible:
                return None
            enough = [one for one in possible if one.amount >= missing]
            one = enough[-1] if enough else possible[0]
            targets = (target for target, room in rooms.items() if one.load.fits(room))
            target = min(targets, key=lambda target: (one.ranks[target], target))
            moves.append(PrefixMove(one.prefix, target, one.load))
            rooms[target] = rooms[target].minus(one.load)
            missing -= one.amount
        return tuple(moves)
