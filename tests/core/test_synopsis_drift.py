"""Bins are decided again after a drift, and bounds hold across the change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given

from properties import examples
from roost.synopsis import Bands, SynopsisSpec, build, count, learn_bins, mean, quantiles
from roost.synopsis.ageing import Band, add, bands_of
from roost.synopsis.bins import BinLearner, Bins
from roost.synopsis.drift import bin_error, requantise
from synopsis_tables import FEATURES, Rows, draw_scope, make_spec, make_table

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
