"""Explains how a dataflow runs: its subqueries, and what each layout would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roost.dataflow.compiler import (
    RUNS,
    CostModel,
    Layout,
    Subquery,
    layouts,
    subqueries,
)
from roost.dataflow.schema import FlowGraph


@dataclass(frozen=True)
class Explanation:
    """How a dataflow is divided; ``str`` of it is a text for people."""

    flow: str
    machines: int
    subqueries: tuple[Subquery, ...]
    layouts: tuple[Layout, ...]

    @property
    def runs(self) -> Layout:
        """The layout that Roost runs."""
        return next(layout for layout in self.layouts if layout.name is RUNS)

    @property
    def exchanges(self) -> tuple[tuple[str, str], ...]:
        """The edges between subqueries, by name."""
        return tuple((start, sub.name) for sub in self.subqueries for start in sub.inputs)

    def __str__(self) -> str:
        """Return the explanation as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"dataflow {self.flow}"
        yield ""
        head = ("subquery", "operators", "reads", "keys", "buckets", "window", "state", "machines")
        units = zip(self.subqueries, self.runs.units, strict=True)
        yield from _aligned(head, [_row(sub, unit.machines) for sub, unit in units])
        yield ""
        edges = ", ".join(f"{start} -> {stop}" for start, stop in self.exchanges) or "none"
        yield f"exchanges: {edges}"
        yield f"hops: {self.runs.hops}"
        yield ""
        yield f"layouts on {self.machines} machines"
        priced = any(layout.cost is not None for layout in self.layouts)
        columns = ("layout", "hops", "fan-out", "channels", *(["cost"] if priced else []), "")
        rows = []
        for layout in self.layouts:
            counts = [f"{n:,}" for n in (layout.hops, layout.fan_out, layout.channels)]
            cost = [f"{layout.cost:.6g}"] if layout.cost is not None else []
            mark = "runs" if layout.name is RUNS else ""
            rows.append((layout.name.value, *counts, *cost, mark))
        yield from _aligned(columns, rows)
        yield ""
        yield f"Only {RUNS} runs today. Its tasks run one level after the other, so every"
        yield "subquery has all machines in turn; the table divides them, as the cost model does."


def _row(sub: Subquery, machines: int) -> tuple[str, ...]:
    keys = " = ".join(dict.fromkeys(", ".join(columns) for columns in sub.keys))
    buckets = "" if not sub.buckets else f"{sub.buckets}"
    if sub.grid is not None:
        buckets = f"{sub.grid[0]}x{sub.grid[1]}"
    if sub.window is not None and not keys:
        keys = "none"
    return (
        sub.name,
        ", ".join(sub.operators),
        ", ".join(sub.inputs),
        keys,
        buckets,
        sub.window or "",
        sub.state or "",
        str(machines),
    )


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines with columns of equal width."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def explain(
    graph: FlowGraph,
    machines: int,
    costs: Mapping[str, float] | None = None,
    model: CostModel | None = None,
) -> Explanation:
    """Explain a valid dataflow on some machines; see :func:`roost.dataflow.compiler.layouts`."""
    return Explanation(
        graph.name, machines, subqueries(graph), layouts(graph, machines, costs, model)
    )
