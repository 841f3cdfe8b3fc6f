"""Rounds of a prefix tree: every machine's policy proposes, and the arbiter accepts or refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from roost.runtime.rounds import AnyDecision, Proposal, Verdict, arbitrate
from roost.synopsis.scaling import Scaler, ScalingDecision, ScalingRules, SketchletSnapshot, Streak

QUIET = "quiet"  # key of the machines that were part of an operation


@dataclass(frozen=True)
class PrefixRound:
    """What policies see at the end of a round, after the operations accepted so far."""

    seen: SketchletSnapshot

    def accepting(self, policy: str, decision: AnyDecision) -> PrefixRound:
        """Return the snapshot with the decision of a policy; raises ValueError to refuse it."""
        if not isinstance(decision, ScalingDecision):
            raise ValueError("a policy of a prefix tree changes nothing else")
        return PrefixRound(self.seen.after(decision))


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
        self.memory: Mapping[str, Any] = saved

    def observe(self, seen: SketchletSnapshot) -> tuple[Sequence[Verdict], SketchletSnapshot]:
        """Decide from an observation; machines of moves in progress begin no operation."""
        moving = {m for one in seen.transfers for m in (one.source, one.target)}
        busy = frozenset(moving | {m for m, left in self._quiet.items() if left})
        verdicts, decided = arbitrate(PrefixRound(replace(seen, busy=busy)), self._policies)
        left = {m: left - 1 for m, left in self._quiet.items() if left > 1}
        new = dict.fromkeys(sorted(decided.seen.busy - busy), self._rules.stabilisation)
        self._quiet = left | new
        own = {key: value for v in verdicts for key, value in v.proposal.memory.items()}
        self.memory = own | {QUIET: {str(m): left for m, left in self._quiet.items()}}
        return verdicts, decided.seen
