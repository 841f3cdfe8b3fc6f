"""Runs a sample of a dataflow's sources, to measure what its operators cost."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from roost.dataflow.colocation import divide
from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Product, Source, SourceKind
from roost.dataflow.schema import resolve
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.runtime.executor import InProcessExecutor, SliceInputs
from roost.runtime.flow import flow_stages
from roost.runtime.flow_layout import SAMPLED, FlowLayout, Sample, exchanged
from roost.runtime.loop import BatchLoop
from roost.stages.contract import Report
from roost.stages.flow_routing import node_of, stage_of
from roost.stages.slices import Slice, cut
from roost.stages.sources import Source as RowSource
from roost.storage.store import Store

RUNS = 3  # the first one includes loading code
PARTS = 8  # a run over one of so many parts tells what does not depend on the rows


def first_rows(source: RowSource) -> Sequence[Slice]:
    """Return the rows of a source that a sample reads."""
    total = source.total()
    count = SAMPLED if total is None else min(SAMPLED, total)
    return source.again(0, count) if count else ()


def sample_flow(
    flow: Dataflow,
    slices: Mapping[str, Sequence[Slice]],
    division: Division | None = None,
    clock: Callable[[], float] = time.time,
) -> Sample | None:
    """Run a dataflow over some rows of each source, by stage; None if that is not possible.

    Every stage of the division, by default every operator, has one machine, in this process. There
    are two batches: the first writes state, and in the second, which reads it, sources end, so that
    all windows close. Together they stand for one batch of a run, which does all of this. Points
    and matches of a run cannot be sampled.
    """
    sources = [o for o in flow.operators if isinstance(o, Source)]
    if any(source.kind is not SourceKind.RECORDS for source in sources):
        return None
    if not any(slices.get(stage_of(source.name)) for source in sources):
        return None
    graph = resolve(flow.name, flow.operators)
    division = divide(graph, LayoutName.OPERATOR_CLOUD) if division is None else division
    graph = replace(graph, division=division)
    layout = FlowLayout(graph, dict.fromkeys(exchanged(graph), 1))
    part = {stage: cut(mine, PARTS)[0] for stage, mine in slices.items()}
    few, rows = (sum(s.rows for mine in of.values() for s in mine) for of in (part, slices))
    runs = [_run(flow, slices, layout, clock) for _ in range(RUNS)]
    products = {o.name for o in flow.operators if isinstance(o, Product)}
    tuples = {
        name: (_count(runs[-1], name, "left"), _count(runs[-1], name, "right")) for name in products
    }
    seconds, fixed = _least(runs), {}
    if few:
        for name, least in _least([_run(flow, part, layout, clock) for _ in range(RUNS)]).items():
            # Where the line through both measurements meets no rows.
            begin = (least * rows - seconds[name] * few) / (rows - few)
            fixed[name] = min(max(begin, 0.0), seconds[name])
    return Sample(seconds, tuples, fixed, rows)


def _count(reports: Sequence[Report], name: str, key: str) -> int:
    """Return a count of a stage."""
    return sum(int(report.counts[key]) for report in reports if node_of(report.stage) == name)


def _least(runs: Sequence[Sequence[Report]]) -> dict[str, float]:
    """Return the least processor seconds of each stage."""
    sums: list[dict[str, float]] = []
    for reports in runs:
        sums.append(defaultdict(float))
        for report in reports:
            sums[-1][node_of(report.stage)] += report.seconds
    return {name: min(found[name] for found in sums) for name in sums[0]}


def _run(
    flow: Dataflow,
    slices: Mapping[str, Sequence[Slice]],
    layout: FlowLayout,
    clock: Callable[[], float],
) -> list[Report]:
    reports: list[Report] = []

    def collect(report: Report) -> Report:
        reports.append(report)
        return report

    executor = InProcessExecutor(1, collect)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = RunConfig(out={"dir": folder})
        ended = [node.name for node in layout.graph.nodes if isinstance(node.operator, Source)]
        with closing(Store(folder / "state")) as store:
            stages = flow_stages(config, store, executor, flow, {}, clock, layout=layout)
            loop = BatchLoop(store, None, None, stages, executor, folder)
            first, last = ({k: cut(mine, 2)[n] for k, mine in slices.items()} for n in range(2))
            rows = [{k: sum(item.rows for item in mine) for k, mine in first.items()}]
            rows.append({k: sum(item.rows for item in mine) for k, mine in slices.items()})
            loop.run(0, {k: [0, stop] for k, stop in rows[0].items()}, SliceInputs(first))
            offsets = {k: [start, rows[1][k]] for k, start in rows[0].items()}
            loop.run(1, offsets, SliceInputs(last), ended)
    return reports
