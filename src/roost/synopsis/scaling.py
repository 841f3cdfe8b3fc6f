"""Scaling of the prefix tree: each machine passes prefixes on, or takes them back.

Problem: the load of a machine depends on where and when rows arrive. A machine that falls behind,
or whose memory fills up, should pass on part of its places; a machine with little load should take
them back, so that queries and rows need few machines.

Idea (Synopsis, sections 3.3 and 3.4): rules with thresholds, which must hold for some observations
in a row. *Scale-out* moves the fewest prefixes that remove the excess; *scale-in* takes
back one subtree at a time. Both leave every machine that takes over below its limits, and these lie
between the lower and the upper thresholds: under a steady load, no operation causes another.

A pure policy: it decides for one machine from a snapshot, and does not carry out anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from roost.balance.changes import NoChange
from roost.synopsis.prefix_choice import Candidate, PrefixLoad, PrefixMove, choose_moves
from roost.synopsis.tree import PrefixTree

SPARE_MAX = 8  # machines that a provision may ask for


class Trigger(StrEnum):
    """What a machine has too much of."""

    BACKLOG = "backlog"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Thresholds of the policy.

    Parameters
    ----------
    memory
        Budget of each machine, in bytes.
    observations
        Number of consecutive observations for which a rule must hold.
    stabilisation
        Number of observations after an operation in which its machines begin no other.
    memory_upper, memory_lower
        Shares of the budget, above which a machine scales out and below which it may scale in.
    backlog_upper, backlog_lower
        The same for the batches that a machine is behind.
    utilisation
        Share of its capacity that a machine has after an operation at most.
    """

    memory: float
    observations: int = 4
    stabilisation: int = 4
    memory_upper: float = 0.45
    memory_lower: float = 0.25
    backlog_upper: float = 2.0
    backlog_lower: float = 0.5
    utilisation: float = 0.8

    def limit(self, capacity: float) -> PrefixLoad:
        """Return what a machine has after an operation at most."""
        share = (self.memory_upper + self.memory_lower) / 2.0
        return PrefixLoad(self.utilisation * capacity, share * self.memory)


@dataclass(frozen=True, slots=True)
class MachineStatus:
    """What was measured of a machine since the last observation."""

    backlog: float  # batches that it is behind: by their delay, and by deltas to be folded
    nbytes: float  # with those that moves in progress will take away
    capacity: float  # rows per second


