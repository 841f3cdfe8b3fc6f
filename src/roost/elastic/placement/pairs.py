"""The policies ``static`` and ``algorithm_1``: which group runs which operator.

``static`` is the greedy heuristic of number partitioning: by decreasing load, each operator goes to
the group whose executors are least loaded so far. It decides once, for operators without a group.

``algorithm_1`` (DoDo, section 6.2.2) pairs the most loaded group with the least loaded one, the
second with the second last, and so on. From the higher-loaded group of a pair it moves operators
whose loads rise with those of their own group rather than with those of the receiver.

Every move lowers the higher load of its pair, and the receiver remains below the mean of both. So
the sorted loads of all groups fall with every move, and a steady load cannot make it oscillate.
As printed, an operator may still move away, make room for another one to leave, and come back. The
rounds that would follow at the same loads show this, and then the other one moves at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roost.balance.changes import NoChange
from roost.elastic.placement.snapshot import (
    ROUNDS_MIN,
    ExecutorGroup,
    OperatorMove,
    Place,
    PlacementDecision,
    PlacementSnapshot,
    correlation,
)
from roost.errors import ConfigError

# Correlations of a dozen rounds are not more precise; smaller differences are ties.
_RESOLUTION = 2


@dataclass(frozen=True)
class Static:
    """Give each operator without a group one, and never move it again."""

    def decide(self, snapshot: PlacementSnapshot) -> PlacementDecision:
        """Assign operators by decreasing mean load; ties go to the larger group."""
        loads = dict.fromkeys((group.name for group in snapshot.groups), 0.0)
        means = {one.name: _mean(one.series) for one in snapshot.operators}
        for operator, name in snapshot.mapping.items():
            loads[name] += means[operator]
        moves = []
        unplaced = [name for name in means if name not in snapshot.mapping]
        for operator in sorted(unplaced, key=lambda name: (-means[name], name)):
            group = min(snapshot.groups, key=lambda one: _rank(one, loads[one.name]))
            loads[group.name] += means[operator]
            moves.append(OperatorMove(operator, None, group.name))
        if not moves:
            return NoChange("every operator has a group")
        return Place(tuple(moves), "first mapping, by decreasing load")


def _mean(series: tuple[float, ...]) -> float:
    return sum(series) / len(series) if series else 0.0


def _fits(snapshot: PlacementSnapshot, move: OperatorMove) -> bool:
    """Return whether the receiver remains below the mean of both loads."""
    means = {one.name: float(snapshot.group_series(one).mean()) for one in snapshot.groups}
    executors = {one.name: one.executors for one in snapshot.groups}
    load = next(_mean(one.series) for one in snapshot.operators if one.name == move.operator)
    added = load / max(executors[move.after], 1e-9)
    return added < (means[str(move.before)] - means[move.after]) / 2.0


def _rank(group: ExecutorGroup, load: float) -> tuple[bool, float, int, str]:
    """Order groups by load, then by size; those without executors come last."""
    n = group.executors
    return n == 0, round(load / max(n, 1), 9), -n, group.name


@dataclass(frozen=True)
class Algorithm1:
    """Move operators between pairs of groups whose loads differ.

    Parameters
    ----------
    difference
        Of the mean loads of a pair, above which it acts.
    correlation
        Of the loads of a pair, below which it acts; an overloaded pair always acts.
    overload
        Mean load above which a group is overloaded.
    single
        Move at most one operator of a pair in a round.
    capacity
        Leave the receiver below the mean of both loads, and look ahead. Without it, correlation
        alone decides, which is the thesis's ablation and may overload a small group.

    Raises
    ------
    ConfigError
        If a threshold is out of range.
    """

    difference: float = 0.15
    correlation: float = 0.8
    overload: float = 0.9
    single: bool = True
    capacity: bool = True

    def __post_init__(self) -> None:
        """Check the thresholds."""
        for name, valid, expected in (
            ("difference", self.difference > 0.0, "a number above 0"),
            ("correlation", -1.0 <= self.correlation <= 1.0, "a number from -1 to 1"),
            ("overload", self.overload > 0.0, "a number above 0"),
        ):
            if not valid:
                raise ConfigError(f"placement.{name}", getattr(self, name), expected)

    def decide(self, snapshot: PlacementSnapshot) -> PlacementDecision:
        """Decide for each pair of groups."""
        if snapshot.rounds < ROUNDS_MIN:
            return NoChange(f"{snapshot.rounds} of {ROUNDS_MIN} rounds are measured")
        moves, reason = self._round(snapshot)
        if moves and self.capacity:
            moves = self._without_detours(snapshot, moves)
        return Place(tuple(moves), reason) if moves else NoChange(reason)

    def _round(self, snapshot: PlacementSnapshot) -> tuple[list[OperatorMove], str]:
        """Return the moves of the printed algorithm, and why."""
        means = {one.name: float(snapshot.group_series(one).mean()) for one in snapshot.groups}
        ordered = sorted(snapshot.groups, key=lambda one: (-means[one.name], one.name))
        half = len(ordered) // 2
        moves: list[OperatorMove] = []
        notes = []
        for high, low in zip(ordered[:half], ordered[: -half - 1 : -1], strict=True):
            found, note = self._pair(snapshot, high, low)
            moves += found
            notes.append(
                f"{high.name} at {means[high.name]:.2f}, {low.name} at "
                f"{means[low.name]:.2f}: {note}"
            )
        return moves, "; ".join(notes) or "there is one group"

    def _without_detours(
        self, snapshot: PlacementSnapshot, moves: list[OperatorMove]
    ) -> list[OperatorMove]:
        """Replace moves that later rounds would take back, at the same loads.

        The operator that leaves the same group later, for good, moves instead if it may.
        """
        path, now, following = list[OperatorMove](), snapshot, moves
        while following:
            path += following
            after = {move.operator: move.after for move in following}
            now = replace(now, mapping={**now.mapping, **after})
            following, _ = self._round(now)
        chosen = []
        for move in moves:
            back = replace(move, before=None, after=str(move.before))
            others = {name for one in moves if one != move for name in (one.before, one.after)}
            found = [move]
            if any(replace(one, before=None) == back for one in path):
                found += [
                    one
                    for one in path
                    if one.before == move.before == snapshot.mapping[one.operator]
                    and one.after == now.mapping[one.operator]
                    and one.after not in others
                    and _fits(snapshot, one)
                ][:1]
            chosen.append(found[-1])
        return chosen

    def _pair(
        self, snapshot: PlacementSnapshot, high: ExecutorGroup, low: ExecutorGroup
    ) -> tuple[list[OperatorMove], str]:
        """Return the operators that move from the higher-loaded group, and why."""
        from_series, to_series = snapshot.group_series(high), snapshot.group_series(low)
        load = float(from_series.mean())
        difference = load - float(to_series.mean())
        if not difference > self.difference:
            return [], f"the loads differ by at most {self.difference:g}"
        together = correlation(from_series, to_series)
        if together >= self.correlation and load <= self.overload:
            return [], f"correlation {together:.2f}, and none is above {self.overload:g}"
        taken: list[OperatorMove] = []
        gain = 0.0
        for number in self._ranked(snapshot, high, low):
            added = float(snapshot.series[number].mean()) / max(low.executors, 1e-9)
            if added <= 0.0 or (self.capacity and gain + added >= difference / 2.0):
                continue
            gain += added
            taken.append(OperatorMove(snapshot.operators[number].name, high.name, low.name))
            if self.single:
                break
        if not taken:
            return [], "no operator is small enough for the other group"
        names = ", ".join(move.operator for move in taken)
        return taken, f"correlation {together:.2f}; {names} moves"

    def _ranked(
        self, snapshot: PlacementSnapshot, high: ExecutorGroup, low: ExecutorGroup
    ) -> list[int]:
        """Return the operators of a group, those that fit the other one best first."""
        own = snapshot.in_group(high.name)
        total, other = snapshot.series[own].sum(axis=0), snapshot.group_series(low)

        def key(number: int) -> tuple[float, float, str]:
            series = snapshot.series[number]
            others = total - series if len(own) > 1 else total * 0.0
            score = (correlation(series, others) - correlation(series, other)) / 2.0
            return (
                -round(score, _RESOLUTION),
                -float(series.mean()),
                snapshot.operators[number].name,
            )

        return sorted(own, key=key)
