"""The scaling policy: rules, the fewest moves that remove an excess, and operations under way."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.balance.changes import NoChange
from roost.runtime.prefix_rounds import NEEDS, Scaling
from roost.synopsis.prefix_choice import PrefixLoad
from roost.synopsis.scaling import (
    AddMachines,
    MachineStatus,
    Needs,
    ScaleIn,
    ScaleOut,
    Scaler,
    ScalingDecision,
    ScalingRules,
    SketchletSnapshot,
    Streak,
    Transfer,
)
from roost.synopsis.tree import PrefixTree

RULES = ScalingRules(memory=1_000.0)  # thresholds 450 and 250, at most 350 after an operation
LONG = Streak(backlog=9, memory=9, idle=9)
LATE, CALM = 9.0, 0.0  # batches of backlog


def snapshot(
    tree: PrefixTree, loads: dict[str, tuple[float, float]], backlogs: list[float] | None = None
) -> SketchletSnapshot:
    """Return machines of 100 rows/s whose bytes are those of their prefixes."""
    held = [0.0] * tree.machines
    for prefix, (_, nbytes) in loads.items():
        held[tree.owner(prefix)] += nbytes
    pairs = zip(backlogs or [CALM] * tree.machines, held, strict=True)
    status = [MachineStatus(backlog, nbytes, 100.0) for backlog, nbytes in pairs]
    return SketchletSnapshot(tree, status, {p: PrefixLoad(*load) for p, load in loads.items()})


def decide(seen: SketchletSnapshot, machine: int = 0, streak: Streak = LONG) -> ScalingDecision:
    return Scaler(RULES, machine).decide(seen, streak)[0]


def moves_of(decision: ScalingDecision) -> list[tuple[str, int]]:
    assert isinstance(decision, ScaleOut)
    return [(move.prefix, move.target) for move in decision.moves]


# ---------------------------------------------------------------------- rules


@pytest.mark.parametrize("backlog", [False, True])
def test_a_rule_fires_after_consecutive_observations(backlog: bool) -> None:
    tree = PrefixTree(2, {"": 0})
    loads = (
        {"0": (60.0, 0.0), "1": (60.0, 0.0)} if backlog else {"0": (1.0, 300.0), "1": (1.0, 200.0)}
    )
    over = snapshot(tree, loads, [LATE if backlog else CALM, CALM])
    under = snapshot(tree, {"0": (1.0, 260.0)}, [1.0, CALM])  # between the thresholds
    scaler, streak, fired = Scaler(RULES, 0), Streak(), []
    for seen in [over] * 3 + [under] + [over] * 5:
        decision, streak = scaler.decide(seen, streak)
        fired.append(isinstance(decision, ScaleOut))
    assert fired == [False] * 7 + [True] * 2, "a gap begins the count anew"


def test_each_rule_moves_what_is_in_excess() -> None:
    """By rate 01 is the smallest prefix that suffices, by bytes 0 is."""
    tree = PrefixTree(2, {"": 0})
    loads = {"00": (30.0, 100.0), "01": (40.0, 100.0), "10": (20.0, 300.0), "11": (25.0, 10.0)}
    late = snapshot(tree, loads, [LATE, CALM])
    assert moves_of(decide(late, streak=Streak(backlog=9))) == [("01", 1)]  # 115 of at most 80
    full = snapshot(tree, loads, [CALM, CALM])
    assert moves_of(decide(full, streak=Streak(memory=9))) == [("0", 1)]  # 510 of at most 350


def test_backlog_that_drains_moves_nothing() -> None:
    seen = snapshot(PrefixTree(2, {"": 0}), {"0": (70.0, 0.0)}, [LATE, CALM])
    assert isinstance(decide(seen), NoChange)


def test_bytes_of_moves_in_progress_count_as_gone() -> None:
    tree = PrefixTree(3, {"": 0, "1": 1})
    seen = snapshot(tree, {"00": (1.0, 250.0), "01": (1.0, 250.0), "1": (1.0, 0.0)})
    assert isinstance(decide(seen), ScaleOut)
    moving = replace(seen, transfers=(Transfer(0, 1, 200.0),))
    assert seen.load(0).nbytes == 500.0 and moving.load(0).nbytes == 300.0
    assert isinstance(decide(moving, streak=Streak(memory=3)), NoChange)
    # They count as if the new owner had them: 250 more do not fit there.
    moving = replace(snapshot(tree, {"00": (1.0, 300.0), "01": (1.0, 300.0), "1": (1.0, 0.0)}))
    moving = replace(moving, transfers=(Transfer(2, 1, 200.0),))
    assert moves_of(decide(moving)) == [("00", 2)]


def test_owners_of_siblings_are_preferred_then_machines_in_use() -> None:
    """Machine 3 owns a sibling of what machine 0 moves, 2 another prefix, and 1 none."""
    tree = PrefixTree(4, {"": 2, "1": 0, "111": 3})
    loads = {"0": (1.0, 1.0), "100": (60.0, 1.0), "110": (60.0, 1.0), "111": (5.0, 1.0)}
    late = [LATE, CALM, CALM, CALM]
    assert moves_of(decide(snapshot(tree, loads, late))) == [("10", 3)]
    # The sibling's owner is part of another operation.
    busy = replace(snapshot(tree, loads, late), busy=frozenset([3]))
    assert moves_of(decide(busy)) == [("10", 2)]
    # The sibling's owner has no room.
    loads["111"] = (70.0, 1.0)
    assert moves_of(decide(snapshot(tree, loads, late))) == [("10", 2)]
    loads["0"] = (70.0, 1.0)
    assert moves_of(decide(snapshot(tree, loads, late))) == [("10", 1)]
    # A machine that is behind takes over nothing.
    late = [LATE, LATE, CALM, CALM]
    assert isinstance(decide(snapshot(tree, loads, late)), AddMachines)


def test_machines_are_requested_only_if_they_would_help() -> None:
    tree = PrefixTree(2, {"": 0, "1": 1})
    late = [LATE, CALM]
    needed = decide(snapshot(tree, {"00": (70.0, 1.0), "01": (70.0, 1.0), "1": (70.0, 1.0)}, late))
    assert isinstance(needed, AddMachines) and needed.more == 1
    three = {"000": (70.0, 1.0), "001": (70.0, 1.0), "01": (70.0, 1.0), "1": (70.0, 1.0)}
    needed = decide(snapshot(tree, three, late))
    assert isinstance(needed, AddMachines) and needed.more == 2
    alone = decide(snapshot(tree, {"00": (140.0, 1.0), "1": (70.0, 1.0)}, late))
    assert isinstance(alone, NoChange), "no machine can have this prefix"


def test_scale_in_takes_back_one_subtree_with_all_below_it() -> None:
    tree = PrefixTree(4, {"": 0, "01": 1, "011": 2, "10": 3})
    loads = {"00": (1.0, 1.0), "010": (5.0, 5.0), "011": (5.0, 5.0), "10": (20.0, 20.0)}
    seen = snapshot(tree, loads)
    decision = decide(seen)
    assert isinstance(decision, ScaleIn) and decision.subtree == "01"
    after = seen.after(decision)
    assert after.tree.owners == {"": 0, "10": 3} and after.busy == {0, 1, 2}
    assert set(after.transfers) == {Transfer(1, 0, 5.0), Transfer(2, 0, 5.0)}
    # Machine 2 is not the owner around any subtree; machine 1 takes back only its own.
    assert isinstance(decide(seen, 2), NoChange)
    own = decide(seen, 1)
    assert isinstance(own, ScaleIn) and own.subtree == "011"


def test_scale_in_leaves_room() -> None:
    tree = PrefixTree(2, {"": 0, "1": 1})
    assert isinstance(decide(snapshot(tree, {"0": (50.0, 1.0), "1": (29.0, 1.0)})), ScaleIn)
    for load in ((31.0, 1.0), (1.0, 350.0)):
        assert isinstance(decide(snapshot(tree, {"0": (50.0, 1.0), "1": load})), NoChange)
    for high in ((CALM, 260.0), (1.0, 1.0)):  # one metric is not below its lower threshold
        seen = snapshot(tree, {"0": (1.0, high[1]), "1": (1.0, 1.0)}, [high[0], CALM])
        decision, streak = Scaler(RULES, 0).decide(seen, LONG)
        assert isinstance(decision, NoChange) and streak.idle == 0


# ---------------------------------------------------------------------- operations


def test_scale_in_is_refused_as_a_whole_and_proposed_again() -> None:
    tree = PrefixTree(4, {"": 0, "01": 1, "011": 2, "10": 3})
    loads = {"00": (50.0, 1.0), "010": (5.0, 5.0), "011": (5.0, 5.0), "10": (60.0, 20.0)}
    rules = replace(RULES, observations=1, stabilisation=0)
    scaling = Scaling(rules, 4, {})
    quiet = snapshot(tree, loads, [CALM, 1.0, 1.0, 1.0])
    moving = replace(quiet, transfers=(Transfer(2, 3, 1.0),))
    for seen, verdict in ((moving, "refused"), (moving, "refused"), (quiet, "accepted")):
        verdicts, after = scaling.observe(seen)
        assert verdicts[0].verdict == verdict
        assert isinstance(verdicts[0].proposal.decision, ScaleIn)
        assert (after.tree == tree) is (verdict == "refused")
    assert "under way on machine 2" in scaling.observe(moving)[0][0].reason


def test_a_provision_is_recorded_as_not_possible() -> None:
    tree = PrefixTree(1, {"": 0})
    scaling = Scaling(replace(RULES, observations=1), 1, {})
    seen = snapshot(tree, {"0": (60.0, 1.0), "1": (60.0, 1.0)}, [LATE])
    (verdict,), after = scaling.observe(seen)
    assert verdict.verdict == "refused" and "add machines" in verdict.reason
    assert after.tree == tree and not after.busy


def observed(bytes_of: list[float], needs: Needs, machines_max: int = 4) -> tuple[Needs, list[str]]:
    """Let every machine decide at once; half of its bytes are in each of two prefixes."""
    n = len(bytes_of)
    tree = PrefixTree.even(n, 8)
    listed = {tree.owner(p): p for p in sorted(tree.owners, key=len)}
    loads = {}
    for m, nbytes in enumerate(bytes_of):
        prefix = listed[m] + "0" * (6 - len(listed[m]))
        assert tree.owner(prefix) == m and tree.owner(prefix + "1") == m
        loads |= {prefix + "0": (1.0, nbytes / 2), prefix + "1": (1.0, nbytes / 2)}
    seen = replace(snapshot(tree, loads, [CALM] * n), machines_max=machines_max)
    scaling = Scaling(replace(RULES, observations=1), n, {NEEDS: asdict(needs)})
    verdicts, _ = scaling.observe(seen)
    return scaling.needs, [one.verdict for one in verdicts if "machine has room" in one.reason]


def test_machines_for_memory_are_needed_until_a_prefix_is_taken_back() -> None:
    needs, verdicts = observed([600.0], Needs())
    assert needs == Needs(memory=2) and verdicts == ["accepted"]
    assert observed([300.0, 300.0], needs)[0] == Needs(memory=2), "they stay while memory is used"
    # Both are below 250 and one has room for all: it takes the other's prefixes back.
    assert observed([100.0, 100.0], needs)[0] == Needs(memory=1)
    # What is stored needs them even if none asked: 900 bytes are more than 450.
    assert observed([300.0, 300.0, 300.0], Needs())[0].memory == 2


def test_machines_for_a_backlog_are_needed_until_they_are_there() -> None:
    tree = PrefixTree(1, {"": 0})
    scaling = Scaling(replace(RULES, observations=1), 1, {})
    loads = {"00": (60.0, 1.0), "01": (60.0, 1.0), "1": (60.0, 1.0)}
    scaling.observe(replace(snapshot(tree, loads, [LATE]), machines_max=4))
    assert scaling.needs.memory == 0 and scaling.needs.backlog > 1
    grown = Scaling(RULES, 4, scaling.memory)
    grown.observe(snapshot(PrefixTree.even(4, 8), loads, [CALM] * 4))
    assert grown.needs == Needs()


def test_no_machine_is_added_beyond_the_most() -> None:
    needs, verdicts = observed([600.0], Needs(), machines_max=1)
    assert verdicts == ["refused"]
    assert needs.memory == 2, "the elastic manager reports that it cannot"


def test_machines_of_an_operation_stabilise() -> None:
    tree = PrefixTree(3, {"": 0})
    scaling = Scaling(replace(RULES, observations=2, stabilisation=3), 3, {})
    loads = {"000": (60.0, 1.0), "001": (60.0, 1.0), "010": (60.0, 1.0)}
    seen = snapshot(tree, loads, [LATE, CALM, CALM])
    changed = []
    for number in range(12):
        changed += [number] if scaling.observe(seen)[1].tree != tree else []
        if number == 3:
            scaling = Scaling(replace(RULES, observations=2, stabilisation=3), 3, scaling.memory)
    # The snapshot stays the same, so the operation begins again after 3 + 2 observations.
    assert changed == [1, 6, 11]


# ---------------------------------------------------------------------- fewest moves


def cost(prefix: str, where: dict[str, int]) -> int:
    """Return how many disjoint prefixes give these owners; 0 stays."""
    own = {target for cell, target in where.items() if cell.startswith(prefix)}
    if own <= {0}:
        return 0
    if len(own) == 1:
        return 1
    return cost(prefix + "0", where) + cost(prefix + "1", where)


@examples(60)
@given(st.integers(0, 2**32))
def test_the_fewest_prefixes_remove_the_excess(seed: int) -> None:
    """Compared with all assignments of all prefixes to machines."""
    rng = np.random.default_rng(seed)
    cells = [format(cell, "03b") for cell in sorted(rng.choice(8, rng.integers(1, 7), False))]
    loads = {c: (float(rng.integers(1, 40)), float(rng.integers(1, 150))) for c in cells}
    others = {"1100": (float(rng.integers(60)), float(rng.integers(300)))}
    cells = [cell for cell in cells if cell != "110"]
    tree = PrefixTree(3, {"": 0, "110": 1})
    seen = snapshot(tree, {c: loads[c] for c in cells} | others, [LATE, CALM, CALM])
    by_rate = bool(rng.integers(2))
    streak = Streak(backlog=9) if by_rate else Streak(memory=9)
    if not by_rate:
        seen = replace(seen, machines=[replace(seen.machines[0], backlog=1.0), *seen.machines[1:]])
    own = np.array([loads[c] for c in cells]).reshape(-1, 2)
    limit = np.array([80.0, 350.0])
    dimension = 0 if by_rate else 1
    excess = own.sum(0)[dimension] - limit[dimension]
    rooms = {1: limit - others["1100"], 2: limit}
    best: int | None = None
    for where in product((0, 1, 2), repeat=len(cells)):
        parts = {t: own[[w == t for w in where]].sum(0) for t in (0, 1, 2)}
        fits = all((parts[t] <= rooms[t] + 1e-6).all() for t in (1, 2) if t in where)
        if fits and parts[1][dimension] + parts[2][dimension] >= excess - 1e-6:
            number = cost("", dict(zip(cells, where, strict=True)))
            best = number if best is None else min(best, number)
    decision = Scaler(RULES, 0).decide(seen, streak)[0]
    due = by_rate or own.sum(0)[1] > 450.0
    if excess <= 0.0 or not due or best is None:
        assert isinstance(decision, NoChange | AddMachines)
        return
    assert isinstance(decision, ScaleOut) and len(decision.moves) == best
    after = seen.after(decision)
    assert after.load(0)[dimension] <= limit[dimension] + 1e-6
    for machine in {move.target for move in decision.moves}:
        assert (np.array(after.load(machine)) <= limit + 1e-6).all()


def test_many_small_prefixes_are_found_greedily() -> None:
    cells = {format(cell, "08b"): (0.5, 1.0) for cell in range(0, 256)}
    tree = PrefixTree(6, {"": 0} | {"1" * k + "0": 1 + k % 5 for k in range(1, 8)})
    seen = snapshot(tree, cells, [LATE, *[CALM] * 5])
    seen = replace(seen, machines=[replace(seen.machines[0], capacity=10.0), *seen.machines[1:]])
    decision = decide(seen)
    assert isinstance(decision, ScaleOut)
    assert seen.after(decision).load(0).rate <= 8.0


# ---------------------------------------------------------------------- trees


@given(st.integers(0, 2**32))
def test_moves_change_the_owners_of_their_places_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, every = PrefixTree(4, {"": 0}), np.arange(32)
    texts = np.array([format(place, "05b") for place in every])
    for _ in range(8):
        prefix = format(int(rng.integers(32)), "05b")[: rng.integers(6)]
        inside = np.char.startswith(texts, prefix)
        before = tree.owners_of(every, 5)
        if rng.integers(3):
            target, source = int(rng.integers(4)), tree.owner(prefix)
            tree = tree.moved(prefix, target)
            expected = np.where(inside & (before == source), target, before)
        else:
            owner = tree.owner(prefix[:-1]) if prefix else tree.owners[""]
            if not prefix:
                continue
            tree = tree.taken_back(prefix)
            expected = np.where(inside, owner, before)
        assert tree.owners_of(every, 5).tolist() == expected.tolist()
        for listed, owner in tree.owners.items():
            assert not listed or tree.owner(listed[:-1]) != owner, "no prefix is redundant"
