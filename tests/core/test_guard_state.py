"""Guard: rounds, restarts, replays, operator commands."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from roost.errors import StateError
from roost.guard import Block, Guard, GuardDecision, LiveQueries, Suspect
from roost.sim.attack import Attack, Normal, World

TICKS_PER_ROUND = 2


def drawn_data(seed: int) -> np.ndarray:
    random = np.random.default_rng([seed, 5])
    towns = random.random((12, 2))
    return np.clip(
        towns[random.integers(0, 12, 4_000)] + 0.02 * random.normal(size=(4_000, 2)), 0, 1
    )


class Play:
    """A world before a guard: hotspots are where the attack is, and one elsewhere each round."""

    def __init__(self, seed: int) -> None:
        attack = Attack(users=4, rate=20, queries=600, start=4)
        self.attack = attack
        self.world = World(
            [Normal(users=30, rate=20, queries=3_000), attack], drawn_data(seed), seed
        )
        begun = self.world.begin()
        self.names = pa.array(self.world.names)
        self.codes, self.boxes = begun.codes, begun.boxes
        self.rounds = np.full(len(begun), -50)
        self.live = np.ones(len(begun), np.bool_)
        self.position = 0
        self.random = np.random.default_rng([seed, 6])
        self.blocks: list[tuple[pa.Array, np.ndarray, int]] = []

    def tick(self, guard: Guard) -> None:
        requests = self.world.next()
        names = self.names.take(pa.array(requests.codes))
        admitted = guard.on_requests(names, requests.registers, self.position)
        self.blocks.append((names, requests.registers, self.position))
        self.position += len(requests)
        new = requests.registers
        size = int(requests.queries[new].max(initial=len(self.live) - 1)) + 1
        grown = size - len(self.live)
        self.codes = np.append(self.codes, np.zeros(grown, np.int32))
        self.boxes = np.vstack([self.boxes, np.zeros((grown, 4))])
        self.rounds = np.append(self.rounds, np.zeros(grown, np.int64))
        self.live = np.append(self.live, np.zeros(grown, np.bool_))
        rows = requests.queries[new]
        self.codes[rows], self.boxes[rows] = requests.codes[new], requests.boxes[new]
        self.rounds[rows], self.live[rows] = guard.round, admitted[new]
        self.live[requests.queries[~new & admitted]] = False
        centre = self.random.random(2)
        if self.attack.targets and self.world.tick % 2 == 0:
            centre = self.attack.targets[-1][1]
        rect = np.array([[*(centre - 0.08), *(centre + 0.08)]])
        kept = np.flatnonzero(self.live)
        guard.on_rebalance(
            rect, LiveQueries(self.names, self.codes[kept], self.rounds[kept], self.boxes[kept])
        )


def play(
    seed: int, ticks: int = 40, restart_at: int | None = None, replay: bool = False
) -> tuple[Guard, list[GuardDecision]]:
    stage, guard = Play(seed), Guard(seed)
    decisions: list[GuardDecision] = []
    for tick in range(ticks):
        if tick == restart_at:
            guard = Guard.from_bytes(guard.to_bytes())
        stage.tick(guard)
        if replay:
            for block in stage.blocks[-3:]:
                guard.on_requests(*block)
        if (tick + 1) % TICKS_PER_ROUND == 0:
            decisions += guard.close_round(guard.round, stage.position)
    return guard, decisions


@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_attackers_are_blocked(seed: int) -> None:
    guard, decisions = play(seed)
    assert guard.blocked == {f"attacker-{k}" for k in range(4)}
    kinds = [type(decision) for decision in decisions]
    assert kinds.index(Suspect) < kinds.index(Block)
    json.dumps(guard.listing(), allow_nan=False)


@pytest.mark.parametrize("restart_at", [1, 6, 9, 17])
def test_a_restart_does_not_change_decisions(restart_at: int) -> None:
    straight, decisions = play(2)
    restarted, again = play(2, restart_at=restart_at)
    assert decisions == again
    assert straight.to_bytes() == restarted.to_bytes()


def test_replayed_batches_count_once() -> None:
    straight, decisions = play(1)
    repeated, again = play(1, replay=True)
    assert decisions == again
    assert straight.to_bytes() == repeated.to_bytes()


def test_the_state_round_trips_exactly() -> None:
    guard, _ = play(3)
    guard.block("mallory", guard.gate.counted, "seen before")
    data = guard.to_bytes()
    again = Guard.from_bytes(data)
    assert again.to_bytes() == data
    assert again.blocked == guard.blocked and again.listing() == guard.listing()
    assert len(data) < 20_000


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(StateError):
        Guard.from_bytes(b"not a state")


def test_a_replay_of_rows_before_a_block_still_admits_them() -> None:
    guard, decisions = play(0)
    (block, *_) = [decision for decision in decisions if isinstance(decision, Block)]
    names = pa.array([block.users[0]] * 6)
    start = block.position - 2
    admitted = guard.gate.judge(names, start)
    assert admitted.tolist() == [True, True, True, False, False, False]


def check_masks(guard: Guard) -> None:
    """Only queries that were registered after their user was found are quarantined."""
    names = [*guard.quarantine, "other"]
    rounds = range(guard.round + 1)
    cases = [(name, number) for name in names for number in rounds]
    users = pa.array([name for name, _ in cases])
    mask = guard.quarantined_mask(users, np.array([number for _, number in cases]))
    never = guard.round + 1
    assert mask.tolist() == [n > guard.quarantine.get(name, never) for name, n in cases]
    assert guard.quarantined_mask(users, np.full(len(users), never)).tolist() == [
        name != "other" for name, _ in cases
    ]


def test_quarantine_comes_before_the_block_and_ends() -> None:
    stage, guard = Play(0), Guard(0)
    quarantined, blocked = [], []
    for tick in range(40):
        stage.tick(guard)
        if (tick + 1) % TICKS_PER_ROUND == 0:
            guard.close_round(guard.round, stage.position)
            quarantined.append(set(guard.quarantine))
            blocked.append(guard.blocked)
            assert not guard.blocked & guard.quarantine.keys()
            check_masks(guard)
    attackers = {f"attacker-{k}" for k in range(4)}
    first = next(k for k, names in enumerate(quarantined) if attackers <= names)
    assert first < next(k for k, names in enumerate(blocked) if attackers <= names)
    # Blocked users are no longer quarantined, and other suspects are released.
    assert quarantined[-1] == set()


def test_unblocking_resets_the_features_of_a_user() -> None:
    guard, _ = play(0)
    assert guard.unblock("attacker-1", 10**6, "false alarm")
    assert guard.blocked == {"attacker-0", "attacker-2", "attacker-3"}
    assert not guard.unblock("normal-0", 10**6)
    events = next(b for b in guard.listing()["blocked"] if b["user"] == "attacker-1")["events"]
    assert [event["blocked"] for event in events] == [True, False]
    assert events[1]["reason"] == "false alarm"
    row = guard.users.names.index("attacker-1")
    assert not guard.users.numbers[row].any()


def test_rounds_of_positions() -> None:
    guard = Guard(0, position=100)
    guard.round = 3
    for number, end in ((3, 110), (4, 110), (5, 130), (6, 140), (7, 150), (8, 160)):
        guard.close_round(number, end)
    positions = np.array([99, 100, 109, 110, 129, 130, 139, 159, 160, 999])
    assert guard.round == 9
    # Older than four rounds back is all the same: too old to count.
    assert guard.rounds_of(positions).tolist() == [4, 4, 4, 5, 5, 6, 6, 8, 9, 9]
    skipped = Guard(0)
    skipped.close_round(9, 50)
    assert skipped.rounds_of(np.array([0, 49, 50])).tolist() == [5, 5, 10]
