"""Matching kernel: exact, columnar and compiled; independent of Spark."""

from __future__ import annotations

from roost.kernel.index import Index, OpenSegment, Pairs
from roost.kernel.preload import prefetch, preload, release, slots_near
from roost.kernel.segment import (
    Segment,
    build_segment,
    order_by_place,
    pack,
    query_schema,
    unpack,
)

__all__ = [
    "Index",
    "OpenSegment",
    "Pairs",
    "Segment",
    "build_segment",
    "order_by_place",
    "pack",
    "prefetch",
    "preload",
    "query_schema",
    "release",
    "slots_near",
    "unpack",
]
