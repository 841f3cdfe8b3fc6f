"""Rounds of a prefix tree: every machine's policy proposes, and the arbiter accepts or refuses.

A round is one batch. Verdicts, the policies' memories and the next tree are recorded in one
transaction; the next batch uses the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from roost.balance.changes import Resize
from roost.model.arrays import Floats, Ints
from roost.runtime.records import last_round
from roost.runtime.rounds import (
    REFUSED,
    AnyDecision,
    CommittedBatch,
    Proposal,
    Proposer,
    Verdict,
    arbitrate,
    memories,
)
from roost.stages.contract import Batch, Reports, task_seconds
from roost.stages.synopsis import TREES, SynopsisStage, owner_bytes
from roost.storage.store import Fact, Store
from roost.synopsis.catalogue import FileKind
from roost.synopsis.prefix_choice import PrefixLoad
from roost.synopsis.prefix_loads import add_loads, divide_rows, stored_bytes, transfers
from roost.synopsis.scaling import (
    AddMachines,
    MachineStatus,
    Needs,
    Scaler,
    ScalingDecision,
    ScalingRules,
    SketchletSnapshot,
    Streak,
    Trigger,
)

PREFIX_ROUNDS = "prefix rounds"  # table of the rounds
QUIET = "quiet"  # key of the machines that were part of an operation
NEEDS = "needs"  # key of the machines that the tree should have
PARTS = 64  # prefixes for each machine whose load policies see, about
KEPT = 0.5  # share of older rows and seconds that is kept with each batch
ROWS_MIN = 0.1  # a prefix with fewer recent rows is dropped
BEHIND_MAX = 10.0  # batches


@dataclass(frozen=True)
class PrefixRound:
    """What policies see at the end of a round, after the operations accepted so far."""

    seen: SketchletSnapshot

    def has_size(self, machines: int) -> bool:
        """Return whether the tree is one of so many machines."""
        return self.seen.tree.machines == machines

    def accepting(self, policy: str, decision: AnyDecision) -> PrefixRound:
        """Return the snapshot with the decision of a policy; raises ValueError to refuse it."""
        if isinstance(decision, Resize):
            if decision.machines < 1:
                raise ValueError(f"a prefix tree needs a machine, not {decision.machines}")
            tree = self.seen.tree.resized(decision.machines, weights(self.seen.loads))
            return PrefixRound(replace(self.seen, tree=tree))
        if not isinstance(decision, ScalingDecision):
            raise ValueError("a policy of a prefix tree changes nothing else")
        return PrefixRound(self.seen.after(decision))


def weights(loads: Mapping[str, PrefixLoad]) -> dict[str, float]:
    """Return the weight of prefixes: their shares of all rows and of all bytes."""
    total = PrefixLoad(*(max(sum(one), 1e-300) for one in zip(*loads.values(), strict=True)))
    return {p: one.rate / total.rate + one.nbytes / total.nbytes for p, one in loads.items()}


class PrefixPolicy:
    """Proposes for one machine; ``saved`` is the last record before a restart, or empty."""

    def __init__(self, scaler: Scaler, saved: Mapping[str, Any]) -> None:
        self.name = f"machine {scaler.machine}"
        self._scaler = scaler
        self._streak = Streak(**saved.get(self.name, {}))

    def propose(self, snapshot: PrefixRound) -> Proposal:
        """Decide from the round, and record what the policy remembers."""
        decision, self._streak = self._scaler.decide(snapshot.seen, self._streak)
        return Proposal(decision, {self.name: asdict(self._streak)})


class Scaling:
    """The policies of all machines; ``saved`` is what :attr:`memory` was before a restart."""

    def __init__(self, rules: ScalingRules, machines: int, saved: Mapping[str, Any]) -> None:
        self._rules = rules
        self._policies = [PrefixPolicy(Scaler(rules, m), saved) for m in range(machines)]
        # For how many observations each machine begins no operation.
        self._quiet = {int(m): int(left) for m, left in saved.get(QUIET, {}).items()}
        self.needs = Needs(**saved.get(NEEDS, {}))
        self.memory: Mapping[str, Any] = saved

    def observe(self, seen: SketchletSnapshot) -> tuple[Sequence[Verdict], SketchletSnapshot]:
        """Decide from an observation; machines of moves in progress begin no operation."""
        moving = {m for one in seen.transfers for m in (one.source, one.target)}
        busy = frozenset(moving | {m for m, left in self._quiet.items() if left})
        verdicts, decided = arbitrate(PrefixRound(replace(seen, busy=busy)), self._policies)
        left = {m: left - 1 for m, left in self._quiet.items() if left > 1}
        new = dict.fromkeys(sorted(decided.seen.busy - busy), self._rules.stabilisation)
        self._quiet = left | new
        self.needs = self.needs.observed(seen, decided.seen, self._rules)
        quiet = {str(m): left for m, left in self._quiet.items()}
        self.memory = memories(verdicts) | {QUIET: quiet, NEEDS: asdict(self.needs)}
        return verdicts, decided.seen


class PrefixRounds:
    """Measures the load of prefixes, and ends a round with every batch.

    Without ``rules`` machines do not scale; ``resize`` proposes how many there are, and
    ``machines_max`` returns how many there can be now.
    """

    records = PREFIX_ROUNDS

    def __init__(
        self,
        store: Store,
        stage: SynopsisStage,
        rules: ScalingRules | None,
        clock: Callable[[], float],
        resize: Proposer[PrefixRound] | None = None,
        machines_max: Callable[[], int] = lambda: 0,
    ) -> None:
        self._machines_max = machines_max
        self._store, self._stage, self._rules, self._clock = store, stage, rules, clock
        self._resize = [] if resize is None else [resize]
        last = last_round(store, PREFIX_ROUNDS) or {}
        self.number = int(last.get("round", -1)) + 1
        machines = stage.table.at(stage.table.epoch).machines
        saved = last.get("memory", {})
        if last.get("machines") != machines:
            saved = {key: value for key, value in saved.items() if key == NEEDS}
        self._scaling = None if rules is None else Scaling(rules, machines, saved)
        self._opened: float | None = None
        self._places: Ints = np.empty(0, np.int64)
        self._rows: Floats = np.empty(0)
        self._seconds = 0.0
        self._worked = np.zeros((2, machines))  # rows and seconds
        self._behind = np.zeros(machines)

    @property
    def needed(self) -> int:
        """Machines that the tree should have at least; zero if any number suffices."""
        return 0 if self._scaling is None else self._scaling.needs.machines

    def after_batch(self, done: CommittedBatch) -> None:
        """Note a batch, and decide."""
        opened, self._opened = self._opened, self._clock()
        table = self._stage.table
        if opened is None:
            return  # after a restart, also of a batch that repeats with an older tree
        batch = done.batch
        self._note(batch, done.reports, max(self._opened - opened, 1e-9))
        seen = self._seen()
        verdicts, decided = self._decided(seen)
        changed = decided.tree != seen.tree
        row = {
            "round": self.number,
            "batch_id": batch.number,
            "machines": seen.tree.machines,
            "next_epoch": table.epoch + 1 if changed else None,
            "verdicts": [verdict.to_json() for verdict in verdicts],
            "memory": {} if self._scaling is None else self._scaling.memory,
        }
        tree = [Fact(TREES, table.epoch + 1, decided.tree.to_json())] if changed else []
        self._store.record(Fact(PREFIX_ROUNDS, self.number, row), *tree)
        self.number += 1
        table.epoch += changed
        self._set_machines(decided.tree.machines)

    def _decided(self, seen: SketchletSnapshot) -> tuple[list[Verdict], SketchletSnapshot]:
        """Decide on the number of machines; if that stays, machines pass prefixes on."""
        verdicts, resized = arbitrate(PrefixRound(seen), self._resize)
        if self._rules is None or self._scaling is None:
            return verdicts, resized.seen
        if resized.seen.tree.machines != seen.tree.machines:
            return verdicts, resized.seen
        more, decided = self._scaling.observe(seen)
        for verdict in more:
            proposed = verdict.proposal.decision
            if not isinstance(proposed, AddMachines) or verdict.verdict != REFUSED:
                continue
            if proposed.trigger is Trigger.MEMORY:
                self._stage.coarsen_early(self._rules.limit(0.0).nbytes)
        return [*verdicts, *more], decided

    def _set_machines(self, machines: int) -> None:
        """Continue with other machines; new ones have done nothing yet."""
        more = machines - self._behind.size
        if not more:
            return
        self._behind = np.pad(self._behind, (0, max(more, 0)))[:machines]
        self._worked = np.pad(self._worked, ((0, 0), (0, max(more, 0))))[:, :machines]
        if self._rules is not None and self._scaling is not None:
            self._scaling = Scaling(self._rules, machines, self._scaling.memory)

    def _note(self, batch: Batch, reports: Reports, seconds: float) -> None:
        """Add what a batch measured; older batches count less."""
        name = self._stage.name
        cells = [found for found in batch.outcomes[name].observed if found is not None]
        places = np.concatenate([self._places, *(places for places, _ in cells)])
        rows = np.concatenate([self._rows * KEPT, *(rows for _, rows in cells)])
        found, at = np.unique(places, return_inverse=True)
        sums = np.bincount(at, rows, found.size).astype(np.float64)
        recent = sums >= ROWS_MIN
        self._places, self._rows = found[recent], sums[recent]
        self._seconds = self._seconds * KEPT + seconds
        if self._rules is None:
            return  # without an exchange, machines are those that read
        worked = np.zeros_like(self._worked)
        for report in reports[name]:
            worked[0, report.machine] += report.rows_in
        for machine, busy in task_seconds(reports, name).items():
            worked[1, machine] = busy
        self._worked = self._worked * KEPT + worked
        # A machine that works for longer than it should makes the next batch late.
        most = self._rules.utilisation
        late = (worked[1] / seconds - most) / (1.0 - most)
        self._behind = np.clip(self._behind + late, 0.0, BEHIND_MAX)

    def _seen(self) -> SketchletSnapshot:
        """Return what policies see."""
        stage, table = self._stage, self._stage.table
        tree, now = table.at(table.epoch).tree, stage.catalogue
        rows, seconds = self._worked
        known = rows[seconds > 0.0] / seconds[seconds > 0.0]
        # Of a machine without rows nothing is known: it is like the slowest one.
        capacity = np.full(tree.machines, known[known > 0.0].min(initial=np.inf))
        capacity = np.divide(rows, seconds, out=capacity, where=(seconds > 0.0) & (rows > 0.0))
        nbytes, deltas = owner_bytes(now), np.zeros(tree.machines)
        for file in now.of_kind(FileKind.DELTA):
            for owner in {part.owner for part in file.parts if part.owner < tree.machines}:
                deltas[owner] += 1
        behind = self._behind + np.maximum(deltas - stage.fold_files, 0.0)
        status = [
            MachineStatus(float(behind[m]), float(nbytes[m]), float(capacity[m]))
            for m in range(tree.machines)
        ]
        bits = stage.spec.place_bits
        found = divide_rows(tree, self._places, self._rows, bits, PARTS * tree.machines)
        rates = {prefix: rows / self._seconds for prefix, rows in found.items()}
        loads = add_loads(rates, stored_bytes(now, tree))
        moving = transfers(now, tree)
        return SketchletSnapshot(tree, status, loads, moving, machines_max=self._machines_max())
