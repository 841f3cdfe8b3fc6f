"""A stream in bands stays within its budget; old rows stay, and the recent ones stay fine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.synopsis import Scope, build, count, learn_bins, mean
from roost.synopsis.ageing import (
    LAST_LEVEL,
    Band,
    add,
    apply_plan,
    bands_of,
    fit_budget,
    measure_buckets,
    next_resolution,
    plan_bands,
)
from roost.synopsis.budget import BandMove, BandPlan, BucketSize, Budget, plan
from roost.synopsis.coarsening import Resolution
from synopsis_tables import DAY_US, START_US, Rows, make_spec, make_table

DAY_S = 86_400
COPIES, COPY_DAYS = 8, 42
TABLE = make_table(6, 2_000)
SPEC = make_spec(TABLE, prefix_bits=2)
BINS = learn_bins(TABLE, SPEC)


def bucket(level: int, day: int, nbytes: int = 100, days: int = 10) -> BucketSize:
    start = day * DAY_US
    return BucketSize(level, start, start + days * DAY_US, start + days * DAY_US - 1, nbytes, 10)


def decide(buckets: list[BucketSize], memory: int, now: int, **options: Any) -> BandPlan:
    return plan(buckets, 0, Budget(memory), now * DAY_US, LAST_LEVEL, **options)


@pytest.mark.parametrize(
    ("buckets", "memory", "now", "expected"),
    [
        ([bucket(0, 0), bucket(0, 10)], 200, 500, BandPlan()),
        # The oldest goes first, and no more than needed: 40 % are expected to be saved.
        ([bucket(0, 10), bucket(0, 0)], 165, 500, BandPlan((BandMove(0, 10 * DAY_US),))),
        ([bucket(0, 0), bucket(0, 10)], 155, 500, BandPlan((BandMove(0, 20 * DAY_US),))),
        # The level with the most bytes for its weight goes first; the finest weighs two.
        ([bucket(0, 20, 190), bucket(1, 0)], 280, 500, BandPlan((BandMove(1, 10 * DAY_US),))),
        ([bucket(0, 20, 210), bucket(1, 0)], 280, 500, BandPlan((BandMove(0, 30 * DAY_US),))),
        # Buckets younger than 30 days go last.
        (
            [bucket(0, 80, 900), bucket(1, 0)],
            980,
            100,
            BandPlan((BandMove(1, 10 * DAY_US),)),
        ),
        ([bucket(0, 80)], 90, 100, BandPlan((BandMove(0, 90 * DAY_US),))),
        # Hours of the day are merged last, after younger buckets.
        (
            [bucket(0, 80), bucket(LAST_LEVEL - 1, 0)],
            190,
            100,
            BandPlan((BandMove(0, 90 * DAY_US),)),
        ),
        ([bucket(LAST_LEVEL - 1, 0)], 90, 100, BandPlan((BandMove(LAST_LEVEL - 1, 10 * DAY_US),))),
        # Late rows go where the other rows of their time are.
        (
            [bucket(0, 0, 1), bucket(0, 90), bucket(2, 0)],
            999,
            500,
            BandPlan((BandMove(0, 10 * DAY_US),)),
        ),
        # Nothing can become coarser than the last level.
        ([bucket(LAST_LEVEL, 0)], 90, 500, BandPlan((), excess=10)),
    ],
    ids=[
        *("fits", "oldest", "both", "older", "recent", "age"),
        *("young", "hours", "only hours", "late", "last"),
    ],
)
def test_decisions(buckets: list[BucketSize], memory: int, now: int, expected: BandPlan) -> None:
    assert decide(buckets, memory, now) == expected


def test_young_buckets_stay_if_machines_can_be_added() -> None:
    assert decide([bucket(0, 80)], 90, 100, young=False) == BandPlan((), excess=10)


def test_the_size_of_a_move_is_predicted_by_the_next_level() -> None:
    buckets = [bucket(0, day) for day in range(0, 50, 10)]
    small = [bucket(1, -10, 10)]
    assert decide([*buckets, *small], 430, 500).moves == (BandMove(0, 10 * DAY_US),)
    assert decide([*buckets, bucket(1, -10, 90)], 575, 500).moves == (BandMove(0, 20 * DAY_US),)


def test_a_row_of_the_future_does_not_make_others_late() -> None:
    buckets = [bucket(1, 10_000), bucket(1, 0), bucket(0, 490)]
    assert decide(buckets, 10_000, 500).moves == ()


def test_only_a_retention_deletes() -> None:
    buckets = [bucket(0, day) for day in range(0, 400, 10)]
    limited = plan(buckets, 0, Budget(10**6, retention_s=100 * DAY_S), 400 * DAY_US, LAST_LEVEL)
    assert limited == BandPlan(expire_us=300 * DAY_US)
    assert decide(buckets, 10**6, 400) == BandPlan()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"memory": 0}, "memory"),
        ({"memory": 1, "study_s": -1.0}, "study"),
        ({"memory": 1, "retention_s": DAY_S}, "retention"),
    ],
)
def test_refused_budgets(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"synopsis\.{named}"):
        Budget(**settings)


def test_levels_are_coarser_in_the_order_of_the_paper() -> None:
    levels = [Resolution.of(SPEC, BINS)]
    for level in range(LAST_LEVEL):
        levels.append(next_resolution(levels[-1], level))
        levels[-1].apply(SPEC, BINS)
        assert levels[-1] != levels[-2]
    changes = [
        next(k for k, level in enumerate(levels) if test(level))
        for test in (
            lambda r: max(r.halvings) > 0,
            lambda r: min(r.halvings) >= 8,
            lambda r: r.place_bits < SPEC.place_bits,
            lambda r: r.bucket_days > SPEC.bucket_days,
            lambda r: r.slots < SPEC.slots,
        )
    ]
    assert changes == sorted(changes) and changes[-1] == LAST_LEVEL
    assert levels[-1].prefix_bits == 0 and levels[-1].place_bits == 2
    for level in levels:  # totals go with the planes
        assert (level.interval_days is None) == (min(level.halvings) >= 8)


def moved(copy: int) -> pa.Table:
    times = np.asarray(TABLE["event_time"].cast(pa.int64())) + copy * COPY_DAYS * DAY_US
    at = TABLE.column_names.index("event_time")
    return TABLE.set_column(at, "event_time", pa.array(times, TABLE["event_time"].type))


STREAM = pa.concat_tables([moved(copy) for copy in range(COPIES)]).combine_chunks()


def replay(memory: int, late: int = 0) -> tuple[Band, ...]:
    """Add the stream in batches; some rows come a copy later."""
    bands: tuple[Band, ...] = ()
    order = np.arange(STREAM.num_rows)
    order[:late] += TABLE.num_rows  # as keys of a sort
    table = STREAM.take(np.argsort(order, kind="stable"))
    for start in range(0, table.num_rows, 1_000):
        batch = table.slice(start, 1_000)
        now = int(np.asarray(batch["event_time"].cast(pa.int64())).max())
        bands, excess = fit_budget(
            add(bands, Band(0, build(batch, SPEC, BINS))), Budget(memory), now
        )
        assert excess == 0 and bands_of(bands).nbytes <= memory
    return bands


WHOLE = build(STREAM, SPEC, BINS)
MEMORY = WHOLE.nbytes // 3
REPLAYED = replay(MEMORY)


def test_memory_is_never_exceeded_and_no_row_is_lost() -> None:
    levels = [band.level for band in REPLAYED]
    assert len(levels) > 3 and levels == sorted(set(levels)) and levels[0] == 0
    result = count(bands_of(REPLAYED))
    assert result.low == result.high == STREAM.num_rows
    # Older rows are in coarser bands.
    ends = [int(band.synopsis.groups.times.max()) for band in REPLAYED]
    assert ends == sorted(ends, reverse=True)


@examples(40)
@given(st.integers(0, COPIES * COPY_DAYS - 30), st.integers(1, 90), st.integers(0, 22))
def test_hours_of_months_are_known_at_every_age(day: int, days: int, hour: int) -> None:
    since = START_US + day * DAY_US
    scope = Scope(None, since, since + days * DAY_US, (hour, hour + 2))
    found = Rows(STREAM).inside(scope)
    sketch = bands_of(REPLAYED)
    result = count(sketch, scope)
    assert result.low <= found.sum() <= result.high
    column = Rows(STREAM).column("temp")[found]
    column = column[np.isfinite(column)]
    if column.size:
        average = mean(sketch, "temp", scope)
        assert average.low <= column.mean() <= average.high
        assert abs(average.value - column.mean()) < 12.0


def test_late_rows_go_to_the_buckets_of_their_time() -> None:
    bands = replay(MEMORY, late=300)
    assert bands_of(bands).count == STREAM.num_rows
    finest = bands[0].synopsis.groups.times.min()
    assert finest > START_US + (COPIES // 2) * COPY_DAYS * DAY_US


def test_measured_buckets_have_all_rows_and_nearly_all_bytes() -> None:
    for band in REPLAYED:
        buckets = measure_buckets(band)
        assert sum(own.rows for own in buckets) == band.synopsis.count
        fixed = band.synopsis.nbytes - sum(own.nbytes for own in buckets)
        parts = band.synopsis.arrays()
        known = ("head", "places.cells", "places.bounds")
        apart = sum(
            array.nbytes for name, array in parts.items()
            if name in known or name.startswith("bin_records")
        )  # fmt: skip
        assert 0 <= fixed - apart <= 64


def test_bands_expire() -> None:
    now = START_US + COPIES * COPY_DAYS * DAY_US
    bands = (Band(0, WHOLE),)
    decided = plan_bands(bands, Budget(10 * WHOLE.nbytes, retention_s=100 * DAY_S), now)
    limit = now - 100 * DAY_US
    assert decided == BandPlan(expire_us=limit)
    kept = bands_of(apply_plan(bands, decided))
    ends = (Rows(STREAM).column("event_time") // SPEC.layout.bucket_us + 1) * SPEC.layout.bucket_us
    assert kept.count == (ends > limit).sum() < STREAM.num_rows


def test_a_budget_below_everything_is_reported() -> None:
    _, excess = fit_budget(REPLAYED, Budget(1_000), START_US)
    assert excess > 0
