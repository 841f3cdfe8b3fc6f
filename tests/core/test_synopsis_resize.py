"""The synopsis of a run equals the one of its rows while its number of machines changes."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_synopsis_stage import STEPS, TABLE, Killed, check_state, config, run, survives
from test_synopsis_tree_changes import write_points

from flow_runs import RandomResizes
from properties import examples
from roost.balance.changes import NoChange, Resize
from roost.runtime.prefix_rounds import PREFIX_ROUNDS, PrefixRound
from roost.runtime.records import commits, intent
from roost.runtime.rounds import Proposal
from roost.stages.synopsis import PREFIXES, TREES
from roost.storage.store import Store
from roost.synopsis.tree import PrefixTree

BITS = 10


@dataclass
class Script:
    """Proposes sizes of the tree at its rounds; the last one until the tree has it."""

    sizes: list[int]
    name: str = "resize"

    def propose(self, snapshot: Any) -> Proposal:
        if not isinstance(snapshot, PrefixRound):
            return Proposal(NoChange("not a tree"))
        size = self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]
        if snapshot.has_size(size):
            return Proposal(NoChange("it has"))
        return Proposal(Resize(size, "script"))


def machines_of(state: Path) -> list[int]:
    """Return the machines of the tree of each batch, as its intent names it."""
    with closing(Store(state)) as store:
        epochs = [intent(store, one.batch_id).epochs[PREFIXES] for one in commits(store)]  # type: ignore[union-attr]
        return [store.get(TREES, epoch)["machines"] for epoch in epochs]


@examples(6)
@given(st.integers(0, 2**32))
def test_random_resizes_give_the_synopsis_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Drivers are killed, and continue with other batches, with and without an exchange."""
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("run")
    path, resize = write_points(folder, 600), RandomResizes(random.Random(seed))
    for _ in numbers():
        exchange = bool(rng.integers(3))
        settings = config(
            folder,
            path,
            batch_rows=int(rng.integers(60, 150)),
            exchange=exchange,
            scaling=exchange and bool(rng.integers(2)),
            scaling_observations=1,
            scaling_stabilisation=0,
            fold_files=int(rng.integers(2, 6)),
        )
        if survives(settings, int(rng.integers(15, 90)), resize=resize):
            break
    check_state(settings.out.state_dir, TABLE.slice(0, 600))


@pytest.mark.parametrize("strategy", ["replicated", "global"])
@pytest.mark.parametrize("exchange", [True, False])
def test_the_tree_grows_and_shrinks(exchange: bool, strategy: str, tmp_path: Path) -> None:
    """New machines get rows at once; those that leave pass on what they have with the next fold."""
    path = write_points(tmp_path, 1_600)
    sizes = [2, 5, 5, 5, 2, 2, 2]
    settings = config(tmp_path, path, exchange=exchange, strategy=strategy)
    run(settings, resize=Script(list(sizes)))
    found = machines_of(settings.out.state_dir)
    # The first batch of a driver measures no time, so it ends no round.
    assert found == [2, 2, 2, 5, 5, 5, 2, 2]
    with closing(Store(settings.out.state_dir)) as store:
        trees = [PrefixTree.from_json(tree) for _, tree in store.items(TREES)]
        rounds = [row for _, row in store.items(PREFIX_ROUNDS)]
    assert [set(tree.owners.values()) for tree in trees] == [{0, 1}, set(range(5)), {0, 1}]
    assert [row["verdicts"][0]["reason"] for row in rounds].count("script") == 2
    check_state(settings.out.state_dir, TABLE.slice(0, 1_600))


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_killed_at_any_step_around_a_resize(step: str, tmp_path: Path) -> None:
    path = write_points(tmp_path, 1_600)
    settings = config(tmp_path, path, exchange=True, scaling=True, fold_files=2)
    for victim in (2, 4):
        seen = 0

        def kill(at: str, number: int, victim: int = victim) -> None:
            nonlocal seen
            seen = max(seen, number)
            if (at, number) == (step, victim):
                raise Killed

        with pytest.raises(Killed):
            run(settings, on_step=kill, resize=Script([4] if victim == 2 else [1]))
    run(settings, resize=Script([3]))
    found = machines_of(settings.out.state_dir)
    assert found[0] == 2 and found[-1] == 3 and {2, 4, 3} <= set(found)
    check_state(settings.out.state_dir, TABLE.slice(0, 1_600))


def test_a_tree_needs_a_machine(tmp_path: Path) -> None:
    class Nothing:
        name = "resize"

        def propose(self, snapshot: PrefixRound) -> Proposal:
            return Proposal(Resize(0, "none"))

    settings = config(tmp_path, write_points(tmp_path, 600), exchange=True)
    run(settings, resize=Nothing())
    with closing(Store(settings.out.state_dir)) as store:
        verdicts = [row["verdicts"][0]["verdict"] for _, row in store.items(PREFIX_ROUNDS)]
    assert set(verdicts) == {"refused"}


# --------------------------------------------------------------------------- trees


def random_tree(rng: np.random.Generator, machines: int) -> PrefixTree:
    tree = PrefixTree(machines, {"": int(rng.integers(machines))})
    for _ in range(int(rng.integers(9))):
        prefix = format(int(rng.integers(1 << BITS)), f"0{BITS}b")[: rng.integers(BITS)]
        tree = tree.moved(prefix, int(rng.integers(machines)))
    return tree


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
@examples(150)
def test_only_what_must_move_moves(before: int, after: int, seed: int) -> None:
    """Places stay with their owners, except those of machines that leave, or to new machines."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, before)
    prefixes = {format(int(k), "06b")[: rng.integers(1, 7)] for k in rng.integers(0, 64, 20)}
    weights = {p: float(rng.random()) for p in prefixes if tree.whole_owner(p) is not None}
    places = np.arange(1 << BITS)
    new = tree.resized(after, weights)
    old, now = tree.owners_of(places, BITS), new.owners_of(places, BITS)
    assert new.machines == after and now.max() < after
    moved = old != now
    if after < before:
        assert (moved == (old >= after)).all()
    else:
        assert (now[moved] >= before).all()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
@examples(50)
def test_rows_are_divided_fairly(before: int, after: int, seed: int) -> None:
    """With many light prefixes, no machine that receives has much more than a fair share."""
    rng = np.random.default_rng(seed)
    tree = PrefixTree.even(before, BITS)
    weights = {format(k, "08b"): float(rng.uniform(0.5, 1.5)) for k in range(256)}
    new, loads, had = tree.resized(after, weights), Counter[int](), Counter[int]()
    for prefix, weight in weights.items():
        loads[new.owner(prefix)] += weight
        had[tree.owner(prefix)] += weight
    fair = sum(weights.values()) / after
    received = [m for m in range(after) if loads[m] > had[m]]
    assert all(loads[m] <= max(1.15 * fair, fair + 2.0) for m in received), (loads, fair)
    if after > before:
        assert all(loads[m] >= 0.8 * fair for m in range(after)), (loads, fair)
