"""Hot keys: keys with more tuples than a machine should have, which no bucket map can relieve.

Where partial results can be merged, the tuples of a hot key are aggregated before the exchange from
the next batch on, and its machine receives a few partial results. A key remains hot until it has
less than half of what makes it hot, so that a share near the limit does not switch back and forth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from roost.balance.changes import NoChange
from roost.dataflow.balancing.loads import SubqueryLoad
from roost.dataflow.loads import HeavyKey

COOLED = 0.5  # of a fair share, below which a key is hot no more


class Remedy(StrEnum):
    """What can be done for a hot key."""

    PARTIAL = "its tuples are aggregated before the exchange"
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


@dataclass(frozen=True)
class EarlyKeys:
    """Decision of a policy: aggregate the tuples of these keys before an operator's exchange.

    All other keys are sent as they are; ``keys`` are their hashes.
    """

    operator: str
    keys: tuple[int, ...]
    reason: str


def early_keys(
    operator: str, heavy: Sequence[HeavyKey], machines: int, now: Collection[int]
) -> EarlyKeys | NoChange:
    """Decide which keys are aggregated before the exchange; ``now`` are those that already are."""
    fair = 1.0 / machines
    hot = [k for k in heavy if k.share > (fair * COOLED if k.hash in now else fair)]
    keys = tuple(sorted(k.hash for k in hot))
    if keys == tuple(sorted(now)):
        return NoChange("no other key is hot")
    shares = ", ".join(f"{k.key} has {k.share:.0%}" for k in hot)
    reason = f"share of the tuples: {shares}" if hot else "no key is hot any more"
    return EarlyKeys(operator, keys, reason)
