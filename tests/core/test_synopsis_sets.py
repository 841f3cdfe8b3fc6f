"""Set sketches: brute force over the rows decides what their results must contain."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from datasketches import hll_sketch, hll_union
from scipy.stats import binomtest

from roost.errors import ConfigError
from roost.model.records import Circle
from roost.synopsis import (
    BoundKind,
    Scope,
    SetSpec,
    Synopsis,
    SynopsisResult,
    SynopsisSpec,
    build,
    cardinality,
    contains,
    count,
    fit_memory,
    frequency,
    learn_bins,
    merge,
    select,
)
from roost.synopsis.sets import HLL
from synopsis_tables import DAY_US, DAYS, START_US, make_table

PERIOD_DAYS = 10
ROWS = 6_000


def make_rows() -> pa.Table:
    rng = np.random.default_rng(3)
    table = make_table(3, ROWS)
    users = np.array([f"user {k}" for k in range(4_000)], object)
    users[:3] = "", "zé", "x" * 300
    numbers = rng.zipf(1.3, ROWS) % 3_000
    names = pa.array(users[rng.integers(0, 4_000, ROWS)], mask=rng.random(ROWS) < 0.1)
    return table.append_column("user", names).append_column(
        "number", pa.array(numbers, pa.int32(), mask=rng.random(ROWS) < 0.1)
    )


TABLE = make_rows()
COLUMNS = {("user",): (), ("number",): (), ("temp",): (), ("wet", "kind", "level"): ("level",)}
SETS = tuple(
    SetSpec.of(TABLE.schema, names, binned=binned, members=2_000, counters=200)
    for names, binned in COLUMNS.items()
)
SPEC = SynopsisSpec.of(TABLE.schema, ["temp", "level", "kind"], bins=16, sets=SETS)
BINS = learn_bins(TABLE, SPEC)
BUILT = build(TABLE, SPEC, BINS)
KNOWN = {"user": next(name for name in TABLE["user"].to_pylist() if name)}
PERIODS = np.asarray(TABLE["event_time"].cast(pa.int64())) // (PERIOD_DAYS * DAY_US)


def items(names: tuple[str, ...]) -> list[tuple[Any, ...] | None]:
    """The combination of values of each row; None if one is null."""
    columns = []
    for name in names:
        values = TABLE[name].to_pylist()
        if name in COLUMNS[names]:
            edges = BINS.edges[SPEC.index(name)]
            values = [None if v is None else int(np.sum(edges <= v)) for v in values]
        columns.append(values)
    return [None if None in row else row for row in zip(*columns, strict=True)]


def between(first: int, last: int) -> Scope:
    """Whole periods, from and including."""
    day = PERIOD_DAYS * DAY_US
    return Scope(since=first * day, until=(last + 1) * day)


def all_ranges() -> list[tuple[int, int]]:
    low, high = int(PERIODS.min()), int(PERIODS.max())
    return [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]


def rows_of(names: tuple[str, ...], first: int, last: int) -> list[int]:
    found = items(names)
    inside = (first <= PERIODS) & (last >= PERIODS)
    return [k for k in np.flatnonzero(inside) if found[k] is not None]


def values_of(names: tuple[str, ...], row: int) -> dict[str, Any]:
    return {name: TABLE[name][row].as_py() for name in names}


@pytest.mark.parametrize("names", COLUMNS, ids=" ".join)
def test_values_that_occurred_are_members_with_at_least_their_frequency(
    names: tuple[str, ...],
) -> None:
    found = items(names)
    low_held = []
    for first, last in all_ranges():
        rows, scope = rows_of(names, first, last), between(first, last)
        counted = Counter(found[row] for row in rows)
        for row in list({found[row]: row for row in rows}.values())[::5]:
            values = values_of(names, row)
            member = contains(BUILT, values, scope)
            assert (member.value, member.low, member.high) == (1.0, 1.0, 1.0)
            assert member.kind is BoundKind.PROBABLE and member.records == last - first + 1
            result = frequency(BUILT, values, scope)
            truth = counted[found[row]]
            assert result.low <= result.value == result.high >= truth
            low_held.append(result.low <= truth)
    assert frequency(BUILT, values).confidence == pytest.approx(0.95, abs=0.001)
    assert binomtest(sum(low_held), len(low_held), 0.95, alternative="less").pvalue > 0.01


@pytest.mark.parametrize("name", ["user", "number"])
def test_values_that_did_not_occur_are_no_members(name: str) -> None:
    wrong, promised = 0, []
    for k in range(4_000):
        value: Any = f"stranger {k}" if name == "user" else 10_000 + k
        result = contains(BUILT, {name: value})
        if result.value == 0.0:
            assert (result.low, result.high, result.kind) == (0.0, 0.0, BoundKind.GUARANTEED)
            assert result.confidence == 1.0
        else:
            wrong += 1
            promised.append(1.0 - result.confidence)
    if name == "number":
        assert wrong < 20  # some hundred members, filters for 2000
    else:
        # As many as the confidence admits, within three deviations.
        expected = 4_000 * promised[0]
        assert abs(wrong - expected) < 3.0 * np.sqrt(expected) + 1.0


@pytest.mark.parametrize("names", COLUMNS, ids=" ".join)
def test_cardinalities(names: tuple[str, ...]) -> None:
    found = items(names)
    for first, last in all_ranges():
        truth = len({found[row] for row in rows_of(names, first, last)})
        result = cardinality(BUILT, names, between(first, last))
        assert result.kind is BoundKind.PROBABLE and result.confidence == 0.95
        assert result.low <= truth <= result.high
        assert result.high - result.low < 0.08 * truth + 1.0


def test_columns_may_be_a_text_with_commas_and_spaces() -> None:
    names = next(own for own in COLUMNS if len(own) > 1)
    assert cardinality(BUILT, ", ".join(names)) == cardinality(BUILT, names)


def test_cardinality_bounds_hold_as_often_as_they_claim() -> None:
    rng, broken, trials = np.random.default_rng(8), 0, 200
    own = SetSpec.of(pa.schema([("id", pa.int64())]), ["id"], members=0, counters=0, lg_k=8)
    spec = SynopsisSpec(SPEC.features[:1], sets=(own,))
    times = np.full(3_000, START_US)
    columns = {"lon": np.zeros(3_000), "lat": np.zeros(3_000), "temp": np.zeros(3_000, np.float32)}
    bins = learn_bins(pa.table(columns), spec)
    for _ in range(trials):
        ids = rng.integers(0, 2**60, 3_000)
        table = pa.table(columns | {"event_time": times, "id": ids})
        result = cardinality(build(table, spec, bins), ["id"])
        broken += not result.low <= 3_000 <= result.high
    assert binomtest(broken, trials, 0.05, alternative="greater").pvalue > 0.01


def same(a: SynopsisResult, b: SynopsisResult) -> bool:
    return (a.kind, a.confidence, a.records) == (b.kind, b.confidence, b.records) and all(
        x == pytest.approx(y, rel=1e-12)
        for x, y in ((a.value, b.value), (a.low, b.low), (a.high, b.high))
    )


@pytest.mark.parametrize("parts", [2, 5])
def test_any_split_gives_the_same_results(parts: int) -> None:
    owner = np.random.default_rng(parts).integers(0, parts, ROWS)
    pieces = [build(TABLE.filter(pa.array(owner == k)), SPEC, BINS) for k in range(parts)]
    merged = merge([pieces[-1], merge(pieces[:-1])])
    for names in COLUMNS:
        for first, last in all_ranges():
            scope = between(first, last)
            assert same(cardinality(merged, names, scope), cardinality(BUILT, names, scope))
            for row in rows_of(names, first, last)[::500]:
                values = values_of(names, row)
                assert same(contains(merged, values, scope), contains(BUILT, values, scope))
                assert same(frequency(merged, values, scope), frequency(BUILT, values, scope))
    assert merged.nbytes == pytest.approx(BUILT.nbytes, rel=0.02)


def test_saved_sets_have_the_same_results_and_count_as_memory(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    BUILT.save(path)
    opened = Synopsis.open(path)
    assert opened.spec == SPEC
    for result in (contains, frequency):
        assert result(opened, KNOWN) == result(BUILT, KNOWN)
    assert cardinality(opened, ["number"]) == cardinality(BUILT, ["number"])
    plain = build(TABLE, SynopsisSpec(SPEC.features, bins=16), BINS)
    assert BUILT.nbytes - plain.nbytes > BUILT.sets.data.nbytes > 0
    small = fit_memory(opened, BUILT.nbytes - 2_000)
    assert cardinality(small, ["user"]) == cardinality(BUILT, ["user"])


def test_a_range_that_cuts_a_period_bounds_the_result() -> None:
    first = int(PERIODS.min())
    day = PERIOD_DAYS * DAY_US
    scope = Scope(since=first * day, until=(first + 1) * day + DAY_US)
    inside, touched = between(first, first), between(first, first + 1)
    result = cardinality(BUILT, ["user"], scope)
    assert result.low == cardinality(BUILT, ["user"], inside).low
    assert result.high == cardinality(BUILT, ["user"], touched).high
    assert result.low < result.value < result.high
    only_second = set(items(("number",))[k] for k in rows_of(("number",), first + 1, first + 1))
    only_second -= {items(("number",))[k] for k in rows_of(("number",), first, first)}
    values = {"number": next(iter(only_second))[0]}
    member = contains(BUILT, values, scope)
    assert (member.low, member.high) == (0.0, 1.0)
    counted = frequency(BUILT, values, scope)
    assert counted.low == 0.0 and counted.high == frequency(BUILT, values, touched).high


def test_values_are_compared_as_the_column_stores_them() -> None:
    row = int(np.flatnonzero(np.asarray(pc.equal(TABLE["temp"], pa.scalar(12.3, pa.float32()))))[0])
    assert TABLE["temp"][row].as_py() != 12.3
    assert contains(BUILT, {"temp": 12.3}).value == 1.0
    assert contains(BUILT, {"user": "zé"}).value == 1.0
    zero = pa.table(
        {name: TABLE[name][:1] for name in ("lon", "lat", "event_time", "level", "kind")}
    )
    negative = zero.append_column("temp", pa.array([-0.0], pa.float32()))
    spec = SynopsisSpec(SPEC.features, bins=16, sets=(SETS[2],))
    assert contains(build(negative, spec, BINS), {"temp": 0.0}).value == 1.0
    # Dictionaries and slices are stored otherwise, with the same values.
    slices = TABLE.slice(100, 50)
    column = slices["user"].dictionary_encode()
    at = slices.schema.get_field_index("user")
    coded = build(slices.set_column(at, "user", column), SPEC, BINS)
    assert np.array_equal(coded.sets.data, build(slices, SPEC, BINS).sets.data)


def test_the_hyperloglog_holds_the_values_of_one_column() -> None:
    """Another program that builds a sketch of the same column gets the same one."""
    for owner, name in enumerate(["user", "number"]):
        for at in np.flatnonzero(BUILT.sets.owners == owner).tolist():
            mine = pa.array(BUILT.sets.periods[at] == PERIODS)
            own, union = hll_sketch(12), hll_union(12)
            for value in TABLE[name].filter(mine).drop_null().to_pylist():
                own.update(value)
            union.update(own)
            alone = union.get_estimate()
            union.update(BUILT.sets.hll(at))
            assert union.get_estimate() == pytest.approx(alone, rel=0.02)
            assert union.get_estimate() == pytest.approx(BUILT.sets.hll(at).get_estimate())


def test_parts_and_other_synopses_have_no_sets() -> None:
    part = select(BUILT, Scope(until=START_US + 5 * DAY_US))
    assert count(part).value > 0
    with pytest.raises(ConfigError, match="there is none"):
        cardinality(part, ["user"])
    assert merge([part, part]).spec.sets == ()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: cardinality(BUILT, ["station"]), "columns: got 'station'"),
        (lambda: cardinality(BUILT, ["kind", "wet"]), "wet, kind, level"),
        (lambda: contains(BUILT, {"number": "x"}), "number: got 'x'"),
        (lambda: contains(BUILT, {"user": None}), "neither null nor infinite"),
        (lambda: contains(BUILT, {"temp": math.inf}), "neither null nor infinite"),
        (lambda: frequency(BUILT, {"number": 2**40}), "int32"),
        (lambda: cardinality(BUILT, ["user"], Scope(Circle(0.0, 0.0, 1.0))), "scope.shape"),
        (lambda: cardinality(BUILT, ["user"], Scope(hours=(1, 2))), "scope.hours"),
        (lambda: cardinality(BUILT, ["user"], Scope(predicate="temp > 1")), "scope.predicate"),
        (lambda: SetSpec.of(TABLE.schema, ["none"]), "synopsis.sets.columns"),
        (lambda: SetSpec.of(TABLE.schema, ["user"], lg_k=5), "7 to 21"),
        (lambda: SynopsisSpec(SPEC.features, sets=(SETS[0], SETS[0])), "one set for the same"),
        (lambda: SynopsisSpec(SPEC.features[:1], sets=(SETS[3],)), "'level'"),
        (lambda: build(TABLE.drop_columns(["user"]), SPEC, BINS), "'user'"),
    ],
)
def test_refused_sets_name_the_part(call: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()


def test_sketches_of_size_zero_are_not_stored() -> None:
    own = SetSpec.of(TABLE.schema, ["user"], lg_k=0, counters=0, period_days=DAYS)
    built = build(TABLE, SynopsisSpec(SPEC.features, sets=(own,)))
    assert contains(built, KNOWN).value == 1.0
    assert not built.sets.blob(0, HLL).size
    with pytest.raises(ConfigError, match="a set with counters"):
        frequency(built, KNOWN)
    with pytest.raises(ConfigError, match="a set with lg_k"):
        cardinality(built, ["user"])
