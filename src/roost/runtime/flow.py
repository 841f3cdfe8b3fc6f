"""Builds the stages of a dataflow from its operators and the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Aggregate, Map, Operator, Sink, Source, SourceKind
from roost.dataflow.schema import FlowGraph, StreamSchema, resolve
from roost.errors import DataflowError
from roost.model.settings import RunConfig
from roost.runtime.executor import Executor
from roost.runtime.flow_balancing import balancing_policies
from roost.runtime.flow_layout import FlowLayout, Sample, lay_out
from roost.runtime.flow_rounds import FlowPolicy, FlowRounds
from roost.runtime.loop import staging
from roost.stages.contract import Stage
from roost.stages.flow import FlowSettings, ProgressStage
from roost.stages.flow_costs import measure_exchange
from roost.stages.flow_routing import FLOW
from roost.stages.flow_source import SourceStage
from roost.stages.flow_stateless import StatelessStage
from roost.stages.flow_subquery import SubqueryStage
from roost.storage.speed import cold_read_speed
from roost.storage.store import Fact, Store

RESERVED = frozenset(["matches", "dead", "aggregates", "nearest", "pairs", "synopsis", "state"])
"""Folders of the output that a sink cannot have."""


def flow_stages(
    config: RunConfig,
    store: Store,
    executor: Executor,
    flow: Dataflow,
    own: Mapping[SourceKind, StreamSchema],
    clock: Callable[[], float],
    sample: Callable[[Division], Sample | None] = lambda division: None,
    layout: FlowLayout | None = None,
    resizable: bool = False,
    machines: int | None = None,
    received: Callable[[str], bool] = lambda sink: True,
) -> list[Stage]:
    """Build the stages of a dataflow; ``own`` has the schemas of the run's points and matches.

    ``sample`` runs a sample, by which machines are divided; where it returns None, all subqueries
    get as many. A ``layout`` replaces the one that would be chosen, and ``machines``, each with a
    core, replace those of settings and executor. If the run is ``resizable``,
    stages continue with the machines that they had. Sinks that are not ``received`` only count
    their rows.
    """
    graph = resolve(flow.name, flow.operators, own)
    out = config.out.dir.absolute()
    sinks = sinks_of(flow)
    for sink in sinks:
        if sink in RESERVED or out / sink == config.out.state_dir.absolute():
            problem = f"a sink names a folder of the output, but not {', '.join(sorted(RESERVED))}"
            raise DataflowError(sink, problem)
        if not sink or "/" in sink or sink.startswith((".", "_")):
            problem = (
                "a sink names a folder: expected a name without /, which begins with no . or _"
            )
            raise DataflowError(sink, problem)
    _agree(store, graph)
    settings = config.dataflow
    if layout is None:
        slots = machines or executor.slots
        machines = machines or settings.machines or config.engine.machines or slots
        rate = config.engine.batch_rows
        model = partial(measure_exchange, rate=rate)
        layout = lay_out(
            store, graph, settings.layout, machines, slots, sample, model, rate, settings.buckets
        )
    graph = layout.graph
    shared = FlowSettings(
        settings.lateness,
        settings.idle,
        {sink: staging(out, sink) if received(sink) else None for sink in sinks},
        staging(out, "dead"),
    )
    sources = [node for node in graph.nodes if isinstance(node.operator, Source)]
    stages: list[Stage] = [ProgressStage(graph, shared, clock)]
    stages += [SourceStage(graph, node, shared) for node in sources]
    for node in graph.nodes:
        if node.operator.stateful:
            table = layout.bucket_table(store, node, settings.buckets, keep=resizable)
            files = store.files(f"flow/{node.number:03d}")
            stages.append(SubqueryStage(graph, node, table, files, shared))
        elif node.name in layout.machines:
            even = layout.even_table(store, node, keep=resizable)
            stages.append(StatelessStage(graph, node, even, shared))
    return stages


def sinks_of(flow: Dataflow | None) -> list[str]:
    """Return the names of a dataflow's sinks."""
    operators = () if flow is None else flow.operators
    return [operator.name for operator in operators if isinstance(operator, Sink)]


def flow_rounds(
    config: RunConfig,
    store: Store,
    stages: Sequence[Stage],
    more: Sequence[FlowPolicy],
    resize: FlowPolicy | None = None,
    wanted: Callable[[], int] | None = None,
) -> list[FlowRounds]:
    """Build the rounds of a dataflow; none without a policy.

    ``resize`` proposes the number of machines, and a round ends when it is not that of ``wanted``.
    Balancing is the last policy, so that it is refused
    if another one changes a map.
    """
    subqueries = [stage for stage in stages if isinstance(stage, SubqueryStage)]
    even = [stage for stage in stages if isinstance(stage, StatelessStage)]
    nodes = [stage.node for stage in subqueries if stage.table is not None]
    first = [] if resize is None else [resize]
    receiving = [
        (stage.node, stage.graph.stages.root(stage.node.name))
        for stage in subqueries
        if stage.graph.stages.receives(stage.node.name)
    ]
    balancing = balancing_policies(config.dataflow, nodes, receiving, resizable=resize is not None)
    policies = [*first, *more, *balancing]
    if not policies or not (subqueries or (first and even)):
        return []
    measure = partial(cold_read_speed, store.files("flow"))
    length = config.dataflow.round
    return [FlowRounds(store, subqueries, even, policies, length, measure, wanted)]


def describe(operator: Operator) -> dict[str, Any]:
    """Return an operator as JSON, by which a changed query is recognised."""
    about: dict[str, Any] = {
        "kind": type(operator).__name__,
        "inputs": [[port.node, port.output] for port in operator.inputs],
    }
    match operator:
        case Source():
            about |= {"source": operator.kind.value, "time": operator.time}
            about["schema"] = [] if operator.schema is None else _columns(operator.schema)
        case Map():
            about["columns"] = {name: str(text) for name, text in operator.columns.items()}
            about["function"] = _name(operator.function)
            about["schema"] = [] if operator.schema is None else _columns(operator.schema)
        case Aggregate():
            about["functions"] = {
                name: given
                if isinstance(given, str)
                else [_name(type(given)), list(given.columns), str(given.type)]
                for name, given in operator.functions.items()
            }
            about["by"] = list(operator.by)
    for name in ("predicates", "condition", "window", "per"):
        if hasattr(operator, name) and isinstance(operator, Operator):
            value = getattr(operator, name)
            about[name] = [value.by.value, value.size, value.advance] if name == "window" else value
    return about


def _columns(schema: Any) -> list[list[str]]:
    return [[field.name, str(field.type)] for field in schema]


def _name(function: Any) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def _agree(store: Store, graph: FlowGraph) -> None:
    """Check that the state directory was made with the same dataflow."""
    new = {node.name: describe(node.operator) for node in graph.nodes}
    known = store.get(FLOW, "operators")
    if known is None:
        store.record(Fact(FLOW, "operators", new))
        return
    for name in {**known, **new}:
        before, now = known.get(name), _plain(new.get(name))
        if before != now:
            change = "changed" if before and now else "removed" if before else "added"
            problem = f"{change} since the state directory was made; use another out.state"
            raise DataflowError(name, problem)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
