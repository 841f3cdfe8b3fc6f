"""Windows over the stream: which points are live, how they are stored and queried.

The points of a window stay where they were written, one immutable segment per machine and batch,
however the plan changes. :mod:`~roost.window.spec` decides what is live,
:mod:`~roost.window.lineage` which partitions to read, :mod:`~roost.window.segment` stores the
points, and the other modules query segments and merge the results. No module depends on Spark.
"""

from __future__ import annotations

from roost.window.aggregate import State
from roost.window.evaluate import Live
from roost.window.join import JoinSpec, join_schema, join_segment
from roost.window.lineage import Lineage
from roost.window.output import RequestedOutput, parse_aggregates
from roost.window.panes import Pane, build_pane
from roost.window.results import standing_results
from roost.window.segment import Alias, WindowSegment, build, row_order
from roost.window.spec import WindowSpec

__all__ = [
    "Alias",
    "JoinSpec",
    "Lineage",
    "Live",
    "Pane",
    "RequestedOutput",
    "State",
    "WindowSegment",
    "WindowSpec",
    "build",
    "build_pane",
    "join_schema",
    "join_segment",
    "parse_aggregates",
    "row_order",
    "standing_results",
]
