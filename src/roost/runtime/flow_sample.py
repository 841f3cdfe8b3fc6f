"""Runs a sample of a dataflow's sources, to measure what its operators cost."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Product, Source, SourceKind
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.runtime.executor import InProcessExecutor, SliceInputs
from roost.runtime.flow import flow_stages
from roost.runtime.flow_layout import Sample
from roost.runtime.loop import BatchLoop
from roost.stages.contract import Report
from roost.stages.flow_routing import node_of, stage_of
from roost.stages.slices import Slice
from roost.stages.sources import Source as RowSource
from roost.storage.store import Store

ROWS = 20_000  # of each source
RUNS = 2  # the first one includes loading code


def first_rows(source: RowSource) -> Sequence[Slice]:
    """Return the rows of a source that a sample reads."""
    total = source.total()
    count = ROWS if total is None else min(ROWS, total)
    return source.again(0, count) if count else ()


def sample_flow(
    flow: Dataflow,
    slices: Mapping[str, Sequence[Slice]],
    layout: LayoutName = LayoutName.OPERATOR_CLOUD,
    clock: Callable[[], float] = time.time,
) -> Sample | None:
    """Run a dataflow over some rows of each source, by stage; None if that is not possible.

    Every stage of the layout has one machine, in this process. Sources end, so that all windows
    close. Points and matches of a run cannot be sampled.
    """
    sources = [o for o in flow.operators if isinstance(o, Source)]
    if any(source.kind is not SourceKind.RECORDS for source in sources):
        return None
    if not any(slices.get(stage_of(source.name)) for source in sources):
        return None
    for _ in range(RUNS):
        reports = _run(flow, slices, [source.name for source in sources], layout, clock)
    seconds: dict[str, float] = defaultdict(float)
    tuples = {}
    products = {o.name for o in flow.operators if isinstance(o, Product)}
    for report in reports:
        name = node_of(report.stage)
        seconds[name] += report.seconds
        if name in products:
            tuples[name] = int(report.counts["left"]), int(report.counts["right"])
    return Sample(dict(seconds), tuples)


def _run(
    flow: Dataflow,
    slices: Mapping[str, Sequence[Slice]],
    sources: Sequence[str],
    layout: LayoutName,
    clock: Callable[[], float],
) -> list[Report]:
    reports: list[Report] = []

    def collect(report: Report) -> Report:
        reports.append(report)
        return report

    executor = InProcessExecutor(1, collect)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataflow = {"layout": layout, "machines": 1}
        config = RunConfig(out={"dir": folder}, dataflow=dataflow)
        with closing(Store(folder / "state")) as store:
            stages = flow_stages(config, store, executor, flow, {}, clock)
            loop = BatchLoop(store, None, None, stages, executor, folder)
            offsets = {k: [0, sum(item.rows for item in mine)] for k, mine in slices.items()}
            loop.run(0, offsets, SliceInputs(slices), sources)
    return reports
