"""The size of one executor group: what is planned, requested and observed, and what follows.

*Planned* executors are those of the last decision, recorded with its round; *observed* ones are
present and warm; *requested* ones have not arrived yet. All three are compared after every
batch, so a driver that dies neither loses nor retains an executor.

New executors count in the layout when all that were planned are warm. Executors that leave are
decommissioned when every layout has moved off their machines. Nothing here waits for the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.elastic.group import Executors, paid_s
from roost.model.elastic import ElasticRules
from roost.runtime.executor import Allocator


class GroupSize:
    """An executor group of a run; ``saved`` is its record of the last round, or empty."""

    def __init__(
        self, allocator: Allocator, rules: ElasticRules, saved: Mapping[str, Any], now: float
    ) -> None:
        self.allocator, self.rules = allocator, rules
        self.planned = min(max(int(saved.get("planned", rules.min)), rules.min), rules.max)
        self.layout = int(saved.get("layout", self.planned))
        self.provision_s = float(saved.get("provision_s", 0.0))
        self._waiting_since: float | None = None
        self._started: dict[str, float] = {}  # when each present executor was seen first
        self.follow(now, moved=False)

    @property
    def machines(self) -> int:
        """Machines that layouts should have: one for each slot of the group's executors."""
        return self.layout * self.allocator.slots

    @property
    def machines_max(self) -> int:
        """Machines of the largest layout."""
        return self.rules.max * self.allocator.slots

    @property
    def _target(self) -> int:
        """Executors to have in all, with spares."""
        return self.planned + self.rules.spares_beside(self.planned)

    @property
    def settled(self) -> bool:
        """Return whether the planned executors are present, and count in the layout."""
        return (
            sum(self.allocator.executors().values()) >= self.planned and self.layout == self.planned
        )

    def executors(self, now: float) -> Executors:
        """Return what a policy sees."""
        present = self.allocator.executors()
        waited = 0.0 if self._waiting_since is None else now - self._waiting_since
        missing = max(self._target - len(present), 0)
        return Executors(self.planned, missing, sum(present.values()), waited)

    def follow(self, now: float, *, moved: bool) -> None:
        """Compare what is planned, requested and observed, and request or release executors.

        ``moved`` states that no layout uses machines beyond its size any more.
        """
        present, target = self.allocator.executors(), self._target
        self._started = {name: self._started.get(name, now) for name in present}
        warm = sum(present.values())
        if warm >= self.planned:
            if self.layout < self.planned and self._waiting_since is not None:
                self.provision_s = now - self._waiting_since
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self.layout > self.planned or warm >= self.planned:
            moved &= self.layout <= self.planned
            self.layout = self.planned
        # Executors that leave stay until no batch to come counts on them.
        kept = max(target, 0 if moved else min(len(present), self.rules.max))
        self.allocator.request(kept)
        if len(present) > kept:
            self.allocator.decommission(self._ranked(present, now)[kept:])

    def _ranked(self, present: Mapping[str, bool], now: float) -> list[str]:
        """Return the executors in the order in which they stay.

        The newest ones leave; names are numbers, or end with one. If started hours are paid, those
        leave of which the least is paid for in vain.
        """
        ranked = sorted(present, key=lambda name: (len(name), name))
        if self.rules.by_started_hour:
            ranked.sort(key=lambda name: (not present[name], -paid_s(self._started[name], now)))
        return ranked
