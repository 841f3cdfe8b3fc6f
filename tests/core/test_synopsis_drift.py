"""Bins are decided again after a drift, and bounds hold across the change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.synopsis import (
    Bands,
    Resolution,
    Scope,
    SynopsisSpec,
    build,
    coarsen,
    count,
    learn_bins,
    mean,
    quantiles,
)
from roost.synopsis.ageing import BINS_OF_LEVEL_MAX, Band, add, bands_of
from roost.synopsis.bins import DROPPED, BinLearner, Bins
from roost.synopsis.drift import bin_error, rebin, requantise
from synopsis_tables import FEATURES, NUMBERS, Rows, draw_scope, make_spec, make_table

TABLE = make_table(8, 3_000)
SPEC = make_spec(TABLE)
BINS = learn_bins(TABLE, SPEC)


def changed(name: str, values: Any) -> pa.Table:
    at = TABLE.column_names.index(name)
    return TABLE.set_column(at, name, values)


WARM = changed("temp", pc.add(TABLE["temp"], pa.scalar(40.0, pa.float32())))
BOTH = pa.concat_tables([TABLE, WARM]).combine_chunks()


def learn(table: pa.Table) -> BinLearner:
    learner = BinLearner(SPEC)
    learner.update(table)
    return learner


def test_the_same_distribution_keeps_its_bins() -> None:
    assert requantise(learn(TABLE), BINS, 1_000) is None
    assert requantise(learn(make_table(9, 3_000)), BINS, 1_000) is None


def test_a_shifted_feature_gets_new_bins() -> None:
    found = requantise(learn(WARM), BINS, 1_000)
    assert found is not None
    assert [drift.feature for drift in found.drifts] == ["temp"]
    assert found.drifts[0].error > 2.0 * found.drifts[0].new_error
    at = FEATURES.index("temp")
    assert found.bins.edges[at].min() > BINS.edges[at].max()
    assert np.array_equal(found.bins.shifts, BINS.shifts)
    assert found.bins.halvings == BINS.halvings


def test_few_rows_decide_nothing() -> None:
    assert requantise(learn(WARM), BINS) is None
    assert requantise(learn(WARM.slice(0, 0)), BINS, 0) is None


def test_new_categories_get_bins() -> None:
    names = pa.array(["frost", "hail", "storm"] * 1_000)
    found = requantise(learn(changed("kind", names)), BINS, 1_000)
    assert found is not None and [drift.feature for drift in found.drifts] == ["kind"]
    assert found.drifts[0].error == pytest.approx(1.0)
    assert set(found.bins.categories[FEATURES.index("kind")] or ()) == {"frost", "hail", "storm"}


def test_the_error_is_that_of_the_means_of_the_bins() -> None:
    rng = np.random.default_rng(3)
    values, edges = rng.gamma(2.0, 3.0, 500), np.array([1.0, 4.0, 9.0])
    total = 0.0
    for low, high in zip([-np.inf, *edges], [*edges, np.inf], strict=True):
        own = values[(values >= low) & (values < high)]
        total += ((own - own.mean()) ** 2).sum()
    assert bin_error(values, edges) == pytest.approx(np.sqrt(total / values.size))


def requantised(spec: SynopsisSpec, bins: Bins) -> Bands:
    found = requantise(learn(WARM), bins, 1_000)
    assert found is not None
    bands = add([Band(0, build(TABLE, spec, bins))], Band(0, build(WARM, spec, found.bins)))
    assert len(bands) == 2
    return bands_of(bands)


BANDS = requantised(SPEC, BINS)


def generations() -> tuple[Bands, pa.Table]:
    """Six tables, each with bins of its own, without planes."""
    bands: list[Band] = []
    tables = []
    for number in range(6):
        table, at = make_table(number, 400), TABLE.column_names.index("kind")
        kinds = np.array([name or "" for name in table["kind"].to_pylist()], object)
        # Other names are the most frequent each time, and rows are warmer.
        swapped = np.select(
            [kinds == "sun", kinds == f"other{number}"], [f"other{number}", "sun"], kinds
        )
        table = table.set_column(at, "kind", pa.array(swapped, mask=kinds == ""))
        warmer = pc.add(table["temp"], pa.scalar(float(number), pa.float32()))
        table = table.set_column(table.column_names.index("temp"), "temp", warmer)
        tables.append(table)
        bins = replace(learn_bins(table, SPEC), shifts=BINS.shifts)
        built = build(table, SPEC, bins)
        coarse = coarsen(built, Resolution((DROPPED,) * 7, 3, 4, 14, 21_600, 4))
        bands = add(bands, Band(5, coarse))
        assert len(bands) == min(number + 1, BINS_OF_LEVEL_MAX)
    return bands_of(bands), pa.concat_tables(tables).combine_chunks()


AGED, AGED_TABLE = generations()


def test_few_bands_of_a_level_have_different_bins() -> None:
    assert AGED.count == AGED_TABLE.num_rows
    merged = next(part for part in AGED.parts if part.count > 400)
    assert merged.groups.keys.size > 5 and merged.rows.x.size > 5
    rows = merged.groups.counts[:, None]
    assert (merged.groups.marginals.sum(axis=2) == rows).all()
    assert np.array_equal(merged.bin_records.counts, merged.groups.marginals.sum(axis=0))
    with pytest.raises(ConfigError, match="planes that are all dropped"):
        rebin(BANDS.parts[0], BANDS.parts[1].bins)


def test_conditions_hold_after_rebinning() -> None:
    rows = Rows(AGED_TABLE)
    kinds, temps = rows.column("kind"), rows.column("temp")
    names = {name for name in kinds if name is not None}
    cases = [(f"kind = '{name}'", (kinds == name).sum()) for name in sorted(names)]
    cases += [(f"temp > {limit}", (temps > limit).sum()) for limit in np.arange(-5.0, 35.0, 0.7)]
    cases += [(f"{name} is null", np.isnan(rows.column(name)).sum()) for name in NUMBERS]
    assert len(cases) > 60
    for predicate, truth in cases:
        result = count(AGED, Scope(predicate=predicate))
        assert result.low <= truth <= result.high, predicate


@given(draw_scope(Rows(AGED_TABLE)), st.sampled_from(NUMBERS))
def test_bounds_hold_after_rebinning(drawn: Any, name: str) -> None:
    scope, found = drawn
    result = count(AGED, scope)
    assert result.low <= found.sum() <= result.high
    column = Rows(AGED_TABLE).column(name)[found]
    column = column[np.isfinite(column)]
    if column.size:
        average = mean(AGED, name, scope)
        assert average.low <= column.mean() <= average.high
        (middle,) = quantiles(AGED, name, [0.5], scope)
        assert middle.low <= np.quantile(column, 0.5) <= middle.high


@examples(40)
@given(draw_scope(Rows(BOTH)))
def test_bounds_hold_across_a_requantisation(drawn: Any) -> None:
    scope, found = drawn
    result = count(BANDS, scope)
    assert result.low <= found.sum() <= result.high
    column = Rows(BOTH).column("temp")[found]
    column = column[np.isfinite(column)]
    if column.size:
        average = mean(BANDS, "temp", scope)
        assert average.low <= column.mean() <= average.high
        (middle,) = quantiles(BANDS, "temp", [0.5], scope)
        assert middle.low <= np.quantile(column, 0.5) <= middle.high
