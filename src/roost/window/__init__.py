"""Windows over the stream: which points count, where they are kept, and how they are asked.

Points of a window stay where they were written, one immutable segment for each machine and batch,
whatever becomes of the plan. :mod:`~roost.window.spec` says what is live,
:mod:`~roost.window.lineage` which partitions to ask, :mod:`~roost.window.segment` holds the points,
and the other modules ask one segment and merge the answers. Nothing here knows files, Spark or
settings.
"""

from __future__ import annotations

from roost.window.aggregate import AggregateSpec, State, finish, merge, partial
from roost.window.answers import answers
from roost.window.evaluate import Live, live_parts, select
from roost.window.join import JoinSpec, join_schema, join_segment
from roost.window.lineage import Lineage
from roost.window.nearest import nearest
from roost.window.panes import Pane, build_pane
from roost.window.segment import Alias, WindowSegment, build, row_order
from roost.window.spec import (
    BatchFacts,
    Cut,
    Extent,
    Past,
    WindowKind,
    WindowSpec,
    expired,
    extent,
)
from roost.window.wants import Wants, parse_aggregates

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
    "State",
    "Wants",
    "WindowKind",
    "WindowSegment",
    "WindowSpec",
    "answers",
    "build",
    "build_pane",
    "expired",
    "extent",
    "finish",
    "join_schema",
    "join_segment",
    "live_parts",
    "merge",
    "nearest",
    "parse_aggregates",
    "partial",
    "row_order",
    "select",
]
