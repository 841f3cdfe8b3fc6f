"""``roost bench reconfigure``: buckets of a dataflow that move while it runs.

:mod:`roost.bench.flow_moves` compares the protocols of moves, :mod:`roost.bench.flow_balance` the
balancing policies on changing loads.
"""

from __future__ import annotations

from roost.bench import flow_balance, flow_moves
from roost.bench.common import Measured, Plot

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
    """Measure moves and balancing."""
    moves, balanced = flow_moves.measure(quick), flow_balance.measure(quick)
    title = "Standard deviation of utilisation: "
    title += f"{flow_balance.MACHINES} machines, {flow_balance.KEYS:,} keys"
    plots = {
        "": Plot(title, {"one round for each batch": balanced.lines}),
        "-moves": Plot("A machine joins: cost of the move over windows moved", moves.lines, 3),
    }
    summary = balanced.summary | moves.summary
    for key in ("lost", "doubled"):
        summary[key] = balanced.summary[key] + moves.summary[key]
    rows = [*moves.rows, *balanced.rows]
    return Measured(rows, summary, plots, TABLE, balanced.rows)
