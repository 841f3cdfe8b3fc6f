"""Roost: continuous spatial queries over streams of points, on Apache Spark.

Nothing here loads Spark until a :class:`Pipeline` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roost.config import RunConfig
from roost.errors import RoostError
from roost.model import Box, Circle, Polygon, Query, Terminate

if TYPE_CHECKING:
    from roost.engine.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = [
    "Box",
    "Circle",
    "Pipeline",
    "Polygon",
    "Query",
    "RoostError",
    "RunConfig",
    "Terminate",
]


def __getattr__(name: str) -> Any:
    """Load the pipeline, and Spark with it, when it is first used."""
    if name == "Pipeline":
        from roost.engine.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module 'roost' has no attribute {name!r}")
