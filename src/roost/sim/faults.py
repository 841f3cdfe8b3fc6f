"""Faults of a simulated cluster: slow machines, crashes, an unreliable network.

Crashes and stragglers are given by round; messages are lost or repeated at random, from the
scenario's seed. A lost plan is not among the faults: a plan is recorded in one transaction, which
the tests of the engine check.
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
    """A machine crashes in a round and restarts empty: it loads its queries again."""

    machine: int
    round: int


@dataclass(frozen=True, slots=True)
class CoordinatorCrash:
    """The coordinator crashes in a round; its successor has only the last plan."""

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
        Probability that a message (report, request, response) is lost, or arrives twice.
    """

    stragglers: tuple[Straggler, ...] = ()
    machine_crashes: tuple[MachineCrash, ...] = ()
    coordinator_crashes: tuple[CoordinatorCrash, ...] = ()
    loss: float = 0.0
    repeat: float = 0.0

    def slowness(self, number: int, machines: int) -> NDArray[np.float64]:
        """Return the slowdown factor of each machine in a round."""
        factors = np.ones(machines)
        for straggler in self.stragglers:
            if straggler.start <= number < straggler.stop:
                factors[straggler.machine] *= straggler.factor
        return factors

    def machines_lost(self, number: int) -> list[int]:
        """Return the machines that crash in a round."""
        return sorted({crash.machine for crash in self.machine_crashes if crash.round == number})

    def coordinator_lost(self, number: int) -> Moment | None:
        """Return when the coordinator crashes in a round, or None."""
        for crash in self.coordinator_crashes:
            if crash.round == number:
                return crash.moment
        return None


class Network:
    """Delivers messages: usually once, at random never or twice."""

    def __init__(self, faults: Faults, random: np.random.Generator) -> None:
        self._loss, self._repeat = faults.loss, faults.repeat
        self._random = random
        self.sent = self.lost = self.repeated = 0

    def copies(self) -> int:
        """Return how often a message arrives: 0, 1 or 2 times."""
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
        """Return the messages that arrive, in order of arrival."""
        arrived = [message for message in messages for _ in range(self.copies())]
        if not self._loss and not self._repeat:
            return arrived
        return [arrived[k] for k in self._random.permutation(len(arrived))]