@dataclass(frozen=True, slots=True)
class Transfer:
    """A move in progress: bytes that are still with the machine that passed a prefix on."""

    source: int
    target: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """Pass prefixes on to other machines."""

    machine: int
    moves: tuple[PrefixMove, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleIn:
    """Take back a prefix with all that is below it, from all of its owners."""

    machine: int
    subtree: str
    reason: str


@dataclass(frozen=True, slots=True)
class AddMachines:
    """Add machines, because none has room for the excess of this one."""

    machine: int
    more: int
    trigger: Trigger
    reason: str


ScalingDecision = ScaleOut | ScaleIn | AddMachines | NoChange


@dataclass(frozen=True)
class SketchletSnapshot:
    """Machines, and the load of prefixes; what moves with a prefix has one owner."""

    tree: PrefixTree
    machines: Sequence[MachineStatus]
    loads: Mapping[str, PrefixLoad]  # what moves with a prefix, beside that of longer ones
    transfers: tuple[Transfer, ...] = ()
    busy: frozenset[int] = frozenset()  # machines with an operation under way
    machines_max: int = 0  # that there can be
    asked: tuple[AddMachines, ...] = ()  # machines that were asked for in this observation

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """Owners of the prefixes that have a load."""
        return {prefix: self.tree.owner(prefix) for prefix in self.loads}

    @cached_property
    def _loads(self) -> Sequence[PrefixLoad]:
        rates = [0.0] * len(self.machines)
        for prefix, owner in self.owners.items():
            rates[owner] += self.loads[prefix].rate
        nbytes = [machine.nbytes for machine in self.machines]
        for one in self.transfers:
            nbytes[one.source] -= one.nbytes
            nbytes[one.target] += one.nbytes
        return [PrefixLoad(*pair) for pair in zip(rates, nbytes, strict=True)]

    def load(self, machine: int) -> PrefixLoad:
        """Return the load of a machine: the rates of its prefixes, and the bytes that it holds.

        Moves in progress count as if they were over.
        """
        return self._loads[machine]

    def inside(self, subtree: str, machine: int) -> dict[int, PrefixLoad]:
        """Return what a machine would take back, by owner."""
        listed = self.tree.owners.items()
        owners = {owner for prefix, owner in listed if prefix.startswith(subtree)} - {machine}
        found = dict.fromkeys(sorted(owners), PrefixLoad())
        for prefix, owner in self.owners.items():
            if prefix.startswith(subtree) and owner != machine:
                found[owner] = found[owner].plus(self.loads[prefix])
        return found

    def after(self, decision: ScalingDecision) -> SketchletSnapshot:
        """Return the snapshot with a decision; raises ValueError if it is not possible now."""
        if isinstance(decision, NoChange):
            return self
        if isinstance(decision, AddMachines):
            if len(self.machines) >= self.machines_max:
                raise ValueError(f"cannot add machines: there are {len(self.machines)} at most")
            return replace(self, asked=(*self.asked, decision))
        if isinstance(decision, ScaleOut):
            tree, source = self.tree, decision.machine
            for move in decision.moves:
                tree = tree.moved(move.prefix, move.target)
            sent = [Transfer(source, move.target, move.load.nbytes) for move in decision.moves]
        else:
            tree, target = self.tree.taken_back(decision.subtree), decision.machine
            inside = self.inside(decision.subtree, target)
            sent = [Transfer(source, target, load.nbytes) for source, load in inside.items()]
        involved = {machine for one in sent for machine in (one.source, one.target)}
        if involved & self.busy:
            names = ", ".join(map(str, sorted(involved & self.busy)))
            raise ValueError(f"another operation is under way on machine {names}")
        transfers, busy = (*self.transfers, *sent), self.busy | involved
        return replace(self, tree=tree, transfers=transfers, busy=busy)


@dataclass(frozen=True, slots=True)
class Needs:
    """Machines that the tree should have at least.

    Those asked for because of a ``backlog`` are needed until they are there; the load decides how
    long they stay. Those for ``memory`` are needed until a machine takes a prefix back.
    """

    backlog: int = 0
    memory: int = 0

    @property
    def machines(self) -> int:
        """The larger number."""
        return max(self.backlog, self.memory)

    def observed(
        self, seen: SketchletSnapshot, decided: SketchletSnapshot, rules: ScalingRules
    ) -> Needs:
        """Return the needs after an observation; ``decided`` has its accepted decisions."""
        there = len(seen.machines)
        more = {one: 0 for one in Trigger}
        for asked in decided.asked:
            more[asked.trigger] += asked.more
        wanted = {trigger: there + count if count else 0 for trigger, count in more.items()}
        backlog = max(self.backlog if self.backlog > there else 0, wanted[Trigger.BACKLOG])
        owners = len(set(decided.tree.owners.values()))
        fewer = owners < len(set(seen.tree.owners.values()))
        stored = sum(machine.nbytes for machine in seen.machines)
        least = math.ceil(stored / (rules.memory_upper * rules.memory))
        kept = min(self.memory, owners) if fewer else self.memory
        return Needs(backlog, max(kept, wanted[Trigger.MEMORY], least if least > 1 else 0))


@dataclass(frozen=True, slots=True)
class Streak:
    """For how many observations in a row each rule of a machine has held."""

    backlog: int = 0
    memory: int = 0
    idle: int = 0


@dataclass(frozen=True)
class Scaler:
    """Decides for one machine."""

    rules: ScalingRules
    machine: int

    def decide(self, seen: SketchletSnapshot, streak: Streak) -> tuple[ScalingDecision, Streak]:
        """Decide from an observation; returns what to pass to the next call, too."""
        if self.machine in seen.busy:
            return NoChange("an operation of the machine is under way"), Streak()
        rules, status, load = self.rules, seen.machines[self.machine], seen.load(self.machine)
        behind = status.backlog > rules.backlog_upper
        full = load.nbytes > rules.memory_upper * rules.memory
        idle = status.backlog < rules.backlog_lower
        idle = idle and load.nbytes < rules.memory_lower * rules.memory
        streak = Streak(
            behind * (streak.backlog + 1), full * (streak.memory + 1), idle * (streak.idle + 1)
        )
        decision: ScalingDecision = NoChange("no rule has held for long enough")
        if streak.backlog >= rules.observations:
            decision = self._scale_out(seen, Trigger.BACKLOG)
        if isinstance(decision, NoChange) and streak.memory >= rules.observations:
            decision = self._scale_out(seen, Trigger.MEMORY)
        if streak.idle >= rules.observations:
            decision = self._scale_in(seen)
        # Refused operations are proposed again at the next observation, unless impossible now.
        return decision, Streak() if isinstance(decision, AddMachines) else streak

    def _room(self, seen: SketchletSnapshot, machine: int) -> PrefixLoad:
        """Return what a machine can take over."""
        status = seen.machines[machine]
        if status.backlog > self.rules.backlog_upper:
            return PrefixLoad(-1.0, -1.0)
        return self.rules.limit(status.capacity).minus(seen.load(machine))

    # ------------------------------------------------------------------ scale-out

    def _scale_out(self, seen: SketchletSnapshot, trigger: Trigger) -> ScalingDecision:
        """Pass on what exceeds the limits; ask for machines if that makes it possible."""
        capacity = seen.machines[self.machine].capacity
        over = seen.load(self.machine).minus(self.rules.limit(capacity))
        by_rate = trigger is Trigger.BACKLOG
        excess = over.rate if by_rate else over.nbytes
        unit = "rows/s" if by_rate else "bytes"
        reason = f"{trigger} for {self.rules.observations} observations: {excess:,.0f} {unit}"
        if excess <= 0.0:
            return NoChange(f"{trigger} is above its threshold, but its cause is gone")
        rooms = {
            machine: self._room(seen, machine)
            for machine in range(len(seen.machines))
            if machine != self.machine and machine not in seen.busy
        }
        spare = range(len(seen.machines), len(seen.machines) + SPARE_MAX)
        candidates = self._candidates(seen, trigger, [*rooms, *spare])
        moves = choose_moves(candidates, excess, rooms)
        if moves is not None:
            return ScaleOut(self.machine, moves, f"{reason} too many")
        rooms |= dict.fromkeys(spare, self.rules.limit(capacity))
        moves = choose_moves(candidates, excess, rooms)
        if moves is None:
            return NoChange(f"{reason} too many, which no other machines could take over")
        more = len({move.target for move in moves} & set(spare))
        reason += " too many, and no machine has room"
        return AddMachines(self.machine, more, trigger, reason)

    def _candidates(
        self, seen: SketchletSnapshot, trigger: Trigger, targets: Sequence[int]
    ) -> list[Candidate]:
        """Return the prefixes around the machine's load; of equal ones, the shortest."""
        loads: dict[str, PrefixLoad] = {}
        for prefix, owner in seen.owners.items():
            for end in range(len(prefix) + 1) if owner == self.machine else ():
                if seen.tree.owner(prefix[:end]) == self.machine:
                    total = loads.get(prefix[:end], PrefixLoad())
                    loads[prefix[:end]] = total.plus(seen.loads[prefix])
        active = set(seen.tree.owners.values())
        found = []
        for prefix, load in loads.items():
            if prefix and loads.get(prefix[:-1]) == load:
                continue
            siblings = self._siblings(seen.tree, prefix)
            ranks = {m: 0 if m in siblings else 1 if m in active else 2 for m in targets}
            amount = load.rate if trigger is Trigger.BACKLOG else load.nbytes
            found.append(Candidate(prefix, load, amount, ranks))
        return found

    @staticmethod
    def _siblings(tree: PrefixTree, prefix: str) -> set[int]:
        """Return the owners of prefixes around which the tree lists the same prefix."""
        around = tree.listed(prefix)
        others = (p for p in tree.owners if p and p != around)
        return {tree.owners[p] for p in others if tree.listed(p[:-1]) == around}

    # ------------------------------------------------------------------ scale-in

    def _scale_in(self, seen: SketchletSnapshot) -> ScalingDecision:
        """Take back the smallest subtree that there is room for."""
        room, limit = (
            self._room(seen, self.machine),
            self.rules.limit(seen.machines[self.machine].capacity),
        )
        found = []
        for prefix, owner in seen.tree.owners.items():
            if prefix and owner != self.machine == seen.tree.owner(prefix[:-1]):
                parts = seen.inside(prefix, self.machine).values()
                load = PrefixLoad(sum(p.rate for p in parts), sum(p.nbytes for p in parts))
                if load.fits(room):
                    found.append((load.rate / limit.rate + load.nbytes / limit.nbytes, prefix))
        if not found:
            return NoChange("there is no subtree that could be taken back")
        reason = f"backlog and memory are low for {self.rules.observations} observations"
        return ScaleIn(self.machine, min(found)[1], reason)
