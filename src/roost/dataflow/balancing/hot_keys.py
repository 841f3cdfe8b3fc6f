"""Hot keys: keys with more tuples than a machine should have, which no bucket map can relieve."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from roost.dataflow.balancing.loads import SubqueryLoad


class Remedy(StrEnum):
    """What can be done for a hot key."""

    PARTIAL = "aggregate partially before the exchange"
    NONE = "none: the function needs all tuples of the key on one machine"


@dataclass(frozen=True)
class HotKey:
    """A key that has more than a machine's fair share of the tuples."""

    subquery: str
    operator: str
    key: str
    share: float
    function: str | None  # that cannot be aggregated partially
    remedy: Remedy

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the report."""
        return asdict(self)


def hot_keys(load: SubqueryLoad) -> tuple[HotKey, ...]:
    """Return the hot keys of the newest round, the hottest first."""
    fair = 1.0 / load.machines
    remedy = Remedy.PARTIAL if load.unmergeable is None else Remedy.NONE
    return tuple(
        HotKey(load.subquery, load.operator, heavy.key, heavy.share, load.unmergeable, remedy)
        for heavy in sorted(load.newest.keys, key=lambda one: (-one.share, one.key))
        if heavy.share > fair
    )
