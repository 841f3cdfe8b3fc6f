"""Runs a sample of a dataflow's sources, to measure what its operators cost."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from roost.dataflow.colocation import divide
from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Product, Source, SourceKind
from roost.dataflow.schema import resolve
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.runtime.executor import InProcessExecutor, SliceInputs
from roost.runtime.flow import flow_stages
from roost.runtime.flow_layout import FlowLayout, Sample, exchanged
from roost.runtime.loop import BatchLoop
from roost.stages.contract import Report
from roost.stages.flow_routing import node_of, stage_of
from roost.stages.slices import Slice, cut
from roost.stages.sources import RowSource
from roost.storage.store import Store

RUNS = 3  # of a small sample: the least of them counts
LIMIT_S = 6.0  # of processor time that all runs with as many machines may take
MACHINES = (2, 16)  # of each stage: blocks are divided, and a further machine has its cost
FEWEST = 1_000  # rows of each source in the first run: a function may take milliseconds for a row
GROWTH = 4  # of the rows, from one run to the next
BATCHES = 3  # the last one meets the state of the others, as most batches of a run do


def first_rows(source: RowSource, batch_rows: int) -> Sequence[Slice]:
    """Return the rows of a source that a sample may read: those of its batches."""
    total = source.total()
    count = BATCHES * batch_rows if total is None else min(BATCHES * batch_rows, total)
    return source.again(0, count) if count else ()


def sample_flow(
    flow: Dataflow,
    slices: Mapping[str, Sequence[Slice]],
    division: Division | None = None,
    clock: Callable[[], float] = time.time,
    limit_s: float = LIMIT_S,
) -> Sample | None:
    """Run a dataflow over the first rows of each source, by stage; None if that is not possible.

    Costs are not proportional to rows: keys repeat more often in a large batch, and windows close
    less often. So a run reads all rows that are given, or as many as it can in ``limit_s``; it is
    repeated if there is time left, because more rows say more than the least of several runs.

    Every stage of the division, by default every operator, has some machines, in this process, so
    that blocks are divided, packed and pickled as on a cluster. A run with more machines shows what
    each of them costs, whatever the number of tuples. The last of some batches counts: it reads and
    writes state, and sources end in it, so that windows close. Points and matches of a run cannot
    be sampled.
    """
    sources = [o for o in flow.operators if isinstance(o, Source)]
    if any(source.kind is not SourceKind.RECORDS for source in sources):
        return None
    if not any(slices.get(stage_of(source.name)) for source in sources):
        return None
    graph = resolve(flow.name, flow.operators)
    division = divide(graph, LayoutName.OPERATOR_CLOUD) if division is None else division
    graph = replace(graph, division=division)
    products = {o.name for o in flow.operators if isinstance(o, Product)}
    # The machines of a Product share tuples; only one has each of them once.
    layouts = [
        FlowLayout(graph, {s: 1 if s in products else count for s in exchanged(graph)})
        for count in MACHINES
    ]
    slices, runs = _affordable(
        lambda some: _run(flow, some, layouts[0], MACHINES[0], clock), slices, limit_s
    )
    few, many = (
        [_run(flow, slices, layout, count, clock) for _ in range(runs)]
        for layout, count in zip(layouts, MACHINES, strict=True)
    )
    tuples = {
        name: (_count(few[-1], name, "left"), _count(few[-1], name, "right")) for name in products
    }
    seconds, more, fixed = _least(few), _least(many), {}
    counts = [Counter(node_of(report.stage) for report in runs[-1].reports) for runs in (few, many)]
    for name, spent in seconds.items():
        # What does not depend on the number of machines is paid for tuples.
        added = (more[name] - spent) / max(counts[1][name] - counts[0][name], 1)
        fixed[name] = min(max(added, 0.0), spent / counts[0][name])
        seconds[name] -= (counts[0][name] - 1) * fixed[name]
    return Sample(seconds, tuples, fixed, sum(_rows(slices)) // BATCHES)


def _affordable(
    run: Callable[[Mapping[str, Sequence[Slice]]], object],
    slices: Mapping[str, Sequence[Slice]],
    limit_s: float,
) -> tuple[dict[str, Sequence[Slice]], int]:
    """Return so many of the first rows of each source that a run takes ``limit_s`` at most.

    Returns also the number of runs that take no longer.
    """
    totals = dict(zip(slices, _rows(slices), strict=True))
    rows, most, spent = FEWEST, max(totals.values()), 0.0

    def first() -> dict[str, Sequence[Slice]]:
        limits = {name: min(rows, total) for name, total in totals.items()}
        return {name: _first(mine, limits[name]) for name, mine in slices.items()}

    if rows < most:
        run(first())  # loads code
    while rows < most:
        started = time.process_time()
        run(first())
        spent = time.process_time() - started
        if GROWTH * spent > limit_s:
            break
        rows, spent = rows * GROWTH, spent * GROWTH
    return first(), RUNS if RUNS * spent <= limit_s else max(int(limit_s / spent), 1)


def _first(slices: Sequence[Slice], rows: int) -> list[Slice]:
    """Return the first rows of slices."""
    found: list[Slice] = []
    for item in slices:
        if rows > 0:
            found.append(replace(item, stop=min(item.stop, item.start + rows)))
        rows -= item.rows
    return found


class _Measured(NamedTuple):
    """Reports of a batch, and processor seconds of all machines by operator."""

    reports: Sequence[Report]
    seconds: Mapping[str, float]


def _count(run: _Measured, name: str, key: str) -> int:
    """Return a count of a stage."""
    return sum(int(report.counts[key]) for report in run.reports if node_of(report.stage) == name)


def _least(runs: Sequence[_Measured]) -> dict[str, float]:
    """Return the least processor seconds of each stage."""
    return {name: min(run.seconds[name] for run in runs) for name in runs[0].seconds}


def _run(
    flow: Dataflow,
    slices: Mapping[str, Sequence[Slice]],
    layout: FlowLayout,
    readers: int,
    clock: Callable[[], float],
) -> _Measured:
    reports: list[Report] = []

    def collect(report: Report) -> Report:
        reports.append(report)
        return report

    executor = InProcessExecutor(readers, collect)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = RunConfig(out={"dir": folder})
        ended = [node.name for node in layout.graph.nodes if isinstance(node.operator, Source)]
        with closing(Store(folder / "state")) as store:
            stages = flow_stages(config, store, executor, flow, {}, clock, layout=layout)
            loop = BatchLoop(store, None, None, stages, executor, folder)
            read = dict.fromkeys(slices, 0)
            for number in range(BATCHES):
                reports.clear()
                part = {k: cut(mine, BATCHES)[number] for k, mine in slices.items()}
                stops = {k: read[k] + rows for k, rows in zip(part, _rows(part), strict=True)}
                offsets = {k: [read[k], stop] for k, stop in stops.items()}
                loop.run(number, offsets, SliceInputs(part), ended if number + 1 == BATCHES else ())
                read = stops
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[node_of(report.stage)] += report.seconds
    for (stage, _), spent in executor.pickling.items():
        seconds[node_of(stage)] += spent
    return _Measured(reports, seconds)


def _rows(slices: Mapping[str, Sequence[Slice]]) -> list[int]:
    """Return the rows of each source."""
    return [sum(item.rows for item in mine) for mine in slices.values()]
