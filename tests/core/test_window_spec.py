"""Windows: what is live at a batch, whatever the stream's cut into batches, and what is past."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError
from roost.model.choices import WindowKind
from roost.model.records import TIME_MIN
from roost.window import WindowSpec
from roost.window.spec import BatchFacts, Cut, Extent, Past, expired, extent

# Batches of points (event time, identifier), and the bytes of each batch.
Stream = list[tuple[list[tuple[int, int]], int]]
Named = set[tuple[int, int, int]]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    batches = draw(st.lists(st.lists(st.integers(-20, 40), max_size=6), min_size=1, max_size=8))
    number, stream = 0, []
    for times in batches:
        points = [(time, number + k) for k, time in enumerate(times)]
        number += len(times)
        stream.append((points, draw(st.integers(0, 30)) if points else 0))
    return stream


SPECS = st.builds(WindowSpec, st.sampled_from(list(WindowKind)), st.integers(1, 40), st.booleans())


def facts_of(stream: Stream) -> list[BatchFacts]:
    return [
        BatchFacts(
            10 + number, len(points), nbytes, max((time for time, _ in points), default=TIME_MIN)
        )
        for number, (points, nbytes) in enumerate(stream)
    ]


def brute_force(spec: WindowSpec, stream: Stream) -> Named:
    """Points (batch, time, identifier) of the window at the last batch, from the definitions."""
    arrived = sorted(
        (10 + number, time, name)
        for number, (points, _) in enumerate(stream)
        for time, name in points
    )
    if not arrived:
        return set()
    if spec.kind is WindowKind.TIME:
        now = max(time for _, time, _ in arrived)
        if spec.tumbling:
            return {p for p in arrived if p[1] // spec.length == now // spec.length}
        return {p for p in arrived if now - spec.length < p[1] <= now}
    if spec.kind is WindowKind.COUNT:
        if spec.tumbling:
            last = (len(arrived) - 1) // spec.length
            return {p for number, p in enumerate(arrived) if number // spec.length == last}
        return set(arrived[-spec.length :])
    full = [(10 + number, nbytes) for number, (points, nbytes) in enumerate(stream) if points]
    if spec.tumbling:
        window, before = {}, 0
        for number, nbytes in full:
            window[number] = before // spec.length
            before += nbytes
        newest = window[full[-1][0]]
        live = {number for number in window if window[number] == newest}
    else:
        tails = [full[-size:] for size in range(1, len(full) + 1)]
        fitting = [tail for tail in tails if sum(nbytes for _, nbytes in tail) <= spec.length]
        live = {number for number, _ in max([tails[0], *fitting], key=len)}
    return {p for p in arrived if p[0] in live}


def points_in(found: Extent, stream: Stream) -> Named:
    live = set()
    for number, (points, _) in enumerate(stream, 10):
        if not found.holds(number):
            continue
        kept = sorted(points)
        if found.cut is not None and found.cut.batch_id == number:
            kept = kept[-found.cut.keep :]
        live |= {
            (number, time, name)
            for time, name in kept
            if found.time_after is None or time > found.time_after
        }
    return live


@given(SPECS, streams())
def test_an_extent_is_brute_force_over_the_points(spec: WindowSpec, stream: Stream) -> None:
    for last in range(len(stream)):
        so_far = stream[: last + 1]
        found = extent(spec, facts_of(so_far), Past())
        assert found.last_batch == 10 + last
        assert points_in(found, so_far) == brute_force(spec, so_far)


@given(SPECS, streams())
def test_expired_batches_are_never_live_again_and_the_others_are(
    spec: WindowSpec, stream: Stream
) -> None:
    gone: set[int] = set()
    for last in range(len(stream)):
        so_far = stream[: last + 1]
        live = {number for number, _, _ in brute_force(spec, so_far)}
        assert not live & gone
        past = expired(spec, facts_of(so_far), Past())
        assert set(past) == {number for number in range(10, 10 + last) if number not in live}
        assert past == sorted(past)
        assert gone <= set(past)
        gone.update(past)


@given(SPECS, streams())
def test_expired_batches_need_not_be_listed(spec: WindowSpec, stream: Stream) -> None:
    listed: list[BatchFacts] = []
    past = Past()
    facts = facts_of(stream)
    for last, batch in enumerate(facts):
        listed.append(batch)
        assert extent(spec, listed, past) == extent(spec, facts[: last + 1], Past())
        gone = expired(spec, listed, past)
        past = past.with_batches(b for b in listed if b.batch_id in gone)
        listed = [b for b in listed if b.batch_id not in gone]
        assert extent(spec, listed, past) == extent(spec, facts[: last + 1], Past())


def test_a_window_without_points_is_empty() -> None:
    for kind in WindowKind:
        spec = WindowSpec(kind, 5)
        assert extent(spec, [], Past()) == Extent(0, -1)
        assert expired(spec, [], Past()) == []
        silent = [BatchFacts(3, 0, 0, TIME_MIN), BatchFacts(4, 0, 0, TIME_MIN)]
        found = extent(spec, silent, Past())
        assert not found.holds(3) and not found.holds(4) and found.last_batch == 4
        assert expired(spec, silent, Past()) == [3]


def test_times_at_the_ends_of_their_range() -> None:
    batches = [BatchFacts(0, 1, 1, TIME_MIN)]
    assert extent(WindowSpec(WindowKind.TIME, 10), batches, Past()).time_after is None
    assert WindowSpec(WindowKind.TIME, 1, lateness=9).watermark(TIME_MIN + 3) == TIME_MIN


def test_a_count_may_cut_a_batch() -> None:
    batches = [BatchFacts(0, 10, 1, 1), BatchFacts(1, 3, 1, 3)]
    assert extent(WindowSpec(WindowKind.COUNT, 5), batches, Past()).cut == Cut(0, 2)
    assert extent(WindowSpec(WindowKind.COUNT, 13), batches, Past()).cut is None
    assert extent(WindowSpec(WindowKind.COUNT, 6, tumbling=True), batches, Past()).cut == Cut(1, 1)


def test_only_time_windows_have_a_watermark() -> None:
    spec = WindowSpec(WindowKind.TIME, 100, lateness=7)
    assert spec.watermark(None) is None
    assert spec.watermark(50) == 43
    assert WindowSpec(WindowKind.COUNT, 100).watermark(50) is None


@pytest.mark.parametrize(
    ("kind", "length", "lateness", "key"),
    [
        (WindowKind.TIME, 0, 0, "window.length"),
        (WindowKind.TIME, 1, -1, "window.lateness"),
        (WindowKind.COUNT, 1, 1, "window.lateness"),
    ],
)
def test_invalid_windows_are_refused(
    kind: WindowKind, length: int, lateness: int, key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        WindowSpec(kind, length, lateness=lateness)


@given(SPECS)
def test_a_window_round_trips_through_json(spec: WindowSpec) -> None:
    assert WindowSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
