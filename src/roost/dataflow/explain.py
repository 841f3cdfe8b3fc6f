"""Explains how a dataflow runs: its subqueries, and what each layout would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roost.dataflow.colocation import divide
from roost.dataflow.compiler import (
    Layout,
    LayoutCosts,
    Subquery,
    cheapest,
    layouts,
    subqueries,
)
from roost.dataflow.schema import FlowGraph
from roost.model.choices import LayoutName


@dataclass(frozen=True)
class Explanation:
    """How a dataflow is divided; ``str`` of it is a text for people."""

    flow: str
    machines: int
    subqueries: tuple[Subquery, ...]
    layouts: tuple[Layout, ...]
    layout: LayoutName  # that runs
    shared: Mapping[str, str]  # of auto: operators without an exchange, and whose buckets they use
    early: tuple[str, ...]  # of auto: operators whose tuples are aggregated before an exchange
    model: LayoutCosts | None = None

    @property
    def runs(self) -> Layout:
        """The layout that runs."""
        return next(layout for layout in self.layouts if layout.name is self.layout)

    @property
    def exchanges(self) -> tuple[tuple[str, str], ...]:
        """The exchanges, by the operators or subqueries on both sides."""
        return self.runs.exchanges

    def __str__(self) -> str:
        """Return the explanation as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"dataflow {self.flow}"
        yield ""
        head = ("subquery", "operators", "reads", "keys", "buckets", "window", "state", "machines")
        rows = []
        for sub in self.subqueries:
            # Operators of one subquery may have machines of their own.
            units = [u.machines for u in self.runs.units if set(u.operators) & set(sub.operators)]
            shared = self.shared.get(sub.name) if self.layout is LayoutName.AUTO else None
            rows.append(_row(sub, "+".join(map(str, units)), shared))
        yield from _aligned(head, rows)
        yield ""
        yield f"exchanges: {', '.join(f'{a} -> {b}' for a, b in self.exchanges) or 'none'}"
        yield f"hops: {self.runs.hops}"
        if self.layout is LayoutName.AUTO:
            yield f"aggregated before the exchange: {', '.join(self.early) or 'none'}"
        yield ""
        yield f"layouts on {self.machines} machines"
        priced = any(layout.cost is not None for layout in self.layouts)
        columns = ("layout", "hops", "fan-out", "channels", *(["cost"] if priced else []), "")
        rows = []
        for layout in self.layouts:
            counts = [f"{n:,}" for n in (layout.hops, layout.fan_out, layout.channels)]
            cost = [f"{layout.cost:.6g}"] if layout.cost is not None else []
            mark = "runs" if layout.name is self.layout else ""
            rows.append((layout.name.value, *counts, *cost, mark))
        yield from _aligned(columns, rows)
        if self.model is not None:
            alpha, beta, rate = self.model.alpha, self.model.beta, self.model.rate
            yield ""
            yield f"cost = alpha * channels + beta * tuples * hops, for {rate:,.0f} tuples:"
            yield f"alpha = {alpha:.3g} for a channel, beta = {beta:.3g} for sending a tuple"


def _row(sub: Subquery, machines: str, shared: str | None) -> tuple[str, ...]:
    keys = " = ".join(dict.fromkeys(", ".join(columns) for columns in sub.keys))
    buckets = "" if not sub.buckets else f"{sub.buckets}"
    if sub.grid is not None:
        buckets = f"{sub.grid[0]}x{sub.grid[1]}"
    if shared is not None:
        buckets = f"of {shared}"
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
        machines,
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
    model: LayoutCosts | None = None,
    layout: LayoutName = LayoutName.AUTO,
) -> Explanation:
    """Explain a valid dataflow on some machines; see :func:`roost.dataflow.compiler.layouts`."""
    if layout is LayoutName.AUTO and model is not None:
        chosen = cheapest(graph, machines, model)
        layout = chosen if chosen is LayoutName.OPERATOR_CLOUD else layout
    division = divide(graph, LayoutName.AUTO)
    shared = {name: one.root for name, one in division.shared.items()}
    early = (node.name for node in graph.nodes if node.name in division.partial)
    return Explanation(
        graph.name,
        machines,
        subqueries(graph),
        layouts(graph, machines, costs, model),
        layout,
        shared,
        tuple(early),
        model,
    )
