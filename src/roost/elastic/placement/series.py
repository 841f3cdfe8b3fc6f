"""The load series of operators, from what an engine measures of its stages in each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.elastic.group import StageLoad
from roost.elastic.placement.snapshot import ROUNDS, OperatorLoad


@dataclass(frozen=True)
class LoadSeries:
    """Loads by operator in the last rounds, and what a row cost; it survives a restart as JSON.

    Examples
    --------
    >>> stage = StageLoad("count", arrived=3_000.0, rows=1_000.0, busy_s=20.0)
    >>> LoadSeries().observed([stage], seconds=10.0, slots=2).operators()[0].series
    (3.0,)
    """

    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # executors, oldest first
    costs: Mapping[str, float] = field(default_factory=dict)  # seconds of a row

    def observed(self, stages: Sequence[StageLoad], seconds: float, slots: int) -> LoadSeries:
        """Return the series after another round of the stages.

        The load counts rows that arrived, also if they still wait. A stage that processed nothing
        has the cost that it had before. Stages that are new begin with loads of zero.
        """
        costs = {one.name: self._cost(one) for one in stages}
        rounds = max((len(series) for series in self.loads.values()), default=0)
        before = [self.loads.get(one.name, (0.0,) * rounds) for one in stages]
        newest = [one.arrived * costs[one.name] / (seconds * slots) for one in stages]
        loads = {
            one.name: (*series, load)[-ROUNDS:]
            for one, series, load in zip(stages, before, newest, strict=True)
        }
        return LoadSeries(loads, costs)

    def _cost(self, stage: StageLoad) -> float:
        if stage.rows > 0.0:
            return stage.busy_s / stage.rows
        return self.costs.get(stage.name, 0.0)

    def operators(self, state_bytes: Mapping[str, float] | None = None) -> tuple[OperatorLoad, ...]:
        """Return the operators of a snapshot, with the bytes of their state if they are known."""
        known = state_bytes or {}
        return tuple(
            OperatorLoad(name, series, known.get(name, 0.0)) for name, series in self.loads.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Return the series as JSON."""
        return {"loads": {k: list(v) for k, v in self.loads.items()}, "costs": dict(self.costs)}

    @classmethod
    def from_json(cls, data: Any) -> LoadSeries:
        """Invert :meth:`to_json`."""
        loads = {name: tuple(map(float, series)) for name, series in data["loads"].items()}
        return cls(loads, dict(data["costs"]))
