"""Windows over the stream: which points count, where they are kept, and how they are asked.

Points of a window stay where they were written, one immutable segment for each machine and batch,
whatever becomes of the plan. :mod:`~roost.window.spec` says what is live,
:mod:`~roost.window.lineage` which partitions to ask, :mod:`~roost.window.segment` holds the points,
and the other modules ask one segment and merge the answers. Nothing here knows files, Spark or
settings.
"""

from __future__ import annotations

from roost.window.aggregate import AggregateSpec, State, finish, merge, partial
from roost.window.evaluate import Live, live_parts, select
from roost.window.lineage import Lineage
from roost.window.nearest import merge_nearest, nearest
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

__all__ = [
    "AggregateSpec",
    "Alias",
    "BatchFacts",
    "Cut",
    "Extent",
    "Lineage",
    "Live",
    "Past",
    "State",
    "WindowKind",
    "WindowSegment",
    "WindowSpec",
    "build",
    "expired",
    "extent",
    "finish",
    "live_parts",
    "merge",
    "merge_nearest",
    "nearest",
    "partial",
    "row_order",
    "select",
]
