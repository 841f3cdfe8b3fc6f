"""Simulated sketchlets: the scaling policy changes a prefix tree under a varying load.

In each batch a machine receives the rows of its prefixes, and processes as many as it can; the
others wait. What it has processed takes bytes. The bytes of a prefix that moved stay with the old
owner for some batches, and then arrive as a whole. Queries, the network and coarsening are not
simulated. A seed determines every result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roost.runtime.prefix_rounds import Scaling
from roost.runtime.rounds import ACCEPTED, Verdict
from roost.sim.load_curves import Curve
from roost.synopsis.prefix_choice import PrefixLoad
from roost.synopsis.scaling import (
    MachineStatus,
    ScaleIn,
    ScaleOut,
    ScalingDecision,
    ScalingRules,
    SketchletSnapshot,
    Transfer,
)
from roost.synopsis.tree import PrefixTree


@dataclass(frozen=True, kw_only=True)
class SketchletScenario:
    """What is simulated.

    Parameters
    ----------
    tree
        The first tree.
    rates
        Rows per second of each prefix, as functions of the clock.
    rules
        Rules of the policy.
    batches
        Number of batches; the policy observes each.
    capacity
        Rows per second that a machine can process.
    row_bytes
        Bytes of a row in the synopsis.
    rows_max
        Rows of a prefix after which its synopsis does not grow.
    move_batches
        Batches after which the bytes of a move arrive.
    noise
        Standard deviation of the logarithm of the rate of a prefix in a batch.
    restarts
        Batches after which the driver restarts.
    """

    tree: PrefixTree
    rates: Mapping[str, Curve]
    rules: ScalingRules
    batches: int
    capacity: float = 1_000.0
    batch_s: float = 1.0
    row_bytes: float = 0.0
    rows_max: float = np.inf
    move_batches: int = 2
    noise: float = 0.0
    restarts: frozenset[int] = frozenset()
    seed: int = 0


@dataclass(frozen=True)
class SketchletRow:
    """One batch: loads before the decisions, the decisions, and the tree after them."""

    seen: SketchletSnapshot
    verdicts: Sequence[Verdict]
    tree: PrefixTree

    @property
    def accepted(self) -> list[ScalingDecision]:
        """Decisions that change the tree."""
        found = [v.proposal.decision for v in self.verdicts if v.verdict == ACCEPTED]
        return [one for one in found if isinstance(one, ScaleOut | ScaleIn)]

    @property
    def machines(self) -> int:
        """Number of machines that own a prefix."""
        return len(set(self.tree.owners.values()))


@dataclass(frozen=True)
class SketchletTrace:
    """Result of a simulation."""

    scenario: SketchletScenario
    rows: Sequence[SketchletRow] = field(repr=False)

    def decisions(self, *kinds: type) -> list[ScalingDecision]:
        """Return the accepted decisions of some kinds, in order."""
        return [one for row in self.rows for one in row.accepted if isinstance(one, kinds)]

    @property
    def batches_to_stable(self) -> list[int | None]:
        """Batches from each scale-out until its machine is below both upper thresholds.

        None if it never is.
        """
        return [
            next((k for k, row in enumerate(self.rows[at:]) if not self._over(row, machine)), None)
            for at, row in enumerate(self.rows)
            for machine in sorted(one.machine for one in row.accepted if isinstance(one, ScaleOut))
        ]

    def _over(self, row: SketchletRow, machine: int) -> bool:
        rules, status = self.scenario.rules, row.seen.machines[machine]
        full = status.nbytes > rules.memory_upper * rules.memory
        return full or status.backlog > rules.backlog_upper


def simulate_sketchlets(scenario: SketchletScenario) -> SketchletTrace:
    """Run a scenario.

    Examples
    --------
    >>> from roost.sim.load_curves import step
    >>> rates = {format(cell, "03b"): step(50.0, 200.0, 20.0) for cell in range(8)}
    >>> tree, rules = PrefixTree(3, {"": 0}), ScalingRules(memory=1e9)
    >>> scenario = SketchletScenario(tree=tree, rates=rates, rules=rules, batches=60)
    >>> trace = simulate_sketchlets(scenario)
    >>> [row.machines for row in trace.rows][::20], trace.rows[-1].machines
    ([1, 1, 2], 2)
    """
    return _Sketchlets(scenario).run()


class _Sketchlets:
    """State of a running simulation."""

    def __init__(self, scenario: SketchletScenario) -> None:
        s = self._s = scenario
        self._random = np.random.default_rng(s.seed)
        self._tree = s.tree
        self._scaling = Scaling(s.rules, s.tree.machines, {})
        self._waiting = np.zeros(s.tree.machines)  # rows
        self._rows = {prefix: 0.0 for prefix in s.rates}  # that were processed
        # Moves in progress by prefix: the old owner, its bytes, and the batch in which they arrive.
        self._moving: dict[str, tuple[int, float, int]] = {}

    def run(self) -> SketchletTrace:
        """Run all batches."""
        return SketchletTrace(self._s, [self._batch(k) for k in range(self._s.batches)])

    def _batch(self, number: int) -> SketchletRow:
        s = self._s
        received = self._receive(number)
        status, transfers = self._measured(number)
        loads = {p: PrefixLoad(r, self._rows[p] * s.row_bytes) for p, r in received.items()}
        seen = SketchletSnapshot(self._tree, status, loads, transfers)
        if number in s.restarts:
            saved = json.loads(json.dumps(self._scaling.memory))
            self._scaling = Scaling(s.rules, s.tree.machines, saved)
        verdicts, decided = self._scaling.observe(seen)
        self._follow(number, decided.tree)
        return SketchletRow(seen, verdicts, decided.tree)

    def _receive(self, number: int) -> dict[str, float]:
        """Route and process the rows of a batch; returns the rate of each prefix."""
        s, clock = self._s, np.asarray((number + 0.5) * self._s.batch_s)
        noise = np.exp(s.noise * self._random.standard_normal(len(s.rates)))
        curves = zip(s.rates.items(), noise.tolist(), strict=True)
        rates = {prefix: float(curve(clock)) * factor for (prefix, curve), factor in curves}
        for prefix, rate in rates.items():
            self._waiting[self._tree.owner(prefix)] += rate * s.batch_s
            self._rows[prefix] = min(self._rows[prefix] + rate * s.batch_s, s.rows_max)
        self._waiting = np.maximum(self._waiting - s.capacity * s.batch_s, 0.0)
        return rates

    def _measured(self, number: int) -> tuple[list[MachineStatus], tuple[Transfer, ...]]:
        """Return the state of the machines, and the moves in progress."""
        s = self._s
        self._moving = {p: move for p, move in self._moving.items() if move[2] > number}
        nbytes = np.zeros(s.tree.machines)
        transfers = []
        for prefix, rows in self._rows.items():
            owner, stored = self._tree.owner(prefix), rows * s.row_bytes
            nbytes[owner] += stored
            if prefix in self._moving:
                source, moved, _ = self._moving[prefix]
                nbytes[owner] -= moved
                nbytes[source] += moved
                transfers.append(Transfer(source, owner, moved))
        behind = self._waiting / (s.capacity * s.batch_s)
        pairs = zip(behind.tolist(), nbytes.tolist(), strict=True)
        return [MachineStatus(b, n, s.capacity) for b, n in pairs], tuple(transfers)

    def _follow(self, number: int, tree: PrefixTree) -> None:
        """Use a tree from the next batch on."""
        for prefix, rows in self._rows.items():
            source = self._tree.owner(prefix)
            if tree.owner(prefix) != source:
                until = number + 1 + self._s.move_batches
                self._moving[prefix] = source, rows * self._s.row_bytes, until
        self._tree = tree
