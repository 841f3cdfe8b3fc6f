"""The pipeline in one process: everything but Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roost.model.settings import RunConfig
from roost.runtime.executor import Executor, InProcessExecutor
from roost.runtime.pipeline import BasePipeline


class InProcessPipeline(BasePipeline):
    """Runs batches in this process, from files and generators.

    After each commit, and at the end of each batch, it checks the stages with :func:`check_states`.

    Parameters
    ----------
    executor
        Runs the tasks; a new :class:`InProcessExecutor` if there is none.
    **hooks
        As in :class:`roost.runtime.pipeline.BasePipeline`.

    Examples
    --------
    >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
    >>> from roost import Box, Query, RunConfig
    >>> folder = tempfile.mkdtemp()
    >>> points = pa.table({"id": [1, 2], "x": [1.0, 9.0], "y": [1.0, 9.0], "event_time": [0, 1]})
    >>> pq.write_table(points, f"{folder}/points.parquet")
    >>> config = RunConfig(
    ...     points={"path": f"{folder}/points.parquet"},
    ...     space={"coordinates": "plane"},
    ...     engine={"available_now": True},
    ...     out={"dir": f"{folder}/out"},
    ... )
    >>> with InProcessPipeline(config) as pipeline:
    ...     position = pipeline.request(Query("corner", Box(0, 0, 2, 2)))
    ...     pipeline.run()["matches"]
    1
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        executor: Executor | None = None,
        on_step: Callable[[str, int], None] = lambda step, number: None,
        **hooks: Any,
    ) -> None:
        def checked(step: str, number: int) -> None:
            if step in ("publish", "end"):
                check_states(self)
            on_step(step, number)

        super().__init__(config, on_step=checked, **hooks)
        self._executor = InProcessExecutor() if executor is None else executor

    @property
    def executor(self) -> Executor:
        """What runs the tasks."""
        return self._executor


def check_states(pipeline: BasePipeline) -> None:
    """Check that each stage's state equals what it computes from the store.

    Not to be called while a batch runs its tasks.

    Raises
    ------
    AssertionError
        If a state differs; the message names the stage.
    """
    for stage in pipeline.stages:
        before = stage.state()
        with pipeline.store.view() as view:
            stage.open(view)
        assert before == stage.state(), f"the state of {stage.name} differs from the store"
