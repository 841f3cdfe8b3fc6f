"""Windows over the stream: which points are live, how they are stored and queried.

The points of a window stay where they were written, one immutable segment per machine and batch,
however the plan changes. :mod:`~roost.window.spec` decides what is live,
:mod:`~roost.window.lineage` which partitions to read, :mod:`~roost.window.segment` stores the
points, and the other modules query one segment and merge the results. This package is independent
of files, Spark and settings.
"""

from __future__ import annotations

from roost.window.aggregate import AggregateSpec, State, finish, merge, partial
from roost.window.evaluate import Live, live_parts, select
from roost.window.join import JoinSpec, join_schema, join_segment, join_spec
from roost.window.lineage import Lineage
from roost.window.nearest import nearest
from roost.window.output import RequestedOutput, parse_aggregates
from roost.window.panes import Pane, build_pane
from roost.window.results import standing_results
from roost.window.segment import Alias, WindowSegment, build, row_order
from roost.window.spec import (
    BatchFacts,
    Cut,
    Extent,
    Past,
    WindowSpec,
    expired,
    extent,
    window_spec,
)

__all__ = [
    "AggregateSpec",
    "Alias",
    "BatchFacts",
    "Cut",
    "Extent",
    "JoinSpec",
    "Lineage",
    "Live",
    "Pane",
    "Past",
    "RequestedOutput",
    "State",
    "WindowSegment",
    "WindowSpec",
    "build",
    "build_pane",
    "expired",
    "extent",
    "finish",
    "join_schema",
    "join_segment",
    "join_spec",
    "live_parts",
    "merge",
    "nearest",
    "parse_aggregates",
    "partial",
    "row_order",
    "select",
    "standing_results",
    "window_spec",
]
