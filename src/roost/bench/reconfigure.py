"""``roost bench reconfigure``: buckets of a dataflow that move while it runs.

:mod:`roost.bench.flow_balance` compares balancing policies on changing loads.
"""

from __future__ import annotations

from roost.bench.common import Measured, Plot
from roost.bench.flow_balance import KEYS, MACHINES, measure

TABLE = {
    "period": ("period", ""),
    "policy": ("policy", ""),
    "deviation without": ("deviation_off", ".4f"),
    "settled": ("deviation", ".4f"),
    "ratio": ("ratio", ".3f"),
    "transient rounds": ("transient_rounds", ""),
    "buckets moved": ("moved_buckets", ""),
    "state moved": ("moved_share", ".3f"),
    "heaviest bucket": ("heaviest_bucket", ".2f"),
}


def run(quick: bool) -> Measured:
    """Measure balancing."""
    found = measure(quick)
    title = f"Standard deviation of utilisation: {MACHINES} machines, {KEYS:,} keys"
    plot = Plot(title, {"one round for each batch": found.lines})
    return Measured(found.rows, found.summary, {"": plot}, TABLE)
