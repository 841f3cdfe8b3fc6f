"""What goes wrong in a simulated cluster, and when: slow machines, crashes, a poor network.

Crashes and slowness are given by round, so that a scenario can say exactly what it means; messages
are lost or repeated by chance, from the scenario's seed. A lost plan is not among the faults: a
plan is one row in the state directory, there wholly or not at all, which is the engine's to prove.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Moment(StrEnum):
    """When in a round the coordinator is lost."""

    BEFORE_DECISION = "before the decision"
    BEFORE_WRITE = "after the decision, before its plan is written"
    AFTER_WRITE = "after the new plan is written"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A machine that takes ``factor`` times as long, in rounds ``start`` to ``stop - 1``."""

    machine: int
    start: int
    stop: int
    factor: float


@dataclass(frozen=True, slots=True)
class MachineCrash:
    """A machine is lost in a round, and comes back empty: it loads its queries again."""

    machine: int
    round: int


@dataclass(frozen=True, slots=True)
class CoordinatorCrash:
    """The coordinator is lost in a round; the next one knows the last plan and nothing else."""

    round: int
    moment: Moment = Moment.BEFORE_DECISION


@dataclass(frozen=True, slots=True)
class Faults:
    """All faults of a scenario.

    Parameters
    ----------
    stragglers, machine_crashes, coordinator_crashes
        By round.
    loss, repeat
        Chance of each message (report, request to shed, answer) to be lost, or to come twice.
    """

    stragglers: tuple[Straggler, ...] = ()
    machine_crashes: tuple[MachineCrash, ...] = ()
    coordinator_crashes: tuple[CoordinatorCrash, ...] = ()
    loss: float = 0.0
    repeat: float = 0.0

    def slowness(self, number: int, machines: int) -> NDArray[np.float64]:
        """How many times as long each machine takes in a round."""
        factors = np.ones(machines)
        for straggler in self.stragglers:
            if straggler.start <= number < straggler.stop:
                factors[straggler.machine] *= straggler.factor
        return factors

    def machines_lost(self, number: int) -> list[int]:
        """Machines that crash in a round."""
        return sorted({crash.machine for crash in self.machine_crashes if crash.round == number})

    def coordinator_lost(self, number: int) -> Moment | None:
        """When the coordinator crashes in a round, if it does."""
        for crash in self.coordinator_crashes:
            if crash.round == number:
                return crash.moment
        return None

    @classmethod
    def drawn(cls, random: np.random.Generator, machines: int, rounds: int) -> Faults:
        """Draw a little of everything, as fuzzing wants it."""

        def some() -> Iterable[int]:
            return range(int(random.integers(0, 3)))

        def moment() -> Moment:
            return list(Moment)[int(random.integers(3))]

        def straggler() -> Straggler:
            start = int(random.integers(rounds))
            length = int(random.integers(1, rounds))
            factor = 1.0 + 4.0 * float(random.random())
            return Straggler(int(random.integers(machines)), start, start + length, factor)

        return cls(
            tuple(straggler() for _ in some()),
            tuple(
                MachineCrash(int(random.integers(machines)), int(random.integers(rounds)))
                for _ in some()
            ),
            tuple(CoordinatorCrash(int(random.integers(rounds)), moment()) for _ in some()),
            float(random.choice([0.0, 0.1, 0.4])),
            float(random.choice([0.0, 0.1, 0.4])),
        )


class Network:
    """Carries messages: once as a rule, never or twice by chance."""

    def __init__(self, faults: Faults, random: np.random.Generator) -> None:
        self._loss, self._repeat = faults.loss, faults.repeat
        self._random = random
        self.sent = self.lost = self.repeated = 0

    def copies(self) -> int:
        """How often one message arrives: 0, 1 or 2 times."""
        self.sent += 1
        if not self._loss and not self._repeat:
            return 1
        if self._random.random() < self._loss:
            self.lost += 1
            return 0
        if self._random.random() < self._repeat:
            self.repeated += 1
            return 2
        return 1

    def carry(self, messages: Iterable[T]) -> list[T]:
        """Give what arrives of some messages, in the order in which it arrives."""
        arrived = [message for message in messages for _ in range(self.copies())]
        if not self._loss and not self._repeat:
            return arrived
        return [arrived[k] for k in self._random.permutation(len(arrived))]
