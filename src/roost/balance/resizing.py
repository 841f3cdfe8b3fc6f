"""Another number of machines for a plan: partitions leave machines that leave, new ones get some.

What a strategy knows decides: costs of partitions empty machines, and TrioStat's statistics choose
what is split off for new ones. Everything else stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roost.balance.changes import Change, Move, Rebalance, Split
from roost.balance.plan import Plan
from roost.balance.rules import SwarmRules
from roost.balance.swarm import DEFAULT, ShedRequest, ShedTarget, give, machine_cost, shed
from roost.workload.trio import MachineStats


def replicated(plan: Plan, machines: int) -> Rebalance:
    """Return the change of a plan in which every machine has every partition."""
    everyone = tuple(range(machines))
    moves = tuple(Move(p.partition_id, everyone) for p in plan.partitions)
    return Rebalance(moves, f"every one of {machines} machines has all queries", machines)


def emptied(plan: Plan, machines: int, costs: Mapping[int, float]) -> tuple[Move, ...]:
    """Return the moves of partitions away from machines from number ``machines`` up.

    The costliest goes first, to the machine with the least cost, then fewest partitions. A shared
    partition only loses the machines that leave, if others have it.
    """
    loads, leaving = [(0.0, 0, machine) for machine in range(machines)], []
    moves = []
    for p in plan.partitions:
        stay = tuple(machine for machine in p.machines if machine < machines)
        if not stay:
            leaving.append(p)
            continue
        if len(stay) < len(p.machines):
            moves.append(Move(p.partition_id, stay))
        for machine in stay:
            cost, count, _ = loads[machine]
            loads[machine] = cost + costs.get(p.partition_id, 0.0) / len(stay), count + 1, machine
    for p in sorted(leaving, key=lambda p: (-costs.get(p.partition_id, 0.0), p.partition_id)):
        cost, count, machine = min(loads)
        loads[machine] = cost + costs.get(p.partition_id, 0.0), count + 1, machine
        moves.append(Move(p.partition_id, (machine,)))
    return tuple(moves)


def resize_by_statistics(
    plan: Plan,
    machines: int,
    statistics: Callable[[int], MachineStats],
    rules: SwarmRules = DEFAULT,
) -> Rebalance:
    """Return the change of SWARM's plan: the costliest machine sheds load to each new one.

    ``statistics`` returns those of a machine, which this function changes.
    """
    stats = {machine: statistics(machine) for machine in range(plan.machines)}
    parts = [part for one in stats.values() for part in one.partitions.values()]
    costs = {part.partition_id: rules.cost.of(part) for part in parts}
    if machines < plan.machines:
        moves = emptied(plan, machines, costs)
        return Rebalance(moves, f"{len(moves)} partitions leave {plan.machines} machines", machines)
    received = sum(one.received() for one in stats.values())
    keep = tuple(p.partition_id for p in plan.partitions if len(p.machines) > 1)
    changes: list[Change] = []
    next_id = plan.next_id
    for new in range(plan.machines, machines) if received > 0.0 else ():
        request = ShedRequest((ShedTarget(new, 0.0),), received, next_id, keep)
        ranked = sorted(stats, key=lambda m: (-machine_cost(stats[m], rules), m))
        answers = ((machine, shed(stats[machine], machine, request, rules)) for machine in ranked)
        high, found = next((answer for answer in answers if answer[1]), (0, ()))
        stats[new] = MachineStats()
        for change in found:
            give(stats[high].partitions, stats[new].partitions, high, change)
            next_id += 2 * isinstance(change, Split)
        changes += found
    reason = f"{len(changes)} changes fill {machines - plan.machines} machines"
    return Rebalance(tuple(changes), reason, machines)
