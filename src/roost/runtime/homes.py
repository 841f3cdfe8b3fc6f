"""Homes: the executors on which machines prefer to run.

The files of a machine stay mapped, and in memory, where its tasks run. So its tasks of successive
batches should run on one executor. Homes are hints in the ``Placement``: no intent names them, and
no result depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from roost.runtime.chain import Chain, Placement
from roost.stages.contract import Reports
from roost.storage.totals import HOMES

Homes = Mapping[str, Mapping[int, str]]
"""Executors by routing and machine."""


def assign(
    homes: Homes, machines: Mapping[str, int], executors: Collection[str], *, level: bool
) -> dict[str, dict[int, str]]:
    """Return a home for every machine, given those before and the number of machines by routing.

    A machine whose home is among the executors keeps it, unless ``level`` is set: then each
    executor gets an equal share of each routing's machines, give or take one, with as few moves as
    possible. The result depends on nothing but the arguments, not on the order of executors.
    """
    order = sorted(set(executors), key=lambda name: (len(name), name))  # 9 before 10
    total: Counter[str] = Counter(dict.fromkeys(order, 0))  # machines of all routings
    assigned: dict[str, dict[int, str]] = {}
    for routing, count in machines.items():
        kept = {m: e for m, e in homes.get(routing, {}).items() if e in total and m < count}
        assigned[routing] = _levelled(kept, count, order) if level else kept
        total.update(assigned[routing].values())
    for routing, count in machines.items():
        mine, own = assigned[routing], Counter(assigned[routing].values())
        for machine in (m for m in range(count) if m not in mine and order):
            # Of equal executors, the one with the fewest machines of other routings.
            home = min(order, key=lambda executor: (own[executor], total[executor]))
            mine[machine] = home
            own[home] += 1
            total[home] += 1
        assigned[routing] = dict(sorted(mine.items()))
    return assigned


def _levelled(kept: Mapping[int, str], count: int, order: Collection[str]) -> dict[int, str]:
    """Return the homes without those beyond an equal share."""
    if not order:
        return {}
    share, more = divmod(count, len(order))
    loads = Counter(kept.values())
    # Executors with the most machines may have one more than the others: that moves the fewest.
    fullest = sorted(order, key=lambda executor: -loads[executor])[:more]
    room = {executor: share + (executor in fullest) for executor in order}
    found: dict[int, str] = {}
    for machine, executor in sorted(kept.items()):
        if room[executor]:
            room[executor] -= 1
            found[machine] = executor
    return found


def placed(
    before: Placement, chain: Chain, executors: Mapping[str, Collection[str]], *, level: bool
) -> Placement:
    """Return the placement of the next batch; ``executors`` are those of each group.

    As long as no group has had several executors, there are no homes, and nothing is pinned.
    Routings that the batch does not use keep their homes. A routing whose group has changed gets
    homes in the new one.
    """
    if not before.homes and all(len(names) < 2 for names in executors.values()):
        return before
    machines = {name: len(homes) for name, homes in before.homes.items()}
    machines |= {node.routing: len(node.machines) for node in chain.nodes if node.routing}
    homes: dict[str, dict[int, str]] = {}
    for group, names in executors.items():
        mine = {name: n for name, n in machines.items() if before.group(name) == group}
        homes |= assign(before.homes, mine, names, level=level)
    return replace(before, homes=homes)


def home_metrics(
    chain: Chain, before: Placement, now: Placement, reports: Reports
) -> dict[str, dict[str, int]]:
    """Return the metrics of a batch, by the name ``homes``; empty if there are no homes.

    ``tasks`` had a home and a known executor, ``misplaced`` of them ran elsewhere, and ``moved``
    machines have another home than in the batch before.
    """
    if not now.homes:
        return {}
    ran = [
        (report.executor, now.home(node, report.machine))
        for node in chain.nodes
        for report in reports[node.name]
        if report.executor
    ]
    places = [(executor, home) for executor, home in ran if home is not None]
    moved = sum(
        before.homes.get(routing, {}).get(machine, home) != home
        for routing, homes in now.homes.items()
        for machine, home in homes.items()
    )
    misplaced = sum(executor != home for executor, home in places)
    return {HOMES: {"tasks": len(places), "misplaced": misplaced, "moved": moved}}
