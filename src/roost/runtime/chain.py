"""A batch's stages as levels with one exchange between two levels.

A *level* holds the stages that run between two exchanges; an executor runs it as one set of tasks.
Its *parts* are (stage, machine) pairs, where the stage receives its inputs through the exchange.
Stages without a routing run inside the part that produces their inputs, and a stage may run inside
the part of another one that has the same routing. A block for a later level
passes through the levels between unopened, so a line of levels carries any graph of stages.

All parts of a level run on one *executor group*. Stages that could share a level, but belong to
different groups, get levels one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from roost.model.elastic import DEFAULT_GROUP
from roost.stages.contract import Routing, Stage


@dataclass(frozen=True)
class Placement:
    """Hints where machines run: executor groups by stage, preferred executors by routing.

    They are in no intent, and no result depends on them. :mod:`roost.runtime.homes` assigns homes.
    A stage without a group is in the default one.
    """

    groups: Mapping[str, str] = field(default_factory=dict)
    homes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def group(self, stage: str) -> str:
        """Return the executor group of a stage, or of the routing that has its name."""
        return self.groups.get(stage, DEFAULT_GROUP)

    def home(self, node: StageNode, machine: int) -> str | None:
        """Return the executor on which a machine of a stage prefers to run, if there is any."""
        homes = {} if node.routing is None else self.homes.get(node.routing, {})
        return homes.get(machine)

    def homes_of(self, chain: Chain, level: int) -> list[str | None]:
        """Return the home of each part of a level."""
        return [self.home(chain.by_name[stage], machine) for stage, machine in chain.parts[level]]


@dataclass(frozen=True)
class StageNode:
    """A stage in a chain."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    marks: tuple[str, ...]
    routing: str | None  # of its inputs; None where the same part produces them
    root: str  # stage that its part is named for: itself, or the one whose task it runs in
    level: int  # number of exchanges before it
    machines: tuple[int, ...]
    group: str = DEFAULT_GROUP  # of executors, that of its level


@dataclass(frozen=True)
class Chain:
    """Nodes in order, with the routings that their inputs need; pickled into tasks."""

    nodes: tuple[StageNode, ...]
    routings: Mapping[str, Routing]

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        routings: Mapping[str, Routing],
        readers: Mapping[str, Sequence[int]],
        placement: Placement = Placement(),  # noqa: B008  (frozen)
    ) -> Chain:
        """Arrange stages that have a task.

        Each stage comes after those that produce its inputs; ``readers`` has the machines of each
        stage that reads a source. Stages that read run in the default group.
        """
        later: dict[str, int] = {}  # least level of roots whose tasks another stage shares
        while True:
            try:
                nodes = _arranged(stages, routings, readers, placement, later)
            except _SharedLater as shared:
                later[shared.root] = shared.level
            else:
                break
        used = {node.routing for node in nodes}
        return cls(tuple(nodes), {name: r for name, r in routings.items() if name in used})

    @property
    def levels(self) -> int:
        """Number of levels."""
        return 1 + max(node.level for node in self.nodes)

    def group(self, level: int) -> str:
        """Return the executor group of a level; one that only passes blocks on has the default."""
        return next((n.group for n in self.nodes if n.level == level), DEFAULT_GROUP)

    @cached_property
    def parts(self) -> list[list[tuple[str, int]]]:
        """The parts of each level: root stage and machine."""
        parts: list[list[tuple[str, int]]] = [[] for _ in range(self.levels)]
        for node in self.nodes:
            if node.root == node.name:
                parts[node.level] += [(node.name, machine) for machine in node.machines]
        return parts

    @cached_property
    def numbers(self) -> dict[tuple[str, int], int]:
        """The number of each part in its level."""
        return {part: number for parts in self.parts for number, part in enumerate(parts)}

    @cached_property
    def by_name(self) -> dict[str, StageNode]:
        """The node of each stage."""
        return {node.name: node for node in self.nodes}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached properties."""
        return {"nodes": self.nodes, "routings": self.routings}


class _SharedLater(Exception):
    """A stage that runs in another one's tasks has inputs that arrive on a later level."""

    def __init__(self, root: str, level: int) -> None:
        super().__init__(root, level)
        self.root, self.level = root, level


def _arranged(
    stages: Sequence[Stage],
    routings: Mapping[str, Routing],
    readers: Mapping[str, Sequence[int]],
    placement: Placement,
    later: Mapping[str, int],
) -> list[StageNode]:
    """Return the nodes of a chain; roots begin on their ``later`` level."""
    producers: dict[str, StageNode] = {}
    nodes: list[StageNode] = []
    groups = {0: DEFAULT_GROUP}  # by level
    for stage in stages:
        sources = [producers[port] for port in stage.inputs]
        marked = [node.level for node in nodes if node.name in stage.marks]
        if len(marked) < len(stage.marks):
            raise ValueError(f"{stage.name} reads marks of a stage that does not precede it")
        routing = stage.routing
        if routing is not None and routings[routing].local:
            routing = None
        place: tuple[str | None, str, int, tuple[int, ...]]
        if not sources:
            place = (None, stage.name, 0, tuple(readers[stage.name]))
        elif routing is None:
            place = (None, sources[0].root, sources[0].level, sources[0].machines)
            if any(source.root != sources[0].root for source in sources):
                raise ValueError(f"different tasks produce the inputs of {stage.name}")
        else:
            root = stage.within or stage.name
            level = max(1 + max([source.level for source in sources] + marked), later.get(root, 0))
            group = placement.group(root)
            for known in (node.level for node in nodes if node.name == root):
                if known < level <= len(stages):
                    raise _SharedLater(root, level)
                if known < level:
                    raise ValueError(f"{stage.name} is not on the level of {root}")
                level = known
            while groups.setdefault(level, group) != group:
                level += 1
            place = (routing, root, level, tuple(range(routings[routing].machines)))
        ports = stage.inputs, stage.outputs, stage.marks
        node = replace(StageNode(stage.name, *ports, *place), group=groups[place[2]])
        if any(level >= node.level for level in marked):
            raise ValueError(f"{stage.name} reads marks of its own level {node.level}")
        nodes.append(node)
        producers.update(dict.fromkeys(stage.outputs, node))
    return nodes
