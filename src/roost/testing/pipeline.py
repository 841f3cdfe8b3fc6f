"""The pipeline in one process: everything but Spark."""

from __future__ import annotations

from typing import Any

from roost.model.settings import RunConfig
from roost.runtime.executor import Executor, InProcessExecutor
from roost.runtime.pipeline import BasePipeline


class InProcessPipeline(BasePipeline):
    """Runs batches in this process, from files and generators.

    Parameters
    ----------
    config
        Settings of the run.
    executor
        Runs the tasks; a new :class:`InProcessExecutor` if there is none.
    **hooks
        Source, sinks, callbacks, clock, seed and stages: see
        :class:`roost.runtime.pipeline.BasePipeline`.

    Examples
    --------
    >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
    >>> from roost import Box, Query, RunConfig
    >>> folder = tempfile.mkdtemp()
    >>> points = pa.table({"id": [1, 2], "x": [1.0, 9.0], "y": [1.0, 9.0], "event_time": [0, 1]})
    >>> pq.write_table(points, f"{folder}/points.parquet")
    """

    def __init__(
        self, config: RunConfig, *, executor: Executor | None = None, **hooks: Any
    ) -> None:
        super().__init__(config, **hooks)
        self._executor = InProcessExecutor() if executor is None else executor

    @property
    def executor(self) -> Executor:
        """What runs the tasks."""
        return self._executor


def check_states(pipeline: BasePipeline) -> None:
    """Check that each stage's state equals what it computes from the store.

    Raises
    ------
    AssertionError
        If one does not; call it between two batches.
    """
    for stage in pipeline.stages:
        before = stage.state()
        with pipeline.store.view() as view:
            stage.open(view)
        assert before == stage.state(), f"{stage.name} has another state than the store"
