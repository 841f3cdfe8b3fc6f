"""The gate: keys, judgement by position, counting once, and a bound on its memory."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest

from roost.guard import Guard
from roost.guard.blocks import BlockEvent, BlockList
from roost.guard.gate import Gate
from roost.guard.loops import DELETED, NEW, RATE_ROUNDS
from roost.guard.tally import Tally
from roost.guard.users import NAME_MAX, UserTable, keys_of

SECRET = np.array([0x0706050403020100, 0x0F0E0D0C0B0A0908], np.uint64)
MASK = (1 << 64) - 1


def siphash_1_3(data: bytes, k0: int, k1: int) -> int:
    """SipHash with one and three rounds, from its definition."""

    def turned(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (64 - bits))) & MASK

    def stirred(v: list[int]) -> list[int]:
        a, b, c, d = v
        a = (a + b) & MASK
        c = (c + d) & MASK
        b, d = turned(b, 13) ^ a, turned(d, 16) ^ c
        a = turned(a, 32)
        a = (a + d) & MASK
        c = (c + b) & MASK
        d, b = turned(d, 21) ^ a, turned(b, 17) ^ c
        return [a, b, turned(c, 32), d]

    names = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [k ^ name for k, name in zip((k0, k1, k0, k1), names, strict=True)]
    tail = len(data) % 8
    words = [data[at : at + 8] for at in range(0, len(data) - tail, 8)]
    words.append(data[len(data) - tail :].ljust(7, b"\0") + bytes([len(data) & 0xFF]))
    for word in words:
        number = int.from_bytes(word, "little")
        v[3] ^= number
        v = stirred(v)
        v[0] ^= number
    v[2] ^= 0xFF
    for _ in range(3):
        v = stirred(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def names_drawn(random: np.random.Generator, count: int, users: int) -> pa.Array:
    return pa.array([f"user-{k}" for k in random.integers(0, users, count)])


def make_gate(users_max: int = 1 << 12) -> tuple[Gate, UserTable, BlockList]:
    users, blocks = UserTable(SECRET, users_max), BlockList()
    return Gate(users, blocks), users, blocks


def counts_of(users: UserTable) -> dict[str, tuple[float, float]]:
    rows = users.numbers[: users.used]
    pairs = zip(rows[:, NEW].tolist(), rows[:, DELETED].tolist(), strict=True)
    return dict(zip(users.names, pairs, strict=True))


def test_keys_are_siphash() -> None:
    texts = ["", "a", "abcdefg", "abcdefgh", "abcdefghi", "naïve", "x" * 300]
    right = [siphash_1_3(text.encode(), *SECRET.tolist()) for text in texts]
    assert keys_of(pa.array(texts), SECRET).tolist() == right
    assert keys_of(pa.array(["q", *texts]).slice(1), SECRET).tolist() == right
    assert keys_of(pa.array(texts).dictionary_encode(), SECRET).tolist() == right


def test_keys_depend_on_the_secret() -> None:
    names = pa.array(["ann", "bob"])
    other = SECRET + np.uint64(1)
    assert not set(keys_of(names, SECRET).tolist()) & set(keys_of(names, other).tolist())


@pytest.mark.parametrize("seed", range(8))
def test_the_last_event_before_a_position_decides(seed: int) -> None:
    random = np.random.default_rng(seed)
    gate, users, blocks = make_gate()
    history: dict[str, list[tuple[int, bool]]] = {}
    for position in random.choice(2_000, 60, replace=False).tolist():
        name = f"user-{random.integers(0, 12)}"
        blocked = bool(random.random() < 0.6)
        key = int(keys_of(pa.array([name]), users.secret)[0])
        blocks.add([(key, name)], BlockEvent(position, blocked, 0, "test"))
        history.setdefault(name, []).append((position, blocked))
    names = names_drawn(random, 2_000, 20)
    right = []
    for at, name in enumerate(names.to_pylist()):
        before = [event for event in history.get(name, []) if event[0] < at]
        right.append(not (before and max(before)[1]))
    registers = random.random(2_000) < 0.5
    assert gate.admit(names, registers, 0, 0).tolist() == right
    for start in random.integers(0, 2_000, 5).tolist():
        part = names.slice(start, 300)
        assert gate.judge(part, start).tolist() == right[start : start + 300]
    refused = sum(item["refused"] for item in blocks.listing())
    assert refused == right.count(False)


@pytest.mark.parametrize("seed", range(5))
def test_requests_count_once_in_any_blocks(seed: int) -> None:
    random = np.random.default_rng(seed)
    names, registers = names_drawn(random, 3_000, 500), random.random(3_000) < 0.5
    whole, users, _ = make_gate()
    whole.admit(names, registers, 0, 0)
    cut, cut_users, _ = make_gate()
    at = 0
    while at < 3_000:
        # Some rows before are read again, as after a restart.
        start = max(at - int(random.integers(0, 200)), 0)
        stop = min(at + int(random.integers(1, 400)), 3_000)
        cut.admit(names.slice(start, stop - start), registers[start:stop], start, 0)
        at = stop
    assert counts_of(users) == counts_of(cut_users)
    right: dict[str, list[int]] = {}
    for name, register in zip(names.to_pylist(), registers.tolist(), strict=True):
        right.setdefault(name, [0, 0])[0 if register else 1] += 1
    assert {name: list(pair) for name, pair in counts_of(users).items()} == right
    assert whole.counted == cut.counted == 3_000


def test_refused_and_anonymous_requests_are_not_counted() -> None:
    gate, users, blocks = make_gate()
    blocks.add(
        [(int(keys_of(pa.array(["bob"]), SECRET)[0]), "bob")], BlockEvent(1, True, 0, "test")
    )
    names = pa.array(["bob", "ann", "bob", None])
    admitted = gate.admit(names, np.ones(4, np.bool_), 0, 0)
    assert admitted.tolist() == [True, True, False, True]
    assert counts_of(users) == {"bob": (1, 0), "ann": (1, 0)}


def test_a_missing_name_is_not_the_empty_name() -> None:
    guard = Guard(1)
    guard.block("", 0)
    names = pa.array(["", None, "ann", ""])
    admitted = guard.on_requests(names, np.ones(4, np.bool_), 1)
    assert admitted.tolist() == [False, True, True, False]
    assert guard.listing()["blocked"][0]["refused"] == 2


def test_tallies_counted_elsewhere_are_added() -> None:
    gate, users, _ = make_gate()
    gate.add(Tally(pa.array(["ann", "bob"]), np.array([[2, 0, 0], [0, 1, 0]])), 3, 0)
    gate.add(Tally(pa.array(["ann"]), np.array([[1, 0, 0]])).negated(), 3, 0)
    assert counts_of(users) == {"ann": (1, 0), "bob": (0, 1)}
    assert gate.counted == 3


def test_refusal_returns_position_and_reason() -> None:
    guard = Guard(1)
    assert guard.gate.refusal("eve") is None
    guard.block("eve", 41, "too many hotspots")
    why = "since position 41 of the query log, too many hotspots"
    assert guard.gate.refusal("eve") == why
    assert guard.unblock("eve", 50)
    assert guard.gate.refusal("eve") is None
    registers = np.ones(4, np.bool_)
    assert guard.on_requests(pa.array(["eve"] * 4), registers, 40).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert guard.on_requests(pa.array(["eve"] * 4), registers, 49).tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_an_operator_cannot_change_requests_already_judged() -> None:
    guard = Guard(1)
    names, registers = pa.array(["eve"] * 10), np.ones(10, np.bool_)
    assert guard.on_requests(names, registers, 0).all()
    guard.block("eve", 3)
    assert guard.gate.judge(names, 0).all()
    assert not guard.gate.judge(names, 10).any()
    assert guard.quarantined_mask(pa.array(["ann", "eve"]), np.zeros(2, np.int64)).tolist() == [
        False,
        False,
    ]


def test_memory_is_bounded_over_a_million_users() -> None:
    guard = Guard(3, users_max=1 << 15)
    table = guard.users
    hot = pa.array([f"hot-{k}" for k in range(50)])
    guard.on_requests(hot, np.ones(50, np.bool_), 0)
    table.numbers[:50, RATE_ROUNDS] = 1.0
    position, block = 50, 50_000
    largest = 0
    for start in range(0, 1_000_000, block):
        names = pa.array([f"made-up-{k}" for k in range(start, start + block)])
        admitted = guard.on_requests(names, np.ones(block, np.bool_), position)
        assert admitted.all()
        position += block
        largest = max(largest, table.nbytes)
        assert table.used == len(table.names) <= 1 << 15
    # 19 numbers, a key, a round and at most four places in the index for each user.
    assert largest <= (1 << 15) * (19 * 8 + 8 + 8 + 4 * 4)
    assert table.evicted + table.used == 1_000_050
    assert set(hot.to_pylist()) <= set(table.names)


def test_eviction_does_not_depend_on_blocks() -> None:
    names = pa.array([f"user-{k}" for k in range(5_000)])
    registers = np.ones(5_000, np.bool_)
    whole, whole_users, _ = make_gate(1 << 10)
    whole.admit(names, registers, 0, 0)
    cut, cut_users, _ = make_gate(1 << 10)
    for start in range(0, 5_000, 37):
        cut.admit(names.slice(start, 37), registers[start : start + 37], start, 0)
    assert whole_users.names == cut_users.names


def test_idle_users_are_evicted() -> None:
    guard = Guard(0)
    guard.on_requests(pa.array(["ann", "bob"]), np.ones(2, np.bool_), 0)
    guard.close_round(0, 2)
    guard.on_requests(pa.array(["bob"]), np.ones(1, np.bool_), 2)
    guard.close_round(63, 3)
    assert guard.listing()["users"] == 2
    guard.close_round(64, 3)
    assert guard.users.names == ["bob"]


def test_long_names_are_truncated_and_stay_distinct() -> None:
    guard = Guard(0)
    one, two = "x" * 500, "x" * 501
    guard.on_requests(pa.array([one, two]), np.ones(2, np.bool_), 0)
    assert guard.listing()["users"] == 2
    assert all(len(name) == NAME_MAX + 17 for name in guard.users.names)
    assert len(set(guard.users.names)) == 2
    # Also by the name that listings show, before any user is blocked.
    guard.block(guard.users.names[0], 1)
    assert guard.gate.refusal(one) and not guard.gate.refusal(two)
    (shown,) = guard.blocked
    guard.block(two, 1)
    assert len(guard.blocked) == 2
    assert guard.unblock(shown, 2) and not guard.gate.refusal(one) and guard.gate.refusal(two)


def test_a_flood_of_names_does_not_evict_active_users() -> None:
    guard = Guard(0, users_max=1 << 10)
    table = guard.users
    busy = pa.array([f"busy-{k % 50}" for k in range(500)])
    guard.on_requests(busy, np.ones(500, np.bool_), 0)
    position = 500
    for start in range(0, 6_000, 700):
        flood = pa.array([f"made-up-{k}" for k in range(start, start + 700)])
        guard.on_requests(flood, np.ones(700, np.bool_), position)
        position += 700
    found = counts_of(table)
    assert all(found[f"busy-{k}"] == (10, 0) for k in range(50))
    # Also if their requests are in the middle of the flood.
    names = [f"other-{k}" for k in range(3_000)]
    late = pa.array([*names[:1_500], *(["late"] * 20), *names[1_500:]])
    guard.on_requests(late, np.ones(3_020, np.bool_), position)
    assert counts_of(table)["late"] == (20, 0)


def test_blocked_users_can_be_read_from_another_thread() -> None:
    guard = Guard(1)
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(len(guard.blocked))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for k in range(300):
            guard.block(f"user-{k}", k)
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen) and len(guard.blocked) == 300
