"""Calibrated cost model: finds and follows coefficients, which are never negative."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.workload import CostModel
from roost.workload.model import solve_nonnegative

TRUE = np.array([2e-3, 4e-7, 9e-10])


def machines(rng: np.random.Generator, count: int = 22) -> np.ndarray:
    """Draw features whose columns differ by many orders of magnitude, as in practice."""
    points = rng.lognormal(10, 1, count)
    queries = rng.lognormal(6, 1, count)
    return np.column_stack([rng.integers(1, 5, count), points, points * queries])


def test_the_model_finds_the_coefficients() -> None:
    rng = np.random.default_rng(1)
    model = CostModel(3)
    assert model.error == 1.0
    for _ in range(20):
        work = machines(rng)
        model.observe(work, work @ TRUE)
    assert model.coefficients == pytest.approx(TRUE, rel=1e-3)
    assert model.error < 1e-3


def test_the_model_finds_the_coefficients_despite_noise() -> None:
    rng = np.random.default_rng(2)
    model = CostModel(3, forgetting=0.98)
    errors = []
    for _ in range(60):
        work = machines(rng)
        errors.append(model.observe(work, work @ TRUE * rng.uniform(0.9, 1.1, len(work))))
    assert model.coefficients == pytest.approx(TRUE, rel=0.1)
    assert model.error == pytest.approx(np.mean(errors[-10:]), abs=0.02)
    assert model.error < 0.1


def test_the_model_adapts_to_a_change() -> None:
    rng = np.random.default_rng(3)
    model = CostModel(3, forgetting=0.8)
    for _ in range(10):
        work = machines(rng)
        model.observe(work, work @ TRUE)
    work = machines(rng)
    assert model.observe(work, work @ TRUE * 2) == pytest.approx(0.5, abs=0.01)
    for _ in range(20):
        work = machines(rng)
        error = model.observe(work, work @ TRUE * 2)
    assert error < 0.02
    assert model.coefficients == pytest.approx(TRUE * 2, rel=0.05)


def test_small_machines_are_fitted_too() -> None:
    rng = np.random.default_rng(4)
    model = CostModel(3)
    for _ in range(20):
        work = machines(rng)
        model.observe(work, work @ TRUE * rng.uniform(0.95, 1.05, len(work)))
    work = machines(rng, 200)
    relative = np.abs(model.predict(work) / (work @ TRUE) - 1.0)
    assert relative.max() < 0.1


def test_a_prior_predicts_before_the_first_observation() -> None:
    rng = np.random.default_rng(5)
    model = CostModel(3, prior=TRUE.tolist())
    work = machines(rng)
    assert model.predict(work) == pytest.approx(work @ TRUE)
    assert model.observe(work, work @ TRUE) == pytest.approx(0.0, abs=1e-9)
    assert model.error == pytest.approx(0.0, abs=1e-9)
    # Observations soon outweigh a wrong prior.
    model = CostModel(3, prior=(TRUE * 5).tolist())
    for _ in range(30):
        work = machines(rng)
        model.observe(work, work @ TRUE)
    assert model.error < 0.05


def test_without_a_prior_the_first_round_is_no_error_of_the_model() -> None:
    work = machines(np.random.default_rng(6))
    model = CostModel(3)
    assert model.observe(work, work @ TRUE) == 1.0
    assert model.error == 1.0
    assert model.observe(work, work @ TRUE) == model.error < 1e-3


def test_negative_coefficients_become_zero() -> None:
    rng = np.random.default_rng(7)
    model = CostModel(3)
    for _ in range(20):
        work = machines(rng)
        model.observe(work, np.maximum(work @ (TRUE * [1, 1, -1]), 1e-4))
    assert (model.coefficients >= 0).all()
    assert model.coefficients[2] == 0.0


@pytest.mark.parametrize(
    "work",
    [
        pytest.param([[1.0, 0.0, 0.0]], id="features that never occur"),
        pytest.param([[1.0, 1e6, 2e6], [1.0, 3e6, 6e6]], id="features that always go together"),
        pytest.param([[0.0, 0.0, 0.0]], id="a machine without work"),
    ],
)
def test_degenerate_rounds_keep_the_model_valid(work) -> None:
    model = CostModel(3)
    for _ in range(5):
        model.observe(work, np.full(len(work), 0.5))
    assert np.isfinite(model.coefficients).all()
    assert (model.coefficients >= 0).all()
    assert np.isfinite(model.error)


def test_idle_rounds_do_not_change_the_model() -> None:
    model = CostModel(3)
    assert model.observe(np.zeros((4, 3)), np.zeros(4)) == 0.0
    assert model.observe(np.empty((0, 3)), np.empty(0)) == 0.0
    assert model.to_json() == CostModel(3).to_json()


def test_the_model_round_trips_through_json() -> None:
    rng = np.random.default_rng(8)
    model = CostModel(3, forgetting=0.9, prior=[1e-3, 1e-7, 1e-9])
    for data in (model.to_json(), None):
        if data is None:
            work = machines(rng)
            model.observe(work, work @ TRUE)
            data = model.to_json()
        back = CostModel.from_json(json.loads(json.dumps(data, allow_nan=False)))
        work = machines(rng)
        assert back.observe(work, work @ TRUE) == model.observe(work, work @ TRUE)
        assert back.to_json() == model.to_json()


numbers = st.floats(-5.0, 5.0, width=16)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=4, max_size=8), st.data())
def test_no_better_point_without_negatives(rows, data) -> None:
    work = np.array(rows)
    times = np.array(data.draw(st.lists(numbers, min_size=len(rows), max_size=len(rows))))
    found = solve_nonnegative(work.T @ work, work.T @ times)
    assert (found >= 0).all()

    def squares(at: np.ndarray) -> float:
        return float(((work @ at - times) ** 2).sum())

    slack = 1e-6 * (1.0 + squares(np.zeros(3)))
    for step in product((-0.3, -0.01, 0.0, 0.01, 0.3), repeat=3):
        assert squares(found) <= squares(np.maximum(found + step, 0.0)) + slack
