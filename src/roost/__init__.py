"""Roost: continuous spatial queries over streams of points, on Apache Spark.

Importing this module loads neither numba, pyarrow nor Spark; the first use of :class:`Pipeline`
or :class:`Dataflow` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roost.errors import RoostError
from roost.model.records import Box, Circle, Polygon, Query, Terminate
from roost.model.settings import RunConfig

if TYPE_CHECKING:
    from roost.dataflow.flow import Dataflow
    from roost.engine.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = [
    "Box",
    "Circle",
    "Dataflow",
    "Pipeline",
    "Polygon",
    "Query",
    "RoostError",
    "RunConfig",
    "Terminate",
]


def __getattr__(name: str) -> Any:
    """Import the pipeline, and Spark with it, on first use; the same for dataflows and pyarrow."""
    if name == "Pipeline":
        from roost.engine.pipeline import Pipeline

        return Pipeline
    if name == "Dataflow":
        from roost.dataflow.flow import Dataflow

        return Dataflow
    raise AttributeError(f"module 'roost' has no attribute {name!r}")
