"""Executors that come and go without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from roost.storage.cache import WorkerCache


class FakeAllocator:
    """Provides executors some seconds after a request, by a clock.

    Parameters
    ----------
    clock
        Returns seconds.
    slots
        Of each executor.
    arrival_s, warm_s
        Seconds from a request until an executor is present, and from then on until it is warm.
    available
        How many there can be; a test may change it, and remove names from ``present``.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        slots: int = 1,
        arrival_s: float = 0.0,
        warm_s: float = 0.0,
        available: int = 1000,
        group: str = "",
    ) -> None:
        self._clock, self.slots = clock, slots
        self.preparations: Callable[[], Sequence[Callable[[WorkerCache], None]]] = lambda: ()
        self._arrival_s, self._warm_s = arrival_s, warm_s
        self.available = available
        self.others: dict[str, FakeAllocator] = {}  # by group; a test may add some beforehand
        self._group = group
        self.present: dict[str, float] = {}  # clock from which each is warm
        self.calls: list[tuple[str, object]] = []  # that changed something
        self._started = 0
        self._total = 0
        self._arriving: list[float] = []

    def of(self, group: str) -> FakeAllocator:
        """Return the allocator of another group, whose executors have its name before a number."""
        return self.others.setdefault(
            group,
            FakeAllocator(self._clock, self.slots, self._arrival_s, self._warm_s, group=group),
        )

    def executors(self) -> Mapping[str, bool]:
        """Return those present, and whether each is warm."""
        now = self._clock()
        arrived = [at for at in self._arriving if at <= now]
        for at in arrived[: max(self.available - len(self.present), 0)]:
            self.present[f"{self._group}{self._started}"] = at + self._warm_s
            self._arriving.remove(at)
            self._started += 1
        return {name: warm <= now for name, warm in self.present.items()}

    def request(self, total: int) -> None:
        """Let executors arrive, or fewer of them."""
        if total != self._total:
            self.calls.append(("request", total))
        self._total = total
        missing = max(total - len(self.present), 0)
        due = self._clock() + self._arrival_s
        self._arriving += [due] * (missing - len(self._arriving))
        del self._arriving[missing:]

    def decommission(self, names: Sequence[str]) -> None:
        """Remove executors at once."""
        self.calls.append(("decommission", tuple(names)))
        for name in names:
            del self.present[name]
